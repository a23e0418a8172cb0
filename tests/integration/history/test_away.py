"""A history that is away: what its users are told, and that it is used again when it is back."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import anyio
import httpx
import pytest

from dispatch.errors import HistoryUnavailable
from dispatch.fabric.functions import request_cancel
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import Filter
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.sinks import SinkAway, ThreadSink
from dispatch.telemetry.spans import spans_of
from tests.support.by_hand import ByHand
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, unique_group
from tests.support.history import PASSWORD, PASSWORD_ENV, RESOURCE, record, served_history
from tests.support.producing import until
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)


async def test_spans_are_kept_by_who_brings_them_until_the_history_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with served_history(tmp_path / "history") as served:
        store = HistoryStore(f"{served.url.replace('//', '//ann@')}/default", password_env=PASSWORD_ENV)
        sink = ThreadSink("history", store.write, away=HistoryUnavailable, close=store.close)
        group = unique_group()
        spans = spans_of(record(0), group, RESOURCE)
        await sink.take(spans)
        assert await anyio.to_thread.run_sync(served.stop) == 0
        with pytest.raises(SinkAway) as caught:
            await sink.take(spans)
        assert str(caught.value) == f"the history at {served.url}/default does not answer: Connection refused"
        await anyio.to_thread.run_sync(served.start)
        await sink.take(spans)
        rows = History(store, group).requests(Filter()).rows
        assert [row.request_id for row in rows] == ["r-0"]
        await sink.aclose()
    assert PASSWORD not in caplog.text


async def test_a_gateway_writes_what_ended_while_its_history_was_away(valkey: ValkeyProcess, tmp_path: Path) -> None:
    group = unique_group()
    configure(valkey.url, group)
    hand = ByHand(valkey.url, group)
    ended = hand.submit("default", 3)
    for request_id in ended:
        hand.run(request_cancel(request_id, actor="test"))
    with served_history(tmp_path / "history") as served:
        await anyio.to_thread.run_sync(served.stop)
        told = {"history_url": served.url, "history_password_env": PASSWORD_ENV}
        async with GatewayProcess(valkey.url, group, **told) as gateway:
            await until(lambda: gateway.event("sink_away") is not None, within_s=30)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
                assert (await client.get("/readyz")).status_code == 200  # calls are none of its business
                assert (await client.get("/api/v1/history/stats")).status_code == 503
                await anyio.to_thread.run_sync(served.start)
                await until(lambda: gateway.event("sink_back") is not None, within_s=60)
                found = (await client.get("/api/v1/history/verify")).json()
            assert gateway.stderr.count('"sink_away"') == 1
            assert PASSWORD not in gateway.stderr
        assert (found["rows"], found["counters"]) == ({"cancelled": 3}, {"cancelled": 3})
        assert (found["checked"]["written"], found["checked"]["missing"]) == (3, [])
    hand.close()


async def test_a_killed_history_has_what_it_said_it_has(tmp_path: Path) -> None:
    with served_history(tmp_path / "history") as served:
        store = HistoryStore(served.url, password_env=PASSWORD_ENV)
        group = unique_group()
        store.write(spans_of(record(0), group, RESOURCE))
        served.stop(signal.SIGKILL)
        served.start()
        assert History(store, group).stats(Filter()).total.requests == 1
        store.close()


async def test_a_wrong_password_and_missing_tables_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_history(tmp_path / "history") as served:
        with HistoryStore(f"{served.url}/empty", password_env=PASSWORD_ENV) as store:
            with pytest.raises(HistoryUnavailable, match="has no tables yet; run: dispatch history init"):
                store.write(spans_of(record(0), "g", RESOURCE))
            assert len(store.init(7)) == 5
            store.write(spans_of(record(0), "g", RESOURCE))
        monkeypatch.setenv(PASSWORD_ENV, "another")
        with (
            HistoryStore(served.url, password_env=PASSWORD_ENV) as store,
            pytest.raises(
                HistoryUnavailable, match="refuses the login: check its user and DISPATCH_HISTORY_PASSWORD_ENV"
            ),
        ):
            store.query("SELECT 1")


async def test_rows_go_when_their_time_is_over(tmp_path: Path) -> None:
    day_ms = 86_400_000
    with served_history(tmp_path / "history", ttl_days=3) as served:
        store = HistoryStore(served.url, password_env=PASSWORD_ENV)
        group = unique_group()
        new = record(0)
        old = record(1, ended_ms=new.ended_ms - 5 * day_ms)
        for one in (old, new):
            store.write(spans_of(one, group, RESOURCE))
        for table in ("dispatch_requests", "dispatch_attempts", "otel_traces"):
            store.command(f"OPTIMIZE TABLE {table} FINAL")
        assert [row.request_id for row in History(store, group).requests(Filter()).rows] == ["r-0"]
        story = History(store, group).request("r-0")
        assert story is not None
        assert len(story.attempts) == 1
        assert store.query("SELECT count() AS found FROM otel_traces") == [{"found": 2}]
        store.close()
