"""A fabric group in memory as a producer sees it: submits, cancels, reply frames, tokens, and lost answers.

It answers in the wire's form, so the decoders of `dispatch.fabric.functions` are at work as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from dispatch.errors import DispatchError, FabricUnavailable, PoolUnknown
from dispatch.fabric.calls import FunctionCall, T
from dispatch.fabric.frames import chunk_line
from dispatch.fabric.library import current_library
from dispatch.fabric.schema import LIMITS, key

GROUP = "g"


@dataclass(slots=True)
class Held:
    """One request the group has."""

    request_id: str
    nonce: str
    producer: str
    pool: str
    timeout_ms: int | None
    envelope: dict[str, Any]
    body: bytes
    state: str = "queued"
    ending: str = ""


@dataclass(slots=True)
class Lost:
    """The next answer of `what` (a function, or get, put, read_frames) is lost; `done`: it was done all the same."""

    what: str
    done: bool
    error: DispatchError = field(default_factory=lambda: FabricUnavailable("no answer"))


class FakeGroup:
    """A `Connection`. `faults` lose single answers; `refuse` answers submits; `held_back` delays every batch."""

    def __init__(self) -> None:
        self.requests: dict[str, Held] = {}
        self.frames: list[bytes] = []
        self.strings: dict[str, bytes] = {}
        self.session = ""
        self.beats: list[tuple[int, int]] = []
        self.faults: list[Lost] = []
        self.refuse: deque[list[Any]] = deque()
        self.batches: list[list[str]] = []
        self.calls: list[str] = []
        self.cancels: list[str] = []
        self.puts: list[tuple[str, int, int]] = []
        self.held_back: anyio.Event | None = None
        self.lapsed = 0
        self.auto = True
        self.closed = False
        self._sequence = 0
        self._tokens = 0
        self._rung = anyio.Event()

    async def run(self, group: str, call: FunctionCall[T]) -> T:
        assert group == GROUP
        await anyio.lowlevel.checkpoint()
        fault = self._fault(call.function)
        if fault is not None and not fault.done:
            raise fault.error
        answer = self._do(call)
        if fault is not None:
            raise fault.error
        return call.decode(answer)

    async def run_many(self, group: str, calls: Sequence[FunctionCall[T]]) -> list[Any]:
        self.batches.append([call.function for call in calls])
        if self.held_back is not None:
            await self.held_back.wait()
        answers: list[Any] = []
        lost: DispatchError | None = None
        for call in calls:
            try:
                answers.append(await self.run(group, call))
            except FabricUnavailable as error:
                lost = error
            except PoolUnknown as error:
                answers.append(error)
        if lost is not None:
            raise lost
        return answers

    async def get(self, name: str) -> bytes | None:
        await self._command("get")
        return self.strings.get(name)

    async def put(self, name: str, value: bytes, *, ttl_ms: int) -> None:
        await self._command("put")
        self.puts.append((name, len(value), ttl_ms))
        if ttl_ms == 1:
            self.strings.pop(name, None)
        else:
            self.strings[name] = value

    async def read_frames(self, name: str, count: int) -> list[bytes]:
        assert ":replies:" in name
        await self._command("read_frames")
        return self.frames[:count]

    async def run_then_read(self, group: str, call: FunctionCall[T], name: str, count: int) -> tuple[T, list[bytes]]:
        return await self.run(group, call), await self.read_frames(name, count)

    async def keep_alive(
        self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int
    ) -> None:
        assert {alive_key[:4], replies_key[:4]} == {"{g}:"}
        self.session = session
        self.beats.append((alive_ms, replies_ms))

    async def push_token(self, name: str) -> None:
        raise AssertionError(f"a producer gives no token back: {name}")

    async def primaries(self) -> list[str]:
        return ["fake:1"]

    def waiter(self) -> FakeWaiter:
        return FakeWaiter(self)

    async def aclose(self) -> None:
        self.closed = True

    def end(self, request_id: str, ending: str = "succeeded", body: bytes = b"{}", *, large: bool = False) -> None:
        """End a request and push its frame."""
        held = self.requests[request_id]
        held.state, held.ending = "ended", ending
        if large:
            self.strings[key(GROUP, "reply_body", id=request_id)] = body
        self.push(request_id, ending, b"{}\n" + (b"" if large else body), by_reference=large)

    def push(self, request_id: str, ending: str, rest: bytes, *, contract: int = 1, by_reference: bool = False) -> None:
        """Push one frame."""
        self._sequence += 1
        head = f"{contract}|{self._sequence}|terminal|{request_id}|{ending}|default|1|2|3|{int(by_reference)}\n"
        self.frames.append(head.encode() + rest)
        self._ring()

    def push_chunks(self, request_id: str, number: int, *data: bytes, event: str = "") -> None:
        """Push one frame of chunks, the first of which has this number."""
        self._sequence += 1
        payload = b"\n".join(chunk_line(event, each) for each in data)
        self.frames.append(f"1|{self._sequence}|chunks|{request_id}|{number}\n".encode() + payload)
        self._ring()

    def _ring(self) -> None:
        self._tokens += 1
        self._rung.set()

    async def _command(self, what: str) -> None:
        await anyio.lowlevel.checkpoint()
        if (fault := self._fault(what)) is not None:
            raise fault.error

    def _fault(self, what: str) -> Lost | None:
        found = next((fault for fault in self.faults if fault.what == what), None)
        if found is not None:
            self.faults.remove(found)
        return found

    def _do(self, call: FunctionCall[Any]) -> Any:
        self.calls.append(call.function)
        return getattr(self, f"_{call.function}")(list(call.args))

    def _library_version(self, _args: list[Any]) -> Any:
        library = current_library()
        return [library.contract, library.digest, library.version]

    def _request_submit(self, args: list[Any]) -> Any:
        _contract, producer, session, _liveness, count = args[:5]
        answer: list[Any] = []
        length = (len(args) - 5) // count
        for at in range(5, len(args), length):
            answer += self._submit(producer, session, args[at : at + length])
        return answer

    def _submit(self, producer: str, session: str, args: list[Any]) -> list[Any]:
        request_id, pool, nonce, _model, _messages, _images, _pages, _units, timeout, size, envelope, body = args[:12]
        now = int(time.time() * 1000)
        held = self.requests.get(request_id)
        if held is not None and held.nonce == nonce:
            return ["ADMITTED", now + 60_000, now, 0, ""]
        if held is not None:
            return [b"EXISTS", held.state.encode(), b"", request_id.encode(), held.ending.encode()]
        if self.refuse:
            return self.refuse.popleft()
        body = body or self.strings.get(key(GROUP, "request_body", id=request_id, nonce=nonce))
        if body is None or len(body) != size:
            return ["REFUSED", "body_missing", 0, size, -1]
        self.session = session
        self.requests[request_id] = Held(
            request_id, nonce, producer, pool, timeout or None, msgspec.json.decode(envelope), body
        )
        if self.auto:
            self.end(request_id, body=body, large=len(body) > LIMITS["inline_reply_bytes"])
        return ["ADMITTED", now + (timeout or 60_000), now, self.lapsed, ""]

    def _request_cancel(self, args: list[Any]) -> Any:
        self.cancels.append(args[0])
        held = self.requests.get(args[0])
        if held is None:
            return ["UNKNOWN", ""]
        if held.state == "ended":
            return ["ENDED", held.ending]
        self.end(args[0], "cancelled", b"")
        return ["CANCELLED", ""]

    def _lease_reap(self, _args: list[Any]) -> Any:
        return [int(time.time() * 1000), 0, 0, 0, 0]

    def _reply_ack(self, args: list[Any]) -> Any:
        if self.session and self.session != args[1]:
            return ["NOT_OWNER"]
        before = len(self.frames)
        self.frames = [frame for frame in self.frames if int(frame.split(b"|")[1]) > args[2]]
        return ["OK", before - len(self.frames), len(self.frames)]

    def _fabric_snapshot(self, args: list[Any]) -> Any:
        held = self.requests.get(args[3])
        rows = []
        if held is not None:
            rows = [{"request_id": held.request_id, "state": held.state, "ending": held.ending or None, "attempt": 1,
                     "pool_id": held.pool, "producer_id": held.producer, "submitted_ms": 1_000}]  # fmt: skip
        if held is not None and held.state == "leased":
            rows[0]["claimed_ms"] = 1_700
        return msgspec.json.encode({"server_ms": 4_000, "rows": rows})


class FakeWaiter:
    """A `Waiter`."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group

    async def wait(self, _key: str, seconds: float) -> bool:
        group = self._group
        if (fault := group._fault("wait")) is not None:
            raise fault.error
        with anyio.move_on_after(seconds):
            while not group._tokens:
                group._rung = anyio.Event()
                await group._rung.wait()
            group._tokens -= 1
            return True
        return False

    async def wait_then_read(self, key: str, seconds: float, list_key: str, count: int) -> list[bytes]:
        await self.wait(key, seconds)
        return await self._group.read_frames(list_key, count)

    async def aclose(self) -> None:
        pass
