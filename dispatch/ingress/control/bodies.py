"""Bodies of the control API: read within bounds after the caller was let in, and documented.

JSON is taken by the letter: a member that stands twice, or a number that is none, is refused.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dispatch.errors import InvalidRequest
from dispatch.ingress.body import Upload
from dispatch.ingress.control.access import Control
from dispatch.ingress.control.answering import invalid
from dispatch.producer.call_headers import check_form, collect

SMALL_BYTES = 64 * 1024
DOCUMENT_BYTES = 4 * 1024 * 1024
"""A config of 1,000 pools and endpoints with every field written out is below 1 MiB."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class Change(BaseModel):
    """Who changes something, and why, for the record."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"additionalProperties": False})

    actor: str = Field("", max_length=200, description='who does it; "" = the key alone says so')
    reason: str = Field("", max_length=1000, description="why")


async def read_change(request: Request, control: Control, model: type[ModelT], limit: int = SMALL_BYTES) -> ModelT:
    """Read the body of a request; none at all stands for an empty object.

    Raises:
        InvalidRequest: it is wrong; names the member.
        RequestRefused: it is too large.
        BodyTooSlow, ClientGone: it does not come.
    """
    headers = collect(request.scope["headers"])
    check_form(headers)
    upload = Upload(headers, request.receive, control.state.settings)
    with control.held.share() as share:
        text = await upload.read(limit, share)
        members = _decode(text) if text else {}
    try:
        return model.model_validate(members)
    except ValidationError as error:
        problem = invalid(error.errors(include_url=False))
        raise InvalidRequest(problem.message, param=problem.param, code=problem.code) from None


def documented(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Return what the OpenAPI document says of a body that `read_change` reads."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


class _Twice(ValueError):
    pass


def _decode(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})", code="invalid_utf8") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"the body is not JSON: {where}: {error.msg}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="nested_too_deep") from None
    except _Twice as error:
        raise InvalidRequest(str(error), code="duplicate_member") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Twice(f"the body has the member {twice[:60]!r} twice in one object")
    return members


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")
