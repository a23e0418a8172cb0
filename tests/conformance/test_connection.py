"""What every method of a connection does when all is well."""

from __future__ import annotations

import os
import uuid
from typing import Any

import anyio
import pytest

from dispatch.errors import BadArgument, FabricError, GroupUnknown, LibraryProblem, PoolUnknown
from dispatch.fabric import functions as f
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.records import Admitted, Exists, Refused, Submission
from dispatch.fabric.schema import key as schema_key
from dispatch.fabric.verifying import require_same, verify_library

pytestmark = [pytest.mark.anyio, pytest.mark.container]

EVERY_BYTE = bytes(range(256)) * 3 + b"\r\n$5\r\n\x00"


def submission(**changes: Any) -> Submission:
    fields: dict[str, Any] = {
        "request_id": uuid.uuid4().hex, "pool_id": "default", "producer_id": "p", "session": "s",
        "nonce": uuid.uuid4().hex, "model": "m", "message_count": 1, "images": 0, "pages": 0,
        "estimated_cost_units": None, "timeout_ms": None, "envelope": b"{}", "body": b"{}", "body_bytes": 2,
    }  # fmt: skip
    return Submission(**fields | changes)


async def test_run_decodes_the_answer(connection, group) -> None:
    answer = await connection.run(group, f.request_submit(submission()))
    assert isinstance(answer, Admitted)
    assert answer.deadline_ms > answer.server_ms


async def test_run_answers_read_only_functions(connection, group) -> None:
    await verify_library(connection, group)
    pools = await connection.run(group, f.fabric_snapshot("pools"))
    assert {row["pool_id"] for row in pools["rows"]} == {"interactive", "document-extract", "backfill", "default"}


async def test_run_carries_every_byte_both_ways(connection, group) -> None:
    sent = submission(body=EVERY_BYTE, body_bytes=len(EVERY_BYTE), envelope=EVERY_BYTE[::-1])
    await connection.run(group, f.request_submit(sent))
    claim = await connection.run(group, f.lease_claim("g", "g/x", nonce="n", want=1))
    assert claim.leases[0].body == sent.body
    assert claim.leases[0].envelope == sent.envelope


async def test_expected_answers_are_records_not_errors(connection, group) -> None:
    sent = submission()
    await connection.run(group, f.request_submit(sent))
    again = await connection.run(group, f.request_submit(submission(request_id=sent.request_id)))
    assert again == Exists("queued", sent.request_id)
    missing = await connection.run(group, f.request_submit(submission(body=b"", body_bytes=9)))
    assert isinstance(missing, Refused)
    assert (missing.reason, missing.retry_after_ms) == ("body_missing", None)


async def test_broken_promises_are_this_packages_errors(connection, group) -> None:
    with pytest.raises(PoolUnknown, match="nowhere") as unknown:
        await connection.run(group, f.request_submit(submission(pool_id="nowhere")))
    assert set(unknown.value.known) == {"interactive", "document-extract", "backfill", "default"}
    with pytest.raises(GroupUnknown, match=r"^group never-configured has"):
        await connection.run("never-configured", f.request_submit(submission()))
    with pytest.raises(BadArgument, match="section"):
        await connection.run(group, f.fabric_snapshot("weather"))


async def test_run_many_keeps_order_and_puts_each_error_at_its_place(connection, group) -> None:
    first, last = submission(), submission()
    answers = await connection.run_many(
        group,
        [
            f.request_submit(first),
            f.request_submit(submission(pool_id="nowhere")),
            f.request_submit(submission(request_id=first.request_id)),
            f.request_submit(last),
        ],
    )
    assert [type(answer) for answer in answers] == [Admitted, PoolUnknown, Exists, Admitted]
    waiting = await connection.run(group, f.fabric_snapshot("waiting", subject="default"))
    assert [row["request_id"] for row in waiting["rows"]] == [first.request_id, last.request_id]


async def test_run_many_of_nothing_is_nothing(connection, group) -> None:
    assert await connection.run_many(group, []) == []


