"""What becomes of a call in HTTP: one table of every refusal, every ending and every exception.

The HTTP front and the SDK's transport both answer by it, so that a client cannot tell them apart.

    rejected-<word>   nothing was done and nothing is queued
    ended-<word>      it was admitted; work was or may have been done, so `x-should-retry` is false

`x-should-retry: true` stands only where another try is surely no second execution; where nothing is said, an SDK goes
by the status. `Retry-After` (whole seconds, 1 to 30) and `retry-after-ms` stand on refusals for want of capacity where
it is known how fast that comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from http import HTTPStatus

import msgspec

from dispatch import errors
from dispatch.contract.reply import Reply

JSON = "application/json"
RETRY_AFTER_MIN_MS, RETRY_AFTER_MAX_MS = 1_000, 30_000

Fields = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer: status, header fields (without ids and length) and body."""

    status: int
    fields: Fields
    body: bytes


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one refusal, ending or exception is in HTTP. `retry` None = not said; `capacity` = come back later."""

    status: int
    reason: str
    retry: bool | None = None
    capacity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error to tell: what it means, a sentence, the request's member at fault, and header fields with its facts."""

    meaning: Meaning
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    retry_after_ms: int | None = None
    fields: tuple[tuple[str, str], ...] = ()


_NO_CAPACITY = HTTPStatus.TOO_MANY_REQUESTS
_NOT_NOW = HTTPStatus.SERVICE_UNAVAILABLE
_NO_ANSWER = HTTPStatus.BAD_GATEWAY
_TOO_LATE = HTTPStatus.GATEWAY_TIMEOUT
_A_BUG = HTTPStatus.INTERNAL_SERVER_ERROR

REFUSALS = {
    "pool_disabled": Meaning(_NOT_NOW, "rejected-pool_disabled"),
    "pool_draining": Meaning(_NOT_NOW, "rejected-pool_draining"),
    "pool_full": Meaning(_NO_CAPACITY, "rejected-pool_full", retry=True, capacity=True),
    "pool_bytes_full": Meaning(_NO_CAPACITY, "rejected-pool_bytes_full", retry=True, capacity=True),
    "group_full": Meaning(_NO_CAPACITY, "rejected-group_full", retry=True, capacity=True),
    "gateway_full": Meaning(_NO_CAPACITY, "rejected-gateway_full", retry=True, capacity=True),
    "memory_full": Meaning(_NOT_NOW, "rejected-memory_full", retry=True),
    "body_too_large": Meaning(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "rejected-body_too_large"),
    "endpoint_open": Meaning(_NOT_NOW, "rejected-endpoint_open", retry=True),
    "body_missing": Meaning(_NOT_NOW, "rejected-body_missing", retry=True),
    "id_conflict": Meaning(HTTPStatus.CONFLICT, "rejected-id_conflict", retry=False),
    "draining": Meaning(_NOT_NOW, "rejected-draining", retry=True),
    "not_running": Meaning(_NOT_NOW, "rejected-not_running", retry=True),
}
"""By reason: the schema's refusals, and those that no function decides (memory, this process)."""

ENDINGS = {
    "cancelled": Meaning(_NOT_NOW, "ended-cancelled", retry=False),
    "expired": Meaning(_TOO_LATE, "ended-expired", retry=False),
    "failed": Meaning(_NO_ANSWER, "ended-failed", retry=False),
    "lost": Meaning(_NO_ANSWER, "ended-lost", retry=False),
    "dead": Meaning(_NO_ANSWER, "ended-dead", retry=False),
    "malformed": Meaning(HTTPStatus.BAD_REQUEST, "rejected-malformed", retry=False),
    "producer_gone": Meaning(_NOT_NOW, "ended-producer_gone", retry=False),
    "reply_dropped": Meaning(_NO_ANSWER, "ended-reply_dropped", retry=False),
    "rejected": Meaning(_NOT_NOW, "rejected-rejected"),
}
"""By ending, where the endpoint gave no answer of its own; `succeeded` is the endpoint's answer."""

EXPIRED_IN_QUEUE = Meaning(_NO_CAPACITY, "rejected-deadline", retry=True, capacity=True)
MAX_WAIT = Meaning(_NO_CAPACITY, "rejected-max_wait", retry=True, capacity=True)
MAX_WAIT_EXCEEDED = "max_wait_exceeded"
"""The error type of a request that was queued for as long as its caller allowed."""

_ENDPOINT_SLOW = Meaning(_TOO_LATE, "ended-failed", retry=False)

