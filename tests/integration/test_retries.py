"""Attempts that failed without an answer are made again, where the pool says so: in time, in bounds, and told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import anyio
import pytest

from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from tests.support.calls import COMPLETION
from tests.support.engines import OK, SILENT, Engine, Fabric, call, text_of
from tests.support.producing import until
from tests.support.stub import Fin, Pause, Reset, Script, SeenRequest, Write, answer_bytes, free_port, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

RESET = Script((Reset(),))
CUT = Script((Write(answer_bytes(COMPLETION)[:-20]), Fin()))
PATIENT = {"breaker_failures": 1000}
QUICK = {"pool_id": "default", "max_attempts": 3, "retry_base_ms": 1, "retry_cap_ms": 50}
SLACK_S = 2.0


def status(code: int, **fields: str) -> Script:
    headers = [(name.replace("_", "-"), value) for name, value in fields.items()]
    return json_answer(b'{"error":{"message":"x"}}', status=f"{code} X", headers=headers)


def fabric_of(valkey: ValkeyProcess, engine: Engine, pool: dict[str, Any] | None = None, **document: Any) -> Fabric:
    endpoint = PATIENT | document.pop("endpoint", {})
    return Fabric(valkey.url, engine.url, endpoint=endpoint, pools=[QUICK | (pool or {})], lease_ms=1500, **document)


def answers(*scripts: Script) -> Any:
    """Answer each call's attempts with these, the last again and again."""
    seen = Counter[str]()

    def answer(request: SeenRequest) -> Script:
        text = text_of(request)
        seen[text] += 1
        return scripts[min(seen[text], len(scripts)) - 1]

    return answer


def failed(found: Reply | BaseException) -> Reply:
    assert isinstance(found, RequestEnded), found
    assert found.reply.ending == "failed"
    return found.reply


@pytest.mark.parametrize(
    ("script", "word", "code"),
    [
        (RESET, "endpoint_disconnected", None),
        (status(429, retry_after_ms="100"), "endpoint_overloaded", 429),
        (status(503, retry_after_ms="100"), "endpoint_overloaded", 503),
    ],
    ids=["reset", "429", "503"],
)
async def test_what_did_no_work_is_tried_again_and_each_attempt_is_told(
    valkey: ValkeyProcess, script: Script, word: str, code: int | None
) -> None:
    async with Engine() as engine:
        engine.calls = answers(script, script, OK)
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(gateway_id="one"), fabric.client() as client:
            reply = await call(client)
            assert isinstance(reply, Reply), reply
            assert (reply.attempt, reply.body) == (3, COMPLETION)
            assert [(one.number, one.status, one.error_type, one.gateway_id) for one in reply.tries] == [
                (1, code, word, "one"),
                (2, code, word, "one"),
            ]
            assert all(one.claimed_ms <= one.ended_ms and one.endpoint_id == "e" for one in reply.tries)
        assert engine.count("call") == 3
        [row] = fabric.endings()
        assert (row["ending"], row["attempt"]) == ("succeeded", 3)
        await fabric.until_clean()


