"""Rules about the whole group: its gateways, its bounds, fair sharing, and what could not be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dispatch.fabric.view import FabricView, PoolRow, RequestRow
from dispatch.studio.findings import Act, Finding, Situation
from dispatch.studio.looking import ago, lease_ms, listed, live_gateways, waiting_pools
from dispatch.studio.trend import PoolTrend, Trend
from dispatch.studio.words import count, duration, percent, plural

_COST_MAX = 16
_START = "dispatch gateway --group"


def no_gateway(s: Situation) -> Iterator[Finding]:
    """No gateway lives, and something waits."""
    waiting = s.view.group.pending if s.view.group else None
    if live_gateways(s.view) != [] or not waiting:
        return
    yield Finding(
        rule="no_gateway",
        kind="broken",
        subject="group",
        sentence=f"No gateway is live: {plural(waiting, 'request waits', 'requests wait')}, nothing is dispatched.",
        since_ms=(s.view.group.last_beat_ms if s.view.group else None) or None,
        act=Act("Open gateways", "gateways"),
        look_first=f"the gateways' processes and logs; start one: {_START} {s.view.name}",
        signals=("pending-grows",),
    )


def gateway_silent(s: Situation) -> Iterator[Finding]:
    """A gateway missed its heartbeats, and holds requests."""
    if s.view.gateways is None or s.view.running is None:
        return
    beats = {row.gateway_id: row.beat_ms for row in s.view.gateways}
    held: dict[str, list[RequestRow]] = defaultdict(list)
    for row in s.view.running:
        if row.gateway_id:
            held[row.gateway_id].append(row)
    for name, rows in sorted(held.items()):
        beat_ms = beats.get(name)
        if beat_ms is not None and s.view.server_ms - beat_ms <= 2 * lease_ms(s.view) // 3:
            continue
        silent = "is gone" if beat_ms is None else f"has not been heard of for {ago(s.view, beat_ms)}"
        yield Finding(
            rule="gateway_silent",
            kind="broken",
            subject=f"gateway:{name}",
            sentence=f"{name} {silent} and holds {plural(len(rows), 'request', 'requests')}; "
            f"{_leases_told(s.view, rows)}.",
            since_ms=beat_ms,
            act=Act("Open gateways", "gateways", name),
            look_first=f"the process and the log of gateway {name}",
            signals=("in-flight-sticks", "requests-vanish"),
        )


def group_capped(s: Situation) -> Iterator[Finding]:
    """All slots of the group are in use, and pools wait."""
    group, pools = s.view.group, waiting_pools(s.view)
    if group is None or group.total_concurrent_dispatch is None or group.in_flight is None or not pools:
        return
    if group.in_flight < group.total_concurrent_dispatch:
        return
    used = plural(group.total_concurrent_dispatch, "slot", "slots")
    yield Finding(
        rule="group_capped",
        kind="capped",
        subject="group",
        sentence=f"All {used} of the group are in use; {plural(len(pools), 'pool waits', 'pools wait')}.",
        act=Act("Change cap", "change_cap"),
        look_first="total_concurrent_dispatch, and whether the backend can take more",
        signals=("pending-grows",),
    )


def gateways_full(s: Situation) -> Iterator[Finding]:
    """The gateways' slots are all in use, and the group has room."""
    live, group = live_gateways(s.view), s.view.group
    taking = [row for row in live or () if not row.draining]
    if not taking or group is None or group.total_concurrent_dispatch is None or group.in_flight is None:
        return
    if any(row.slots is None or row.in_flight is None for row in taking):
        return
    slots, used = sum(row.slots or 0 for row in taking), sum(row.in_flight or 0 for row in taking)
    room = group.total_concurrent_dispatch - group.in_flight
    if used < slots or room <= 0 or not any(_could_launch(row) for row in waiting_pools(s.view)):
        return
    yield Finding(
        rule="gateways_full",
        kind="capped",
        subject="group",
        sentence=f"Gateways are full ({count(used)} of {count(slots)}); {plural(room, 'group slot', 'group slots')} "
        "cannot be used.",
        act=Act("Open gateways", "gateways"),
        look_first="how many gateways run, and their slots",
        signals=("pending-grows",),
    )