EXCEPTIONS: tuple[tuple[type[errors.DispatchError], Meaning], ...] = (
    (errors.PoolUnknown, Meaning(HTTPStatus.NOT_FOUND, "rejected-pool_unknown")),
    (errors.RequestUnknown, Meaning(HTTPStatus.NOT_FOUND, "rejected-request_unknown")),
    (errors.GroupUnknown, Meaning(_NOT_NOW, "rejected-group_unknown", retry=True)),
    (errors.OutcomeUnknown, Meaning(_NO_ANSWER, "ended-outcome_unknown", retry=False)),
    (errors.FabricUnavailable, Meaning(_NOT_NOW, "rejected-fabric_unavailable", retry=True)),
    (errors.StreamBroken, Meaning(_NO_ANSWER, "ended-stream_broken", retry=False)),
    (errors.StreamTooSlow, Meaning(_NOT_NOW, "ended-stream_too_slow", retry=False)),
    (errors.LibraryProblem, Meaning(_NOT_NOW, "rejected-library", retry=True)),
    (errors.ContractMismatch, Meaning(_NOT_NOW, "rejected-contract_mismatch", retry=True)),
    (errors.ConfigurationError, Meaning(_NOT_NOW, "rejected-configuration", retry=True)),
    (errors.RequestInProgress, Meaning(HTTPStatus.CONFLICT, "rejected-idempotency_in_progress", retry=True)),
    (
        errors.IdempotencyConflict,
        Meaning(HTTPStatus.UNPROCESSABLE_ENTITY, "rejected-idempotency_mismatch", retry=False),
    ),
    (errors.StateConflict, Meaning(_NOT_NOW, "ended-interrupted", retry=False)),  # the client was closed meanwhile
    (errors.BadArgument, Meaning(HTTPStatus.BAD_REQUEST, "rejected-bad_argument")),
    (errors.HistoryOff, Meaning(HTTPStatus.NOT_FOUND, "rejected-history_off", retry=False)),
    (errors.HistoryError, Meaning(_NOT_NOW, "rejected-history_unavailable", retry=True)),
    (errors.ScriptFault, Meaning(_A_BUG, "ended-script_fault", retry=False)),
    (errors.DispatchError, Meaning(_A_BUG, "ended-internal", retry=False)),
)
"""The first class that fits decides. `InvalidRequest` and `RequestRefused` carry their own word."""

INTERNAL = Problem(meaning=Meaning(_A_BUG, "ended-internal", retry=False), message="internal error; see the log")

_OWN_KEY_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED})


def rejected(status: int, code: str, message: str, param: str | None = None) -> Problem:
    """Make the problem of a request that is wrong in itself."""
    return Problem(meaning=Meaning(status, f"rejected-{code}"), message=message, param=param, code=code)


def refused(reason: str, message: str) -> Problem:
    """Make the problem of a refusal by this process."""
    return Problem(meaning=REFUSALS[reason], message=message, code=reason)


def problem_of(error: errors.DispatchError, *, keyed: bool = False) -> Problem:
    """Say what an exception of `Caller.call` or of reading a call is in HTTP. `keyed`: it has an idempotency key."""
    match error:
        case errors.InvalidRequest() | errors.AccessRefused():
            return rejected(error.status, error.code or "invalid_request", str(error), error.param)
        case errors.RequestRefused():
            meaning = REFUSALS.get(error.reason, Meaning(_NOT_NOW, f"rejected-{error.reason}"))
            wait, fields = error.retry_after_ms, tuple(_facts(error))
            return Problem(meaning=meaning, message=str(error), code=error.reason, retry_after_ms=wait, fields=fields)
        case errors.PoolUnknown():
            return Problem(meaning=_meaning_of(error), message=str(error), param="pool", code="pool_unknown")
        case errors.RequestInProgress() | errors.IdempotencyConflict():
            meaning = _meaning_of(error)
            code = meaning.reason.removeprefix("rejected-")
            return Problem(meaning=meaning, message=str(error), param="idempotency-key", code=code)
        case errors.StateConflict() if keyed:  # the call goes on, and a repeat gets its reply
            interrupted = replace(_meaning_of(error), retry=True)
            return Problem(meaning=interrupted, message=str(error), code="interrupted")
    meaning = _meaning_of(error)
    return Problem(meaning=meaning, message=str(error), code=meaning.reason.partition("-")[2])


