"""A cluster: each group lives on one of its primaries, the library on all."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
import redis

from dispatch.errors import FabricUnavailable
from dispatch.fabric import functions as f
from dispatch.fabric.deploy import Action, NodeState, compare, load
from dispatch.fabric.library import current_library
from dispatch.fabric.schema import key, root
from dispatch.fabric.streams import HISTORY, Reading
from dispatch.fabric.sync import BlockingConnection
from dispatch.fabric.verifying import verify_library
from tests.conftest import load_library
from tests.support.by_hand import ByHand
from tests.support.cluster import ValkeyCluster
from tests.support.groups import configure, unique_group
from tests.support.valkey import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as running:
        load_library(running.url)
        yield running


@pytest.fixture
def groups(cluster: ValkeyCluster) -> list[str]:
    """Two configured groups, one on each primary."""
    names: dict[int, str] = {}
    with redis.Redis(port=cluster.nodes[0].port) as eye:
        while len(names) < 2:
            name = unique_group()
            names[eye.execute_command("CLUSTER", "KEYSLOT", root(name)) // 8192] = name
    for name in names.values():
        configure(cluster.url, name)
    return list(names.values())


async def test_calls_find_their_groups_primary(cluster, groups, open_connection) -> None:
    connection = await open_connection(cluster.url)
    for group in groups:
        await verify_library(connection, group)
        answers = await connection.run_many(group, [f.fabric_snapshot("pools"), f.library_version()])
        assert len(answers[0]["rows"]) == 4
        assert answers[1].digest == current_library().digest


async def test_plain_commands_find_their_groups_primary(cluster, groups, open_connection) -> None:
    connection = await open_connection(cluster.url)
    for group in groups:
        blob, alive, replies, tokens = (f"{{{group}}}:{name}" for name in ("blob", "alive", "replies", "tokens"))
        await connection.put(blob, b"\x00\xff", ttl_ms=30_000)
        assert await connection.get(blob) == b"\x00\xff"
        await connection.keep_alive(alive, "s", replies, alive_ms=30_000, replies_ms=30_000)
        assert await connection.get(alive) == b"s"
        await connection.push_token(tokens)
        assert await connection.read_frames(tokens, 9) == [b"1"]


async def test_waiting_works_on_every_primary(cluster, groups, open_connection) -> None:
    connection = await open_connection(cluster.url)
    for group in groups:
        waiter = connection.waiter()
        tokens = f"{{{group}}}:tokens"
        assert await waiter.wait(tokens, 0.05) is False
        await connection.push_token(tokens)
        assert await waiter.wait(tokens, 5) is True
        await waiter.aclose()


async def test_primaries_are_listed(cluster, open_connection) -> None:
    connection = await open_connection(cluster.url)
    assert set(await connection.primaries()) == cluster.addresses


async def test_no_node_of_a_cluster_answers(open_connection) -> None:
    with anyio.fail_after(8), pytest.raises(FabricUnavailable, match=r"Valkey at valkey://127.* does not answer: "):
        await open_connection(f"valkey://127.0.0.1:{free_port()},127.0.0.1:{free_port()}?cluster=true")


def test_loading_writes_every_primary(cluster) -> None:
    library = current_library()
    with BlockingConnection(cluster.url) as connection:
        with redis.Redis(port=cluster.nodes[1].port) as eye:
            eye.execute_command("FUNCTION FLUSH")
        states = {report.address: report.state for report in compare(connection, library)}
        assert states == {
            f"127.0.0.1:{cluster.nodes[0].port}": NodeState.EQUAL,
            f"127.0.0.1:{cluster.nodes[1].port}": NodeState.MISSING,
        }
        assert {report.action for report in load(connection, library)} == {Action.UNCHANGED, Action.LOADED}
        assert {report.state for report in compare(connection, library)} == {NodeState.EQUAL}


@pytest.mark.parametrize("client_name", ["glide", "redis"])
async def test_records_are_read_on_every_primary(cluster, groups, open_connection) -> None:
    connection = await open_connection(cluster.url)
    for group in groups:
        hand = ByHand(cluster.url, group)
        hand.submit()
        hand.settle(hand.claim(1))
        hand.run(f.reply_ack("p", "s", upto=10))
        hand.close()
        reading = Reading(HISTORY, "one", 10)
        streams = [key(group, "endings"), key(group, "deliveries")]
        await connection.run(group, f.records_watch(HISTORY, prepare=True))
        entries = await connection.read_records(streams, reading)
        assert sorted(entry.key for entry in entries) == sorted(streams)
        claimed = await connection.claim_records(streams[0], reading, idle_ms=0)
        assert [entry.entry_id for entry in claimed.entries] == [e.entry_id for e in entries if e.key == streams[0]]
        for entry in entries:
            await connection.ack_records(entry.key, HISTORY, [entry.entry_id])
        state = await connection.run(group, f.records_watch(HISTORY))
        assert (state.endings.pending, state.deliveries.pending) == (0, 0)