def sharing_off(s: Situation) -> Iterator[Finding]:
    """A pool that was always ready was served less than its weight, by more than the scheduler's bound allows."""
    if s.trend is None or s.view.group is None or s.view.group.policy != "drr":
        return
    ready = [(row, each) for row in s.view.pools or () if (each := _ready(s.trend, row)) is not None]
    cost_max = s.view.group.cost_max or _COST_MAX
    for pool, trend in ready:
        if any(_behind((pool, trend), other, cost_max) for other in ready if other[0] is not pool):
            yield Finding(
                rule="sharing_off",
                kind="held",
                subject=f"pool:{pool.pool_id}",
                sentence=f"Sharing is off for {pool.pool_id}: {percent(trend.share)} of {percent(trend.fair_share)}.",
                act=Act("Open audit", "audit", pool.pool_id),
                look_first="dispatch doctor: whether every counter is true",
                signals=("pending-grows",),
            )


def versions_differ(s: Situation) -> Iterator[Finding]:
    """Live gateways run several versions."""
    by_version: dict[str, list[str]] = defaultdict(list)
    for row in live_gateways(s.view) or ():
        by_version[row.version or "an unknown version"].append(row.gateway_id)
    if len(by_version) < 2:
        return
    told = "; ".join(f"{version} on {listed(names)}" for version, names in sorted(by_version.items()))
    yield Finding(
        rule="versions_differ",
        kind="person",
        subject="group",
        sentence=f"Gateways run {len(by_version)} versions: {told}.",
        act=Act("Open system", "system"),
        look_first="whether an upgrade is under way",
    )


def clock_off(s: Situation) -> Iterator[Finding]:
    """This machine's clock and the server's differ."""
    offset = s.view.read_ms - s.view.server_ms
    if not s.compare_clocks or abs(offset) <= s.limits.clock_ms:
        return
    yield Finding(
        rule="clock_off",
        kind="person",
        subject="group",
        sentence=f"The clock here is {duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'} Valkey's.",
        act=Act("Open system", "system"),
        look_first="time synchronisation of both machines",
    )


def counters_differ(s: Situation) -> Iterator[Finding]:
    """An audit found counters that are not true."""
    if s.differences:
        yield Finding(
            rule="counters_differ",
            kind="broken",
            subject="group",
            sentence=f"{plural(s.differences, 'counter is', 'counters are')} not true.",
            act=Act("Open audit", "audit"),
            look_first="dispatch doctor --repair",
        )


def not_read(s: Situation) -> Iterator[Finding]:
    """A section of the state could not be read."""
    for section, why in sorted(s.view.unknown.items()):
        yield Finding(
            rule=f"not_read_{section}",
            kind="unknown",
            subject="group",
            sentence=f"The section {section} could not be read: {why.rstrip('.')}.",
            act=Act("Open system", "system"),
            look_first="the library's version and the rights of this key",
        )


def _leases_told(view: FabricView, rows: list[RequestRow]) -> str:
    ends = [row.lease_until_ms for row in rows if row.lease_until_ms is not None]
    left = min(ends, default=0) - view.server_ms
    when = (
        f"leases end in {duration(left)}" if left > 0 else "their leases are over, and no gateway has taken them back"
    )
    return f"{when}, then they are lost or run again" if left > 0 else when


def _could_launch(pool: PoolRow) -> bool:
    capped = pool.max_concurrent is not None and (pool.in_flight or 0) >= pool.max_concurrent
    return pool.block_reason in {None, "insufficient_credit", "protected"} and not capped


def _ready(trend: Trend, pool: PoolRow) -> PoolTrend | None:
    """Return the pool's trend if it could have been served all the time."""
    each = trend.of(pool.pool_id)
    if each is None or not each.backlogged or each.hindered or each.cost_served is None or not pool.quantum:
        return None
    return each


def _behind(one: tuple[PoolRow, PoolTrend], other: tuple[PoolRow, PoolTrend], cost_max: int) -> bool:
    """Say whether `one` was served less per weight than `other`, beyond the bound of a group with settlement.

    A window of a page holds no visit's begin or end, so a burst of each may be cut off: one quantum more.
    """
    (pool, trend), (rival, rivals) = one, other
    weight, rival_weight = pool.quantum or 1, rival.quantum or 1
    ahead = (rivals.cost_served or 0) / rival_weight - (trend.cost_served or 0) / weight
    spread = sum((cost_max - 1) * (1 + 2 * (row.in_flight or 0)) / (row.quantum or 1) for row in (pool, rival))
    return ahead > 2 + spread + cost_max / weight
