"""What the OpenAPI document says of errors, the same for every route."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from dispatch.ingress.control.shapes import ErrorBody

Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    HTTPStatus.BAD_REQUEST: "a parameter or a member of the body is wrong; `error.param` names it",
    HTTPStatus.UNAUTHORIZED: "no key, or none of this group",
    HTTPStatus.FORBIDDEN: "the key does not allow this; the message says what it allows",
    HTTPStatus.NOT_FOUND: "it is not there, or the key may not see it",
    HTTPStatus.CONFLICT: "it is in a state that does not allow this",
    HTTPStatus.REQUEST_TIMEOUT: "the body did not come within its time",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is too large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "the body is not JSON",
    HTTPStatus.MISDIRECTED_REQUEST: "`X-Dispatch-Fabric-Group` names another group than this gateway's",
    HTTPStatus.UNPROCESSABLE_ENTITY: "it can be read, and is refused as it is",
    HTTPStatus.TOO_MANY_REQUESTS: "there is no room now; `Retry-After` says when to come back, if that is known",
    HTTPStatus.SERVICE_UNAVAILABLE: "Valkey does not answer, or this gateway takes nothing now",
}
_ALWAYS = (400, 401, 403, 421, 503)
BODY = (408, 413, 415)
"""Of routes that read a body."""


def errors(*more: int, **bodies: type[BaseModel]) -> Responses:
    """Return the errors of a route: those of every one, and `more`; `bodies` (`s409=...`) have more in them."""
    found: Responses = {}
    for status in sorted({*_ALWAYS, *more, *(int(name[1:]) for name in bodies)}):
        found[status] = {"model": bodies.get(f"s{status}", ErrorBody), "description": _MEANINGS[HTTPStatus(status)]}
    return found
