"""What a function touches is what its header says: the lives of some requests, watched by MONITOR."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict

import pytest
import redis

from dispatch.fabric import functions as f
from dispatch.fabric.headers import read_header
from dispatch.fabric.records import (
    Chore,
    ChoreReport,
    Chunks,
    Heartbeat,
    Lease,
    Outcome,
    Repair,
    Settlement,
    Submission,
    Verdict,
)
from dispatch.fabric.schema import document, key, lua_root, root
from dispatch.fabric.sync import BlockingConnection
from tests.conftest import load_library
from tests.support.groups import configure, default_document
from tests.support.valkey import ValkeyProcess

GROUP = "watched"
SECTIONS = (
    "group", "config", "generation", "generations", "pools", "endpoints", "gateways", "leases", "waiting", "dead",
    "endings", "events", "request",
)  # fmt: skip


class Life:
    """Makes calls as producers and gateways do, each kind of each function at least once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = BlockingConnection(url)
        self._numbers = itertools.count(1)

    def submit(
        self, *, pool: str = "default", timeout_ms: int | None = None, body_bytes: int = 2, fairness_key: str = "",
        priority: int | None = None, idempotency: str = "", detached: bool = False,
    ) -> str:  # fmt: skip
        number = next(self._numbers)
        submission = Submission(
            request_id=f"r{number}", pool_id=pool, producer_id="p", session="s", nonce=f"n{number}", model="m",
            message_count=1, images=0, pages=0, estimated_cost_units=None, timeout_ms=timeout_ms,
            envelope=b"{}", body_bytes=body_bytes, body=b"{}" if body_bytes == 2 else b"",
            fairness_key=fairness_key, priority=priority, idempotency=idempotency, fingerprint=idempotency,
            detached=detached,
        )  # fmt: skip
        if not submission.body:
            body_key = key(GROUP, "request_body", id=submission.request_id, nonce=submission.nonce)
            self.connection.put(body_key, b"x" * body_bytes, ttl_ms=60_000)
        self.connection.run(GROUP, f.request_submit(submission))
        return submission.request_id

    def claim(self, want: int) -> tuple[Lease, ...]:
        call = f.lease_claim("g", "g/watched", nonce=f"n{next(self._numbers)}", want=want)
        return self.connection.run(GROUP, call).leases

    def settle(
        self, *leases: Lease, outcome: Outcome = Outcome.SUCCEEDED, want: int = 0, large: bool = False,
        actual_units: int | None = None, error_type: str = "", verdict: Verdict = Verdict.NEUTRAL,
    ) -> None:  # fmt: skip
        items = [
            Settlement(
                request_id=lease.request_id, fence=lease.fence, outcome=outcome, by_reference=large,
                actual_cost_units=actual_units, error_type=error_type, verdict=verdict, hold_ms=10,
                retryable=verdict is Verdict.BACKPRESSURE,
            )
            for lease in leases
        ]  # fmt: skip
        call = f.lease_settle("g", "g/watched", nonce=f"n{next(self._numbers)}", want=want, items=items)
        self.connection.run(GROUP, call)

    def renew(self, *leases: Lease) -> None:
        held = tuple((lease.request_id, lease.fence) for lease in leases)
        beat = Heartbeat(gateway_id="g", host="h", pid=1, version="1", slots=4, held=held)
        self.connection.run(GROUP, f.lease_renew(beat))

    def cancel(self, request_id: str) -> None:
        self.connection.run(GROUP, f.request_cancel(request_id, actor="a"))

    def run(self) -> None:
        configure(self.url, GROUP)
        self.connection.run(GROUP, f.library_version())
        self.connection.run(GROUP, f.snapshot_publish("g"))
        self.renew()
        assert not self.claim(4)
        for pool in ("interactive", "default", "default", "backfill"):
            self.submit(pool=pool)
        large = self.submit(body_bytes=5000)
        self.cancel(self.submit())
        self.cancel("nowhere")
        leases = self.claim(4)
        items = [
            Chunks(request_id=lease.request_id, fence=lease.fence, number=0, count=1, payload=b"c") for lease in leases
        ]
        self.connection.run(GROUP, f.reply_append("g", items))
        self.cancel(leases[0].request_id)
        self.renew(*leases[:2])
        for section in SECTIONS:
            subject = {"waiting": "default", "request": large, "generation": "1"}.get(section, "")
            self.connection.run(GROUP, f.fabric_snapshot(section, subject=subject))
        self.settle(leases[0], leases[1], want=2)
        self.settle(leases[2], outcome=Outcome.FAILED, large=True)
        self.settle(leases[3], outcome=Outcome.RELEASE, want=8)
        self.submit(timeout_ms=1)
        self.submit(timeout_ms=1)
        self.connection.run(GROUP, f.lease_reap(limit=10))
        self.claim(4)
        self.connection.run(GROUP, f.reply_ack("p", "s", upto=10_000))
        self.connection.run(GROUP, f.records_watch("r", prepare=True))
        document = default_document() | {"policy": "fifo", "total_concurrent_dispatch": 2}
        document["pools"][0]["min_concurrent"] = 1
        configure(self.url, GROUP, document, expected=1)
        self.submit(pool="interactive")
        self.settle(*self.claim(2), want=2)
        self.keyed()
        self.troubled()
        self.dying()
        self.watched()
        self.asked()
        self.connection.close()

    def keyed(self) -> None:
        """Fairness keys and levels, paused and drained pools."""
        for fairness_key, priority in (("", None), ("a", 0), ("b", 3), ("a", 1)):
            self.submit(pool="backfill", fairness_key=fairness_key, priority=priority)
        self.settle(*self.claim(2), want=2, actual_units=9)
        self.cancel(self.submit(pool="backfill", fairness_key="c"))
        for action in ("pause", "drain", "resume"):
            self.connection.run(GROUP, f.pool_pause("backfill", action, actor="a"))
        self.settle(*self.claim(8))

    def troubled(self) -> None:
        """An endpoint that fails, holds and is probed, retries, and requests that nobody waits for."""
        document = default_document() | {"total_concurrent_dispatch": 100}
        document["endpoints"][0] |= {"breaker_failures": 1, "open_ms": 10, "gate": "vllm"}
        document["pools"][1] |= {"max_attempts": 2, "retry_base_ms": 1, "retry_cap_ms": 1}
        configure(self.url, GROUP, document, expected=2)
        pool = document["pools"][1]["pool_id"]
        self.submit(pool=pool, idempotency="k")
        self.submit(pool=pool, idempotency="k")
        self.cancel(self.submit(pool=pool, idempotency="c"))
        retried, *_ = self.claim(8)
        self.settle(retried, outcome=Outcome.FAILED, error_type="endpoint_overloaded", verdict=Verdict.BACKPRESSURE)
        self.submit(pool=pool)
        self.renew()
        self.report()
        self.settle(*self.claim(8), outcome=Outcome.FAILED, verdict=Verdict.FAILURE)
        self.submit(pool=pool, idempotency="d", detached=True)
        self.report()
        self.settle(*self.claim(8), want=8)
        self.connection.run(GROUP, f.lease_reap(limit=10))
        chore = self.report()
        for kind in ("sample", "probe"):
            report = ChoreReport(kind=kind, endpoint_id="default", token=chore.token, waiting=1, token_ms=20)
            self.connection.run(GROUP, f.endpoint_report("g", report))

    def report(self) -> Chore:
        return self.connection.run(GROUP, f.endpoint_report("g"))

    def dying(self) -> None:
        """Attempts that are spent, and what is done with those requests."""
        document = default_document() | {"dead_kept": 2, "total_concurrent_dispatch": 100}
        document["endpoints"].append({"endpoint_id": "well", "url": "http://127.0.0.1:9/v1"})
        document["pools"][0] |= {"delivery": "at_least_once", "max_attempts": 1, "endpoint": "well"}
        configure(self.url, GROUP, document, expected=3)
        pool = document["pools"][0]["pool_id"]
        for number in range(4):
            request_id = self.submit(pool=pool, body_bytes=5000 if number % 2 else 2, fairness_key="k")
            self.settle(*self.claim(8), outcome=Outcome.LOST)
            self.connection.run(GROUP, f.fabric_snapshot("dead"))
            self.connection.run(GROUP, f.dead_content(request_id))
        for action in ("retry", "drop"):
            name = self.connection.run(GROUP, f.fabric_snapshot("dead"))["rows"][0]["request_id"]
            self.connection.run(GROUP, f.dead_change(action, name, actor="a", new_id="anew"))
        self.settle(*self.claim(8))

    def asked(self) -> None:
        """What callers ask, and what lets them in."""
        self.connection.run(GROUP, f.pool_estimate("default"))
        for gateway in ("g", "other"):
            self.connection.run(GROUP, f.snapshot_publish(gateway))
        self.connection.run(GROUP, f.key_change("create", "k", b"{}", actor="a"))
        self.connection.run(GROUP, f.key_read("k"))
        self.connection.run(GROUP, f.key_read())
        self.connection.run(GROUP, f.key_change("revoke", "k", actor="a"))

    def watched(self) -> None:
        """What an operator's doctor asks and does."""
        self.submit(fairness_key="d")
        for part in ("group", "pools", "endpoints", "entries", "leases", "timers", "chores", "requests", "dead"):
            self.connection.run(GROUP, f.fabric_audit(part, subject="default"))
        for kind in ("probe", "look", "chores", "timer", "chore", "retry", "dead", "clock"):
            self.connection.run(GROUP, f.fabric_repair(Repair(kind, "default"), actor="a"))
        self.connection.run(GROUP, f.fabric_repair(Repair("pool", "default", "bytes", seen=2, value=2), actor="a"))
        self.connection.run(GROUP, f.fabric_repair(Repair("placement", "default"), actor="a"))
        self.connection.run(GROUP, f.fabric_repair(Repair("holder", "default"), actor="a"))


