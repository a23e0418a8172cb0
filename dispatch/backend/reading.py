"""What a complete answer means: outcome, breaker verdict, hold, facts, and what the caller gets of it.

The rules (readings chosen where standards are silent):

- 2xx with a JSON object is a success, whatever is in it, unless it reports an error. Anything else in a 2xx (empty,
  HTML, cut, an event stream nobody asked for) is `failed` and a breaker failure: nothing usable comes from there.
- An error inside a 2xx is `failed`. Its `code`, where it names a status, decides the verdict like a status would;
  without one it is a failure. It is not retryable: work may have been done.
- 429 and 503 are backpressure: retryable, the endpoint is held, the breaker is untouched.
- Other 4xx are neutral: the request is at fault, or the configured key. Other 5xx are failures. 3xx too: redirects are
  not followed, the key must not go where a backend points.
- A JSON error answer travels to the caller byte for byte. A page or plain text becomes an OpenAI error with our
  sentence (plain text is quoted in it). The text of a 401 stays here: it may quote the key.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from dispatch.backend.document import (
    Document,
    ReportedError,
    clean,
    error_in_success,
    finish_reasons_of,
    id_of,
    model_of,
    read_document,
    reported_error,
    usage_of,
)
from dispatch.backend.endpoint import Endpoint
from dispatch.backend.exchange import Answer
from dispatch.backend.execution import ErrorType, Execution, Verdict
from dispatch.backend.failures import Failure
from dispatch.backend.headers import Fields, first, is_json_type, relayed
from dispatch.backend.retry_after import hold_ms
from dispatch.contract import ReplyError, ReplyHead

RETRY_AFTER_MAX_S = 30
"""Callers are told 1 to 30 whole seconds; SDKs give up on larger values."""

_JSON = ("content-type", "application/json")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,60}", re.ASCII)
_QUOTED_LENGTH = 500
_REQUEST_AT_FAULT = frozenset({400, 404, 405, 413, 414, 415, 422})
_REQUEST_AT_FAULT_TYPES = frozenset({"invalid_request_error", "badrequesterror"})


def read_answer(answer: Answer, endpoint: Endpoint) -> Execution:
    """Judge a complete answer; `execution_ms` is left to the caller. Never raises for what stands in it."""
    if 200 <= answer.status < 300:
        return _read_success(answer, endpoint)
    if answer.status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return _read_backpressure(answer, endpoint)
    return _read_error(answer, endpoint)


def read_failure(failure: Failure, endpoint: Endpoint) -> Execution:
    """Turn a call without a complete answer into its execution."""
    error = ReplyError(
        type=failure.type.value,
        message=failure.message,
        source="dispatch" if failure.expired else "endpoint",
    )
    return Execution(
        outcome="expired" if failure.expired else "failed",
        head=_head(endpoint, failure.status, error=error),
        verdict=failure.verdict,
        retryable=failure.retryable,
    )


def _read_success(answer: Answer, endpoint: Endpoint) -> Execution:
    document = read_document(answer.body)
    fields = relayed(answer.fields)
    if document is None:
        message = f"{_said(endpoint, answer.status)} with {_what_it_is(answer)}, not with a JSON object"
        error = ReplyError(type=ErrorType.UNREADABLE.value, message=message, source="endpoint")
        head = _head(endpoint, answer.status, error=error, headers=fields)
        return Execution(outcome="failed", head=head, verdict="failure")
    reported = error_in_success(document)
    if reported is not None:
        return read_reported(answer, endpoint, reported)
    head = _head(endpoint, answer.status, headers=(_content_type(answer.fields), *fields), document=document)
    return Execution(outcome="succeeded", head=head, body=answer.body, verdict="good")


def read_reported(answer: Answer, endpoint: Endpoint, reported: ReportedError) -> Execution:
    """Judge an answer of status 2xx that reports an error in its body or its stream; the body itself is not read."""
    status = reported.status
    verdict: Verdict = "failure"
    kind = ErrorType.FAILED
    hold = 0
    if status in {429, 503}:
        verdict, kind, hold = "backpressure", ErrorType.OVERLOADED, hold_ms(answer.fields, now=datetime.now(UTC))
    elif (status is not None and status < 500) or (reported.type or "").lower() in _REQUEST_AT_FAULT_TYPES:
        verdict, kind = "neutral", ErrorType.REJECTED
    inner = "" if status is None else f" {status}"
    error = ReplyError(
        type=kind.value,
        message=f"{_said(endpoint, answer.status)}, but with an error{inner} in it",
        source="caller" if kind is ErrorType.REJECTED else "endpoint",
        param=reported.param,
        code=reported.code,
    )
    body = _error_body(reported.message or error.message, reported.type or kind, error)
    return Execution(
        outcome="failed",
        head=_head(endpoint, answer.status, error=error, headers=(_JSON, *relayed(answer.fields))),
        body=b"" if _quotes_key(body, endpoint) else body,
        verdict=verdict,
        hold_ms=hold,
    )


def _read_backpressure(answer: Answer, endpoint: Endpoint) -> Execution:
    hold = hold_ms(answer.fields, now=datetime.now(UTC))
    retry_after = ("retry-after", str(min(max(-(-hold // 1000), 1), RETRY_AFTER_MAX_S)))
    error, body, headers = _error_parts(answer, endpoint, ErrorType.OVERLOADED, "endpoint")
    return Execution(
        outcome="failed",
        head=_head(endpoint, answer.status, error=error, headers=(*headers, retry_after)),
        body=body,
        verdict="backpressure",
        hold_ms=hold,
        retryable=True,
    )


def _read_error(answer: Answer, endpoint: Endpoint) -> Execution:
    status = answer.status
    verdict: Verdict = "neutral" if 400 <= status < 500 else "failure"
    source = "caller" if status in _REQUEST_AT_FAULT else "endpoint"
    if 300 <= status < 400:
        kind = ErrorType.REDIRECT
    elif status < 400:
        kind = ErrorType.UNREADABLE
    elif status == HTTPStatus.UNAUTHORIZED:
        kind = ErrorType.UNAUTHORIZED
    else:
        kind = ErrorType.REJECTED if status < 500 else ErrorType.FAILED
    error, body, headers = _error_parts(answer, endpoint, kind, source)
    return Execution(
        outcome="failed",
        head=_head(endpoint, status, error=error, headers=headers),
        body=body,
        verdict=verdict,
    )


def _error_parts(answer: Answer, endpoint: Endpoint, kind: ErrorType, source: str) -> tuple[ReplyError, bytes, Fields]:
    """Return our error, the body and the headers for the caller of an answer that is no success."""
    document = read_document(answer.body)
    reported = ReportedError(message="") if document is None else reported_error(document)
    hint = ": its configured key was refused" if kind is ErrorType.UNAUTHORIZED else ""
    error = ReplyError(
        type=kind.value,
        message=_said(endpoint, answer.status) + hint,
        source=source,
        param=reported.param,
        code=reported.code,
    )
    fields = relayed(answer.fields)
    if answer.status < 400:
        return error, b"", fields
    if document is not None and kind is not ErrorType.UNAUTHORIZED and not _quotes_key(answer.body, endpoint):
        return error, answer.body, (_content_type(answer.fields), *fields)
    return error, _error_body(error.message + _quotation(answer, endpoint, kind), kind, error), (_JSON, *fields)


def _quotation(answer: Answer, endpoint: Endpoint, kind: ErrorType) -> str:
    plain = first(answer.fields, "content-type").lower().startswith("text/plain")
    if kind is ErrorType.UNAUTHORIZED or not plain or _quotes_key(answer.body, endpoint):
        return ""
    text = clean(answer.body[: 4 * _QUOTED_LENGTH].decode("utf-8", "replace"), _QUOTED_LENGTH)
    return f": {text}" if text else ""


def _error_body(message: str, kind: str, error: ReplyError) -> bytes:
    """Return an OpenAI error; for the caller alone, so that `message` may be the backend's own."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": error.param, "code": error.code}})