async def test_nobody_there_is_tried_again_until_somebody_is(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        fabric = Fabric(
            valkey.url, f"http://127.0.0.1:{free_port()}/v1", endpoint=PATIENT, pools=[QUICK], lease_ms=1500
        )
        async with fabric.gateway(), fabric.client() as client:
            reply = failed(await call(client))
            assert (reply.attempt, len(reply.tries)) == (3, 2)
            assert {one.error_type for one in reply.tries} == {"endpoint_unreachable"}
        assert engine.count("call") == 0
        await fabric.until_clean()


async def test_by_default_nothing_is_tried_again(valkey: ValkeyProcess) -> None:
    async with Engine(RESET) as engine:
        fabric = Fabric(valkey.url, engine.url, endpoint=PATIENT)
        async with fabric.gateway(), fabric.client() as client:
            reply = failed(await call(client))
            assert (reply.attempt, reply.tries) == (1, ())
        assert engine.count("call") == 1


@pytest.mark.parametrize(
    "script",
    [status(500), status(400), status(401), status(502), status(504), CUT],
    ids=["500", "400", "401", "502", "504", "cut"],
)
async def test_what_may_have_done_work_is_not_tried_again(valkey: ValkeyProcess, script: Script) -> None:
    async with Engine(script) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            assert failed(await call(client)).attempt == 1
        assert engine.count("call") == 1


async def test_a_silent_endpoint_is_not_asked_again(valkey: ValkeyProcess) -> None:
    async with Engine(SILENT) as engine:
        fabric = fabric_of(valkey, engine, endpoint={"first_byte_timeout_ms": 200})
        async with fabric.gateway(), fabric.client() as client:
            reply = failed(await call(client))
            assert reply.error is not None
            assert (reply.attempt, reply.error.type) == (1, "endpoint_timeout")
        assert engine.count("call") == 1


@pytest.mark.parametrize("code", [502, 504])
async def test_a_gateways_status_is_tried_again_where_the_pool_says_so(valkey: ValkeyProcess, code: int) -> None:
    async with Engine() as engine:
        engine.calls = answers(status(code), OK)
        fabric = fabric_of(valkey, engine, {"retry_on": ["502", "504"]})
        async with fabric.gateway(), fabric.client() as client:
            reply = await call(client)
            assert isinstance(reply, Reply)
            assert reply.attempt == 2
            engine.calls = answers(RESET)
            assert failed(await call(client)).attempt == 1  # not in the list


async def test_the_endpoints_wish_is_kept_before_the_next_attempt(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        engine.calls = answers(status(503, retry_after_ms="700"), OK)
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            reply = await call(client)
            assert isinstance(reply, Reply)
        (first, _), (second, _) = engine.begun
        assert 0.69 <= second - first < 0.7 + 1 + SLACK_S


async def test_no_attempt_is_made_that_would_come_after_the_deadline(valkey: ValkeyProcess) -> None:
    async with Engine(status(503, retry_after="20")) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.client() as client:
            begun = time.monotonic()
            reply = failed(await call(client, timeout=5))
            assert time.monotonic() - begun < 3
            assert (reply.attempt, reply.status) == (1, 503)


async def test_a_request_that_waits_for_its_retry_holds_no_slot_and_can_be_cancelled(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        engine.calls = answers(RESET, OK)
        pool = {"max_concurrent": 1, "retry_base_ms": 3_600_000, "retry_cap_ms": 3_600_000}
        fabric = fabric_of(valkey, engine, pool)
        async with fabric.gateway(), fabric.client() as client:
            waiting = asyncio.create_task(call(client, "a", timeout=3500))
            await until(lambda: fabric.pool()["delayed"] == 1)
            row = fabric.pool()
            assert (row["in_flight"], row["pending"]) == (0, 0)
            engine.calls = OK
            assert isinstance(await call(client, "b"), Reply)
            waiting.cancel()
            await until(lambda: fabric.pool()["delayed"] == 0)
        assert [one["ending"] for one in fabric.endings()] == ["cancelled", "succeeded"]
        await fabric.until_clean()


async def test_a_retry_comes_before_what_was_submitted_later(valkey: ValkeyProcess) -> None:
    order: list[str] = []

    def answer(request: SeenRequest) -> Script:
        order.append(text_of(request))
        return RESET if order == ["a"] else Script((Pause(0.3), *OK.steps))

    async with Engine() as engine:
        engine.calls = answer
        fabric = fabric_of(valkey, engine, {"max_concurrent": 1})
        async with fabric.gateway(), fabric.client() as client:
            calls = []
            for text in "abcd":
                calls.append(asyncio.create_task(call(client, text)))
                await until(lambda text=text: fabric.pool()["submitted"] > "abcd".index(text))
            replies = await asyncio.gather(*calls)
        assert all(isinstance(one, Reply) for one in replies)
        assert order.index("a", 1) <= 2  # behind the one that ran meanwhile at most
        assert [one for one in order[1:] if one != "a"] == ["b", "c", "d"]


async def test_retries_of_a_failing_endpoint_are_bounded_for_the_whole_group(valkey: ValkeyProcess) -> None:
    async with Engine(RESET) as engine:
        fabric = fabric_of(valkey, engine, {"max_attempts": 10}, retry_budget_percent=20, retry_budget_min_per_s=1)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            found = await asyncio.gather(*(call(client, str(number)) for number in range(100)))
            assert all(failed(one) for one in found)
        retries = engine.count("call") - 100
        assert 10 <= retries <= 30  # 20 % of a hundred, or the floor of ten, and what a second window may add
        assert retries == sum(len(failed(one).tries) for one in found)


FORMS = {
    "2": "2", "fraction": "0.5", "zero": "0", "negative": "-5", "far": "999999999", "digits": "9" * 5000,
    "word": "soon", "date": "Thu, 01 Jan 1970 00:00:00 GMT", "year": "Sat, 01 Jan 10000 00:00:00 GMT",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", [429, 503])
async def test_whatever_retry_after_says_the_hold_ends_and_the_breaker_stays_closed(
    valkey: ValkeyProcess, code: int, form: str
) -> None:
    async with Engine() as engine:
        engine.calls = answers(status(code, retry_after=FORMS[form]), OK)
        fabric = fabric_of(valkey, engine, endpoint={"breaker_failures": 1}, hold_max_ms=600)
        async with fabric.gateway(), fabric.client() as client:
            begun = time.monotonic()
            first, second = await asyncio.gather(call(client, "a"), call(client, "b"))
            assert isinstance(first, Reply)
            assert isinstance(second, Reply)
            assert time.monotonic() - begun < 2 * (0.6 + 1) + SLACK_S
            assert fabric.endpoint()["breaker"] == "closed"


async def test_an_engine_that_loads_its_model_serves_everything_later(valkey: ValkeyProcess) -> None:
    loading = json_answer(
        b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}',
        status="503 Service Unavailable",
        headers=[("retry-after-ms", "200")],
    )
    async with Engine(loading) as engine:
        fabric = fabric_of(
            valkey, engine, {"max_attempts": 100}, endpoint={"breaker_failures": 1}, retry_budget_min_per_s=1000
        )
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            calls = [asyncio.create_task(call(client, str(number))) for number in range(20)]
            await anyio.sleep(2)
            assert not any(one.done() for one in calls)
            engine.calls, loaded = OK, time.monotonic()
            assert all(isinstance(one, Reply) for one in await asyncio.gather(*calls))
            assert time.monotonic() - loaded < 1 + 0.2 + SLACK_S
            assert fabric.endpoint()["breaker"] == "closed"
        await fabric.until_clean()
