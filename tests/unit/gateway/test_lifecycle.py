"""Starting, draining, stopping; what a gateway says about itself."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from dispatch.config import GatewaySettings
from dispatch.errors import ConfigurationError, FabricUnavailable, LibraryProblem
from dispatch.fabric.records import LibraryVersion
from dispatch.gateway import Gateway
from tests.support.executors import HeldExecutor
from tests.support.fake_fabric import FakeFabric
from tests.unit.gateway.conftest import make_gateway, make_settings

pytestmark = pytest.mark.anyio


async def test_disabled_nothing_starts() -> None:
    tasks = asyncio.all_tasks()
    async with Gateway(GatewaySettings(enabled=False)) as gateway:
        assert asyncio.all_tasks() == tasks
        assert not gateway.running
        status = gateway.status()
        assert (status.enabled, status.running, status.in_flight) == (False, False, 0)
        assert await gateway.endpoints() == ()


async def test_without_a_valkey_url_it_fails_at_once_naming_the_setting() -> None:
    with pytest.raises(ConfigurationError, match="DISPATCH_VALKEY_URL"):
        await Gateway(GatewaySettings(endpoint_url="http://127.0.0.1:9/v1")).start()


async def test_without_an_endpoint_it_fails_at_once_naming_the_setting() -> None:
    fabric = FakeFabric(configured=False)
    with pytest.raises(ConfigurationError, match="DISPATCH_ENDPOINT_URL"):
        await make_gateway(fabric, HeldExecutor()).start()
    assert fabric.calls["group_configure"] == 0


async def test_without_the_key_of_its_endpoint_it_fails_at_once_naming_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    fabric = FakeFabric(configured=False)
    gateway = make_gateway(
        fabric, HeldExecutor(), endpoint_url="http://127.0.0.1:9/v1", endpoint_api_key_env="SOME_KEY"
    )
    with pytest.raises(ConfigurationError, match="SOME_KEY"):
        await gateway.start()
    assert fabric.generation == 0


async def test_a_group_that_was_never_configured_gets_the_default_config() -> None:
    fabric = FakeFabric(configured=False)
    async with make_gateway(fabric, HeldExecutor(), endpoint_url="http://127.0.0.1:9/v1") as gateway:
        assert fabric.generation == 1
        assert [(row["pool_id"], row["quantum"]) for row in fabric.document["pools"]] == [
            ("interactive", 4),
            ("document-extract", 2),
            ("backfill", 1),
            ("default", 1),
        ]
        assert [endpoint.url for endpoint in await gateway.endpoints()] == ["http://127.0.0.1:9/v1"]


async def test_a_configured_group_keeps_its_endpoints_and_a_given_one_is_told_to_be_unused() -> None:
    fabric = FakeFabric()
    with capture_logs() as logs:
        async with make_gateway(fabric, HeldExecutor(), endpoint_url="http://127.0.0.1:9/other") as gateway:
            assert "http://127.0.0.1:9/other" not in [endpoint.url for endpoint in await gateway.endpoints()]
    assert [line["generation"] for line in logs if line["event"] == "endpoint_url_unused"] == [fabric.generation]


async def test_another_gateway_that_was_faster_is_fine() -> None:
    fabric = FakeFabric(configured=False)
    known = fabric._known

    def configured_meanwhile() -> None:
        try:
            known()
        finally:
            fabric.generation = fabric.generation or 1

    fabric._known = configured_meanwhile  # type: ignore[method-assign] # a race that cannot be had otherwise
    async with make_gateway(fabric, HeldExecutor(), endpoint_url="http://127.0.0.1:9/v1") as gateway:
        assert gateway.running
        assert fabric.calls["group_configure"] == 1


async def test_a_config_that_is_lost_while_it_runs_is_made_again() -> None:
    fabric, executor = FakeFabric(configured=False), HeldExecutor(held=False)
    async with make_gateway(fabric, executor, endpoint_url="http://127.0.0.1:9/v1"):
        await fabric.until(lambda: fabric.calls["lease_claim"] == 1)
        fabric.generation = 0
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
        assert fabric.generation == 1


async def test_an_unreachable_server_fails_the_start_and_leaves_nothing() -> None:
    tasks = asyncio.all_tasks()
    with pytest.raises(FabricUnavailable, match=r"127\.0\.0\.1:1"):
        await Gateway(make_settings()).start()
    assert asyncio.all_tasks() == tasks


async def test_another_library_fails_the_start(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFabric, "_library_version", lambda *_: [1, b"other", b"0"])
    assert LibraryVersion(1, "other", "0")
    with pytest.raises(LibraryProblem, match="dispatch scripts load"):
        await make_gateway(fabric, HeldExecutor()).start()


async def test_start_and_stop_may_be_in_different_tasks(fabric: FakeFabric) -> None:
    gateway = make_gateway(fabric, HeldExecutor(held=False))
    await asyncio.create_task(gateway.start())
    with pytest.raises(RuntimeError, match="started already"):
        await gateway.start()
    request_id = fabric.submit()
    await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    await asyncio.create_task(gateway.stop())
    await gateway.stop()
    assert not gateway.running
    await gateway.start()
    assert gateway.running
    await gateway.stop()


async def test_draining_claims_nothing_and_waits_for_what_runs(fabric: FakeFabric, executor: HeldExecutor) -> None:
    gateway = make_gateway(fabric, executor, slots=2, drain_timeout_ms=5000)
    await gateway.start()
    running = [fabric.submit(), fabric.submit()]
    await executor.until_begun(2)
    waiting = fabric.submit()
    stopping = asyncio.create_task(gateway.stop())
    await asyncio.sleep(0)
    assert gateway.draining
    fabric.wants.clear()
    executor.release(*running)
    await stopping
    assert [fabric.ending(one) for one in running] == ["succeeded", "succeeded"]
    assert fabric.ending(waiting) is None
    assert set(fabric.wants) == {0}
    assert fabric.beats[-1][6] == 1
    assert fabric.beats[-1][9 + fabric.beats[-1][7] :] == []


async def test_heartbeats_go_on_while_draining(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=200)
    gateway = make_gateway(fabric, executor, drain_timeout_ms=5000)
    await gateway.start()
    request_id = fabric.submit()
    await executor.until_begun(1)
    stopping = asyncio.create_task(gateway.stop())
    seen = len(fabric.beats)
    await fabric.until(lambda: len(fabric.beats) > seen + 6)
    assert not executor.broken_off
    executor.release()
    await stopping
    assert fabric.ending(request_id) == "succeeded"


async def test_what_has_not_begun_is_given_back(fabric: FakeFabric, executor: HeldExecutor) -> None:
    gateway = make_gateway(fabric, executor)
    await gateway.start()
    begun = fabric.submit()
    await executor.until_begun(1)
    unbegun = fabric.submit(b"abc", stored=True)
    fetch = asyncio.Event()

    async def slow_get(_key: str) -> bytes | None:
        await fetch.wait()
        raise AssertionError("broken off before")

    fabric.get = slow_get  # type: ignore[method-assign] # holds the run before its endpoint is called
    await fabric.until(lambda: len(fabric.leases) == 2)
    stopping = asyncio.create_task(gateway.stop())
    await fabric.until(lambda: fabric.released == [unbegun])
    executor.release()
    await stopping
    assert fabric.ending(begun) == "succeeded"
    assert executor.begun == {begun: 1}
    assert fabric.queue[0].attempt == 0


async def test_what_outlasts_the_drain_is_broken_off_and_told(fabric: FakeFabric, executor: HeldExecutor) -> None:
    gateway = make_gateway(fabric, executor, drain_timeout_ms=200)
    await gateway.start()
    request_id = fabric.submit()
    await executor.until_begun(1)
    started = time.monotonic()
    await gateway.stop()
    assert 0.2 <= time.monotonic() - started < 1.0
    assert fabric.ending(request_id) == "lost"
    assert executor.broken_off == {request_id: 1}


async def test_a_second_stop_with_less_time_ends_it_sooner(fabric: FakeFabric, executor: HeldExecutor) -> None:
    gateway = make_gateway(fabric, executor, drain_timeout_ms=60_000)
    await gateway.start()
    request_id = fabric.submit()
    await executor.until_begun(1)
    stopping = asyncio.create_task(gateway.stop())
    await asyncio.sleep(0)
    await gateway.stop(timeout_ms=0)
    await stopping
    assert fabric.ending(request_id) == "lost"


async def test_it_stops_in_time_also_when_the_server_is_away(fabric: FakeFabric, executor: HeldExecutor) -> None:
    gateway = make_gateway(fabric, executor, drain_timeout_ms=200)
    await gateway.start()
    fabric.submit()
    await executor.until_begun(1)
    fabric.go_down()
    started = time.monotonic()
    await gateway.stop()
    assert time.monotonic() - started < 2.2
    assert not gateway.running


async def test_a_claim_that_is_answered_while_draining_is_given_back(
    fabric: FakeFabric, executor: HeldExecutor
) -> None:
    request_id = fabric.submit()
    fabric.lose("lease_claim", done=True, times=3)
    gateway = make_gateway(fabric, executor)
    await gateway.start()
    await fabric.until(lambda: len(fabric.leases) == 1)
    await gateway.stop()
    assert fabric.released == [request_id]
    assert not fabric.leases
    assert not executor.begun


async def test_a_cancelled_host_still_settles_what_it_holds(fabric: FakeFabric, executor: HeldExecutor) -> None:
    gateway = make_gateway(fabric, executor, drain_timeout_ms=60_000)

    async def application() -> None:
        async with gateway:
            await asyncio.Event().wait()

    running = asyncio.create_task(application())
    request_id = fabric.submit()
    await executor.until_begun(1)
    assert gateway._task is not None
    gateway._task.cancel()  # what asyncio.run does to every task when its main task has ended
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fabric.ending(request_id) == "lost"
    assert not fabric.leases


async def test_cancelling_the_start_leaves_nothing(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()

    async def never(*_: object) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fabric, "run", never)
    tasks = asyncio.all_tasks()
    starting = asyncio.create_task(make_gateway(fabric, HeldExecutor()).start())
    await waits.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert asyncio.all_tasks() == tasks


async def test_a_bug_in_a_loop_ends_the_gateway_visibly_and_settles(
    fabric: FakeFabric, executor: HeldExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = make_gateway(fabric, executor)
    await gateway.start()
    request_id = fabric.submit()
    await executor.until_begun(1)
    service = gateway._service
    assert service is not None

    def broken(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service.heart, "_reconcile", broken)
    service.heart._on_token(True)
    await gateway.wait_stopped()
    assert gateway.failure is not None
    assert not gateway.running
    assert fabric.ending(request_id) == "lost"
    with pytest.raises(BaseExceptionGroup):
        await gateway.stop()


async def test_an_id_that_another_living_process_uses_is_refused() -> None:
    fabric = FakeFabric(lease_ms=1500)
    fabric.gateways["gw"] = {"gateway_id": "gw", "host": "elsewhere", "pid": 7, "slots": 4, "beat_ms": 1}

    async def beats() -> None:
        await asyncio.sleep(0.3)
        fabric.gateways["gw"]["beat_ms"] = 2

    beating = asyncio.create_task(beats())
    with pytest.raises(ConfigurationError, match=r"DISPATCH_GATEWAY_ID.*'gw'.*process 7 on host elsewhere"):
        await make_gateway(fabric, HeldExecutor()).start()
    await beating
    assert not fabric.beats


@pytest.mark.parametrize(
    "entry",
    [
        {"host": "elsewhere", "pid": 7, "slots": 0},
        {"host": "elsewhere", "pid": 7, "slots": 4},
        {"host": socket.gethostname(), "pid": 2**22 + 1, "slots": 4},
    ],
    ids=["left", "silent", "dead"],
)
async def test_an_id_of_a_process_that_is_gone_is_free(entry: dict[str, Any]) -> None:
    fabric = FakeFabric(lease_ms=600)
    fabric.gateways["gw"] = {"gateway_id": "gw", "beat_ms": 1} | entry
    started = time.monotonic()
    async with make_gateway(fabric, HeldExecutor()):
        assert (time.monotonic() - started > 0.25) == (entry["slots"] == 4 and entry["host"] == "elsewhere")
    assert fabric.gateways["gw"]["slots"] == 0


async def test_stopping_it_while_it_starts_ends_the_start(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()

    async def never(*_: object) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fabric, "run", never)
    gateway = make_gateway(fabric, HeldExecutor())
    starting = asyncio.create_task(gateway.start())
    await waits.wait()
    await gateway.stop()
    with pytest.raises(RuntimeError, match="stopped while it started"):
        await starting