def touched_by_function(url: str) -> dict[str, set[str]]:
    """Run a `Life` under MONITOR and return the schema's names of the keys each function touched."""
    templates = {
        name: re.compile(re.sub(r"<[a-z]+>", "[^:]+", f"{re.escape(root(GROUP))}:{entry['key']}"))
        for name, entry in document()["keys"].items()
    }
    touched: dict[str, set[str]] = defaultdict(set)
    function = ""
    with redis.Redis.from_url(url.replace("valkey://", "redis://")) as client, client.monitor() as monitor:
        Life(url).run()
        client.echo("the end")
        while (event := monitor.next_command())["command"] != "ECHO the end":
            words = event["command"].split()
            if event["client_type"] == "lua":
                for word in words:
                    touched[function] |= {name for name, form in templates.items() if form.fullmatch(word)}
            elif words[0] in ("FCALL", "FCALL_RO"):
                function = words[1].removeprefix("dispatch_")
                touched[function] |= set()
    return touched


@pytest.fixture(scope="module")
def touched() -> dict[str, set[str]]:
    with ValkeyProcess() as server:
        load_library(server.url)
        return touched_by_function(server.url)


@pytest.mark.parametrize("path", sorted((lua_root() / "functions").glob("*.lua")), ids=lambda path: path.stem)
def test_a_function_touches_only_what_its_header_names(path, touched) -> None:
    header = read_header(path)
    assert header.name in touched, "the life above never calls it"
    assert touched[header.name] <= set(header.words("Touches"))
