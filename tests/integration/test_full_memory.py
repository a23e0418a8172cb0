"""When memory is full nothing new is admitted, and everything that frees memory still works."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
import redis

from dispatch.errors import RequestRefused
from dispatch.fabric import functions as f
from dispatch.fabric.records import Heartbeat
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def server(start_valkey: Callable[..., ValkeyProcess]) -> ValkeyProcess:
    return start_valkey(options=("--maxmemory-policy", "noeviction"))


def test_submits_are_refused_and_what_runs_comes_to_its_end(server: ValkeyProcess) -> None:
    fleet = Fleet(server.url, {"default": {}}, slots=100)
    waiting = fleet.submit("default", [1] * 400)
    held = list(fleet.claim(50))
    with redis.Redis(host="127.0.0.1", port=server.port) as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 1)
        with pytest.raises(RequestRefused) as refused:
            fleet.submit("default", [1])
        assert refused.value.reason == "memory_full"

        run = fleet.connection.run
        beat = Heartbeat(
            gateway_id="g", host="h", pid=1, version="1", slots=100,
            held=tuple((lease.request_id, lease.fence) for lease in held),
        )  # fmt: skip
        assert run(fleet.group, f.lease_renew(beat)).lost == ()
        assert len(fleet.settle(held, want=10)) == 10
        assert run(fleet.group, f.request_cancel(waiting[-1], actor="test")).status == "CANCELLED"
        run(fleet.group, f.lease_reap(limit=10))
        upto = int(client.lrange(f"{{{fleet.group}}}:list:llm:replies:p", -1, -1)[0].split(b"|")[1])
        assert run(fleet.group, f.reply_ack("p", "s", upto=upto)).trimmed == 51

        counted = run(fleet.group, f.fabric_snapshot("group"))
        assert (counted["in_flight"], counted["pending"]) == (10, 400 - 50 - 10 - 1)
        client.config_set("maxmemory", 0)
    assert fleet.submit("default", [1])
    fleet.close()


def test_a_refused_submit_leaves_nothing(server: ValkeyProcess) -> None:
    fleet = Fleet(server.url, {"default": {}})
    with redis.Redis(host="127.0.0.1", port=server.port) as client:
        before = set(client.scan_iter(f"{{{fleet.group}}}:*"))
        client.config_set("maxmemory", 1)
        with pytest.raises(RequestRefused):
            fleet.submit("default", [1])
        client.config_set("maxmemory", 0)
        assert set(client.scan_iter(f"{{{fleet.group}}}:*")) == before
        claim = f.lease_claim("g", "g/d", nonce=uuid.uuid4().hex, want=1)
        assert fleet.connection.run(fleet.group, claim).leases == ()
    fleet.close()