async def test_put_and_get_carry_every_byte_and_expire(connection, group, eye) -> None:
    key = f"{{{group}}}:blob"
    assert await connection.get(key) is None
    await connection.put(key, EVERY_BYTE, ttl_ms=30_000)
    assert await connection.get(key) == EVERY_BYTE
    assert 0 < eye.pttl(key) <= 30_000
    await connection.put(key, b"", ttl_ms=30_000)
    assert await connection.get(key) == b""


async def test_a_large_body_passes(connection, group) -> None:
    key = f"{{{group}}}:large"
    body = os.urandom(16 << 20)
    await connection.put(key, body, ttl_ms=30_000)
    assert await connection.get(key) == body


async def test_read_frames_leaves_them_there(connection, group, eye) -> None:
    key = f"{{{group}}}:frames"
    assert await connection.read_frames(key, 10) == []
    eye.rpush(key, EVERY_BYTE, "b", "c")
    assert await connection.read_frames(key, 2) == [EVERY_BYTE, b"b"]
    assert await connection.read_frames(key, 10) == [EVERY_BYTE, b"b", b"c"]


async def test_run_then_read_reads_what_the_call_left_there(connection, group, eye) -> None:
    replies = schema_key(group, "replies", producer="p")
    eye.set(schema_key(group, "alive", producer="p"), "s")
    eye.rpush(replies, "1|1|a", "1|2|b", "1|3|c")
    ack = f.reply_ack("p", "s", upto=1)
    answer, frames = await connection.run_then_read(group, ack, replies, 1)
    assert (answer.owner, answer.trimmed, answer.remaining) == (True, 1, 2)
    assert frames == [b"1|2|b"]


async def test_run_then_read_raises_the_error_of_either(connection, group, eye) -> None:
    text, frames = f"{{{group}}}:text", f"{{{group}}}:frames"
    eye.set(text, "no list")
    with pytest.raises(FabricError, match="WRONGTYPE"):
        await connection.run_then_read(group, f.library_version(), text, 1)
    with pytest.raises(LibraryProblem, match="no_such_function"):
        await connection.run_then_read(group, FunctionCall("no_such_function", [], int), frames, 1)


@pytest.mark.parametrize("count", [1, 100])
async def test_a_call_s_error_is_its_own_however_many_arguments_it_has(connection, group, count) -> None:
    with pytest.raises(LibraryProblem, match="no_such_function"):
        await connection.run(group, FunctionCall("no_such_function", ["x"] * count, int))


async def test_keep_alive_marks_the_producer_and_renews_its_replies(connection, group, eye) -> None:
    alive, replies = f"{{{group}}}:alive", f"{{{group}}}:replies"
    await connection.keep_alive(alive, "session", replies, alive_ms=30_000, replies_ms=300_000)
    assert eye.get(alive) == b"session"
    assert 0 < eye.pttl(alive) <= 30_000
    assert not eye.exists(replies)
    eye.rpush(replies, "frame")
    await connection.keep_alive(alive, "session", replies, alive_ms=30_000, replies_ms=300_000)
    assert 200_000 < eye.pttl(replies) <= 300_000


async def test_push_token_adds_one(connection, group, eye) -> None:
    key = f"{{{group}}}:tokens"
    await connection.push_token(key)
    await connection.push_token(key)
    assert eye.llen(key) == 2


async def test_primaries_of_a_single_server(connection, valkey) -> None:
    assert await connection.primaries() == [f"127.0.0.1:{valkey.port}"]


async def test_close_is_repeatable(open_connection, valkey) -> None:
    opened = await open_connection(valkey.url)
    await opened.aclose()
    await opened.aclose()


async def test_thousands_of_calls_at_once(connection, group, client_name) -> None:
    count = 200 if client_name == "blocking" else 3000
    answers = []

    async def one() -> None:
        answers.append(await connection.run(group, f.library_version()))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)
    assert len(answers) == count
    assert len(set(answers)) == 1
    require_same(answers[0])


@pytest.mark.parametrize("client_name", ["glide", "redis"])
async def test_a_cancelled_call_does_not_shift_answers(connection, group) -> None:
    keys = [f"{{{group}}}:{number}" for number in range(20)]
    for key in keys:
        await connection.put(key, key.encode(), ttl_ms=30_000)
    for key in keys:
        with anyio.move_on_after(0):
            await connection.get(key)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.get, key)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    for key in keys:
        assert await connection.get(key) == key.encode()
