"""The control API as an application of its own, mounted at `/api/v1` of the HTTP front."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import anyio
import msgspec
from fastapi import FastAPI, Request, Response, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.routing import Route

from dispatch.contract.answers import JSON, Answer
from dispatch.ingress.body import Held
from dispatch.ingress.control import config, dead, events, fleet, history, keys, pools, requests, snapshot, submitting
from dispatch.ingress.control.access import Control
from dispatch.ingress.control.answering import JSON_FIELDS, as_response, ids_of, on_http_exception
from dispatch.ingress.control.group import Group
from dispatch.ingress.control.watching import Watch
from dispatch.ingress.state import IngressState
from dispatch.telemetry.history.queries import History

BASE = "/api/v1"

_OWN_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_VERSION = "1"
_QUESTIONS_AT_ONCE = 4
_DESCRIPTION = """What an operator sees and does, and calls that are fetched later.

Roles of a key: `observe` reads, `admin` changes (and reads), `submit` queues calls and fetches or cancels those that
were made with it. A key of certain pools sees these alone. Times are milliseconds of the server's clock. What does not
apply is left out; what should be known and is not is null. Lists come in parts: `cursor` says where to go on, "" is the
end.

Errors are OpenAI error bodies; `x-dispatch-reason` says the same as a word. The header `X-Dispatch-Fabric-Group`, which
is optional, says which group is meant: a gateway of another one refuses (421).
"""
_KEY = HTTPBearer(auto_error=False, scheme_name="key", description="a key as `dispatch keys create` makes it")


def create_control(state: IngressState, held: Held) -> FastAPI:
    """Make the application. It works over `state.connection`, which the caller opens and closes.

    Raises:
        ValueError: there is none.
    """
    if state.connection is None:
        raise ValueError("the control API needs a connection to the fabric group")
    settings = state.settings
    app = _Application(
        title="Fabric Dispatch",
        version=_VERSION,
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_OWN_TELEMETRY,
        dependencies=[Security(_KEY)],
        generate_unique_id_function=lambda route: route.name,
    )
    group = Group(state.connection, state.gateway.status().fabric_group, settings.control_timeout_s)
    past = None if state.history is None else History(state.history, group.name)
    watch = Watch(group, settings.events_every_s)
    app.state.control = Control(state, group, held, watch, past, anyio.CapacityLimiter(_QUESTIONS_AT_ONCE))
    for module in (snapshot, pools, config, submitting, requests, dead, keys, events, fleet, history):
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, on_http_exception)

    async def document(request: Request) -> Response:
        """Describe the API; it tells nothing of the group, so no key is asked for."""
        return as_response(Answer(HTTPStatus.OK, [*JSON_FIELDS], msgspec.json.encode(app.openapi())), ids_of(request))

    app.router.routes.append(Route("/openapi.json", document, methods=["GET"]))
    return app


class _Application(FastAPI):
    """The framework's application, whose document says of errors what they are here."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, made once."""
        if self.openapi_schema is None:
            schema = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes,
                servers=[{"url": BASE}],
            )  # fmt: skip
            for path in schema["paths"].values():
                for operation in path.values():
                    _tell_our_errors(operation["responses"])
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            self.openapi_schema = schema
        return self.openapi_schema


def _tell_our_errors(responses: dict[str, Any]) -> None:
    """Take out the framework's own error, which no route answers with. Ours are JSON, whatever the answer is."""
    for status, response in list(responses.items()):
        content: list[dict[str, Any]] = list(response.get("content", {}).values())
        schema = content[0].get("schema", {}) if content else {}
        if schema.get("$ref", "").endswith("/HTTPValidationError"):
            del responses[status]
        elif status.isdigit() and int(status) >= HTTPStatus.BAD_REQUEST:
            response["content"] = {JSON: {"schema": schema}}
