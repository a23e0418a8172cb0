"""`DispatchTransport`: an HTTP client's calls go into the queue instead of over the network.

    async with DispatchClient("valkey://127.0.0.1:6379") as client:
        http = httpx.AsyncClient(transport=DispatchTransport(client, pool="interactive"))
        openai = AsyncOpenAI(base_url="http://dispatch/v1", api_key="unused", http_client=http)

It answers as the HTTP front does: the same paths, statuses, header fields, error bodies and event streams, and it reads
the same `X-Dispatch-*` headers. So what a client does with a server, it does here: retries, errors, timeouts.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from dispatch.contract import Call, Operation, read_call
from dispatch.contract.answer_fields import Ids, raw_fields
from dispatch.contract.answers import (
    EXPIRED_IN_QUEUE,
    JSON,
    MAX_WAIT,
    Answer,
    Problem,
    answer_of_problem,
    answer_of_reply,
    problem_of,
    rejected,
    retry_after,
)
from dispatch.errors import ConfigurationError, DispatchError
from dispatch.fabric.records import Estimate
from dispatch.producer import sync
from dispatch.producer.blocking_stream import BlockingChunkStream
from dispatch.producer.call_headers import Headers, call_options, caller_request_id, check_form, collect
from dispatch.producer.client import DispatchClient
from dispatch.producer.options import DEFAULT_POOL, CallOptions
from dispatch.producer.served import BlockingServedStream, ServedStream, ServingTimes
from dispatch.producer.streaming import ChunkStream

if TYPE_CHECKING:
    import httpx2

    class _Bases(httpx.AsyncBaseTransport, httpx.BaseTransport, httpx2.AsyncBaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...
        async def handle_async_request(self, request: Any) -> Any: ...
else:
    _bases = (httpx.AsyncBaseTransport, httpx.BaseTransport)
    try:
        import httpx2
    except ImportError:  # the client library of newer OpenAI packages; who has it gets a transport of its kind
        pass
    else:
        _bases += (httpx2.AsyncBaseTransport, httpx2.BaseTransport)
    _Bases = type("_Bases", _bases, {})

ADMISSION_MS = 5_000
"""How long Valkey may take to admit a call before it is answered 503; the client decides whether to try again."""

_IN_VAIN = (EXPIRED_IN_QUEUE.reason, MAX_WAIT.reason)
_POOLS = "/pools/"
_MODELS = "/v1/models"
_OPERATIONS = {f"/v1/{operation.path}": operation for operation in Operation}


class DispatchTransport(_Bases):
    """A transport for `httpx` and `httpx2`: an AsyncClient's over a `DispatchClient`, a Client's over its sync twin.

    Host and scheme of the URL do not matter; its path is `/v1/...` or `/pools/{pool}/v1/...`. `pool` is where calls go
    that name none, `models` what `GET /v1/models` lists; without them it is a 404, because a producer does not know the
    endpoints. A client's read timeout is kept, as against a server: the request is cancelled then; others (connect,
    write, pool) have no meaning here. Closing a response before its end cancels its request. The `DispatchClient` is
    opened and closed by whoever made it.
    """

    def __init__(
        self,
        client: DispatchClient | sync.DispatchClient,
        *,
        pool: str = DEFAULT_POOL,
        models: Sequence[str] = (),
        admission_ms: int = ADMISSION_MS,
        times: ServingTimes | None = None,
    ) -> None:
        """Send calls through `client`. `times`: when the head of a stream comes, and its keep-alives.

        Raises:
            InvalidRequest: `pool` is no name.
        """
        CallOptions(pool_id=pool)
        self._client = client
        self._pool = pool
        self._models = tuple(models)
        self._admission_ms = admission_ms
        self._times = times or ServingTimes()

    async def handle_async_request(self, request: Any) -> Any:
        """Make the call of `request` and return its answer.

        Raises:
            ReadTimeout: of the request's own library.
            ConfigurationError: the client is a blocking one.
        """
        client = self._client
        if not isinstance(client, DispatchClient):
            raise ConfigurationError("an AsyncClient's transport needs dispatch.DispatchClient, not the one of sync")
        asked = _Asked.of(request)
        if isinstance(asked, Answer):
            return _response(request, asked, _ids(request))
        if asked.operation is None:
            return _response(request, self._list_models(), _ids(request))
        try:
            call, options = self._read(asked, await request.aread(), _read_timeout_s(request))
            if call.stream:
                served = ServedStream(call.operation, options.pool_id, self._times)
                return await _AsyncExchange(request, client, client.stream_call(call, options), served).response()
            async with _ReadTimeout(request):
                reply = await client.call(call, options)
        except DispatchError as error:
            return _response(request, asked.answer_of(error), _ids(request))
        answer = await _with_wait(client, answer_of_reply(reply), reply.pool_id)
        return _response(request, answer, _ids(request, reply.request_id))

    def handle_request(self, request: Any) -> Any:
        """Make the call of `request` and return its answer.

        Raises:
            ReadTimeout: of the request's own library.
            ConfigurationError: the client is an asynchronous one.
        """
        client = self._client
        if not isinstance(client, sync.DispatchClient):
            raise ConfigurationError("a blocking Client's transport needs dispatch.sync.DispatchClient")
        asked = _Asked.of(request)
        if isinstance(asked, Answer):
            return _response(request, asked, _ids(request))
        if asked.operation is None:
            return _response(request, self._list_models(), _ids(request))
        try:
            call, options = self._read(asked, request.read(), _read_timeout_s(request))
            if call.stream:
                served = BlockingServedStream(call.operation, options.pool_id, self._times)
                return _BlockingExchange(request, client, client.stream_call(call, options), served).response()
            reply = client.call(call, options, within_s=_read_timeout_s(request))
        except DispatchError as error:
            return _response(request, asked.answer_of(error), _ids(request))
        except TimeoutError as error:
            raise _timed_out(request) from error
        answer = _with_wait_blocking(client, answer_of_reply(reply), reply.pool_id)
        return _response(request, answer, _ids(request, reply.request_id))

    def _read(self, asked: _Asked, body: bytes, within_s: float) -> tuple[Call, CallOptions]:
        assert asked.operation is not None  # noqa: S101 - asked by the caller
        check_form(asked.headers)
        admission_ms = max(1, int(min(self._admission_ms, within_s * 1000)))
        options = call_options(asked.headers, asked.pool, admission_ms, default_pool=self._pool)
        return read_call(asked.operation, body), options

    def _list_models(self) -> Answer:
        if not self._models:
            message = "a producer does not know the endpoints' models: ask a gateway, or give models=[...]"
            return answer_of_problem(rejected(HTTPStatus.NOT_FOUND, "models_unknown", message))
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "fabric-dispatch"} for name in self._models]
        return Answer(HTTPStatus.OK, [("content-type", JSON)], msgspec.json.encode({"object": "list", "data": rows}))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks for, by its path and headers. `operation` None = the list of models."""

    operation: Operation | None
    pool: str | None
    headers: Headers

    @classmethod
    def of(cls, request: Any) -> _Asked | Answer:
        """Read it; or return the answer, if it is nothing that there is."""
        path: str = request.url.path
        pool = None
        if path.startswith(_POOLS):
            pool, _, rest = path.removeprefix(_POOLS).partition("/")
            path = f"/{rest}"
        operation = _OPERATIONS.get(path)
        if operation is None and path != _MODELS:
            return _no_such(request, HTTPStatus.NOT_FOUND)
        method = "GET" if operation is None else "POST"
        if request.method != method:
            answer = _no_such(request, HTTPStatus.METHOD_NOT_ALLOWED)
            answer.fields.append(("allow", method))
            return answer
        return cls(operation, pool, collect((name.lower(), value) for name, value in request.headers.raw))

    def answer_of(self, error: DispatchError) -> Answer:
        """Return what is answered for an exception."""
        return answer_of_problem(problem_of(error, keyed=b"idempotency-key" in self.headers))


