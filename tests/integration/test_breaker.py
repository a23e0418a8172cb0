"""The breaker of an endpoint, shared by all gateways: it opens, has one probe at a time, and closes, come what may."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import pytest

from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from dispatch.fabric import functions
from tests.support.calls import COMPLETION
from tests.support.descriptors import no_free_descriptor
from tests.support.engines import BROKEN, LIST, OK, SILENT, Engine, Fabric, call, slow, text_of
from tests.support.gateway_process import GatewayProcess
from tests.support.producing import until
from tests.support.stub import Reset, Script, SeenRequest, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

OPEN_MS = 600
PROBE_MS = 1500
BREAKER = {"breaker_failures": 3, "open_ms": OPEN_MS, "close_after": 2, "probe_timeout_ms": PROBE_MS}
BOUND_S = (OPEN_MS + PROBE_MS) / 1000 + 1
"""Within this a breaker whose endpoint is well again has closed."""
SLACK_S = 2.0
"""What a busy machine may take on top."""

HELD = json_answer(b"{}", status="503 Service Unavailable", headers=[("retry-after", "60")])


def fabric_of(valkey: ValkeyProcess, engine: Engine, **document: Any) -> Fabric:
    endpoint = BREAKER | document.pop("endpoint", {})
    return Fabric(valkey.url, engine.url, endpoint=endpoint, lease_ms=1500, **document)


async def open_breaker(fabric: Fabric, client: Any, engine: Engine) -> float:
    """Fail calls until the breaker is open; returns when that was."""
    before, engine.calls = engine.calls, BROKEN
    for _ in range(3):
        assert isinstance(await call(client), RequestEnded)
    assert fabric.endpoint()["breaker"] == "open"
    engine.calls = before
    return time.monotonic()


@asynccontextmanager
async def two_processes(fabric: Fabric) -> AsyncIterator[dict[str, GatewayProcess]]:
    """Run two gateways as processes, by their ids."""
    both = {name: GatewayProcess(fabric.url, fabric.group, gateway_id=name) for name in ("first", "second")}
    async with both["first"], both["second"]:
        yield both


def ending(found: Reply | BaseException) -> tuple[str, str]:
    """Return how a call ended and its error's word."""
    assert isinstance(found, RequestEnded), found
    error = found.reply.error
    return found.reply.ending, "" if error is None else error.type


async def test_failures_in_a_row_open_it_for_all_gateways_and_good_probes_close_it(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            opened = await open_breaker(fabric, client, engine)
            assert engine.count("call") == 3
            replies = await asyncio.gather(*(call(client) for _ in range(4)))
            assert all(isinstance(one, Reply) for one in replies)
            first = min(at for at, _ in engine.begun[3:])
            assert first >= opened + OPEN_MS / 1000 - 0.2  # nothing was asked before its time
            assert fabric.endpoint()["breaker"] == "closed"
        assert fabric.moves() == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]
        await fabric.until_clean()


async def test_a_success_between_failures_and_errors_of_callers_leave_it_closed(valkey: ValkeyProcess) -> None:
    refusal = json_answer(b'{"error":{"message":"no"}}', status="400 Bad Request")

    def answer(request: SeenRequest) -> Script:
        return {"bad": BROKEN, "good": OK, "wrong": refusal}[text_of(request)]

    async with Engine() as engine:
        fabric, engine.calls = fabric_of(valkey, engine), answer
        async with fabric.gateway(), fabric.client() as client:
            for text in ("bad", "bad", "good", "bad", "bad", "wrong", "wrong", "wrong"):
                await call(client, text)
            assert fabric.endpoint()["breaker"] == "closed"
            await call(client, "bad")
            assert fabric.endpoint()["breaker"] == "open"


async def test_one_probe_at_a_time_over_two_gateways(valkey: ValkeyProcess) -> None:
    async with Engine(slow(0.15)) as engine:
        fabric = fabric_of(valkey, engine, endpoint={"close_after": 5})
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            calls = [asyncio.create_task(call(client)) for _ in range(12)]
            states: list[tuple[str, int]] = []
            while not all(one.done() for one in calls):
                row = fabric.endpoint()
                states.append((row["breaker"], row["in_flight"]))
                await anyio.sleep(0.01)
            assert max(running for state, running in states if state == "half_open") == 1
            assert all(isinstance(one, Reply) for one in await asyncio.gather(*calls))
            assert engine.count("models") == 0  # what waits is the probe


async def test_a_probe_that_fails_opens_it_again(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.calls = Script((Reset(),))
            assert ending(await call(client)) == ("failed", "endpoint_disconnected")
            assert fabric.endpoint()["breaker"] == "open"
            engine.calls = OK
            assert isinstance(await call(client), Reply)
        assert ("half_open", "open") in fabric.moves()


async def test_without_traffic_a_gateway_asks_for_the_models_and_closes_it(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            opened = await open_breaker(fabric, client, engine)
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S)
            asked = [at for at, kind in engine.begun if kind == "models"]
            assert len(asked) == 2
            assert asked[0] >= opened + OPEN_MS / 1000 - 0.2
            assert engine.count("call") == 3


async def test_an_endpoint_that_stays_away_is_asked_once_for_each_open_time(valkey: ValkeyProcess) -> None:
    async with Engine(models=BROKEN) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            await until(lambda: engine.count("models") >= 3, within_s=8)
            asked = [at for at, kind in engine.begun if kind == "models"]
            assert min(later - earlier for earlier, later in pairwise(asked)) > OPEN_MS / 1000 - 0.2
            engine.models = LIST
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S)


