"""What gateways do for an endpoint beside their runs: ask it whether it works again, sample its engine's metrics.

A chore is taken by one gateway at a time and is due again if nothing comes of it, so that a gateway that dies with it
delays it only. A probe is left to a waiting request where there is one.
"""

from __future__ import annotations

from dispatch.fabric.records import Chore, ChoreReport
from tests.model import breaker, chores, line
from tests.model.records import Endpoint, Group, Probe, Sample

TRAFFIC_MS = 500
"""A probe is left to waiting requests for so long at a time."""
SAMPLE_MS = 2_000
"""The longest that a sample may take."""


def configured(group: Group, endpoint: Endpoint) -> None:
    """Have a gate sampled from now on, or no more. What an engine said under another config does not count.

    For an endpoint that is left out nothing is to be done; if it is back, its breaker is where it was.
    """
    endpoint.sample = endpoint.sampling = None
    if endpoint.settings is None:
        chores.clear(group, "probe", endpoint)
    elif endpoint.breaker != "closed":
        chores.set_due(group, "probe", endpoint, max(group.now, endpoint.open_until_ms))
    chores.clear(group, "sample", endpoint)
    if endpoint.settings and endpoint.settings.gate != "none":
        chores.set_due(group, "sample", endpoint, group.now)


def report(group: Group, said: ChoreReport) -> None:
    """Take what a chore came to. A token that is not current changes nothing."""
    endpoint = group.endpoint(said.endpoint_id)
    probe = endpoint.probe
    if said.kind == "probe" and probe and (probe.request_id, probe.token) == ("", said.token):
        breaker.note(group, endpoint, ("", said.token), breaker.Said(said.verdict, said.hold_ms, said.error_type))
    elif said.kind == "sample" and endpoint.sampling == said.token:
        _sampled(group, endpoint, said)
    line.use_room(group, endpoint)


def take(group: Group, gateway: str) -> Chore:
    """Hand out the chore that has been due for longest."""
    for name, due in sorted(group.chores.items(), key=lambda item: (item[1], item[0])):
        kind, _, endpoint_name = name.partition(":")
        endpoint = group.endpoint(endpoint_name)
        if due > group.now:
            break
        taken = _take_probe(group, endpoint, gateway) if kind == "probe" else _take_sample(group, endpoint)
        if taken:
            return Chore(kind.upper(), endpoint_name, *taken, chores.due_in(group))
    return Chore("NONE", "", 0, 0, chores.due_in(group))


def _take_probe(group: Group, endpoint: Endpoint, gateway: str) -> tuple[int, int] | None:
    if endpoint.settings is None or not breaker.half_open(endpoint, group.now):
        chores.clear(group, "probe", endpoint)
        if endpoint.breaker == "open" and group.now < endpoint.open_until_ms:
            chores.set_due(group, "probe", endpoint, endpoint.open_until_ms)
        return None
    if endpoint.probe and breaker.probing(endpoint, group.now):
        chores.set_due(group, "probe", endpoint, endpoint.probe.until_ms)
        return None
    if endpoint.holder or line.waiting(group, endpoint):
        chores.set_due(group, "probe", endpoint, group.now + TRAFFIC_MS)
        return None
    if group.now < endpoint.hold_until_ms:
        chores.set_due(group, "probe", endpoint, endpoint.hold_until_ms)
        return None
    group.fence += 1
    until = group.now + endpoint.settings.probe_timeout_ms
    breaker.begin_probe(group, endpoint, Probe("", group.fence, gateway, until))
    chores.set_due(group, "probe", endpoint, until)
    return group.fence, until


def _take_sample(group: Group, endpoint: Endpoint) -> tuple[int, int]:
    group.fence += 1
    endpoint.sampling = group.fence
    chores.set_due(group, "sample", endpoint, group.now + SAMPLE_MS)
    return group.fence, group.now + SAMPLE_MS


def _sampled(group: Group, endpoint: Endpoint, said: ChoreReport) -> None:
    """Take a sample. One that could not be read leaves the last one, which grows old."""
    endpoint.sampling = None
    poll_ms = endpoint.settings.gate_poll_ms if endpoint.settings else SAMPLE_MS
    chores.set_due(group, "sample", endpoint, group.now + poll_ms)
    if said.waiting is not None or said.token_ms is not None:
        endpoint.sample = Sample(said.waiting, said.token_ms, group.now)
