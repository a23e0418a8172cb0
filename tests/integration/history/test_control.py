"""The history over the control API and by command: the same answers everywhere, to whom they are for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from dispatch.fabric.records import Outcome
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import Filter
from dispatch.telemetry.history.store import HistoryStore
from tests.support.commands import Commands, Done
from tests.support.control import ControlStack, control_stack, told
from tests.support.groups import configure, unique_group
from tests.support.history import (
    NOW_MS,
    PASSWORD_ENV,
    delivery,
    envelope,
    queued_only,
    read_endings,
    record,
    write,
)
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

SPAN = {"since_ms": NOW_MS - 3_600_000, "until_ms": NOW_MS}
ROUTES = ["requests", "requests/r-1", "stats", "series", "errors", "tokens", "shares", "gateways", "verify"]
OF_THE_GROUP = ["shares", "gateways", "verify"]
RECORDS = [
    record(0, pool_id="backfill", envelope=envelope(model="llama", caller_request_id="mine")),
    record(1, pool_id="default", ending="failed", outcome="failed", error_type="endpoint_timeout", status=504),
    queued_only(2, pool_id="backfill"),
]


@pytest.fixture(scope="session")
def store(stores: Callable[[str], HistoryStore]) -> HistoryStore:
    return stores("http")


@pytest.fixture
async def control(valkey: ValkeyProcess, store: HistoryStore) -> AsyncIterator[ControlStack]:
    async with control_stack(valkey.url, history=store) as stack:
        await anyio.to_thread.run_sync(write, store, stack.group, *RECORDS, delivery(RECORDS[0], 30))
        yield stack


async def by_command(stack: ControlStack, *words: str, over: str) -> Done:
    """Run a history command for the stack's group, straight or over the gateway."""
    store: HistoryStore = stack.history
    run = Commands(stack.hand.url, stack.group)
    direct = ("--history", store.address, "--password-env", PASSWORD_ENV)
    where = direct if over == "history" else ("--gateway", stack.url)
    return await anyio.to_thread.run_sync(partial(run, "history", *words, *where))


async def test_the_api_answers_as_the_history_does(control: ControlStack, store: HistoryStore) -> None:
    history, wanted = History(store, control.group), Filter(**SPAN)
    weights = {row["pool_id"]: row["quantum"] for row in control.hand.section("pools")["rows"]}
    expected = {
        "requests": history.requests(wanted),
        "requests/mine": history.request("r-0"),
        "stats": history.stats(wanted),
        "series": history.series(wanted, 60),
        "errors": history.errors(wanted),
        "tokens": history.tokens(wanted),
        "shares": history.shares(wanted, 60, weights),
        "gateways": history.gateways(),
    }
    for path, answer in expected.items():
        params = {} if path in {"gateways", "requests/mine"} else SPAN
        found = await control.get(f"/history/{path}", "observe", **params)
        assert found.status_code == 200, found.text
        assert found.json() == msgspec.to_builtins(answer), path
        assert found.headers["x-request-id"]
    listed = [row["request_id"] for row in await control.rows("/history/requests", limit=1)]
    assert listed == ["r-2", "r-1", "r-0"]
    [only] = await control.rows("/history/requests", failed=True, pool="default")
    assert only["error_type"] == "endpoint_timeout"
    missing = await control.get("/history/requests/never")
    assert told(missing) == (404, "request_unknown")


async def test_a_key_of_certain_pools_sees_these(control: ControlStack) -> None:
    role = "observe-backfill"
    assert {row["pool_id"] for row in await control.rows("/history/requests", role)} == {"backfill"}
    for path in ("stats", "series", "tokens", "errors"):
        found = (await control.get(f"/history/{path}", role, **SPAN)).text
        assert "backfill" in found
        assert "endpoint_timeout" not in found
        assert '"default"' not in found
    assert (await control.get("/history/requests/r-0", role)).status_code == 200
    assert told(await control.get("/history/requests/r-1", role)) == (404, "request_unknown")
    assert told(await control.get("/history/stats", role, pool="default")) == (403, "pool_not_allowed")
    for path in OF_THE_GROUP:
        assert told(await control.get(f"/history/{path}", role)) == (403, "pool_not_allowed")
    for path in ROUTES:
        assert told(await control.get(f"/history/{path}", "submit")) == (403, "role_not_allowed")
        assert (await control.get(f"/history/{path}", "")).status_code == 401


@pytest.mark.parametrize(
    ("path", "params", "named"),
    [
        ("requests", {"cursor": "x"}, "cursor"),
        ("requests", {"ending": "gone"}, "ending"),
        ("requests", {"pool": "a b"}, "pool"),
        ("requests", {"limit": 0}, "limit"),
        ("series", {"since_ms": 0, "step_s": 1}, "step_s"),
        ("shares", {"since_ms": 5, "until_ms": 4}, "until_ms"),
        ("verify", {"cursor": "'; DROP"}, "cursor"),
    ],
)
async def test_what_makes_no_sense_is_named(
    control: ControlStack, path: str, params: dict[str, Any], named: str
) -> None:
    answer = await control.get(f"/history/{path}", **params)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named


