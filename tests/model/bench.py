"""One way to drive a fabric group, so that the same scenario runs on the twin and on a server."""

from __future__ import annotations

import itertools
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from dispatch.fabric import functions as f
from dispatch.fabric import records as r
from dispatch.fabric.sync import BlockingConnection
from tests.model.reference import Claimant, Reference

BODY = b'{"model":"m"}'
LONG_MS = 3_600_000
"""Lease, liveness and timeouts of scenarios: nothing in them ends by time."""


def document(pools: dict[str, dict[str, Any]], *, total: int = 1_000, **group: Any) -> dict[str, Any]:
    """Return a config document with these pools, all on the endpoint `default` unless they name another."""
    endpoints = group.pop("endpoints", {"default": {}})
    return {
        "total_concurrent_dispatch": total,
        "lease_ms": LONG_MS,
        "liveness_ms": LONG_MS,
        **group,
        "pools": [{"pool_id": name, "default_timeout_ms": LONG_MS, **pool} for name, pool in pools.items()],
        "endpoints": [
            {"endpoint_id": name, "url": "http://127.0.0.1:9/v1", **endpoint} for name, endpoint in endpoints.items()
        ],
    }


def submission(request_id: str, pool: str, cost: int | None, producer: str = "producer") -> r.Submission:
    """Return a small request that nothing but its pool and cost distinguishes."""
    return r.Submission(
        request_id=request_id, pool_id=pool, producer_id=producer, session="session", nonce=f"n-{request_id}",
        model="m", message_count=1, images=0, pages=0, estimated_cost_units=cost, timeout_ms=None, envelope=b"{}",
        body_bytes=len(BODY), body=BODY, liveness_ms=LONG_MS,
    )  # fmt: skip


Actual = Callable[[r.Lease], int | None]


def _as_estimated(_lease: r.Lease) -> None:
    return None


class Bench(ABC):
    """A configured group and what runs in it."""

    def __init__(self) -> None:
        self.generation = 0
        self.running: list[r.Lease] = []
        """Leases that are not settled yet, in launch order."""
        self._holders: dict[int, str] = {}
        self._numbers = itertools.count()

    def configure(self, config: dict[str, Any]) -> None:
        """Bring a config into force; it must be valid and another than the last."""
        answer = self._configure(config)
        assert answer.status == "APPLIED", answer
        self.generation = answer.generation

    def submit(self, pool: str, count: int = 1, *, cost: int = 1, key: str = "", level: int | None = None) -> None:
        """Queue `count` equal requests."""
        for _ in range(count):
            request = submission(f"r{next(self._numbers)}", pool, cost)
            answer = self._submit(replace(request, fairness_key=key, priority=level))
            assert isinstance(answer, r.Admitted), answer

    def claim(self, want: int, *, gateway: str = "g") -> list[str]:
        """Claim until `want` are launched or nothing can be. Returns their pools in launch order."""
        made: list[str] = []
        while True:
            claim = self._claim(self._claimant(gateway), want - len(made))
            made += self._note(gateway, claim)
            if not claim.again:
                return made

    def settle(self, leases: Iterable[r.Lease], *, want: int = 0, actual: Actual = _as_estimated) -> list[str]:
        """End running leases well, each by its gateway; the last call launches up to `want`. Returns those' pools.

        `actual` says what a lease has really cost.
        """
        ended = list(leases)
        by_gateway: dict[str, list[r.Settlement]] = {}
        for lease in ended:
            item = r.Settlement(
                request_id=lease.request_id,
                fence=lease.fence,
                outcome=r.Outcome.SUCCEEDED,
                actual_cost_units=actual(lease),
            )
            by_gateway.setdefault(self._holders[lease.fence], []).append(item)
        self.running = [lease for lease in self.running if lease not in ended]
        made: list[str] = []
        for number, (gateway, items) in enumerate(by_gateway.items(), 1):
            last = number == len(by_gateway)
            answer = self._settle(self._claimant(gateway), want if last else 0, items)
            assert set(answer.answers) == {"OK"}, answer.answers
            made += self._note(gateway, answer.claim)
            if answer.claim.again and last:
                made += self.claim(want - len(made), gateway=gateway)
        return made

    def in_flight(self, pool: str) -> int:
        return sum(lease.pool_id == pool for lease in self.running)

    @staticmethod
    def _claimant(gateway: str) -> Claimant:
        return Claimant(gateway, f"{gateway}/group", uuid.uuid4().hex)

    def _note(self, gateway: str, claim: r.Claim) -> list[str]:
        self.running += claim.leases
        self._holders.update((lease.fence, gateway) for lease in claim.leases)
        return [lease.pool_id for lease in claim.leases]

    @abstractmethod
    def _configure(self, config: dict[str, Any]) -> r.Configured: ...

    @abstractmethod
    def _submit(self, request: r.Submission) -> r.Admitted | r.Exists | r.Refused: ...

    @abstractmethod
    def _claim(self, claimant: Claimant, want: int) -> r.Claim: ...

    @abstractmethod
    def _settle(self, claimant: Claimant, want: int, items: Sequence[r.Settlement]) -> r.Settled: ...


class TwinBench(Bench):
    """Drives the twin, its clock standing still."""

    NOW = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.twin = Reference()

    def _configure(self, config: dict[str, Any]) -> r.Configured:
        return self.twin.configure(
            config, expected_generation=self.generation, actor="test", nonce=f"config-{self.generation}"
        )

    def _submit(self, request: r.Submission) -> r.Admitted | r.Exists | r.Refused:
        return self.twin.submit(request, self.NOW)

    def _claim(self, claimant: Claimant, want: int) -> r.Claim:
        return self.twin.claim(claimant, want, self.NOW)

    def _settle(self, claimant: Claimant, want: int, items: Sequence[r.Settlement]) -> r.Settled:
        return self.twin.settle(claimant, want, items, self.NOW)


class ServerBench(Bench):
    """Drives a group on a server."""

    def __init__(self, connection: BlockingConnection, group: str) -> None:
        super().__init__()
        self._connection, self._group = connection, group

    def _configure(self, config: dict[str, Any]) -> r.Configured:
        call = f.group_configure(
            json.dumps(config).encode(), expected_generation=self.generation, actor="test", reason="",
            nonce=uuid.uuid4().hex,
        )  # fmt: skip
        return self._connection.run(self._group, call)

    def _submit(self, request: r.Submission) -> r.Admitted | r.Exists | r.Refused:
        return self._connection.run(self._group, f.request_submit(request))

    def _claim(self, claimant: Claimant, want: int) -> r.Claim:
        call = f.lease_claim(claimant.gateway, claimant.dispatcher, nonce=claimant.nonce, want=want)
        return self._connection.run(self._group, call)

    def _settle(self, claimant: Claimant, want: int, items: Sequence[r.Settlement]) -> r.Settled:
        call = f.lease_settle(claimant.gateway, claimant.dispatcher, nonce=claimant.nonce, want=want, items=items)
        return self._connection.run(self._group, call)
