"""An endpoint that takes nothing blocks the pools that use it, and nobody else."""

from __future__ import annotations

from dispatch.fabric import functions as f
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess

QUANTUM, M = 4, 16


def test_other_pools_run_on_and_the_blocked_one_keeps_its_credit_without_a_burst(valkey: ValkeyProcess) -> None:
    fleet = Fleet(
        valkey.url,
        {
            "blocked": {"quantum": QUANTUM, "endpoint": "slow"},
            "b": {"quantum": 1, "endpoint": "fast"},
            "c": {"quantum": 1, "endpoint": "fast"},
        },
        slots=8,
        endpoints=[
            {"endpoint_id": "slow", "url": "http://127.0.0.1:9/v1", "max_concurrent": 1},
            {"endpoint_id": "fast", "url": "http://127.0.0.1:10/v1"},
        ],
    )
    for pool in ("blocked", "b", "c"):
        fleet.submit(pool, [1] * 500)
    held = list(fleet.claim(8))
    [stuck] = [lease for lease in held if lease.pool_id == "blocked"]
    held.remove(stuck)
    assert len(held) == 7, "the blocked pool holds its one slot, the others use all that is left"

    before = len(fleet.launches)
    while len(fleet.launches) < before + 400:
        held = list(fleet.settle(held, want=7))
        assert len(held) == 7
    while_blocked = [pool for _, pool, _ in fleet.sequence()[before:]]
    assert "blocked" not in while_blocked
    assert abs(while_blocked.count("b") - while_blocked.count("c")) <= 2
    rows = {row["pool_id"]: row for row in fleet.connection.run(fleet.group, f.fabric_snapshot("pools"))["rows"]}
    assert rows["blocked"]["block_reason"] == "endpoint_capacity"
    assert set(rows["blocked"]["skips"]) == {"endpoint_capacity"}
    assert rows["blocked"]["deficit"] <= M

    before = len(fleet.launches)
    running = [stuck, *held]
    for _ in range(60):
        running = list(fleet.settle(running, want=8))
    back = [pool for _, pool, _ in fleet.sequence()[before:]]
    assert 50 <= back.count("blocked") <= 62, "one at a time, each time its slot is free"
    assert abs(back.count("b") - back.count("c")) <= 2
    fleet.settle(running)
    fleet.close()
