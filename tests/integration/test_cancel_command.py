"""`dispatch cancel`: what becomes of requests that wait, run, wait for a retry, have ended, or never were."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dispatch.errors import RequestEnded
from dispatch.fabric import functions as f
from dispatch.fabric.audit import differences
from dispatch.fabric.records import Lease, Outcome, Settlement
from dispatch.producer.client import DispatchClient
from tests.support.by_hand import ByHand
from tests.support.commands import Commands
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import until
from tests.support.stub import Hold, Script, StubBackend
from tests.support.valkey import ValkeyProcess

DONE, REFUSED, TROUBLE = 0, 1, 2


@pytest.fixture
def hand(valkey: ValkeyProcess, group: str) -> Iterator[ByHand]:
    made = ByHand(valkey.url, group)
    yield made
    made.close()


@pytest.fixture
def dispatch(valkey: ValkeyProcess, group: str) -> Commands:
    return Commands(valkey.url, group)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def settle_when_asked(hand: ByHand, lease: Lease, outcome: Outcome) -> None:
    """Be the gateway that runs a request until somebody asks it to stop."""
    deadline = time.monotonic() + 20
    while "cancel_asked_by" not in row(hand, lease.request_id):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hand.settle([lease], outcome=outcome)


def row(hand: ByHand, request_id: str) -> dict[str, Any]:
    [found] = hand.section("request", subject=request_id)["rows"]
    return dict(found)


def test_one_that_waits_ends_at_once(hand: ByHand, dispatch: Commands) -> None:
    [request_id] = hand.submit("backfill")
    done = dispatch("cancel", request_id, "--reason", "wrong prompt", "--actor", "anna")
    assert (done.code, done.out, done.err) == (DONE, f"{request_id}: cancelled; it was not running\n", "")
    assert row(hand, request_id)["ending"] == "cancelled"
    assert hand.pool("backfill")["pending"] == 0
    assert (
        b"cancelled by anna: wrong prompt" in hand.connection.read_frames(f"{{{hand.group}}}:list:llm:replies:p", 1)[0]
    )


def test_one_that_waits_for_its_next_attempt_ends_at_once(valkey: ValkeyProcess) -> None:
    group = unique_group()
    pools = [{"pool_id": "default", "max_attempts": 3, "retry_base_ms": 3_600_000, "retry_cap_ms": 3_600_000}]
    configure(valkey.url, group, default_document() | {"pools": pools})
    hand, dispatch = ByHand(valkey.url, group), Commands(valkey.url, group)
    [request_id] = hand.submit(timeout_ms=3_600_000)
    [lease] = hand.claim(1)
    item = Settlement(
        request_id=request_id, fence=lease.fence, outcome=Outcome.FAILED, error_type="endpoint_unreachable",
        retryable=True,
    )  # fmt: skip
    hand.run(f.lease_settle("g", "g/1", nonce=uuid.uuid4().hex, want=0, items=[item]))
    if row(hand, request_id)["state"] == "delayed":  # else its jitter went beyond the deadline
        assert hand.pool("default")["delayed"] == 1
        assert dispatch("cancel", request_id).out == f"{request_id}: cancelled; it was not running\n"
    assert hand.section("group")["delayed"] == 0
    assert differences(hand.connection, group) == []
    hand.close()


def test_it_waits_for_a_running_one_to_be_stopped(
    hand: ByHand, dispatch: Commands, background: ThreadPoolExecutor
) -> None:
    [request_id] = hand.submit()
    [lease] = hand.claim(1)
    gateway = background.submit(settle_when_asked, hand, lease, Outcome.CANCELLED)
    done = dispatch("cancel", request_id, "--wait", "20", "--reason", "too long", "--actor", "anna")
    gateway.result()
    assert (done.code, done.out) == (DONE, f"{request_id}: cancelled; gateway g has stopped it\n")


def test_one_that_ended_before_it_could_be_stopped_is_told_so(
    hand: ByHand, dispatch: Commands, background: ThreadPoolExecutor
) -> None:
    [request_id] = hand.submit()
    [lease] = hand.claim(1)
    gateway = background.submit(settle_when_asked, hand, lease, Outcome.SUCCEEDED)
    done = dispatch("cancel", request_id, "--wait", "20")
    gateway.result()
    assert (done.code, done.out) == (REFUSED, f"{request_id}: ended succeeded before it could be stopped\n")


@pytest.mark.parametrize("wait", ["0", "0.3"])
def test_one_that_still_runs_after_the_wait_is_told_so(hand: ByHand, dispatch: Commands, wait: str) -> None:
    [request_id] = hand.submit()
    [lease] = hand.claim(1)
    done = dispatch("cancel", request_id, "--wait", wait, "--reason", "why", "--actor", "anna")
    assert (done.code, done.out) == (REFUSED, "")
    assert done.err == f"dispatch: {request_id}: still runs on gateway g, which was told to stop it\n"
    assert row(hand, request_id)["cancel_asked_by"] == "anna: why"
    hand.settle([lease], outcome=Outcome.CANCELLED)


def test_several_are_told_each_and_the_exit_code_says_whether_all_are_cancelled(
    hand: ByHand, dispatch: Commands
) -> None:
    ended, running, waiting, cancelled = hand.submit(count=4)
    leases = {lease.request_id: lease for lease in hand.claim(2)}
    hand.settle([leases[ended]])
    assert dispatch("cancel", waiting, waiting).code == DONE
    assert dispatch("cancel", cancelled, waiting).code == DONE  # one of them was cancelled before
    done = dispatch("cancel", ended, running, waiting, "nope", "--wait", "0", "--json")
    assert done.code == REFUSED
    assert [(each["request_id"], each["result"]) for each in done.json["requests"]] == [
        (ended, "ended"), (running, "running"), (waiting, "cancelled"), ("nope", "unknown"),
    ]  # fmt: skip
    assert done.err.splitlines() == [
        f"dispatch: {running}: still runs on gateway g, which was told to stop it",
        "dispatch: nope: is not there; it was never submitted to this group, or ended a while ago",
    ]
    assert dispatch("cancel", ended).out == f"{ended}: had ended before: succeeded\n"
    hand.settle([leases[running]], outcome=Outcome.CANCELLED)


def test_many_are_cancelled_in_few_calls(hand: ByHand, dispatch: Commands) -> None:
    ids = hand.submit("backfill", 250)
    done = dispatch("cancel", *ids)
    assert (done.code, len(done.out.splitlines())) == (DONE, 250)
    assert hand.pool("backfill")["pending"] == 0


@pytest.mark.anyio
async def test_a_real_gateway_breaks_its_call_off(valkey: ValkeyProcess) -> None:
    group = unique_group()
    async with StubBackend(Script((Hold(),))) as stub:
        configure(valkey.url, group, default_document(f"{stub.url}/v1"))
        dispatch = Commands(valkey.url, group)
        async with GatewayProcess(valkey.url, group), DispatchClient(valkey.url, fabric_group=group) as client:
            async with anyio.create_task_group() as tasks:
                told: list[RequestEnded] = []

                async def call() -> None:
                    with pytest.raises(RequestEnded) as ended:
                        await client.complete(
                            model="m", messages=[{"role": "user", "content": "x"}], request_id="long", timeout=60
                        )
                    told.append(ended.value)

                tasks.start_soon(call)
                await until(lambda: len(stub.requests) == 1, within_s=15)
                done = await anyio.to_thread.run_sync(lambda: dispatch("cancel", "long", "--wait", "15"))
                assert done.code == DONE, done
                assert done.out.startswith("long: cancelled; gateway ")
            assert told[0].reply.ending == "cancelled"
