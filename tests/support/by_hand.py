"""Producers and gateways by hand: each call of the function library made one by one, in the order a test wants."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from dispatch.fabric import functions as f
from dispatch.fabric.layouts import read_record
from dispatch.fabric.records import Heartbeat, Lease, Outcome, Settlement, Submission
from dispatch.fabric.schema import LIMITS, key
from dispatch.fabric.sync import BlockingConnection
from tests.support.producing import eye


class ByHand:
    """One producer and any number of gateways of one group."""

    def __init__(self, url: str, group: str) -> None:
        self.url = url
        self.group = group
        self.connection = BlockingConnection(url)
        self._numbers = itertools.count(1)

    def run(self, call: Any) -> Any:
        return self.connection.run(self.group, call)

    def submit(self, pool: str = "default", count: int = 1, **fields: Any) -> list[str]:
        """Submit requests that cost 1 unless `fields` say more; returns their ids."""
        ids = []
        for _ in range(count):
            number = next(self._numbers)
            body = b"x" * fields.get("size", 2)
            known = {name: value for name, value in fields.items() if name != "size"}
            submission = Submission(
                **{
                    "request_id": f"r{number}", "pool_id": pool, "producer_id": "p", "session": "s",
                    "nonce": f"n{number}", "model": "m", "message_count": 1, "images": 0, "pages": 0,
                    "estimated_cost_units": None, "timeout_ms": None, "envelope": b"{}", "body_bytes": len(body),
                    "body": body, **known,
                }
            )  # fmt: skip
            answer = self.run(f.request_submit(submission))
            assert type(answer).__name__ == "Admitted", answer
            ids.append(submission.request_id)
        return ids

    def refusal(self, pool: str) -> str:
        """Submit and return why it was refused."""
        number = next(self._numbers)
        submission = Submission(
            request_id=f"r{number}", pool_id=pool, producer_id="p", session="s", nonce=f"n{number}", model="m",
            message_count=1, images=0, pages=0, estimated_cost_units=None, timeout_ms=None, envelope=b"{}",
            body_bytes=2, body=b"{}",
        )  # fmt: skip
        return str(self.run(f.request_submit(submission)).reason)

    def claim(self, want: int, gateway: str = "g") -> list[Lease]:
        """Claim `want` leases, or as many as there are, in as many calls as that takes."""
        leases: list[Lease] = []
        while True:
            part = min(want - len(leases), LIMITS["claim_max"])
            claim = self.run(f.lease_claim(gateway, f"{gateway}/1", nonce=uuid.uuid4().hex, want=part))
            leases += claim.leases
            if len(leases) == want or (len(claim.leases) < part and not claim.again):
                return leases

    def settle(self, leases: Iterable[Lease], *, outcome: Outcome = Outcome.SUCCEEDED, gateway: str = "g") -> None:
        items = [Settlement(request_id=lease.request_id, fence=lease.fence, outcome=outcome) for lease in leases]
        self.run(f.lease_settle(gateway, f"{gateway}/1", nonce=uuid.uuid4().hex, want=0, items=items))

    def beat(self, leases: Iterable[Lease] = (), gateway: str = "g") -> None:
        held = tuple((lease.request_id, lease.fence) for lease in leases)
        self.run(f.lease_renew(Heartbeat(gateway_id=gateway, host="h", pid=1, version="1", slots=8, held=held)))

    def section(self, name: str, **more: Any) -> Any:
        return self.run(f.fabric_snapshot(name, **more))

    def pool(self, name: str) -> dict[str, Any]:
        """Return the snapshot's row of a pool."""
        [row] = self.section("pools", subject=name)["rows"]
        return dict(row)

    def tokens(self) -> int:
        """Return how many wake tokens lie there."""
        with eye(self.url) as client:
            return int(client.llen(key(self.group, "wake")))

    def change_record(self, name: str, change: dict[str, Any], **parts: str) -> None:
        """Write into a packed record past the library: `name` is the key's (group, pool, endpoint)."""
        with eye(self.url) as client:
            where = key(self.group, name, **parts)
            record = read_record(name, client.hget(where, "record")) | change
            client.hset(where, "record", msgspec.msgpack.encode(record))

    def close(self) -> None:
        self.connection.close()
