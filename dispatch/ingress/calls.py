"""The hot route: one call in, its reply out. Plain ASGI, so that nothing stands between us and the connection.

A client that closes its connection cancels its request, queued or running, unless that has an idempotency key: then it
goes on, for the client that comes back with the key. A half-closed client (FIN after the request) counts as gone too:
the server reports both alike, for every operation, stream or not.

A stream takes no idempotency key (400): a repeat could not get what its first caller saw.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

import structlog
from starlette.types import Receive, Scope, Send

from dispatch.contract import Call, Operation
from dispatch.contract.answer_fields import Ids
from dispatch.contract.answers import INTERNAL, Answer, answer_of_problem, answer_of_reply, problem_of, rejected
from dispatch.errors import DispatchError
from dispatch.fabric.api_keys import Role
from dispatch.ingress.body import BodyTooSlow, ClientGone, Held, Upload
from dispatch.ingress.noting import Noting
from dispatch.ingress.reading import admission_ms, check_serving, read_in_turn
from dispatch.ingress.sending import send_answer
from dispatch.ingress.state import IngressState
from dispatch.ingress.streams import StreamWriter
from dispatch.producer.call_headers import Headers, call_options, caller_request_id, check_form, collect
from dispatch.producer.options import CallOptions
from dispatch.producer.served import ServedStream, ServingTimes

log = structlog.get_logger(__name__)

T = TypeVar("T")

_TOO_SLOW = rejected(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", "the body did not come within its time")


@dataclass(frozen=True, slots=True)
class _Incoming:
    headers: Headers
    pool: str | None
    receive: Receive
    upload: Upload


class CallRoute:
    """One operation, at `/v1/...` and under `/pools/{pool}/v1/...`."""

    def __init__(self, operation: Operation, state: IngressState, held: Held, noting: Noting) -> None:
        self._operation = operation
        self._noting = noting
        self._state = state
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Answers everybody but a client that is gone."""
        headers = collect(scope["headers"])
        upload = Upload(headers, receive, self._state.settings)
        ids = Ids(caller_request_id(headers))
        incoming = _Incoming(headers, scope.get("path_params", {}).get("pool"), receive, upload)
        try:
            outcome = await self._outcome(incoming, send)
            if outcome is None:
                self._noting.stream(self._operation)
                return
            answer, ids = outcome[0], Ids(ids.caller, outcome[1])
            await self._state.waits.tell(answer)
        except ClientGone:
            log.info("caller_gone", operation=self._operation, caller_request_id=ids.caller)
            return
        except BodyTooSlow:
            answer = answer_of_problem(_TOO_SLOW)
        except DispatchError as error:
            answer = answer_of_problem(problem_of(error, keyed=b"idempotency-key" in headers))
        except Exception:  # noqa: BLE001 - a bug of ours; told in the form that every client can read
            # As text: where logging is not set up, structlog would show local variables, which hold the body.
            trace = traceback.format_exc()
            log.error("call_failed", operation=self._operation, caller_request_id=ids.caller, trace=trace)  # noqa: TRY400 - see above
            answer = answer_of_problem(INTERNAL)
        self._noting.answer(self._operation, answer)
        await send_answer(send, answer, ids, upload)

    async def _outcome(self, incoming: _Incoming, send: Send) -> tuple[Answer, str] | None:
        """Read the call, queue it and wait for its reply; returns its answer and the request's id.

        A stream is written as it comes; then, None.

        Raises:
            DispatchError, BodyTooSlow: it was refused, or how it ended is not known.
            ClientGone: nobody waits for it any more; it is cancelled.
        """
        gateway, settings = self._state.gateway, self._state.settings
        principal = await self._state.authority.principal(incoming.headers)
        principal.require(Role.SUBMIT)
        check_serving(gateway)
        check_form(incoming.headers)
        upload = incoming.upload
        within_ms = admission_ms(settings, upload.announced(gateway.max_payload_bytes))
        asked = call_options(incoming.headers, incoming.pool, within_ms, default_pool=principal.default_pool)
        options = principal.limit(asked)
        with self._held.share() as share:
            body = await upload.read(gateway.max_payload_bytes, share)
            call = await read_in_turn(self._operation, body, self._held)
            if call.stream:
                return await self._stream(incoming, send, call, options)
            reply = await _while_connected(incoming.receive, lambda: self._state.client.call(call, options))
            return answer_of_reply(reply), reply.request_id

    async def _stream(
        self, incoming: _Incoming, send: Send, call: Call, options: CallOptions
    ) -> tuple[Answer, str] | None:
        stream = self._state.client.stream_call(call, options)
        settings = self._state.settings
        times = ServingTimes(head_s=settings.stream_head_s, keep_alive_s=settings.stream_keep_alive_s)
        served = ServedStream(call.operation, options.pool_id, times)
        writer = StreamWriter(stream, served, options.caller_request_id)
        answer = await _while_connected(incoming.receive, lambda: writer.write(send))
        return None if answer is None else (answer, stream.request_id)


async def _while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Do `work` while watching the connection; when that ends first, `work` is cancelled.

    A task beside this one, not a task group of anyio's around both: that alone was a tenth of a call's whole cost.

    Raises:
        ClientGone: the connection ended.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine that runs belongs to one
    cancelled_before = task.cancelling()
    watch = asyncio.get_running_loop().create_task(_watch(receive, task))
    try:
        return await work()
    except asyncio.CancelledError:
        if watch.done() and task.uncancel() <= cancelled_before:
            watch.result()  # a fault in watching is told as itself
            raise ClientGone from None
        raise
    finally:
        watch.cancel()  # from here on it cancels nobody, even if the connection has ended meanwhile


async def _watch(receive: Receive, task: asyncio.Task[object]) -> None:
    """Cancel `task` when the client closes the connection."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:
        task.cancel()
        raise
    task.cancel()