async def test_an_endpoint_that_refuses_our_key_is_not_asked_without_pause(valkey: ValkeyProcess) -> None:
    unauthorized = json_answer(b"{}", status="401 Unauthorized")
    async with Engine(models=unauthorized) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            await until(lambda: engine.count("models") >= 3, within_s=10)
            asked = [at for at, kind in engine.begun if kind == "models"]
            assert asked[2] - asked[0] > 1.5
            assert fabric.endpoint()["breaker"] == "half_open"
            engine.models = LIST
            await fabric.until_state("closed", within_s=5)


async def test_a_silent_probe_is_cut_in_its_time_and_its_caller_is_told(valkey: ValkeyProcess) -> None:
    async with Engine(models=SILENT) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.calls = SILENT
            probing = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 4)
            row = fabric.endpoint()
            assert row["breaker"] == "half_open"
            assert row["probe"]["request_id"]
            assert row["probe"]["until_ms"] - row["probe"]["since_ms"] == PROBE_MS
            begun = time.monotonic()
            found = await probing
            assert ending(found) == ("failed", "endpoint_timeout")
            assert time.monotonic() - begun < PROBE_MS / 1000 + SLACK_S
            await engine.stub.until(lambda stub: stub.open_connections == 0)
            assert fabric.endpoint()["breaker"] == "open"
            await until(lambda: fabric.endpoint()["breaker"] == "half_open" and engine.count("models") == 1)
            await until(lambda: fabric.moves()[-1] == ("half_open", "open"), within_s=PROBE_MS / 1000 + SLACK_S)
            await engine.stub.until(lambda stub: stub.open_connections == 0)


async def test_a_probe_past_its_own_deadline_does_not_blame_the_endpoint(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.calls = SILENT
            opened = time.monotonic()
            found = await call(client, timeout=OPEN_MS / 1000 + 0.7)
            assert ending(found) == ("expired", "deadline_exceeded")
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S - (time.monotonic() - opened))
        assert ("half_open", "open") not in fabric.moves()


async def test_a_probe_whose_caller_leaves_is_stopped_at_once_and_makes_way(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.calls = SILENT
            probing = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 4)
            engine.calls, held = OK, engine.last_call
            left = time.monotonic()
            probing.cancel()
            await engine.stub.until(lambda _: held.connection.closed_by == "client")
            assert time.monotonic() - left < 1 + SLACK_S
            replies = await asyncio.gather(*(call(client) for _ in range(2)))
            assert all(isinstance(one, Reply) for one in replies)
            assert fabric.endpoint()["breaker"] == "closed"
        await fabric.until_clean()
        assert [one["ending"] for one in fabric.endings()].count("cancelled") == 1


async def test_a_cancelled_probe_frees_its_slot_within_a_second(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine, endpoint={"max_concurrent": 1})
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.calls = SILENT
            probing = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 4)
            engine.calls, held = OK, engine.last_call
            request_id = fabric.endpoint()["probe"]["request_id"]
            asked = time.monotonic()
            assert fabric.run(functions.request_cancel(request_id, actor="test")).status == "CANCELLING"
            assert ending(await probing) == ("cancelled", "cancelled")
            assert time.monotonic() - asked < 1 + SLACK_S
            assert held.connection.closed_by == "client"
            assert isinstance(await call(client), Reply)


async def test_a_probe_for_which_there_is_no_socket_does_not_blame_the_endpoint(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            opened = await open_breaker(fabric, client, engine)
            row = fabric.endpoint()
            with no_free_descriptor():
                assert ending(await call(client)) == ("failed", "endpoint_unreachable")
            assert engine.count("call") == 3
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S - (time.monotonic() - opened))
            assert fabric.endpoint()["failures"] == row["failures"]


async def test_a_pool_that_is_paused_at_the_probe_does_not_keep_it_open(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            calls = [asyncio.create_task(call(client)) for _ in range(3)]
            await until(lambda: fabric.pool()["pending"] == 3)
            fabric.run(functions.pool_pause("default", "pause", actor="test"))
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S)
            assert engine.count("call") == 3
            fabric.run(functions.pool_pause("default", "resume", actor="test"))
            assert all(isinstance(one, Reply) for one in await asyncio.gather(*calls))


async def test_a_gateway_killed_at_the_probe_keeps_it_open_no_longer_than_its_time(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine)
        async with two_processes(fabric) as processes, fabric.client() as client:
            opened = await open_breaker(fabric, client, engine)
            engine.calls = SILENT
            probing = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 4)
            engine.calls = OK
            processes[fabric.endpoint()["probe"]["gateway_id"]].signal(signal.SIGKILL)
            killed = time.monotonic()
            assert isinstance(await call(client), Reply)  # the next probe
            assert time.monotonic() - killed < PROBE_MS / 1000 + 1 + SLACK_S
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S - (killed - opened))
            assert ending(await probing) == ("lost", "lost")
            await fabric.until_clean()