class _AsyncExchange:
    """A stream as the body of a response. Read once; a second reading goes on where the first one stopped."""

    def __init__(self, request: Any, client: DispatchClient, stream: ChunkStream, served: ServedStream) -> None:
        self._request = request
        self._client = client
        self._stream = stream
        self._served = served

    async def response(self) -> Any:
        """Wait for the head.

        Raises:
            DispatchError: nothing was queued, or how it ended is not known.
        """
        try:
            async with _ReadTimeout(self._request):
                answer = await self._served.open(self._stream)
        except BaseException:
            await self._stream.aclose()
            raise
        ids = _ids(self._request, self._stream.request_id)
        if self._served.over:
            return _response(self._request, await _with_wait(self._client, answer, self._served.pool_id), ids)
        library = _library_of(self._request)
        body = _bodies(library)[0](self)
        return library.Response(answer.status, headers=raw_fields(answer, ids), stream=body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body as they come."""
        while not self._served.over:
            async with _ReadTimeout(self._request):
                piece = await self._served.next_piece(self._stream)
            if piece:
                yield piece

    async def aclose(self) -> None:
        """Let go of the stream."""
        await self._stream.aclose()


class _BlockingExchange:
    """The same for blocking code."""

    def __init__(
        self, request: Any, client: sync.DispatchClient, stream: BlockingChunkStream, served: BlockingServedStream
    ) -> None:
        self._request = request
        self._client = client
        self._stream = stream
        self._served = served

    def response(self) -> Any:
        """Wait for the head.

        Raises:
            DispatchError: nothing was queued, or how it ended is not known.
        """
        try:
            answer = self._served.open(self._stream, _read_timeout_s(self._request))
        except BaseException as error:
            self._stream.close()
            if isinstance(error, TimeoutError):
                raise _timed_out(self._request) from error
            raise
        ids = _ids(self._request, self._stream.request_id)
        if self._served.over:
            return _response(self._request, _with_wait_blocking(self._client, answer, self._served.pool_id), ids)
        library = _library_of(self._request)
        body = _bodies(library)[1](self)
        return library.Response(answer.status, headers=raw_fields(answer, ids), stream=body)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the body as they come."""
        while not self._served.over:
            try:
                piece = self._served.next_piece(self._stream, _read_timeout_s(self._request))
            except TimeoutError as error:
                self.close()
                raise _timed_out(self._request) from error
            if piece:
                yield piece

    def close(self) -> None:
        """Let go of the stream."""
        self._stream.close()


class _ReadTimeout:
    """Bounds a wait by the request's read timeout; raises the timeout of its library."""

    def __init__(self, request: Any) -> None:
        self._request = request
        seconds = _read_timeout_s(request)
        self._timeout = asyncio.timeout(None if math.isinf(seconds) else seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as over:
            raise _timed_out(self._request) from over


@functools.cache
def _bodies(library: ModuleType) -> tuple[Any, Any]:
    """Return the classes of streamed bodies that `library`'s two clients take."""

    class AsyncBody(library.AsyncByteStream):  # type: ignore[misc,name-defined]  # whichever it is
        def __init__(self, exchange: _AsyncExchange) -> None:
            self._exchange = exchange

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self._exchange.pieces()

        async def aclose(self) -> None:
            await self._exchange.aclose()

    class Body(library.SyncByteStream):  # type: ignore[misc,name-defined]  # as above
        def __init__(self, exchange: _BlockingExchange) -> None:
            self._exchange = exchange

        def __iter__(self) -> Iterator[bytes]:
            return self._exchange.pieces()

        def close(self) -> None:
            self._exchange.close()

    return AsyncBody, Body


async def _with_wait(client: DispatchClient, answer: Answer, pool_id: str) -> Answer:
    """Add when to come back to the answer to a call that was queued in vain, if that is known."""
    if dict(answer.fields).get("x-dispatch-reason") in _IN_VAIN:
        with suppress(DispatchError):
            _add_wait(answer, await client.estimate(pool_id))
    return answer


def _with_wait_blocking(client: sync.DispatchClient, answer: Answer, pool_id: str) -> Answer:
    if dict(answer.fields).get("x-dispatch-reason") in _IN_VAIN:
        with suppress(DispatchError):
            _add_wait(answer, client.estimate(pool_id))
    return answer


def _add_wait(answer: Answer, estimate: Estimate) -> None:
    if estimate.wait_ms is not None:
        answer.fields.extend(retry_after(estimate.wait_ms))


def _library_of(request: Any) -> ModuleType:
    """Return the client library that `request` comes from."""
    home = next(kind for kind in type(request).__mro__ if kind.__name__ == "Request").__module__
    return sys.modules[home.partition(".")[0]]


def _response(request: Any, answer: Answer, ids: Ids) -> Any:
    return _library_of(request).Response(answer.status, headers=raw_fields(answer, ids), content=answer.body)


def _ids(request: Any, internal: str | None = None) -> Ids:
    return Ids(caller_request_id(collect((name.lower(), value) for name, value in request.headers.raw)), internal)


def _read_timeout_s(request: Any) -> float:
    seconds = request.extensions.get("timeout", {}).get("read")
    return math.inf if seconds is None else float(seconds)


def _timed_out(request: Any) -> Exception:
    message = "no answer came in time; the request is cancelled"
    error: Exception = _library_of(request).ReadTimeout(message, request=request)
    return error


def _no_such(request: Any, status: HTTPStatus) -> Answer:
    message = f"{status.phrase}: {request.method} {request.url.path}"
    problem: Problem = rejected(status, status.phrase.lower().replace(" ", "_"), message)
    return answer_of_problem(problem)
