"""What this process counts of its own work: an observer of gateway, connections and HTTP front."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch.contract.envelope import RequestEnvelope
from dispatch.contract.reply import ReplyHead
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.fabric.records import Lease, Outcome, Settlement
from dispatch.telemetry import names
from dispatch.telemetry.identity import gen_ai_operation
from dispatch.telemetry.metrics import catalogue as c
from dispatch.telemetry.metrics.tallies import Capped, Counter, Histogram, Reading
from dispatch.telemetry.server_address import server_of

MODELS_MAX = 1000
"""Models that are counted by name; a client names them, so there is a bound."""
_AGAIN = {"RETRY": "retry", "REQUEUED": "requeued"}
_NO_ERROR = ""


class Counting(Observer):
    """Counts everything the observer protocol tells."""

    def __init__(self, then: Observer = NOBODY) -> None:
        """`then` is told of results, too."""
        self._then = then
        self._queue_wait, self._execution, self._total = map(Histogram, (c.QUEUE_WAIT, c.EXECUTION, c.TOTAL))
        self._settled, self._failed, self._again = map(Counter, (c.SETTLED, c.FAILED, c.AGAIN))
        self._lost, self._wakes, self._claims = map(Counter, (c.LEASES_LOST, c.WAKES, c.CLAIMS))
        self._claimed, self._chunks, self._chunk_bytes = map(Counter, (c.CLAIMED, c.CHUNKS, c.CHUNK_BYTES))
        self._http, self._refused, self._errors = map(Counter, (c.HTTP, c.HTTP_REFUSED, c.FUNCTION_ERRORS))
        self._functions, self._delivery = map(Histogram, (c.FUNCTION, c.DELIVERY))
        self._duration, self._first_chunk = map(Histogram, (c.GEN_AI_DURATION, c.GEN_AI_FIRST_CHUNK))
        self._input, self._output = map(Counter, (c.GEN_AI_INPUT, c.GEN_AI_OUTPUT))
        self._models = Capped(MODELS_MAX)
        self._all = [each for each in vars(self).values() if isinstance(each, Counter | Histogram)]
        # Known from the start to be 0: a rate over what appears with its first event would miss that event.
        for counter in (self._claimed, self._chunks, self._chunk_bytes):
            counter.add(by=0)
        for words, counter in ((("work", "own", "reconnect"), self._wakes), (("full", "some", "none"), self._claims)):
            for word in words:
                counter.add(word, by=0)

    def read(self) -> Iterator[Reading]:
        """Return what was counted. May be called from any thread."""
        for each in self._all:
            yield each.read()
        yield c.MODELS_FOLDED, {(): self._models.folded}

    def called(self, functions: tuple[str, ...], seconds: float, error: str) -> None:
        """Count a round trip."""
        for function in functions:
            self._functions.add(seconds, function)
            if error:
                self._errors.add(function, error)

    def claimed(self, wanted: int, got: int) -> None:
        """Count a claim."""
        self._claims.add("none" if not got else "full" if got >= wanted else "some")
        if got:
            self._claimed.add(by=got)

    def ran(self, envelope: RequestEnvelope, head: ReplyHead, seconds: float, first_chunk_s: float | None) -> None:
        """Count an attempt at an endpoint by the GenAI conventions."""
        host, port = server_of(head.backend_address or "")
        labels = (
            gen_ai_operation(envelope.operation), names.OPENAI, self._models(envelope.model), host,
            "" if port is None else str(port),
        )  # fmt: skip
        self._duration.add(seconds, *labels, _NO_ERROR if head.error is None else head.error.type)
        if first_chunk_s is not None:
            self._first_chunk.add(first_chunk_s, *labels)
        usage = head.usage
        if usage is not None:
            if usage.input_tokens is not None:
                self._input.add(*labels, by=usage.input_tokens)
            if usage.output_tokens is not None:
                self._output.add(*labels, by=usage.output_tokens)

    def settled(self, lease: Lease, item: Settlement, word: str, server_ms: int) -> None:
        """Count a result; if it ended the request, how long everything took."""
        self._then.settled(lease, item, word, server_ms)
        pool = lease.pool_id
        self._know(pool)
        if word == "LEASE_LOST":
            self._lost.add(pool, "unsettled")
            return
        self._settled.add(pool, item.outcome.value)
        if item.error_type:
            self._failed.add(pool, item.error_type)
        if word in _AGAIN:
            self._again.add(pool, _AGAIN[word])
        elif item.outcome is not Outcome.RELEASE:
            self._queue_wait.add(max(0, lease.claimed_ms - lease.submitted_ms) / 1000, pool)
            self._execution.add(max(0, server_ms - lease.claimed_ms) / 1000, pool)
            self._total.add(max(0, server_ms - lease.submitted_ms) / 1000, pool)

    def lease_lost(self, lease: Lease, reason: str) -> None:
        """Count a lost lease."""
        self._know(lease.pool_id)
        self._lost.add(lease.pool_id, reason)

    def woke(self, source: str) -> None:
        """Count a token."""
        self._wakes.add(source)

    def streamed(self, chunks: int, size_bytes: int) -> None:
        """Count chunks."""
        self._chunks.add(by=chunks)
        self._chunk_bytes.add(by=size_bytes)

    def answered(self, operation: str, status: int, reason: str) -> None:
        """Count an HTTP answer."""
        self._http.add(operation, str(status))
        if reason:
            self._refused.add(reason)

    def _know(self, pool: str) -> None:
        """Let the rare counters of a pool begin at 0, so that a rate sees their first event."""
        if (pool, "lost") not in self._lost.values:
            for reason in ("lost", "fenced", "unsettled"):
                self._lost.add(pool, reason, by=0)
            for kind in _AGAIN.values():
                self._again.add(pool, kind, by=0)

    def delivered(self, pool: str, seconds: float) -> None:
        """Count how long a reply took to its producer."""
        self._delivery.add(seconds, pool)