def answer_of_problem(problem: Problem) -> Answer:
    """Make the OpenAI error of `problem`."""
    meaning = problem.meaning
    fields = [("content-type", JSON), ("x-dispatch-reason", meaning.reason), *problem.fields]
    if meaning.retry is not None:
        fields.append(("x-should-retry", "true" if meaning.retry else "false"))
    if meaning.status == HTTPStatus.UNAUTHORIZED:
        fields.append(("www-authenticate", "Bearer"))
    if meaning.capacity and problem.retry_after_ms is not None:
        fields += retry_after(problem.retry_after_ms)
    error = {
        "message": problem.message,
        "type": problem.type or _type_of(meaning.status),
        "param": problem.param,
        "code": problem.code,
    }
    return Answer(meaning.status, fields, msgspec.json.encode({"error": error}))


def retry_after(wait_ms: int) -> Fields:
    """Return the header fields that say when to come back: whole seconds, 1 to 30, and milliseconds."""
    wait_ms = min(max(wait_ms, RETRY_AFTER_MIN_MS), RETRY_AFTER_MAX_MS)
    return [("retry-after", str(-(-wait_ms // 1000))), ("retry-after-ms", str(wait_ms))]


def answer_of_reply(reply: Reply) -> Answer:
    """Make the answer of a terminal reply: the endpoint's own, or the error that its ending means."""
    answer = _endpoint_answer(reply) or answer_of_problem(_problem_of_ending(reply))
    answer.fields.append(("x-dispatch-pool", reply.pool_id))
    for name, value in (("queue", reply.queue_ms), ("execution", reply.execution_ms)):
        if value is not None:
            answer.fields.append((f"x-dispatch-{name}-ms", str(value)))
    if reply.head.gateway_id is not None:
        answer.fields.append(("x-dispatch-gateway", reply.head.gateway_id))
    if reply.attempt > 1:
        answer.fields.append(("x-dispatch-attempt", str(reply.attempt)))
    if reply.replayed:
        answer.fields.append(("x-dispatch-replayed", "true"))
    return answer


def _endpoint_answer(reply: Reply) -> Answer | None:
    """Return the endpoint's answer if it gave one that may travel."""
    status = reply.status
    fields = list(reply.head.headers)
    if reply.succeeded:
        return Answer(status or HTTPStatus.OK, fields, reply.body)
    if reply.ending != "failed" or not reply.body or status is None or status in _OWN_KEY_REFUSED:
        return None
    meaning = _meaning_of_failure(reply)
    fields += [("x-dispatch-reason", meaning.reason), ("x-should-retry", "true" if meaning.retry else "false")]
    return Answer(meaning.status, fields, reply.body)


def _problem_of_ending(reply: Reply) -> Problem:
    error, ending = reply.error, reply.ending
    message = error.message if error is not None and error.message else f"the request ended {ending}"
    if ending == "expired" and reply.queue_ms is not None and reply.execution_ms is None and not reply.tries:
        return _waited_in_vain(reply)
    meaning = _meaning_of_failure(reply) if ending == "failed" else ENDINGS.get(ending, ENDINGS["failed"])
    return Problem(
        meaning=meaning,
        message=message,
        param=error.param if error is not None else None,
        code=error.type if error is not None else ending,
    )


def _waited_in_vain(reply: Reply) -> Problem:
    error = reply.error
    bounded = error is not None and error.type == MAX_WAIT_EXCEEDED
    why = error.message if error is not None and error.message else "the deadline passed while the call was queued"
    queued = f"{reply.queue_ms} ms in pool {reply.pool_id!r}"
    return Problem(
        meaning=MAX_WAIT if bounded else EXPIRED_IN_QUEUE,
        message=f"{why}: {queued}. Nothing was done: try again later, or allow more time",
        code=MAX_WAIT_EXCEEDED if bounded else "deadline_exceeded",
    )


def _meaning_of_failure(reply: Reply) -> Meaning:
    """Say what `failed` is: an error status of the endpoint stays; anything else becomes 502 or 504."""
    status, error = reply.status, reply.error
    kind = error.type if error is not None else ""
    if kind in ("endpoint_timeout", "deadline_exceeded"):
        return _ENDPOINT_SLOW
    if status is None or status < HTTPStatus.BAD_REQUEST or status in _OWN_KEY_REFUSED or status > 599:
        return ENDINGS["failed"]
    busy = kind == "endpoint_overloaded"  # nothing was done: another try is no second execution
    return Meaning(status, "ended-failed", retry=busy)


def _facts(refusal: errors.RequestRefused) -> Fields:
    """Return a refusal's facts as header fields, for programs."""
    named = (("pool", refusal.pool), ("depth", refusal.depth), ("limit", refusal.limit))
    return [(f"x-dispatch-{name}", str(value)) for name, value in named if value is not None and value != ""]


def _meaning_of(error: errors.DispatchError) -> Meaning:
    return next(meaning for kind, meaning in EXCEPTIONS if isinstance(error, kind))


def _type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
