"""One group on the benchmark's server: filled with waiting work, then claimed from and settled, call after call."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from dispatch.fabric import functions as f
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.layouts import read_record
from dispatch.fabric.records import Lease, Outcome, Settlement, Submission
from dispatch.fabric.schema import key
from scripts.bench.server import BenchServer

BODY = b"x" * 1024
SUBMITS_A_CALL = 64
LONG_MS = 3_600_000
"""Nobody renews what a line holds while the others are measured, however long that takes on a busy machine."""
GATEWAY = "bench"

_FILLER_LIBRARY = """#!lua name=bench_filler
server.register_function("dispatch_fill", function(keys, args)
  local texts = {}
  for at = 1, 1000 do texts[at] = "1|" .. (args[2] + at) .. "|1|9999999999999|1024|filler" end
  for _ = 1, args[1] / 1000 do server.call("RPUSH", keys[1], unpack(texts)) end
  return 1
end)
"""


class Line:
    """Drives one group. Times are the server's own (`INFO commandstats`), in microseconds a request."""

    def __init__(self, server: BenchServer, pools: Sequence[dict[str, Any]], *, slots: int = 100_000) -> None:
        self.server = server
        self.group = f"g{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count()
        self.held: list[Lease] = []
        server.configure(
            self.group,
            {
                "total_concurrent_dispatch": slots, "max_queued": 10_000_000,
                "lease_ms": LONG_MS, "liveness_ms": LONG_MS,
                "pools": [{"max_queue_depth": 10_000_000, "max_queue_bytes": 1 << 39, **pool} for pool in pools],
                "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
            },
        )  # fmt: skip

    def run(self, call: FunctionCall[Any]) -> Any:
        """Run one call and decode its answer."""
        return call.decode(self.server.client.execute_command(*call.command(self.group)))

    def fill(self, pool: str, count: int, *, keys: int = 0, bodies: bytes = BODY) -> None:
        """Submit `count` requests; with `keys` they come from so many fairness keys in turn."""
        for start in range(0, count, SUBMITS_A_CALL):
            calls = [
                f.request_submit(self._submission(pool, bodies, f"k{at % keys}" if keys else ""))
                for at in range(start, min(count, start + SUBMITS_A_CALL))
            ]
            self.run(f.submit_together(calls))

    def deepen(self, pool: str, count: int) -> None:
        """Make the pool's list `count` entries longer without a request behind each: only its length matters."""
        if b"bench_filler" not in str(self.server.client.function_list(library="bench_filler")).encode():
            self.server.client.function_load(_FILLER_LIBRARY)
        waiting = key(self.group, "requests", pool=pool)
        for _ in range(0, count, 100_000):
            self.server.client.execute_command("FCALL", "dispatch_fill", 1, waiting, 100_000, 1_000_000)
        name = key(self.group, "pool", pool=pool)
        record = read_record("pool", self.server.client.hget(name, "record"))
        record["depth"] += count
        record["bytes"] += count * len(BODY)
        record["levels"][1] += count
        self.server.client.hset(name, "record", msgspec.msgpack.encode(record))

    def claim(self, want: int) -> None:
        """Claim and hold."""
        call = f.lease_claim(GATEWAY, f"{GATEWAY}/d", nonce=self._nonce(), want=want)
        self.held += self.run(call).leases

    def step(self, batch: int) -> None:
        """Settle `batch` of what is held and claim as many in the same call."""
        items = [
            Settlement(request_id=lease.request_id, fence=lease.fence, outcome=Outcome.SUCCEEDED, status=200,
                       head=b'{"status":200}', body=BODY)
            for lease in self.held[:batch]
        ]  # fmt: skip
        del self.held[:batch]
        call = f.lease_settle(GATEWAY, f"{GATEWAY}/d", nonce=self._nonce(), want=batch, items=items)
        answer = self.run(call)
        if set(answer.answers) - {"OK"}:
            raise RuntimeError(f"a settle was answered {answer.answers}")
        self.held += answer.claim.leases

    def cost(self, requests: int, batch: int = 1) -> float:
        """Return the server's time for each of `requests` claimed-and-settled ones."""
        self.server.client.config_resetstat()
        done = 0
        while done < requests:
            self.step(batch)
            done += batch
        return self.server.function_us() / done

    def forget_replies(self) -> None:
        """Drop the reply list, which nobody reads here."""
        self.server.client.delete(key(self.group, "replies", producer="bench"))

    def _nonce(self) -> str:
        return f"n{next(self._numbers)}"

    def _submission(self, pool: str, body: bytes, fairness_key: str) -> Submission:
        number = next(self._numbers)
        inline = len(body) <= len(BODY)
        submission = Submission(
            request_id=f"{self.group}-{number}", pool_id=pool, producer_id="bench", session="s", nonce=f"s{number}",
            model="m", message_count=1, images=0, pages=0, estimated_cost_units=None, timeout_ms=None,
            envelope=b'{"contract":1,"operation":"chat.completions","model":"m"}', body_bytes=len(body),
            body=body if inline else b"", fairness_key=fairness_key, liveness_ms=LONG_MS,
        )  # fmt: skip
        if not inline:
            name = key(self.group, "request_body", id=submission.request_id, nonce=submission.nonce)
            self.server.client.set(name, body, px=LONG_MS)
        return submission