async def test_a_watcher_killed_at_its_probe_keeps_it_open_no_longer_than_its_time(valkey: ValkeyProcess) -> None:
    async with Engine(models=SILENT) as engine:
        fabric = fabric_of(valkey, engine)
        async with two_processes(fabric) as processes, fabric.client() as client:
            await open_breaker(fabric, client, engine)
            await until(lambda: engine.count("models") == 1)
            engine.models = LIST
            probe = fabric.endpoint()["probe"]
            assert "request_id" not in probe
            processes[probe["gateway_id"]].signal(signal.SIGKILL)
            await fabric.until_state("closed", within_s=PROBE_MS / 1000 + 1 + SLACK_S)


async def test_a_gateway_that_drains_gives_its_probe_back(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine, endpoint={"probe_timeout_ms": 60_000})
        gateway = fabric.gateway()
        await gateway.start()
        async with fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.models = SILENT
            await until(lambda: engine.count("models") == 1)
            engine.models = LIST
            async with fabric.gateway():
                await gateway.stop()
                await fabric.until_state("closed", within_s=5)
        await engine.stub.until(lambda stub: stub.open_connections == 0)


async def test_overload_holds_the_endpoint_and_never_opens_it(valkey: ValkeyProcess) -> None:
    busy = json_answer(b"{}", status="429 Too Many Requests", headers=[("retry-after-ms", "300")])
    async with Engine(busy) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            for _ in range(4):
                assert ending(await call(client)) == ("failed", "endpoint_overloaded")
            engine.calls = OK
            assert isinstance(await call(client), Reply)
            times = [at for at, _ in engine.begun]
            assert min(later - earlier for earlier, later in pairwise(times)) > 0.25
        assert {to for _, to in fabric.moves()} <= {"held"}
        assert ("free", "held") in fabric.moves()


async def test_an_overloaded_answer_to_the_probe_holds_and_the_next_one_closes_it(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine, hold_max_ms=400)
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            engine.models = HELD
            await until(lambda: engine.count("models") == 1)
            engine.models = LIST
            await fabric.until_state("closed", within_s=BOUND_S + SLACK_S)
        assert ("half_open", "open") not in fabric.moves()


async def test_a_pool_that_rejects_when_open_refuses_and_others_wait(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default"}, {"pool_id": "picky", "on_open": "reject"}]
    async with Engine(models=SILENT) as engine:
        fabric = fabric_of(valkey, engine, pools=pools, endpoint={"open_ms": 2500})
        async with fabric.gateway(), fabric.client() as client:
            await open_breaker(fabric, client, engine)
            waiting = asyncio.create_task(call(client))
            refused = await call(client, pool="picky")
            assert getattr(refused, "reason", "") == "endpoint_open", refused
            assert isinstance(await waiting, Reply)


async def test_work_that_waited_goes_out_within_a_second_of_the_endpoints_return(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = fabric_of(valkey, engine, endpoint={"close_after": 1})
        async with fabric.gateway(), fabric.client() as client:
            opened = await open_breaker(fabric, client, engine)
            replies = await asyncio.gather(*(call(client) for _ in range(10)))
            assert all(isinstance(one, Reply) and one.body == COMPLETION for one in replies)
            assert time.monotonic() - opened < OPEN_MS / 1000 + 1 + SLACK_S


async def test_an_open_endpoint_blocks_its_own_pools_and_no_others(valkey: ValkeyProcess) -> None:
    async with Engine(BROKEN, models=BROKEN) as bad, Engine(slow(0.02)) as good:
        endpoint = BREAKER | {"open_ms": 60_000}
        more = [{"endpoint_id": "good", "url": good.url}]
        pools = [
            {"pool_id": "a", "quantum": 4, "endpoint": "e"},
            {"pool_id": "b", "endpoint": "good"},
            {"pool_id": "c", "endpoint": "good"},
        ]
        fabric = Fabric(
            valkey.url, bad.url, endpoint=endpoint, more_endpoints=more, pools=pools, total_concurrent_dispatch=4
        )
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            blocked = [asyncio.create_task(call(client, pool="a")) for _ in range(30)]
            await fabric.until_state("open")
            begun = time.monotonic()
            calls = [call(client, pool=name) for _ in range(30) for name in ("b", "c")]
            assert all(isinstance(one, Reply) for one in await asyncio.gather(*calls))
            assert time.monotonic() - begun < 60 * 0.02 / 4 + SLACK_S
            row = fabric.pool("a")
            assert row["block_reason"] == "endpoint_open"
            assert row["skips"]["endpoint_open"] >= 1
            assert row["in_flight"] == 0
            for one in blocked:
                one.cancel()
            await asyncio.gather(*blocked, return_exceptions=True)
        await fabric.until_clean()