async def test_a_gateway_without_a_history_says_so(valkey: ValkeyProcess) -> None:
    async with control_stack(valkey.url, keys=False) as stack:
        for path in ROUTES:
            answer = await stack.get(f"/history/{path}")
            assert told(answer) == (404, "history_off")
            assert "DISPATCH_HISTORY_URL is not set" in answer.json()["error"]["message"]


async def test_a_history_that_is_away_is_a_503_and_nothing_else_suffers(valkey: ValkeyProcess) -> None:
    with HistoryStore("clickhouse://127.0.0.1:9") as store:
        async with control_stack(valkey.url, keys=False, history=store) as stack:
            for path in ROUTES:
                answer = await stack.get(f"/history/{path}")
                assert told(answer) == (503, "history_unavailable")
                assert "Connection refused" in answer.json()["error"]["message"]
            assert (await stack.get("/pools")).status_code == 200


@pytest.mark.parametrize("over", ["history", "gateway"])
async def test_commands_say_the_same_straight_and_over_a_gateway(
    control: ControlStack, store: HistoryStore, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.history = store
    monkeypatch.setenv("DISPATCH_API_KEY", control.tokens["observe"])
    ask = partial(by_command, control, over=over)
    listed = await ask("list", "--json")
    assert (listed.code, listed.err) == (0, "")
    assert [row["request_id"] for row in listed.json["requests"]] == ["r-2", "r-1", "r-0"]
    first = await ask("list", "--limit", "1", "--failed", "--since", "2h")
    assert first.out.splitlines()[1].startswith("r-2")
    assert first.err == "dispatch: there are more than these 1 (--limit)\n"
    assert (await ask("list", "--wait-over", "999")).out.count("r-") == 1
    shown = await ask("show", "mine")
    assert "ending:           succeeded" in shown.out
    assert "reply taken:      30 ms later" in shown.out
    assert "attempt 1:        " in shown.out
    gone = await ask("show", "never")
    assert (gone.code, gone.out) == (2, "")
    assert gone.err == f"dispatch: the history of group {control.group} has no request never\n"
    stats = (await ask("stats", "--json")).json
    assert stats["total"]["endings"] == {"succeeded": 1, "failed": 1, "expired": 1}
    assert "100 ms" not in (await ask("stats")).err
    series = (await ask("series", "--since", "30m", "--json")).json
    assert sum(point["requests"] for point in series["points"]) == 3
    assert "endpoint_timeout" in (await ask("errors")).out
    assert (await ask("tokens", "--model", "llama", "--json")).json["tokens"][0]["input_tokens"] == 7
    assert (await ask("shares", "--step", "600", "--json")).json["total"]["pools"]
    assert "all" in (await ask("shares")).out
    assert "g-1" in (await ask("gateways")).out
    wrong = await ask("stats", "--since", "yesterday")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--since 'yesterday' is no time: 90s, 15m" in wrong.err


@pytest.mark.parametrize("over", ["history", "gateway"])
async def test_verify_holds_counters_stream_and_rows_against_each_other(
    valkey: ValkeyProcess, store: HistoryStore, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.telemetry.history.verify.GRACE_MS", -60_000)
    async with control_stack(valkey.url, keys=False, history=store) as stack:
        stack.history = store
        stack.hand.submit("default", 5)
        stack.hand.settle(stack.hand.claim(3))
        stack.hand.settle(stack.hand.claim(2), outcome=Outcome.FAILED)
        records = read_endings(valkey.url, stack.group)
        await anyio.to_thread.run_sync(write, store, stack.group, *records[1:])
        done = await by_command(stack, "verify", "--json", over=over)
        assert done.code == 1, done.err
        assert done.json["counters"] == done.json["stream"] == {"succeeded": 3, "failed": 2}
        assert done.json["rows"] == {"succeeded": 2, "failed": 2}
        assert (done.json["missing"], done.json["written"]) == ([records[0].request_id], 4)
        said = await by_command(stack, "verify", over=over)
        assert "5 records of the stream were looked up: 4 have a row, 1 have none" in said.out
        assert f"missing: {records[0].request_id}" in said.out
        await anyio.to_thread.run_sync(write, store, stack.group, records[0])
        whole = await by_command(stack, "verify", "--json", over=over)
        assert (whole.code, whole.json["missing"], whole.json["rows"]) == (0, [], {"succeeded": 3, "failed": 2})


async def test_commands_without_a_history_say_what_to_give(valkey: ValkeyProcess) -> None:
    group = unique_group()
    configure(valkey.url, group)
    done = Commands(valkey.url, group)("history", "stats")
    assert (done.code, done.out) == (2, "")
    assert "no history is named: give --history (DISPATCH_HISTORY_URL" in done.err
    printed = Commands(valkey.url, group)("history", "init", "--print", "--ttl-days", "7")
    assert printed.code == 0
    assert printed.out.count("CREATE TABLE IF NOT EXISTS") == 5
    assert printed.out.count("toIntervalDay(7)") == 5
