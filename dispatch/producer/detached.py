"""Requests that nobody waits for: submitted now, asked after and fetched later by their id, from any process.

Their liveness is nobody's: they run though the client that submitted them is gone. The group keeps the reply for
`idempotency_ttl_ms` (a day) from the end on, and whoever fetches it leaves it there.

Who waits for a reply looks for it at growing intervals: a wake list for each request would be one more key that has to
be cleaned up, for work of which minutes are expected.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import msgspec

from dispatch.contract import Call, Reply, Scalar
from dispatch.errors import (
    FabricUnavailable,
    InvalidRequest,
    OutcomeUnknown,
    RequestEnded,
    RequestInProgress,
    RequestUnknown,
)
from dispatch.fabric import functions
from dispatch.fabric.connection import Connection
from dispatch.fabric.frames import Frame, decode_frame
from dispatch.fabric.records import Admitted, Estimate
from dispatch.fabric.schema import key
from dispatch.producer.bodies import body_key, with_body
from dispatch.producer.completion import build_completion
from dispatch.producer.errand import Errand
from dispatch.producer.options import DEFAULT_POOL, CallOptions, timeout_ms
from dispatch.producer.overdue import end_overdue
from dispatch.producer.recovery import row_of, state_of

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
_LATE_MS = 1_000
"""From when on after its deadline the group is asked to end the request: its gateways do that by themselves."""

SILENCE_S = 10.0
"""How long who waits without a bound puts up with a Valkey that does not answer."""


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was submitted to be fetched later: keep `id`.

    `deadline_ms` (the server's clock) is when it ends at the latest, None if that is not known. `repeated`: it is an
    earlier request with the same idempotency key, and nothing was queued now.
    """

    id: str
    pool_id: str
    deadline_ms: int | None = None
    repeated: bool = False


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request is, at `server_ms` of the server's clock. None = does not apply, or is not known any more.

    `state`: queued, leased (it runs), delayed (it waits for its next attempt) or ended. `ending` and `reply_kept` (a
    reply can be fetched) are about one that has ended; its other members are known for a minute after that.
    """

    id: str
    state: str
    pool_id: str
    server_ms: int
    ending: str | None = None
    attempt: int | None = None
    submitted_ms: int | None = None
    deadline_ms: int | None = None
    claimed_ms: int | None = None
    due_ms: int | None = None
    gateway_id: str | None = None
    endpoint_id: str | None = None
    reply_kept: bool = False

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state == "ended"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the group knows of a request. `row` None: nothing but perhaps its reply. `frame` None: no reply is kept."""

    request_id: str
    server_ms: int
    row: dict[str, Any] | None
    frame: Frame | None

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is not known."""
        return self.row is None or self.row["state"] == "ended"

    @property
    def overdue(self) -> bool:
        """Whether somebody should have ended it by now."""
        return self.row is not None and not self.ended and self.server_ms > self.row["deadline_ms"] + _LATE_MS

    def state(self) -> RequestState:
        """Say where it is.

        Raises:
            RequestUnknown: nothing is known of it.
        """
        row = self.row
        if row is None:
            if self.frame is None:
                raise unknown(self.request_id)
            reply = self.frame.reply
            return RequestState(
                id=self.request_id, state="ended", pool_id=reply.pool_id, server_ms=self.server_ms,
                ending=reply.ending, attempt=reply.attempt, reply_kept=True,
            )  # fmt: skip
        known: dict[str, Any] = {name: row.get(name) for name in _ROW_MEMBERS}
        return RequestState(
            id=self.request_id, server_ms=self.server_ms, reply_kept=self.frame is not None, **known
        )  # fmt: skip

    def kept(self) -> Frame | None:
        """Return the frame of its reply; None = it has not ended.

        Raises:
            RequestUnknown: it has, or nothing is known of it, and there is no reply to fetch.
        """
        if self.frame is not None or not self.ended:
            return self.frame
        if self.row is None:
            raise unknown(self.request_id)
        ending = self.row.get("ending") or ""
        raise RequestUnknown(
            f"request {self.request_id} has ended {ending}, and no reply of it is kept: only those of submitted ones "
            "and of calls with an idempotency key are",
            ending=ending,
        )


_ROW_MEMBERS = (
    "state", "pool_id", "ending", "attempt", "submitted_ms", "deadline_ms", "claimed_ms", "due_ms", "gateway_id",
    "endpoint_id",
)  # fmt: skip


def unknown(request_id: str) -> RequestUnknown:
    """Make the error for an id of which the group knows nothing."""
    return RequestUnknown(
        f"request {request_id!r} is not known: it was never submitted to this group, or it ended and no reply of it "
        "is kept (any more)"
    )


def detached(call: Call, options: CallOptions) -> CallOptions:
    """Return the options with which `call` is submitted to be fetched later.

    Raises:
        InvalidRequest: it asks for a stream.
    """
    if call.stream:
        raise InvalidRequest(
            "a request that is fetched later has one whole answer: leave 'stream' out or send false",
            param="stream",
            code="unsupported",
        )
    return replace(options, detached=True)


def handle_of(errand: Errand[Any, Any]) -> Handle:
    """Return the handle of a submit that was answered with an admission or with an earlier reply."""
    draft, replay = errand.draft, errand.replay
    if replay is not None:
        reply = replay.reply if isinstance(replay, Frame) else replay
        assert isinstance(reply, Reply)  # what stands for the call is never an error  # noqa: S101 - for the type checker
        return Handle(id=reply.request_id, pool_id=reply.pool_id, repeated=True)
    answer = None if errand.attempt is None else errand.attempt.answered()
    deadline_ms = answer.deadline_ms if isinstance(answer, Admitted) else None
    return Handle(id=draft.request_id, pool_id=draft.submission.pool_id, deadline_ms=deadline_ms)


def handle_of_earlier(errand: Errand[Any, Any], earlier: RequestInProgress) -> Handle:
    """Return the handle of the same request that was submitted before and has not ended."""
    return Handle(id=earlier.request_id, pool_id=errand.draft.submission.pool_id, repeated=True)


def result_key(group: str, request_id: str) -> str:
    """Return where the reply of a request is kept."""
    return key(group, "result", id=request_id)


def found_in(request_id: str, answer: Any, raw: bytes | None) -> Found:
    """Read the answer to `state_of` and what stands under `result_key` (None: nothing, or it was not looked for).

    Raises:
        ContractError: the reply cannot be read.
    """
    frame = None if raw is None else decode_frame(raw)
    return Found(request_id=request_id, server_ms=answer["server_ms"], row=row_of(answer), frame=frame)


def may_be_kept(answer: Any) -> bool:
    """Say whether a reply is to be looked for, going by the answer to `state_of`."""
    row = row_of(answer)
    return row is None or row["state"] == "ended"


async def look(connection: Connection, group: str, request_id: str) -> Found:
    """Ask what the group knows of a request.

    Raises:
        FabricError: what the connection says.
    """
    answer = await connection.run(group, state_of(request_id))
    raw = await connection.get(result_key(group, request_id)) if may_be_kept(answer) else None
    return found_in(request_id, answer, raw)


async def whole_reply(connection: Connection, group: str, frame: Frame) -> Reply:
    """Return the reply of a frame with its body. It stays where it is.

    Raises:
        OutcomeUnknown: the body is gone.
        FabricError: what the connection says.
    """
    return with_body(frame, await connection.get(body_key(group, frame))) if frame.by_reference else frame.reply


class Patience:
    """How long somebody waits for a reply (`seconds`, None = until the request has ended), and when to look again."""

    def __init__(self, request_id: str, seconds: float | None) -> None:
        timeout_ms(seconds or None)  # 0 is allowed: look once
        self._request_id = request_id
        self._seconds = seconds
        self._until = None if seconds is None else time.monotonic() + seconds
        self._heard = time.monotonic()
        self._pause = _FIRST_PAUSE_S

    def heard(self) -> None:
        """Note that the server has answered."""
        self._heard = time.monotonic()

    def bear(self, error: FabricUnavailable) -> None:
        """Put up with a server that does not answer.

        Raises:
            FabricUnavailable: no longer.
        """
        now = time.monotonic()
        if now > (self._heard + SILENCE_S if self._until is None else self._until):
            raise error

    def pause(self) -> float:
        """Return how long to wait before the next look.

        Raises:
            TimeoutError: the time is over.
        """
        pause, self._pause = self._pause, min(self._pause * 1.5, _LAST_PAUSE_S)
        if self._until is None:
            return pause
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"request {self._request_id} has not ended within {self._seconds:g} s; it goes on")
        return min(pause, left)


async def wait_for_reply(connection: Connection, group: str, request_id: str, seconds: float | None) -> Reply:
    """Wait until the request has ended and return its reply, whatever its ending.

    Raises:
        RequestUnknown, OutcomeUnknown: there is none to fetch.
        TimeoutError: it has not ended in time. It goes on.
        FabricUnavailable: Valkey did not answer until then.
    """
    patience = Patience(request_id, seconds)
    while True:
        try:
            found = await look(connection, group, request_id)
            patience.heard()
            if (frame := found.kept()) is not None:
                return await whole_reply(connection, group, frame)
            if found.overdue:
                await connection.run(group, end_overdue())
        except OutcomeUnknown:
            raise
        except FabricUnavailable as error:
            patience.bear(error)
        await anyio.sleep(patience.pause())


class Submits:
    """What a client can do for requests that are fetched later. Mixed into the asynchronous client."""

    async def submit(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        pool: str = DEFAULT_POOL,
        metadata: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it travels with the request: the group ends it, not this task
        **more: Any,
    ) -> Handle:
        """Queue one chat completion and return at once: it is fetched with `result`, also by another process.

        Arguments and errors are those of `complete()`. It runs though this client is closed. The same call again with
        its `request_id` is the same request (`handle.repeated`).
        """
        named = {"model": model, "messages": messages, "pool": pool, "metadata": metadata, "timeout": timeout}
        return await self.submit_call(*build_completion(named | more))

    async def submit_call(self, call: Call, options: CallOptions | None = None) -> Handle:
        """Queue one call of any operation, to be fetched later.

        Raises:
            InvalidRequest: it asks for a stream, or cannot be queued.
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of `complete()`.
        """
        raise NotImplementedError

    async def result(self, request_id: str, timeout: float | None = None) -> Reply:  # noqa: ASYNC109 - waits in steps
        """Wait for the reply of a submitted request and return it; it succeeded.

        `timeout` is in seconds; None waits until the request has ended, which is at its deadline at the latest. The
        reply stays where it is for a day after the end, so this can be repeated.

        Raises:
            RequestEnded: it ended otherwise; `reply` says how.
            TimeoutError: it has not ended in time. It goes on.
            RequestUnknown: no such request is known, or no reply of it is kept.
            OutcomeUnknown: its reply's body is gone.
            FabricUnavailable: Valkey does not answer.
        """
        connection, group = self._fabric()
        reply = await wait_for_reply(connection, group, request_id, timeout)
        if not reply.succeeded:
            raise RequestEnded(reply)
        return reply

    async def status(self, request_id: str) -> RequestState:
        """Say where a request is.

        Raises:
            RequestUnknown: no such request is known.
            FabricError: Valkey does not answer, or not in this version's form.
        """
        connection, group = self._fabric()
        return (await look(connection, group, request_id)).state()

    async def estimate(self, pool: str = DEFAULT_POOL) -> Estimate:
        """Say how long a request that is submitted to `pool` now would wait.

        Raises:
            PoolUnknown: there is no such pool.
            FabricError: Valkey does not answer, or not in this version's form.
        """
        connection, group = self._fabric()
        return await connection.run(group, functions.pool_estimate(pool))

    def _fabric(self) -> tuple[Connection, str]:
        """Return the connection and the group.

        Raises:
            StateConflict: the client is not open, or has no queue.
        """
        raise NotImplementedError