def _quotes_key(body: bytes, endpoint: Endpoint) -> bool:
    return bool(endpoint.api_key) and endpoint.api_key.encode() in body


def _head(
    endpoint: Endpoint,
    status: int | None,
    *,
    error: ReplyError | None = None,
    headers: Fields = (),
    document: Document | None = None,
) -> ReplyHead:
    return ReplyHead(
        status=status,
        headers=headers,
        error=error,
        usage=None if document is None else usage_of(document),
        finish_reasons=() if document is None else finish_reasons_of(document),
        response_model=None if document is None else model_of(document),
        response_id=None if document is None else id_of(document),
        endpoint_id=endpoint.endpoint_id,
        backend_address=endpoint.address,
    )


def _content_type(fields: Fields) -> tuple[str, str]:
    """Return the content type of a body that is JSON, whatever it was labelled as: SDKs go by the label."""
    value = first(fields, "content-type")
    return ("content-type", value) if is_json_type(value) and value.isascii() and value.isprintable() else _JSON


def _said(endpoint: Endpoint, status: int) -> str:
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    return f"endpoint {endpoint.endpoint_id!r} answered {status}{phrase}"


def _what_it_is(answer: Answer) -> str:
    media = first(answer.fields, "content-type").partition(";")[0].strip().lower()
    if media == "text/event-stream":
        return "an event stream that was not asked for"
    if not answer.body.strip():
        return "an empty body"
    if is_json_type(media):
        return "broken JSON"
    return f"{media} content" if _MEDIA_TYPE.fullmatch(media) else "something"
