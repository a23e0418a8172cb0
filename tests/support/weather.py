"""Two flaky endpoints, three pools, and whatever producers, gateways and watchers may do, by chance."""

from __future__ import annotations

import random
import time
import uuid

from dispatch.fabric import functions as f
from dispatch.fabric.records import ChoreReport, Lease, Outcome, Settlement, Verdict
from tests.support.by_hand import ByHand
from tests.support.groups import configure
from tests.support.leftovers import counters_above_zero

FLAKY = {
    "url": "http://h/v1", "breaker_failures": 2, "open_ms": 20, "close_after": 2, "probe_timeout_ms": 50,
    "gate": "vllm", "gate_poll_ms": 50, "gate_stale_ms": 50, "max_concurrent": 3,
}  # fmt: skip


class Weather:
    """Producers, gateways and watchers of two flaky endpoints, by chance."""

    def __init__(self, hand: ByHand, seed: int, policy: str) -> None:
        self.hand, self.chance, self.policy = hand, random.Random(seed), policy
        self.waiting: list[str] = []
        self.running: list[Lease] = []
        self.generation = 0
        self.configure()

    def configure(self) -> None:
        """Apply a config of all pools and one or both endpoints."""
        pools = [
            {"pool_id": name, "max_attempts": 3, "retry_base_ms": 20, "retry_on": ["unreachable"],
             "delivery": self.chance.choice(["at_most_once", "at_least_once"]),
             "min_concurrent": self.chance.choice([0, 1])}
            for name in ("default", "a", "b")
        ]  # fmt: skip
        endpoints = [FLAKY | {"endpoint_id": "one", "gate": self.chance.choice(["none", "vllm"])}]
        if self.chance.random() < 0.7:
            endpoints.append(FLAKY | {"endpoint_id": "two", "gate_fail": "closed"})
            pools[2]["endpoint"] = "two"
        config = {"policy": self.policy, "pools": pools, "endpoints": endpoints, "dead_kept": 3}
        self.generation = configure(self.hand.url, self.hand.group, config, expected=self.generation)

    def settle(self) -> None:
        """End a run in any way."""
        lease = self.running.pop(self.chance.randrange(len(self.running)))
        item = Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=self.chance.choice(list(Outcome)),
            error_type="endpoint_unreachable", retryable=True, verdict=self.chance.choice(list(Verdict)),
            hold_ms=self.chance.choice([0, 30]),
        )  # fmt: skip
        self.hand.run(f.lease_settle("g", "g/1", nonce=uuid.uuid4().hex, want=0, items=[item]))

    def watch(self, *, fair: bool = False) -> None:
        """Take a chore, and tell what it came to or not."""
        chore = self.hand.run(f.endpoint_report("g"))
        if chore.kind == "NONE" or (not fair and self.chance.random() < 0.3):
            return
        report = ChoreReport(
            kind=chore.kind.lower(), endpoint_id=chore.endpoint_id, token=chore.token,
            verdict=Verdict.GOOD if fair else self.chance.choice(list(Verdict)),
            waiting=0 if fair else self.chance.choice([None, 0, 9]),
        )  # fmt: skip
        self.hand.run(f.endpoint_report("g", report))

    def clears(self) -> None:
        """From now on all goes well: everything that waits runs, and nothing is left."""
        deadline = time.monotonic() + 30
        while self.running or (group := self.hand.section("group"))["pending"] or group["delayed"]:
            assert time.monotonic() < deadline, self.hand.section("pools")["rows"]
            items = [
                Settlement(
                    request_id=lease.request_id, fence=lease.fence, outcome=Outcome.SUCCEEDED, verdict=Verdict.GOOD
                )
                for lease in self.running
            ]
            self.hand.run(f.lease_settle("g", "g/1", nonce=uuid.uuid4().hex, want=0, items=items))
            self.watch(fair=True)
            self.running = self.hand.claim(3)
            time.sleep(0.005)
        assert counters_above_zero(self.hand.url, self.hand.group) == {}

    def step(self) -> None:
        """Let something happen."""
        hand, chance = self.hand, self.chance
        match chance.randrange(10):
            case 0 | 1 | 2:
                self.waiting += hand.submit(chance.choice(["default", "a", "b"]), size=chance.randint(2, 50))
            case 3 | 4:
                self.running += hand.claim(chance.randint(1, 3))
            case 5 | 6 if self.running:
                self.settle()
            case 7 if self.waiting:
                name = self.waiting.pop(chance.randrange(len(self.waiting)))
                hand.run(f.request_cancel(name, actor="t", only_waiting=True))
            case 8:
                self.watch()
            case 9 if chance.random() < 0.2:
                self.configure()
            case _:
                time.sleep(0.01)
