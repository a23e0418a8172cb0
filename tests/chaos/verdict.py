"""What must hold after a run, whatever was done to it. Every field counts violations; all must be 0.

Nothing here looks at a server or a process: `judge` reads the evidence alone, so that a test can doctor it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.chaos.evidence import Call, Evidence, Record, Trouble

GRACE_S = 2.0
"""How long after a request's deadline its caller may still wait."""

MEASURING_S = 0.3
"""How late a process on a busy machine may see what happened on time. Longer stalls are in its log."""

LAST_LOOK_S = 1.0
"""How long a client whose process stood still looks for a reply that came meanwhile, before it gives up."""

AFTERMATH_S = 5.0
"""How long after a fault the group may still be busy with it: leases run out, liveness lapses, processes come back."""

UNTOLD_S = 3.0
"""How long a reply may be on its way to a caller that nothing was done to."""

SAFE_ENDINGS = frozenset({"succeeded", "failed", "dead", "expired", "cancelled"})
"""What an at-least-once request of a living producer may end as."""


@dataclass(slots=True)
class Verdict:
    """Violations by field, each as a sentence."""

    ended_twice: list[str] = field(default_factory=list)
    never_ended: list[str] = field(default_factory=list)
    leaked_slots: list[str] = field(default_factory=list)
    audit_differences: list[str] = field(default_factory=list)
    late_callers: list[str] = field(default_factory=list)
    lost_at_least_once: list[str] = field(default_factory=list)
    missing_records: list[str] = field(default_factory=list)
    excess_executions: list[str] = field(default_factory=list)
    untold_attempts: list[str] = field(default_factory=list)
    not_once_in_calm: list[str] = field(default_factory=list)
    untold_callers: list[str] = field(default_factory=list)
    wrong_replies: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    calm: int = 0
    """How many requests lived while nothing was done to anything."""

    def fields(self) -> dict[str, list[str]]:
        """Return every field that must be empty."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "calm"}

    def counts(self) -> dict[str, int]:
        """Return how many violations each field has."""
        return {name: len(sentences) for name, sentences in self.fields().items()}

    @property
    def clean(self) -> bool:
        """Whether nothing was violated."""
        return not any(self.fields().values())


def judge(evidence: Evidence) -> Verdict:
    """Hold the evidence against everything that must be true."""
    case = _Case(evidence)
    verdict = Verdict()
    verdict.ended_twice = [*case.ended_more_than_once(), *case.contradictions()]
    verdict.never_ended = list(case.never_ended())
    verdict.leaked_slots = [f"{name} is {value!r}" for name, value in sorted(evidence.leftovers.items())]
    verdict.audit_differences = list(evidence.audit)
    verdict.late_callers = list(case.late_callers())
    verdict.lost_at_least_once = list(case.lost())
    verdict.missing_records = list(case.missing_records())
    verdict.excess_executions = list(case.excess_executions())
    verdict.untold_attempts = list(case.untold_attempts())
    verdict.not_once_in_calm = list(case.not_once_in_calm())
    verdict.untold_callers = list(case.untold())
    outcomes = [(call.tag, call.ended) for call in evidence.calls if call.ended]
    verdict.wrong_replies = [f"call {tag} was given another's answer" for tag, ended in outcomes if not ended.right]
    faults = [f"call {tag}: {ended.detail}" for tag, ended in outcomes if ended.how == "fault"]
    verdict.crashes = [*evidence.crashes, *faults]
    verdict.calm = sum(case.calm(call) for call in evidence.calls)
    return verdict


class _Case:
    """The evidence, sorted by what belongs together."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.by_id: dict[str, list[Record]] = defaultdict(list)
        self.by_tag: dict[str, list[Record]] = defaultdict(list)
        for record in evidence.records:
            self.by_id[record.request_id].append(record)
            if record.tag:
                self.by_tag[record.tag].append(record)
        self.executed = Counter(one.tag for one in evidence.executions)

    # -- each request ends once ---------------------------------------------------------------------------------------

    def ended_more_than_once(self) -> Iterator[str]:
        for request_id, records in self.by_id.items():
            if len(records) > 1:
                yield f"request {request_id} ended {_words(records)}"
        repeated = {call.tag for call in self.evidence.calls if call.order.repeat}
        for tag, records in self.by_tag.items():
            # A repeated call is a new request where the first one ended without an attempt, and only then.
            counted = {record.request_id for record in records if record.attempt > 0 or tag not in repeated}
            if len(counted) > 1:
                yield f"call {tag} became several requests: {_words(records)}"

    def contradictions(self) -> Iterator[str]:
        """Yield the calls whose caller was told something else than the record says."""
        for call in self.evidence.calls:
            ended, records = call.ended, self.by_tag[call.tag]
            if ended is None or not records:
                continue
            true = {word for one in self.by_id[ended.request_id] for word in (one.ending, one.outcome)}
            if ended.how == "reply" and ended.ending not in true:
                yield f"call {call.tag} was told {ended.ending}, the record says {_words(records)}"
            if ended.how == "refused" and not call.order.repeat:
                yield f"call {call.tag} was told that nothing is queued ({ended.detail}); it ended {_words(records)}"

    def never_ended(self) -> Iterator[str]:
        open_ones = [(name, state) for name, (state, _) in self.evidence.states.items() if state != "ended"]
        for request_id, state in open_ones:
            yield f"request {request_id} is {state} still"
        vanished = self.evidence.submitted - len(self.by_id) - len(open_ones)
        if vanished > 0:
            yield f"{vanished} of {self.evidence.submitted} admitted requests have neither a record nor a state"
        for call in self.evidence.calls:
            if call.ended is None and call.died_at is None:
                yield f"call {call.tag} of {call.producer} has no outcome"

    def missing_records(self) -> Iterator[str]:
        told = {
            call.ended.request_id: call.ended.ending
            for call in self.evidence.calls
            if call.ended and call.ended.how == "reply"
        }
        ended = {name: ending for name, (state, ending) in self.evidence.states.items() if state == "ended"}
        for request_id, ending in (told | ended).items():
            if request_id not in self.by_id:
                yield f"request {request_id} ended {ending} without a record"
        recorded = Counter(record.ending for record in self.evidence.records)
        for ending in sorted({*recorded, *self.evidence.counted} - {"rejected"}):
            if recorded[ending] != self.evidence.counted[ending]:
                yield f"the pools count {self.evidence.counted[ending]} {ending}, {recorded[ending]} are recorded"
        for record in self.evidence.records:
            if not record.tag:
                yield f"the record of request {record.request_id} has lost its envelope"

    # -- nobody waits for nothing -------------------------------------------------------------------------------------

    def late_callers(self) -> Iterator[str]:
        for call in self.evidence.calls:
            until = call.ended.at if call.ended else call.died_at
            if until is None or call.order.repeat or self._handicapped(call, call.started, until):
                continue
            stalled = sum(
                max(0.0, min(stall.until, until) - max(stall.since, call.started))
                for stall in self.evidence.stalls.get(call.producer, ())
            )
            excused = stalled + LAST_LOOK_S if stalled else 0.0
            late = until - self._deadline(call) - GRACE_S - MEASURING_S - excused
            if late > 0:
                outcome = call.ended.ending or call.ended.how if call.ended else "nothing"
                yield (
                    f"call {call.tag} of {call.producer} waited {until - call.started:.2f} s and was told {outcome} "
                    f"{late + MEASURING_S:.2f} s later than {GRACE_S:.0f} s after its deadline"
                )

    def untold(self) -> Iterator[str]:
        """Yield the calls that gave up long after their request had ended, though nothing was done to their way."""
        for call in self.evidence.calls:
            if call.ended is None or call.ended.how != "gave_up":
                continue
            for record in self.by_tag[call.tag]:
                waited = call.ended.at - record.ended
                if waited > UNTOLD_S and not self._troubled(call.producer, record.ended, call.ended.at):
                    yield (
                        f"call {call.tag} of {call.producer} gave up ({call.ended.detail}) {waited:.1f} s after its "
                        f"request had ended {record.ending}"
                    )

    def _deadline(self, call: Call) -> float:
        """Return the request's deadline, fixed by the server at submit; the caller's own where nothing was admitted."""
        timeout_ms = call.order.timeout_ms
        timeout = self.evidence.default_timeout_s if timeout_ms is None else timeout_ms / 1000
        return min((record.submitted for record in self.by_tag[call.tag]), default=call.started) + timeout

    # -- work is done as often as it may be ---------------------------------------------------------------------------

    def lost(self) -> Iterator[str]:
        callers = {call.tag: call for call in self.evidence.calls}
        for record in self.evidence.records:
            if self.evidence.delivery.get(record.pool) != "at_least_once" or record.ending in SAFE_ENDINGS:
                continue
            if record.ending == "lost" and record.chunks > 0:
                continue  # a stream is not run again once its caller has seen a part of it
            call = callers.get(record.tag)
            died = call is not None and call.died_at is not None
            gone = record.ending in ("producer_gone", "reply_dropped") and call is not None
            if gone and call is not None and (died or self._troubled(call.producer, record.submitted, record.ended)):
                continue
            how = f"{record.ending} ({record.error}, gateway {record.gateway}, attempt {record.attempt})"
            yield f"request {record.request_id} of the at-least-once pool {record.pool} ended {how}"

    def excess_executions(self) -> Iterator[str]:
        for tag, count in self.executed.items():
            attempts = sum(record.attempt for record in self.by_tag[tag])
            if count > attempts + sum(self._drains(record) for record in self.by_tag[tag]):
                yield f"call {tag} was executed {count} times in {attempts} attempts: {_words(self.by_tag[tag])}"

    def untold_attempts(self) -> Iterator[str]:
        """Yield the requests whose record tells of other earlier attempts than were counted.

        One that ended while it waited for another attempt has had its last one earlier, too.
        """
        for record in self.evidence.records:
            if record.tries not in (record.attempt - 1, record.attempt):
                yield f"{_words([record])} tells of {record.tries} earlier attempts"

    def _drains(self, record: Record) -> int:
        """Return how often a gateway that was told to stop may have given the request back.

        Where that is allowed (at least once) no attempt is counted, whether or not the endpoint call had begun.
        """
        if self.evidence.delivery.get(record.pool) != "at_least_once":
            return 0
        return sum(trouble.kind == "drain" for trouble in self._during(record.submitted, record.ended))

    def not_once_in_calm(self) -> Iterator[str]:
        for call in self.evidence.calls:
            records = self.by_tag[call.tag]
            if len(records) != 1 or records[0].ending != "succeeded" or not self.calm(call):
                continue
            count, attempts = self.executed[call.tag], records[0].attempt
            if count != 1 or attempts != 1:
                yield f"call {call.tag} was executed {count} times in {attempts} attempts though nothing was done"

    def calm(self, call: Call) -> bool:
        """Whether nothing was done to anything while the request lived, nor shortly before."""
        if call.ended is None:
            return False
        ends = [call.ended.at, *(record.ended for record in self.by_tag[call.tag])]
        return not any(self._during(call.started - AFTERMATH_S, max(ends)))

    # -- what was done to whom ----------------------------------------------------------------------------------------

    def _during(self, since: float, until: float) -> Iterator[Trouble]:
        return (trouble for trouble in self.evidence.troubles if trouble.since <= until and trouble.until >= since)

    def _handicapped(self, call: Call, since: float, until: float) -> bool:
        """Whether the caller itself was stopped or cut off meanwhile."""
        return any(trouble.target == call.producer for trouble in self._during(since, until))

    def _troubled(self, producer: str, since: float, until: float) -> bool:
        """Whether something was done to the producer or to the server between, or to what the server does then."""
        return any(
            trouble.target in (producer, "valkey", "machine") for trouble in self._during(since - AFTERMATH_S, until)
        )


def _words(records: Iterable[Record]) -> str:
    return ", ".join(f"{record.ending} (request {record.request_id}, attempt {record.attempt})" for record in records)


Judge = Callable[[Evidence], Verdict]
