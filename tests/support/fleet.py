"""Several gateways that claim and settle at once on a real server, each a thread with a connection of its own."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from dispatch.fabric import functions as f
from dispatch.fabric.records import Lease, Outcome, Settlement, Submission
from dispatch.fabric.sync import BlockingConnection
from tests.model.oracle import worst_lead
from tests.support.groups import configure, unique_group

Launch = tuple[int, str, int]
"""Fence, pool and cost; fences number the launches of a group in the server's own order."""

Costs = Callable[[random.Random, int], int]


class Fleet:
    """A group of its own on the server at `url`, filled with work and run by any number of gateways."""

    def __init__(self, url: str, pools: Mapping[str, dict[str, Any]], *, slots: int = 8, **group: Any) -> None:
        self.url = url
        self.group = unique_group()
        self.quanta = {name: pool.get("quantum", 1) for name, pool in pools.items()}
        wide = {"max_queue_depth": 1_000_000}
        document = {
            "total_concurrent_dispatch": slots, "max_queued": 1_000_000,
            "pools": [{"pool_id": name} | wide | pool for name, pool in pools.items()],
            "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
        } | group  # fmt: skip
        configure(url, self.group, document)
        self.connection = BlockingConnection(url)
        self.launches: list[Launch] = []
        self._lock = threading.Lock()

    def submit(
        self, pool: str, costs: Iterable[int], *, fairness_key: str = "", priority: int | None = None
    ) -> list[str]:
        """Queue a request for each cost; returns their ids."""
        calls = [f.request_submit(self._submission(pool, cost, fairness_key, priority)) for cost in costs]
        for start in range(0, len(calls), 128):
            self.connection.run(self.group, f.submit_together(calls[start : start + 128]))
        return [str(call.args[5]) for call in calls]

    def claim(self, want: int, *, gateway: str = "g") -> tuple[Lease, ...]:
        """Claim once, and log what was launched."""
        call = f.lease_claim(gateway, f"{gateway}/d", nonce=uuid.uuid4().hex, want=want)
        leases = self.connection.run(self.group, call).leases
        self._note(leases)
        return leases

    def settle(self, leases: Sequence[Lease], *, gateway: str = "g", want: int = 0) -> tuple[Lease, ...]:
        """Settle as succeeded and claim in the same call."""
        return self._settle(self.connection, gateway, leases, want)

    def race(self, launches: int, *, gateways: int, seed: int) -> None:
        """Let `gateways` claim and settle at once until so many launches were made."""
        threads = [
            threading.Thread(target=self._work, args=(f"g{number}", launches, random.Random(seed * 100 + number)))
            for number in range(gateways)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def sequence(self) -> list[Launch]:
        """Return the launches in the server's order."""
        return sorted(self.launches)

    def lead(self, first: str, second: str) -> Fraction:
        """Return how far `first` got ahead of `second` over any window, in service per quantum."""
        ahead, series = 0, [0]
        for _, pool, cost in self.sequence():
            if pool == first:
                ahead += cost * self.quanta[second]
            elif pool == second:
                ahead -= cost * self.quanta[first]
            series.append(ahead)
        return Fraction(worst_lead(series), self.quanta[first] * self.quanta[second])

    def jain(self, window: int) -> float:
        """Return the least Jain's index of normalised service over all windows of so many launches."""
        service = dict.fromkeys(self.quanta, 0.0)
        least, sequence = 1.0, self.sequence()
        for at, (_, pool, cost) in enumerate(sequence):
            service[pool] += cost / self.quanta[pool]
            if at >= window:
                _, gone, gone_cost = sequence[at - window]
                service[gone] -= gone_cost / self.quanta[gone]
            if at >= window - 1:
                values = list(service.values())
                least = min(least, sum(values) ** 2 / (len(values) * sum(value * value for value in values)))
        return least

    def no_gaps(self) -> bool:
        """Whether every launch of the server is on record."""
        return all(later[0] == earlier[0] + 1 for earlier, later in pairwise(self.sequence()))

    def close(self) -> None:
        self.connection.close()

    def _work(self, gateway: str, launches: int, chance: random.Random) -> None:
        held: list[Lease] = []
        with BlockingConnection(self.url) as connection:
            while len(self.launches) < launches:
                done = chance.sample(held, chance.randint(0, len(held)))
                for lease in done:
                    held.remove(lease)
                held += self._settle(connection, gateway, done, chance.choice((1, 1, 2, 3, 8)))
            self._settle(connection, gateway, held, 0)

    def _settle(
        self, connection: BlockingConnection, gateway: str, leases: Sequence[Lease], want: int
    ) -> tuple[Lease, ...]:
        items = [
            Settlement(request_id=lease.request_id, fence=lease.fence, outcome=Outcome.SUCCEEDED) for lease in leases
        ]
        call = f.lease_settle(gateway, f"{gateway}/d", nonce=uuid.uuid4().hex, want=want, items=items)
        answer = connection.run(self.group, call)
        assert set(answer.answers) <= {"OK"}
        self._note(answer.claim.leases)
        return answer.claim.leases

    def _note(self, leases: Iterable[Lease]) -> None:
        with self._lock:
            self.launches += [(lease.fence, lease.pool_id, lease.cost) for lease in leases]

    def _submission(self, pool: str, cost: int, fairness_key: str, priority: int | None) -> Submission:
        return Submission(
            request_id=uuid.uuid4().hex, pool_id=pool, producer_id="p", session="s", nonce="n", model="m",
            message_count=None, images=0, pages=0, estimated_cost_units=cost, timeout_ms=None, envelope=b"{}",
            body_bytes=2, body=b"{}", liveness_ms=600_000, fairness_key=fairness_key, priority=priority,
        )  # fmt: skip
