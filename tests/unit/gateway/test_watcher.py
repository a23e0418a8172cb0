"""Chores against a fabric in memory: taken when due, done beside each other, reported, given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from dispatch.errors import ScriptFault
from dispatch.fabric.schema import key
from dispatch.gateway.endpoints import Endpoints
from dispatch.gateway.identity import Identity
from dispatch.gateway.link import Link
from dispatch.gateway.watcher import Watcher
from tests.support.engines import BROKEN, SILENT, Engine
from tests.support.executors import HeldExecutor
from tests.support.fake_fabric import FakeFabric, Fault
from tests.unit.gateway.conftest import make_gateway

pytestmark = pytest.mark.anyio

LONG_MS = 60_000
PAGE = b"vllm:num_requests_waiting 4\n"


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(page=PAGE) as opened:
        yield opened


def fabric_with(*rows: dict[str, object], **more: int) -> FakeFabric:
    fabric = FakeFabric(**more)
    fabric.document["endpoints"] = list(rows)
    fabric.document["default_endpoint"] = rows[0]["endpoint_id"]
    return fabric


def row(engine: Engine, name: str = "e", **more: object) -> dict[str, object]:
    return {"endpoint_id": name, "url": engine.url, "gate": "vllm"} | more


def hand_out(fabric: FakeFabric, kind: str, name: str = "e", token: int = 1, span_ms: int = LONG_MS) -> None:
    """Have a chore handed out, and tell the gateway by its next heartbeat."""
    fabric.chores.append((kind, name, token, span_ms))
    fabric.tokens[key("g", "wake_gateway", gateway="gw")].put_nowait(None)


async def test_a_probe_is_made_and_reported(engine: Engine) -> None:
    fabric = fabric_with(row(engine))
    async with make_gateway(fabric, HeldExecutor()):
        hand_out(fabric, "PROBE", token=7)
        await fabric.until(lambda: len(fabric.reports) == 1)
        engine.models = BROKEN
        hand_out(fabric, "PROBE", token=8)
        await fabric.until(lambda: len(fabric.reports) == 2)
    assert fabric.reports == [["probe", "e", 7, "good", 0, ""], ["probe", "e", 8, "failure", 0, "endpoint_failed"]]


async def test_a_sample_is_made_and_reported(engine: Engine) -> None:
    fabric = fabric_with(row(engine))
    async with make_gateway(fabric, HeldExecutor()):
        hand_out(fabric, "SAMPLE", token=7)
        await fabric.until(lambda: len(fabric.reports) == 1)
    assert fabric.reports == [["sample", "e", 7, "4.000", ""]]


async def test_chores_that_are_due_together_are_done_beside_each_other(engine: Engine) -> None:
    async with Engine(models=SILENT) as silent:
        fabric = fabric_with(row(engine), row(silent, "silent"))
        async with make_gateway(fabric, HeldExecutor()):
            hand_out(fabric, "PROBE", "silent", 1)
            for token in range(2, 6):
                hand_out(fabric, "SAMPLE", "e", token)
            await fabric.until(lambda: len(fabric.reports) == 4)
            await silent.stub.until(lambda stub: len(stub.requests) == 1)
    assert sorted(report[2] for report in fabric.reports[:4]) == [2, 3, 4, 5]


async def test_a_chore_has_the_time_it_is_given(engine: Engine) -> None:
    engine.models = SILENT
    fabric = fabric_with(row(engine))
    async with make_gateway(fabric, HeldExecutor()):
        begun = time.monotonic()
        hand_out(fabric, "PROBE", span_ms=500)
        await fabric.until(lambda: len(fabric.reports) == 1)
        assert time.monotonic() - begun < 3
    assert fabric.reports == [["probe", "e", 1, "failure", 0, "endpoint_timeout"]]


async def test_claims_and_heartbeats_go_on_meanwhile(engine: Engine) -> None:
    engine.models = SILENT
    fabric, executor = fabric_with(row(engine), lease_ms=300), HeldExecutor(held=False)
    async with make_gateway(fabric, executor):
        hand_out(fabric, "PROBE")
        await engine.stub.until(lambda stub: len(stub.requests) == 1)
        beats = len(fabric.beats)
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
        await fabric.until(lambda: len(fabric.beats) > beats + 3)
        assert not fabric.reports


async def test_an_endpoint_that_cannot_be_asked_here_is_not_blamed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    fabric = fabric_with(row(engine, api_key_env="NO_SUCH_KEY"))
    async with make_gateway(fabric, HeldExecutor()):
        hand_out(fabric, "PROBE", token=1)
        hand_out(fabric, "PROBE", "unknown", token=2)
        hand_out(fabric, "SAMPLE", token=3)
        await fabric.until(lambda: len(fabric.reports) == 3)
    assert sorted(fabric.reports, key=lambda report: report[2]) == [
        ["probe", "e", 1, "neutral", 0, "endpoint_misconfigured"],
        ["probe", "unknown", 2, "neutral", 0, "endpoint_unknown"],
        ["sample", "e", 3, "", ""],
    ]
    assert not engine.begun


async def test_a_lost_report_is_repeated_and_a_fault_of_the_library_is_outlived(engine: Engine) -> None:
    fabric = fabric_with(row(engine))
    fabric.faults.append(Fault("endpoint_report", done=False, error=ScriptFault("x.lua:1: boom")))
    async with make_gateway(fabric, HeldExecutor()) as gateway:
        hand_out(fabric, "PROBE")
        await engine.stub.until(lambda stub: len(stub.requests) == 1)
        fabric.lose("endpoint_report", done=False, times=3)
        await fabric.until(lambda: len(fabric.reports) == 1)
        assert gateway.running


async def test_what_is_under_way_is_given_back_at_the_end(engine: Engine) -> None:
    engine.models = SILENT
    fabric = fabric_with(row(engine))
    async with make_gateway(fabric, HeldExecutor()):
        hand_out(fabric, "PROBE", token=5)
        await engine.stub.until(lambda stub: len(stub.requests) == 1)
    assert fabric.reports == [["probe", "e", 5, "neutral", 0, ""]]
    await engine.stub.until(lambda stub: stub.open_connections == 0)


async def test_an_answer_that_came_late_does_not_hide_what_is_due() -> None:
    fabric = FakeFabric()
    link = Link(fabric, "g")
    watcher = Watcher(Identity("gw", "g", 1), link, Endpoints(link), None)  # type: ignore[arg-type]  # nothing is asked
    now = asyncio.get_running_loop().time()
    watcher.expect(500, 10_000, now)
    due = watcher._due_at
    watcher.expect(None, 9_999, now)
    assert watcher._due_at == due
    watcher.expect(None, 10_001, now)
    assert watcher._due_at > due
