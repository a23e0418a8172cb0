"""Submit now, fetch later: a call of any operation is queued, and answered with its id.

The body is the call's, byte for byte, as it would be sent to `/v1/...`; the header `X-Dispatch-Operation` says which
operation it is. (Inside a JSON document of ours its bytes would not stay as they are.) All other headers are those of a
call. The request is nobody's: it goes on when the connection ends, and needs no living producer.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from dispatch.contract import Operation
from dispatch.errors import InvalidRequest
from dispatch.ingress.body import Upload
from dispatch.ingress.control.access import Here, Submitter
from dispatch.ingress.control.answering import ControlRoute
from dispatch.ingress.control.documenting import BODY, errors
from dispatch.ingress.control.shapes import Shape
from dispatch.ingress.reading import admission_ms, check_serving, read_in_turn
from dispatch.producer.call_headers import Headers, call_options, check_form, collect

router = APIRouter(prefix="/requests", tags=["requests"], route_class=ControlRoute)

OPERATION_HEADER = "X-Dispatch-Operation"
_OPERATIONS = [operation.value for operation in Operation]


class Submitted(Shape):
    """A request that is queued, or is an earlier one with the same idempotency key (`repeated`)."""

    request_id: str
    pool_id: str
    deadline_ms: int | None = Field(description="when it ends at the latest; null for an earlier one")
    repeated: bool
    href: str = Field(description="where it says how it stands; also in `Location`")


def _header(name: str, what: str, **schema: Any) -> dict[str, Any]:
    return {"in": "header", "name": name, "required": False, "description": what, "schema": {"type": "string"} | schema}


_DOCUMENTED = {
    "parameters": [
        _header(OPERATION_HEADER, "which operation the body is a call of", enum=_OPERATIONS) | {"required": True},
        _header("X-Dispatch-Pool", "the pool; none = the key's, or `default`"),
        _header("X-Dispatch-Timeout-Ms", "how long it may take from now, 1 to 3600000"),
        _header("X-Dispatch-Max-Wait-Ms", "how long it may wait to be launched"),
        _header("X-Dispatch-Fairness-Key", "for whom it is"),
        _header("X-Dispatch-Priority", "0 (first) to 3"),
        _header("X-Dispatch-Metadata", "a JSON object of scalars"),
        _header("Idempotency-Key", "the same key and call again is the same request"),
    ],
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object", "description": "the call, without `stream`"}}},
    },
}


@router.post(
    "",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Submitted,
    responses=errors(404, 409, 422, 429, *BODY),
    openapi_extra=_DOCUMENTED,
)
async def submit(request: Request, response: Response, principal: Submitter, control: Here) -> Any:
    """Queue a call to be fetched later. It is refused as a call would be; `stream: true` is a 400."""
    state, headers = control.state, collect(request.scope["headers"])
    gateway, settings = state.gateway, state.settings
    check_serving(gateway)
    check_form(headers)
    operation = _operation(headers)
    upload = Upload(headers, request.receive, settings)
    within_ms = admission_ms(settings, upload.announced(gateway.max_payload_bytes))
    options = principal.limit(call_options(headers, None, within_ms, default_pool=principal.default_pool))
    with control.held.share() as share:
        body = await upload.read(gateway.max_payload_bytes, share)
        call = await read_in_turn(operation, body, control.held)
        handle = await state.client.submit_call(call, options)
    href = f"{request.url.path}/{handle.id}"
    response.headers["location"] = href
    response.headers["x-dispatch-request-id"] = handle.id
    response.headers["x-dispatch-pool"] = handle.pool_id
    return {
        "request_id": handle.id, "pool_id": handle.pool_id, "deadline_ms": handle.deadline_ms,
        "repeated": handle.repeated, "href": href,
    }  # fmt: skip


def _operation(headers: Headers) -> Operation:
    values = headers.get(OPERATION_HEADER.lower().encode(), ())
    try:
        [value] = values
        return Operation(value.strip().decode("latin-1"))
    except ValueError:
        allowed = ", ".join(_OPERATIONS)
        message = f"the header {OPERATION_HEADER} is needed once, and must be one of: {allowed}"
        raise InvalidRequest(message, param=OPERATION_HEADER.lower(), code="invalid_header") from None
