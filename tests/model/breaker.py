"""Whether anything may be launched on an endpoint now: its breaker, its hold and its gate. DESIGN sections 6 and 6b.9.

* Closed: failures in a row are counted; `breaker_failures` of them open it. A good attempt ends the row, a neutral one
  and backpressure do not touch it.
* Open: nothing is launched until `open_until_ms`. What attempts that began before say meanwhile changes nothing.
* Half open, from then on by the clock alone: one probe at a time, the next launch or a watcher's question. Good probes
  are counted, `close_after` of them close it; a failed one opens it again. A probe that ends otherwise, or takes longer
  than `probe_timeout_ms` or its own deadline, makes way for the next; until that has begun its verdict still counts.
* Backpressure, whoever tells it, holds the endpoint, up to the group's `hold_max_ms`, and is no failure. No hold
  shortens another.
* Gate: nothing is launched while waiting + launched since the sample reach `gate_target` or a token takes longer than
  `gate_token_ms`; but what runs nothing of ours lets one trial through. A sample that is too old, or missing, counts
  as `gate_fail` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.fabric.records import Verdict
from tests.model import chores
from tests.model.records import Endpoint, Group, Move, Probe, Request

ASK_AGAIN_MS = 1_000
"""A watcher that could not ask, or learnt nothing, does not ask again in the same instant."""


@dataclass(frozen=True)
class Said:
    """What a lease or a probe says of its endpoint. One that came to no end says nothing."""

    verdict: Verdict = Verdict.NEUTRAL
    hold_ms: int = 0
    error_type: str = ""


def half_open(endpoint: Endpoint, now: int) -> bool:
    return endpoint.breaker == "half_open" or (endpoint.breaker == "open" and now >= endpoint.open_until_ms)


def probing(endpoint: Endpoint, now: int) -> bool:
    """Whether a probe is under way."""
    return endpoint.probe is not None and now < endpoint.probe.until_ms


def gated(endpoint: Endpoint, in_flight: int, now: int) -> bool:
    """Whether the endpoint's gate lets nothing through."""
    settings, sample = endpoint.settings, endpoint.sample
    if settings is None or settings.gate == "none" or in_flight == 0:
        return False
    if sample is None or now - sample.at_ms > settings.gate_stale_ms:
        return settings.gate_fail == "closed"
    crowded = sample.waiting is not None and sample.waiting + sample.launched >= settings.gate_target
    return crowded or (sample.token_ms is not None and sample.token_ms > settings.gate_token_ms)


def block_reason(endpoint: Endpoint, in_flight: int, now: int) -> str:
    """Return why nothing may be launched, as a skip reason; "" when something may."""
    settings = endpoint.settings
    if endpoint.breaker != "closed" and (probing(endpoint, now) or not half_open(endpoint, now)):
        return "endpoint_open"
    if now < endpoint.hold_until_ms or gated(endpoint, in_flight, now):
        return "endpoint_gated"
    full = settings is not None and settings.max_concurrent is not None and in_flight >= settings.max_concurrent
    return "endpoint_capacity" if full else ""


def changes(endpoint: Endpoint) -> list[int]:
    """Return the moments at which the clock alone may change whether the endpoint is blocked."""
    found = [endpoint.hold_until_ms]
    if endpoint.breaker != "closed":
        found += [endpoint.open_until_ms, endpoint.probe.until_ms if endpoint.probe else 0]
    if endpoint.settings and endpoint.settings.gate != "none" and endpoint.sample:
        found.append(endpoint.sample.at_ms + endpoint.settings.gate_stale_ms + 1)
    return sorted(found)


def frees_itself(endpoint: Endpoint, in_flight: int, now: int) -> int | None:
    """Return when a blocked endpoint will be free if nothing but time happens; None if that does not help."""
    if not block_reason(endpoint, in_flight, now):
        return None
    moments = [moment for moment in changes(endpoint) if moment > now]
    return next((moment for moment in moments if not block_reason(endpoint, in_flight, moment)), None)


def launched(group: Group, endpoint: Endpoint, request: Request) -> None:
    """Note a launch on an endpoint that is not blocked. If it is half open, this is its probe."""
    endpoint.attempts += 1
    if endpoint.sample:
        endpoint.sample.launched += 1
    if endpoint.settings and endpoint.breaker != "closed":
        until = min(group.now + endpoint.settings.probe_timeout_ms, request.deadline_ms)
        request.probe_until_ms = until
        begin_probe(group, endpoint, Probe(request.id, request.fence, request.gateway, until))


def begin_probe(group: Group, endpoint: Endpoint, probe: Probe) -> None:
    if endpoint.breaker == "open":
        group.moves.append(Move(endpoint.name, "open", "half_open"))
    endpoint.breaker, endpoint.probe = "half_open", probe


def note(group: Group, endpoint: Endpoint, by: tuple[str, int], said: Said) -> None:
    """Take notice of how a lease, or a watcher's probe, went. `by`: its id ("" = a watcher's) and fence or token.

    A probe is over by that, whatever it says.
    """
    if said.verdict == Verdict.FAILURE:
        endpoint.failures += 1
        endpoint.last_error = said.error_type
    elif said.verdict == Verdict.BACKPRESSURE:
        _hold(group, endpoint, said.hold_ms)
    is_probe = endpoint.probe is not None and (endpoint.probe.request_id, endpoint.probe.token) == by
    if is_probe:
        endpoint.probe = None
        pause_ms = ASK_AGAIN_MS if by[0] == "" and said.verdict == Verdict.NEUTRAL else 0
        if endpoint.settings is not None:
            chores.set_due(group, "probe", endpoint, max(group.now + pause_ms, endpoint.hold_until_ms))
    if is_probe or endpoint.breaker == "closed":
        _judge(group, endpoint, said.verdict)


def _judge(group: Group, endpoint: Endpoint, verdict: Verdict) -> None:
    """Take a verdict that counts: anyone's while closed, the probe's while half open.

    One that has been left out of the config does not open (again), and its last probe may close it.
    """
    settings, closed = endpoint.settings, endpoint.breaker == "closed"
    if verdict == Verdict.FAILURE:
        endpoint.in_a_row += closed
        if settings and (not closed or endpoint.in_a_row >= settings.breaker_failures):
            _open(group, endpoint, settings.open_ms)
    elif verdict == Verdict.GOOD and closed:
        endpoint.in_a_row = 0
    elif verdict == Verdict.GOOD:
        endpoint.good += 1
        if endpoint.good >= (settings.close_after if settings else 1):
            _close(group, endpoint)


def _open(group: Group, endpoint: Endpoint, open_ms: int) -> None:
    group.moves.append(Move(endpoint.name, endpoint.breaker, "open"))
    endpoint.breaker, endpoint.open_until_ms, endpoint.good = "open", group.now + open_ms, 0
    chores.set_due(group, "probe", endpoint, endpoint.open_until_ms)


def _close(group: Group, endpoint: Endpoint) -> None:
    group.moves.append(Move(endpoint.name, endpoint.breaker, "closed"))
    endpoint.breaker, endpoint.open_until_ms, endpoint.good, endpoint.in_a_row = "closed", 0, 0, 0
    chores.clear(group, "probe", endpoint)


def _hold(group: Group, endpoint: Endpoint, hold_ms: int) -> None:
    until = group.now + min(hold_ms, group.settings.hold_max_ms)
    if until <= endpoint.hold_until_ms:
        return
    if group.now >= endpoint.hold_until_ms:
        group.moves.append(Move(endpoint.name, "free", "held"))
    endpoint.hold_until_ms = until
