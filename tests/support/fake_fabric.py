"""A fabric in memory, just enough of one for a gateway: a queue, leases with fences and nonces, tokens, and faults.

It answers in the wire's form, so the decoders of `dispatch.fabric.functions` are at work as well.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dispatch.contract.envelope import CONTRACT_VERSION, Operation, RequestEnvelope
from dispatch.errors import BadArgument, FabricUnavailable, GroupUnknown
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.library import current_library
from dispatch.fabric.schema import key

SLEEP_MS = 60_000


def now_ms() -> int:
    return int(time.time() * 1000)


@dataclass(slots=True)
class FakeRequest:
    request_id: str
    envelope: bytes
    body: bytes
    body_bytes: int
    deadline_ms: int
    pool_id: str = "default"
    fence: int = 0
    attempt: int = 0
    claim_nonce: str = ""
    lease_until_ms: int = 0
    cancel: bool = False
    nonce: str = "n"
    probe_until_ms: int = 0


@dataclass(slots=True)
class FakeResult:
    request_id: str
    outcome: str
    error_type: str
    head: dict[str, Any]
    body: bytes
    by_reference: bool
    verdict: str
    retryable: bool


@dataclass(slots=True)
class Fault:
    """What happens to a call instead of its answer; `done`: the server has done it all the same."""

    function: str
    done: bool
    error: Exception = field(default_factory=lambda: FabricUnavailable("no answer"))


class FakeFabric:
    """A `Connection`. Set `down` to lose the server, `faults` to lose single answers."""

    def __init__(self, group: str = "g", *, lease_ms: int = 30_000, configured: bool = True) -> None:
        self.group = group
        self.lease_ms = lease_ms
        self.generation = 1 if configured else 0
        self.document: dict[str, Any] = {
            "lease_ms": lease_ms,
            "max_payload_bytes": 1000,
            "default_endpoint": "default",
            "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
        }
        self.queue: deque[FakeRequest] = deque()
        self.leases: dict[str, FakeRequest] = {}
        self.probe_ms = 0
        """Above 0, leases are given out as probes that have so long."""
        self.known: dict[str, FakeRequest] = {}
        self.chores: deque[tuple[str, str, int, int]] = deque()
        """Kind (PROBE, SAMPLE), endpoint, token, and the time in ms that it may take."""
        self.reports: list[list[Any]] = []
        self.results: list[FakeResult] = []
        self.released: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.tokens: dict[str, asyncio.Queue[None]] = defaultdict(asyncio.Queue)
        self.calls: Counter[str] = Counter()
        self.listening: Counter[str] = Counter()
        self.wants: list[int] = []
        self.batches: list[int] = []
        self.beats: list[list[Any]] = []
        self.gateways: dict[str, dict[str, Any]] = {}
        self.down = False
        self.faults: list[Fault] = []
        self.poison = ""
        self.changed = asyncio.Event()
        self._fence = 0
        self._answers: dict[str, list[Any]] = {}
        self._down_since = asyncio.Event()

    # --- what a test does

    def submit(
        self,
        body: bytes = b"{}",
        *,
        timeout_s: float = 60,
        stored: bool = False,
        ring: bool = True,
        envelope: bytes = b"",
    ) -> str:
        request_id = uuid.uuid4().hex
        written = RequestEnvelope(
            contract=CONTRACT_VERSION, request_id=request_id, producer_id="p", pool_id="default",
            operation=Operation.CHAT_COMPLETIONS, model="m",
        )  # fmt: skip
        request = FakeRequest(
            request_id, envelope or msgspec.json.encode(written), b"" if stored else body, len(body),
            now_ms() + int(timeout_s * 1000),
        )  # fmt: skip
        if stored:
            self.stored[key(self.group, "request_body", id=request_id, nonce="n")] = body
        self.queue.append(request)
        self.known[request_id] = request
        if ring:
            self.tokens[key(self.group, "wake")].put_nowait(None)
        return request_id

    def cancel(self, request_id: str, gateway_id: str) -> None:
        self.leases[request_id].cancel = True
        self.tokens[key(self.group, "wake_gateway", gateway=gateway_id)].put_nowait(None)

    def lease_behind_its_back(self, request_id: str, *, nonce: str = "elsewhere-1") -> None:
        """Lease the request as if a claim's answer had been lost for good."""
        self._lease(next(one for one in self.queue if one.request_id == request_id), nonce)

    def forget_claim(self, request_id: str, *, nonce: str = "") -> None:
        """Lose the newest writes of a request, back to when it was queued; with a `nonce`, it is submitted anew."""
        request = self.known[request_id]
        self.leases.pop(request_id, None)
        request.attempt = 0 if nonce else request.attempt - 1
        request.nonce = nonce or request.nonce
        self.queue.append(request)
        self.tokens[key(self.group, "wake")].put_nowait(None)

    def lose(self, function: str, *, done: bool, times: int = 1) -> None:
        self.faults += [Fault(function, done) for _ in range(times)]

    def go_down(self) -> None:
        self.down = True
        self._down_since.set()

    def come_back(self) -> None:
        self.down = False
        self._down_since.clear()

    def ending(self, request_id: str) -> str | None:
        found = [one.outcome for one in self.results if one.request_id == request_id]
        assert len(found) <= 1, f"{request_id} ended {found}"
        return found[0] if found else None

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        """Wait until something called the fabric and `condition` holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    # --- Connection

    async def run(self, group: str, call: FunctionCall[Any]) -> Any:
        assert group == self.group
        await asyncio.sleep(0)
        if self.down:
            raise FabricUnavailable("down")
        self.calls[call.function] += 1
        fault = self._fault(call.function)
        if fault is not None:
            if fault.done:
                getattr(self, f"_{call.function}")(list(call.args))
            raise fault.error
        answer = getattr(self, f"_{call.function}")(list(call.args))
        await asyncio.sleep(0)
        self.changed.set()
        return call.decode(answer)

    async def run_many(self, group: str, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        return [await self.run(group, call) for call in calls]

    async def get(self, key: str) -> bytes | None:
        await asyncio.sleep(0)
        if self.down or self._fault("get") is not None:
            raise FabricUnavailable("down")
        return self.stored.get(key)

    async def put(self, key: str, value: bytes, *, ttl_ms: int) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise FabricUnavailable("down")
        assert ttl_ms > 0
        self.stored[key] = value

    async def read_frames(self, key: str, count: int) -> list[bytes]:
        raise NotImplementedError

    async def run_then_read(self, group: str, call: Any, key: str, count: int) -> tuple[Any, list[bytes]]:
        raise NotImplementedError

    async def keep_alive(
        self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int
    ) -> None:
        raise NotImplementedError

    async def push_token(self, key: str) -> None:
        await asyncio.sleep(0)
        self.calls["push_token"] += 1
        self.tokens[key].put_nowait(None)
        self.changed.set()

    async def primaries(self) -> list[str]:
        return ["fake"]

    def waiter(self) -> FakeWaiter:
        return FakeWaiter(self)

    async def aclose(self) -> None:
        pass

    def _fault(self, name: str) -> Fault | None:
        fault = next((one for one in self.faults if one.function == name), None)
        if fault is not None:
            self.faults.remove(fault)
        return fault

    # --- functions

    def _library_version(self, _args: list[Any]) -> list[Any]:
        library = current_library()
        return [CONTRACT_VERSION, library.digest.encode(), b"x"]

    def _group_configure(self, args: list[Any]) -> list[Any]:
        if self.generation != args[1]:
            return [b"CONFLICT", self.generation, b"somebody", now_ms()]
        self.generation += 1
        self.document = {"lease_ms": self.lease_ms, "max_payload_bytes": 1000} | json.loads(args[2])
        return [b"APPLIED", self.generation, args[3].encode(), now_ms()]

    def _fabric_snapshot(self, args: list[Any]) -> bytes:
        self._known()
        if args[0] == "gateways":
            return json.dumps({"rows": list(self.gateways.values()), "cursor": ""}).encode()
        assert args[0] == "config"
        return json.dumps({"generation": self.generation, "document": self.document}).encode()

    def _snapshot_publish(self, _args: list[Any]) -> list[Any]:
        return [b"WAIT", 1000, 0]

    def _lease_claim(self, args: list[Any]) -> list[Any]:
        self._known()
        _, _, nonce, want = args
        return self._claim(nonce, want)

    def _lease_settle(self, args: list[Any]) -> list[Any]:
        self._known()
        _, _, nonce, want, count, *cells = args
        rows = [cells[at : at + 16] for at in range(0, 16 * count, 16)]
        if self.poison and any(row[0] == self.poison and row[11] for row in rows):
            raise BadArgument("a result that is not taken")
        if nonce not in self._answers:
            self._answers[nonce] = [count, *(self._settle(row) for row in rows)]
            self.batches.append(count)
        return self._answers[nonce] + self._claim(nonce, want)

    def _lease_renew(self, args: list[Any]) -> list[Any]:
        self._known()
        self.beats.append(args)
        about = {"gateway_id": args[0], "host": args[1], "pid": args[2], "slots": args[4], "beat_ms": now_ms()}
        self.gateways[args[0]] = about
        nonces = args[8 : 8 + args[7]]
        cells = args[9 + args[7] :]
        named = {cells[at]: cells[at + 1] for at in range(0, len(cells), 2)}
        lost, cancelled, unknown = [], [], []
        for request_id, fence in named.items():
            lease = self.leases.get(request_id)
            if lease is None or lease.fence != fence:
                lost.append(request_id)
                continue
            lease.lease_until_ms = now_ms() + self.lease_ms
            if lease.cancel:
                cancelled.append(request_id)
        for request_id, lease in self.leases.items():
            if request_id not in named and lease.claim_nonce not in nonces:
                unknown += self._row(lease)
        return [now_ms(), self.generation, self._chore_ms(), len(lost), *lost, len(cancelled), *cancelled, *unknown]

    def _endpoint_report(self, args: list[Any]) -> list[Any]:
        self._known()
        if args[1] != "next":
            self.reports.append(args[1:])
        if not self.chores:
            return [b"NONE", b"", 0, 0, -1]
        kind, endpoint, token, span_ms = self.chores.popleft()
        return [kind.encode(), endpoint.encode(), token, now_ms() + span_ms, self._chore_ms()]

    def _chore_ms(self) -> int:
        return 0 if self.chores else -1

    def _lease_reap(self, _args: list[Any]) -> list[Any]:
        return [now_ms(), 0, 0, 0, 0]

    def _known(self) -> None:
        if not self.generation:
            raise GroupUnknown("no configuration")

    def _claim(self, nonce: str, want: int) -> list[Any]:
        self.wants.append(want)
        made = [lease for lease in self.leases.values() if lease.claim_nonce == nonce]
        if not made:
            made = [self._lease(self.queue[0], nonce) for _ in range(min(want, len(self.queue)))]
        rows = [cell for lease in made for cell in self._row(lease)]
        return [now_ms(), self.generation, SLEEP_MS, 0, 0, self._chore_ms(), len(made), *rows]

    def _lease(self, request: FakeRequest, nonce: str) -> FakeRequest:
        self.queue.remove(request)
        self._fence += 1
        request.fence, request.claim_nonce, request.attempt = self._fence, nonce, request.attempt + 1
        request.lease_until_ms = now_ms() + self.lease_ms
        request.probe_until_ms = now_ms() + self.probe_ms if self.probe_ms else 0
        self.leases[request.request_id] = request
        return request

    def _row(self, lease: FakeRequest) -> list[Any]:
        return [
            lease.request_id.encode(), b"default", b"p", b"default", lease.fence, lease.attempt, now_ms(), now_ms(),
            lease.deadline_ms, lease.lease_until_ms, 1, lease.body_bytes, lease.nonce.encode(), lease.envelope,
            lease.body, lease.probe_until_ms,
        ]  # fmt: skip

    def _settle(self, row: list[Any]) -> bytes:
        lease = self.leases.get(row[0])
        if lease is None or lease.fence != row[1]:
            return b"LEASE_LOST"
        del self.leases[row[0]]
        if row[2] == "release":
            lease.attempt -= 1
            self.queue.appendleft(lease)
            self.released.append(row[0])
            return b"REQUEUED"
        head = json.loads(row[10])
        self.results.append(FakeResult(row[0], row[2], row[4], head, row[11], bool(row[12]), row[6], bool(row[14])))
        return b"OK"


class FakeWaiter:
    """A `Waiter`: pops tokens of the fabric; fails while it is down."""

    def __init__(self, fabric: FakeFabric) -> None:
        self._fabric = fabric

    async def wait(self, key: str, seconds: float) -> bool:
        if self._fabric.down:
            raise FabricUnavailable("down")
        token = asyncio.ensure_future(self._fabric.tokens[key].get())
        gone = asyncio.ensure_future(self._fabric._down_since.wait())
        self._fabric.listening[key] += 1
        self._fabric.changed.set()
        try:
            done, _ = await asyncio.wait({token, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._fabric.listening[key] -= 1
            for one in (token, gone):
                one.cancel()
        if gone in done:
            raise FabricUnavailable("down")
        return token in done

    async def wait_then_read(self, key: str, seconds: float, list_key: str, count: int) -> list[bytes]:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass
