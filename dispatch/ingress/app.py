"""The OpenAI-compatible HTTP front of a gateway process, as an ASGI application.

`POST /v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/responses` and `GET /v1/models`, each also under
`/pools/{pool}`; `GET /healthz` (the process lives), `GET /readyz` (it takes calls) and `GET /metrics`; the control API
at `/api/v1`.
There is no middleware: it would hide from a waiting call that its client has gone. Every error is an OpenAI error body.
Where keys are asked for, they are checked before anything of a body is read; health and readiness need none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dispatch.contract import Operation
from dispatch.contract.answer_fields import Ids, raw_fields
from dispatch.contract.answers import INTERNAL, JSON, Answer, answer_of_problem, problem_of, rejected
from dispatch.errors import DispatchError
from dispatch.fabric.api_keys import Role
from dispatch.ingress.body import Held
from dispatch.ingress.calls import CallRoute
from dispatch.ingress.control import BASE as CONTROL
from dispatch.ingress.control import create_control
from dispatch.ingress.metrics import MetricsPage, metrics_response, require_reader
from dispatch.ingress.models import ModelList
from dispatch.ingress.noting import Noting
from dispatch.ingress.readiness import readiness
from dispatch.ingress.state import IngressState
from dispatch.producer.call_headers import caller_request_id, collect

log = structlog.get_logger(__name__)

_BASES = ("", "/pools/{pool}")
# A call's spans are ours, one for each queue step; a second set by the framework would wrap the hot route.
_OWN_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


class _Front(FastAPI):
    """Lets calls through to their route at once: what a framework wraps around a request is an eighth of a call's cost.

    `calls` are routes by path. They tell their own errors; all the rest, and all of `/pools`, takes the usual way.
    """

    def __init__(self, calls: Mapping[str, CallRoute], **more: Any) -> None:
        super().__init__(**more)
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        route = self._calls.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (super().__call__ if route is None else route)(scope, receive, send)


def create_app(state: IngressState) -> FastAPI:
    """Make the application. Its lifespan closes what it opens; `state`'s parts are opened and closed by the caller."""
    models = ModelList(state.gateway, state.settings.models_timeout_s)
    calls: dict[str, CallRoute] = {}

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await models.aclose()

    app = _Front(
        calls,
        title="Fabric Dispatch",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=_OWN_TELEMETRY,
    )
    held = Held(state.settings.max_held_bytes)
    noting = Noting(state.observer)
    for operation in Operation:
        route = CallRoute(operation, state, held, noting)
        calls[f"/v1/{operation.path}"] = route
        for base in _BASES:
            app.router.routes.append(Route(f"{base}/v1/{operation.path}", route, methods=["POST"]))

    async def list_models(request: Request) -> Response:
        """List the models that the endpoints serve."""
        try:
            principal = await state.authority.principal(collect(request.scope["headers"]))
            principal.require(Role.SUBMIT, Role.OBSERVE)
        except DispatchError as error:
            return _response(request, answer_of_problem(problem_of(error)))
        return _response(request, await models.answer())

    for base in _BASES:
        app.add_api_route(f"{base}/v1/models", list_models, methods=["GET"], response_class=Response)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_class=Response)
    async def healthz(request: Request) -> Response:
        """Say that the process lives and its event loop turns."""
        return _response(request, Answer(HTTPStatus.OK, [("content-type", JSON)], b'{"status":"ok"}'))

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_class=Response)
    async def readyz(request: Request) -> Response:
        """Say whether this gateway takes calls, and why not."""
        ready, body = await readiness(state.gateway, state.settings.ready_timeout_s)
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _response(request, Answer(status, [("content-type", JSON)], body))

    if state.metrics is not None:
        _add_metrics(app, state, state.metrics)
    if state.connection is not None:
        app.mount(CONTROL, create_control(state, held))
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _add_metrics(app: FastAPI, state: IngressState, page: MetricsPage) -> None:
    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return this gateway's metrics and the group's, as Prometheus reads them."""
        headers = collect(request.scope["headers"])
        try:
            if not state.metrics_open:
                await require_reader(state.authority, headers, request.scope.get("server"))
        except DispatchError as error:
            return _response(request, answer_of_problem(problem_of(error)))
        return await metrics_response(page, headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Tell a wrong path or method."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    phrase = HTTPStatus(status).phrase
    message = f"{phrase}: {request.method} {request.url.path}"
    answer = answer_of_problem(rejected(status, phrase.lower().replace(" ", "_"), message))
    more = getattr(error, "headers", None) or {}  # of a 405: the methods that are allowed
    answer.fields.extend((name.lower(), value) for name, value in more.items())
    return _response(request, answer)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Tell an exception that nobody expected; the server logs it with its traceback."""
    log.error("request_failed", path=request.url.path, kind=type(error).__name__)
    return _response(request, answer_of_problem(INTERNAL))


def _response(request: Request, answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    ids = Ids(caller_request_id(collect(request.scope["headers"])))
    response.raw_headers.extend(raw_fields(answer, ids))
    return response
