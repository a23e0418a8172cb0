"""How the control API answers: ids on every answer, and every error as an OpenAI error body that names the field."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any, get_origin

import msgspec
import structlog
from fastapi import Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from dispatch.contract.answer_fields import Ids, raw_fields
from dispatch.contract.answers import INTERNAL, JSON, Answer, Problem, answer_of_problem, problem_of, rejected
from dispatch.errors import DispatchError, InvalidRequest
from dispatch.ingress.body import BodyTooSlow, ClientGone
from dispatch.producer.call_headers import caller_request_id, collect

log = structlog.get_logger(__name__)

GROUP_HEADER = "x-dispatch-fabric-group"
"""Which group is meant; in the answer to what has succeeded, for which it was."""

_TOO_SLOW = rejected(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", "the body did not come within its time")
JSON_FIELDS = (("content-type", JSON),)
_PLACES = {"path", "query", "header", "body", "cookie"}
_SHOWN_MAX = 80


class Refusal(Exception):
    """An answer that is no exception of the package: a problem, and facts that stand beside the error in the body."""

    def __init__(self, problem: Problem, **facts: Any) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.facts = facts


class ControlRoute(APIRoute):
    """A route whose answers all carry the ids, and whose errors have one form."""

    def require_known_query(self, request: Request) -> None:
        """Make sure that the request asks for nothing that the route does not know, and for nothing twice.

        Raises:
            InvalidRequest: it does; an answer to something else than was asked would look right.
        """
        given = request.query_params.multi_items()
        for name, _ in given:
            if name not in self._query_names:
                allowed = f"it takes {', '.join(sorted(self._query_names))}" if self._query_names else "it takes none"
                message = f"{request.method} {self.path_format} has no parameter {name[:_SHOWN_MAX]!r}: {allowed}"
                raise InvalidRequest(message, param=name[:_SHOWN_MAX], code="unknown_parameter")
        for name, may_repeat in self._query_names.items():
            if not may_repeat and len(request.query_params.getlist(name)) > 1:
                raise InvalidRequest(f"{name} is given more than once", param=name, code="invalid_value")

    @cached_property
    def _query_names(self) -> dict[str, bool]:
        """By name: whether it is a list."""
        others = {"path", "header", "cookie"}
        found = get_flat_params(self.dependant)  # those of a model do not say where they stand: they are of the query
        return {
            one.alias: get_origin(one.field_info.annotation) is list
            for one in found
            if getattr(one.field_info, "in_", None) not in others
        }

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the framework's handler."""
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                response = await handle(request)
            except HTTPException:
                raise
            except Exception as error:  # noqa: BLE001 - one that nobody expected is told in the form of all others
                response = as_response(_answer_of(error))
            response.headers.setdefault("cache-control", "no-store")
            if response.status_code < HTTPStatus.BAD_REQUEST:
                response.headers[GROUP_HEADER] = request.app.state.control.group.name
            if "x-request-id" not in response.headers:
                response.raw_headers.extend(ids_of(request).fields())
            return response

        return answered


def as_response(answer: Answer, ids: Ids | None = None) -> Response:
    """Make the framework's answer of ours; without `ids`, the route adds those of the caller."""
    response = Response(answer.body, answer.status)
    if ids is None:
        response.raw_headers.extend((name.encode("ascii"), value.encode("latin-1")) for name, value in answer.fields)
    else:
        response.raw_headers.extend(raw_fields(answer, ids))
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Tell a wrong path or method."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    phrase = HTTPStatus(status).phrase
    problem = rejected(status, phrase.lower().replace(" ", "_"), f"{phrase}: {request.method} {request.url.path}")
    answer = answer_of_problem(problem)
    more = getattr(error, "headers", None) or {}  # of a 405: the methods that are allowed
    answer.fields.extend((name.lower(), value) for name, value in more.items())
    return as_response(answer, ids_of(request))


def _answer_of(error: Exception) -> Answer:
    if isinstance(error, Refusal):
        answer = answer_of_problem(error.problem)
        body = msgspec.json.decode(answer.body) | error.facts
        return Answer(answer.status, answer.fields, msgspec.json.encode(body))
    return answer_of_problem(_problem_of(error))


def _problem_of(error: Exception) -> Problem:
    match error:
        case DispatchError():
            return problem_of(error)
        case RequestValidationError():
            return invalid(error.errors())
        case BodyTooSlow():
            return _TOO_SLOW
        case ClientGone():  # nobody reads it
            return rejected(HTTPStatus.BAD_REQUEST, "client_gone", "the client is gone")
        case ResponseValidationError():  # its text would repeat what was to be answered
            where = [".".join(map(str, one["loc"])) for one in error.errors()]
            log.error("control_answer_unfit", members=where[:10])
        case _:
            # As text: where logging is not set up, structlog would show local variables, which may hold content.
            log.error("control_request_failed", trace=traceback.format_exc())
    return INTERNAL


def invalid(problems: Sequence[Any]) -> Problem:
    """Make the problem of a request that a model refused; the first thing wrong names the field."""
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    if len(path) > 1 and path[0] in _PLACES:
        path = path[1:]
    name = ".".join(path) or None
    found = first.get("input")
    shown = f" is {str(found)[:_SHOWN_MAX]!r}" if isinstance(found, str | int | float | bool) else ""
    code = "missing_member" if first["type"] == "missing" else "invalid_value"
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return rejected(HTTPStatus.BAD_REQUEST, code, f"{name or 'the request'}{shown}: {reason}", name)


def ids_of(request: Request) -> Ids:
    """Return the ids that an answer to this request carries."""
    return Ids(caller_request_id(collect(request.scope["headers"])))
