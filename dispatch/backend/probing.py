"""What an answer to `GET /models` says about an endpoint that was taken for unavailable.

The rules of calls hold, where they are about the endpoint and not about this one question:

- 2xx with JSON of any form is good, unless it reports an error; another 2xx (a page of a proxy) is a failure.
- 404, 405, 501 and other 4xx are good: the engine answers, it only has no such list.
- 401, 403, 407 and 408 say nothing: whoever stands before the engine may have refused without asking it.
- 429 and 503 hold the endpoint. Other 5xx, redirects, no answer, and none within the probe's time are failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.exchange import Answer
from dispatch.backend.execution import ErrorType, Verdict
from dispatch.backend.failures import Failure
from dispatch.backend.reading import read_answer

_LIST_MAX_BYTES = 4 * 1024 * 1024
_SAYS_NOTHING = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
        HTTPStatus.REQUEST_TIMEOUT,
    }
)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe came to; `error_type` is "" for a good one, `hold_ms` is 0 unless the endpoint asked for time."""

    verdict: Verdict
    error_type: str = ""
    hold_ms: int = 0


def read_probe(found: Answer | Failure, endpoint: Endpoint) -> Probe:
    """Judge the answer to a probe. Never raises for what stands in it."""
    if isinstance(found, Failure):
        # Its own time is what the probe had; nobody's deadline.
        return Probe("failure", ErrorType.TIMEOUT.value) if found.expired else Probe(found.verdict, found.type.value)
    execution = read_answer(found, endpoint)
    error_type = execution.head.error.type if execution.head.error is not None else ""
    if found.status in _SAYS_NOTHING:
        return Probe("neutral", error_type)
    if found.status >= 300 and (execution.verdict == "neutral" or found.status == HTTPStatus.NOT_IMPLEMENTED):
        return Probe("good")
    if execution.verdict == "good" or (error_type == ErrorType.UNREADABLE.value and _is_json(found.body)):
        return Probe("good")
    return Probe(execution.verdict, error_type, execution.hold_ms)


def _is_json(body: bytes) -> bool:
    """Say whether a body is JSON of some other form than an object (there are engines that list models bare)."""
    if len(body) > _LIST_MAX_BYTES:
        return False
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True
