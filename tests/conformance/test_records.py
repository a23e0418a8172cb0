"""Streams of records, read by the consumers of one group: each record by one of them, until it is acknowledged."""

from __future__ import annotations

import pytest

from dispatch.errors import FabricError
from dispatch.fabric import functions as f
from dispatch.fabric.schema import key
from dispatch.fabric.streams import HISTORY, Reading, StreamEntry
from tests.support.by_hand import ByHand
from tests.support.producing import eye

pytestmark = [pytest.mark.anyio, pytest.mark.container, pytest.mark.parametrize("client_name", ["glide", "redis"])]

ONE, OTHER = (Reading(HISTORY, consumer, 100) for consumer in ("one", "other"))


def names(entries: list[StreamEntry]) -> list[str]:
    return [entry.fields[b"request_id"].decode() for entry in entries]


@pytest.fixture
def hand(valkey, group) -> ByHand:
    return ByHand(valkey.url, group)


def end(hand: ByHand, count: int) -> list[str]:
    ids = hand.submit(count=count)
    hand.settle(hand.claim(count))
    return ids


async def test_consumers_share_what_is_there_and_nobody_reads_it_twice(connection, group, hand) -> None:
    await connection.run(group, f.records_watch(HISTORY, prepare=True))
    streams = [key(group, "endings"), key(group, "deliveries")]
    assert await connection.read_records(streams, ONE) == []
    first, second = end(hand, 2), end(hand, 1)
    two = Reading(HISTORY, "one", 2)
    assert names(await connection.read_records(streams, two)) == first
    entries = await connection.read_records(streams, OTHER)
    assert names(entries) == second
    assert entries[0].key == streams[0]
    assert entries[0].fields[b"ending"] == b"succeeded"
    hand.run(f.reply_ack("p", "s", upto=100))
    [delivery] = await connection.read_records(streams, ONE)
    assert (delivery.key, delivery.fields[b"producer"]) == (streams[1], b"p")


async def test_what_is_not_acknowledged_is_taken_over(connection, group, hand) -> None:
    await connection.run(group, f.records_watch(HISTORY, prepare=True))
    endings = key(group, "endings")
    ids = end(hand, 5)
    entries = await connection.read_records([endings], ONE)
    await connection.ack_records(endings, HISTORY, [entry.entry_id for entry in entries[:2]])
    await connection.ack_records(endings, HISTORY, [])
    assert (await connection.claim_records(endings, OTHER, idle_ms=60_000)).entries == []
    claimed = await connection.claim_records(endings, Reading(HISTORY, "other", 2), idle_ms=0)
    assert (names(claimed.entries), claimed.deleted) == (ids[2:4], 0)
    assert claimed.cursor != "0-0"
    rest = await connection.claim_records(endings, OTHER, idle_ms=0, cursor=claimed.cursor)
    assert (names(rest.entries), rest.cursor) == (ids[4:], "0-0")
    assert (await connection.run(group, f.records_watch(HISTORY))).endings.pending == 3
    await connection.ack_records(endings, HISTORY, [entry.entry_id for entry in entries])
    assert (await connection.run(group, f.records_watch(HISTORY))).endings.pending == 0


async def test_what_was_trimmed_while_it_was_pending_is_told(connection, group, hand) -> None:
    await connection.run(group, f.records_watch(HISTORY, prepare=True))
    endings = key(group, "endings")
    ids = end(hand, 4)
    await connection.read_records([endings], ONE)
    with eye(hand.url) as client:
        client.xtrim(endings, maxlen=1, approximate=False)
    claimed = await connection.claim_records(endings, OTHER, idle_ms=0)
    assert (names(claimed.entries), claimed.deleted) == (ids[3:], 3)


async def test_without_a_reader_there_is_an_error_that_a_caller_can_act_on(connection, group, hand) -> None:
    end(hand, 1)
    with pytest.raises(FabricError, match="NOGROUP"):
        await connection.read_records([key(group, "endings")], ONE)
    with pytest.raises(FabricError, match="NOGROUP"):
        await connection.claim_records(key(group, "endings"), ONE, idle_ms=0)
