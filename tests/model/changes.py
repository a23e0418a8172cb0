"""Bringing a changed config into force: pools keep credit, turn, open visit and running requests, and are placed anew.

A pool is placed anew when its own config or that of its old or new endpoint changed; all are when the policy or the
greatest cost changed. It stands in the line afterwards, at its turn, and is judged there under the new rules.
"""

from __future__ import annotations

from tests.model import chores, line, watching
from tests.model.records import Endpoint, Group, Pool
from tests.model.settings import GroupSettings


def removal_problems(group: Group, settings: GroupSettings) -> list[str]:
    """Say which pools that are left out still have work, which would be stranded."""
    named = {pool.pool_id for pool in settings.pools}
    return [
        f"{name} has work"
        for name, pool in group.pools.items()
        if name not in named and (pool.live or group.pool_in_flight(name) or group.delayed(name))
    ]


def apply(group: Group, settings: GroupSettings) -> None:
    """Bring valid settings into force."""
    old, gone = group.settings, set(group.endpoints)
    everything = (old.policy, old.cost_max) != (settings.policy, settings.cost_max)
    changed_endpoints = _apply_endpoints(group, settings)
    moved = []
    for config in settings.pools:
        pool = group.pools.setdefault(config.pool_id, Pool(config))
        old_endpoint = pool.settings.endpoint
        if everything or pool.settings != config or {old_endpoint, config.endpoint} & changed_endpoints:
            _lift(group, pool)
            pool.settings = config
            moved.append(pool)
    for name in set(group.pools) - {config.pool_id for config in settings.pools}:
        _lift(group, group.pools.pop(name))
        group.kept = [kept for kept in group.kept if kept != name]
    group.settings = settings
    for pool in moved:
        _place(group, pool)
    for name in gone - {config.endpoint_id for config in settings.endpoints}:
        if name in changed_endpoints and not group.endpoint_in_flight(name):
            chores.clear(group, "probe", group.endpoints.pop(name))
    for config_ in settings.endpoints:  # whoever had the turn on one of them may have been lifted
        line.use_room(group, group.endpoint(config_.endpoint_id))


def _apply_endpoints(group: Group, settings: GroupSettings) -> set[str]:
    """Give endpoints their new settings; those left out lose theirs. Returns the names of those that changed."""
    wanted = {config.endpoint_id: config for config in settings.endpoints}
    changed = set()
    for name in [*wanted, *(name for name in group.endpoints if name not in wanted)]:
        endpoint: Endpoint = group.endpoint(name)
        if endpoint.settings != wanted.get(name):
            endpoint.settings = wanted.get(name)
            watching.configured(group, endpoint)
            changed.add(name)
    return changed


def _lift(group: Group, pool: Pool) -> None:
    """Take the pool out of the line or from its endpoint, without touching its credit, turn and visit."""
    if pool.place == "line":
        line.collect(group, pool)
    endpoint = group.endpoint(pool.settings.endpoint)
    if endpoint.holder == pool.name:
        endpoint.holder = ""
    pool.place, pool.parked = "idle", ""


def _place(group: Group, pool: Pool) -> None:
    """Place a lifted pool under the settings in force. Credit outside an open visit is clamped, as at a visit's end."""
    pool.reason = ""
    if not pool.live:
        pool.turn = None
        line.forget_credit(pool)
        return
    if not pool.open:
        pool.deficit = min(pool.deficit, group.settings.cost_max)
    line.come_back(group, pool)
