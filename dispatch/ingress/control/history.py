"""What has ended, asked of the history. A key of certain pools sees what belongs to these."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dispatch.contract.answers import Answer
from dispatch.errors import HistoryOff, HistoryUnavailable, RequestUnknown
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import ENDINGS, LIMITS
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import (
    Control,
    Here,
    Observer,
    allowed_pools,
    allows_all_pools,
    require_all_pools,
    require_pool,
)
from dispatch.ingress.control.answering import JSON_FIELDS, ControlRoute, as_response
from dispatch.ingress.control.documenting import errors
from dispatch.ingress.control.paging import EVENT_ID, NAME
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import (
    ErrorCount,
    Filter,
    GatewayRows,
    RequestList,
    RequestStory,
    Series,
    Shares,
    Stats,
    TokenCount,
    Verification,
)
from dispatch.telemetry.history.verify import verification

router = APIRouter(prefix="/history", tags=["history"], route_class=ControlRoute)

T = TypeVar("T")

_OFF = "this gateway has no history to ask: DISPATCH_HISTORY_URL is not set"
_HOUR_MS = 3_600_000
_MS_MAX = 10**14
_ANSWER_S = 12.0
_ENDING = f"^({'|'.join(ENDINGS)})?$"
_NAME_OR_NONE = NAME.replace("{1,128}", "{0,128}")

Id = Annotated[str, Path(pattern=NAME, description="the id of a request, or the one that its caller gave it")]
Moment = Annotated[int | None, Field(ge=0, le=_MS_MAX)]
Slower = Annotated[int | None, Field(ge=0, le=_MS_MAX)]


class Span(BaseModel):
    """Which time is meant, in ms of the server's clock."""

    model_config = ConfigDict(extra="forbid")

    since_ms: Moment = Field(None, description="what ended from then on; none = the last hour")
    until_ms: Moment = Field(None, description="what ended before; none = now")


class Facts(Span):
    """Which requests are meant: those of all facts that are given."""

    pool: str = Field("", pattern=_NAME_OR_NONE)
    model: str = Field("", max_length=512)
    ending: str = Field("", pattern=_ENDING)
    gateway_id: str = Field("", pattern=_NAME_OR_NONE)
    endpoint_id: str = Field("", pattern=_NAME_OR_NONE)
    producer_id: str = Field("", pattern=_NAME_OR_NONE)
    error_type: str = Field("", max_length=200)


class Listed(Facts):
    """Which requests are wanted, and how many. Without times: all that are kept."""

    since_ms: Moment = Field(None, description="what ended from then on")
    until_ms: Moment = Field(None, description="what ended before")
    request_id: str = Field("", max_length=256, description="its id, or the one that its caller gave it")
    failed: bool = Field(False, description="only what ended otherwise than succeeded or cancelled")
    wait_over_ms: Slower = Field(None, description="only what waited longer")
    run_over_ms: Slower = Field(None, description="only what ran longer")
    total_over_ms: Slower = Field(None, description="only what took longer in all")
    limit: int = Field(100, ge=1, le=1_000, description="rows of one answer")
    cursor: str = Field("", max_length=300, description='the cursor of the answer before; "" = from the start')


class Stepped(Facts):
    """Which requests are meant, and the length of a step."""

    step_s: int = Field(60, ge=1, le=31_536_000, description="seconds; at most 1,000 steps of the time")


class SharesOf(Span):
    """Which time is meant, and the length of a step."""

    step_s: int = Field(60, ge=1, le=31_536_000, description="seconds; at most 1,000 steps of the time")


class Part(BaseModel):
    """Which part of the endings stream is looked at, the newest first."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(200, ge=1, le=LIMITS["snapshot_page_max"], description="records of one answer")
    cursor: str = Field("", pattern=rf"^({EVENT_ID[1:-1]})?$", description='where to go on; "" = from the newest')


@router.get("/requests", response_model=RequestList, responses=errors(404))
async def list_history(principal: Observer, control: Here, wanted: Annotated[Listed, Query()]) -> Response:
    """List requests that have ended, the newest first."""
    history = _history(control)
    facts = wanted.model_dump(exclude={"limit", "cursor", "pool"})
    meant = Filter(**facts, pool_id=wanted.pool, pools=_pools(principal, wanted.pool))
    return _told(await _ask(control, partial(history.requests, meant, limit=wanted.limit, cursor=wanted.cursor)))


@router.get("/requests/{request_id}", response_model=RequestStory, responses=errors(404))
async def read_history(principal: Observer, control: Here, request_id: Id) -> Response:
    """Tell of one request all that is known: how it ended, each of its attempts, and when its reply was taken."""
    history = _history(control)
    found = await _ask(control, partial(history.request, request_id, pools=_pools(principal, "")))
    if found is None:
        raise RequestUnknown(f"the history of group {control.group.name} has no request {request_id}")
    return _told(found)


@router.get("/stats", response_model=Stats, responses=errors(404))
async def read_stats(principal: Observer, control: Here, wanted: Annotated[Facts, Query()]) -> Response:
    """Count what ended, over all pools and for each; throughput, and percentiles of waiting, running and delivery."""
    return _told(await _ask(control, partial(_history(control).stats, _meant(principal, wanted))))


@router.get("/series", response_model=Series, responses=errors(404))
async def read_series(principal: Observer, control: Here, wanted: Annotated[Stepped, Query()]) -> Response:
    """Count what ended step by step, for each pool."""
    return _told(await _ask(control, partial(_history(control).series, _meant(principal, wanted), wanted.step_s)))


@router.get("/errors", response_model=list[ErrorCount], responses=errors(404))
async def read_errors(principal: Observer, control: Here, wanted: Annotated[Facts, Query()]) -> Response:
    """Count failures by ending and error type, the most frequent first."""
    return _told(await _ask(control, partial(_history(control).errors, _meant(principal, wanted))))


@router.get("/tokens", response_model=list[TokenCount], responses=errors(404))
async def read_tokens(principal: Observer, control: Here, wanted: Annotated[Facts, Query()]) -> Response:
    """Sum tokens by pool and model, as far as endpoints report them."""
    return _told(await _ask(control, partial(_history(control).tokens, _meant(principal, wanted))))


@router.get("/shares", response_model=Shares, responses=errors(404))
async def read_shares(principal: Observer, control: Here, wanted: Annotated[SharesOf, Query()]) -> Response:
    """Hold what pools were served against their weights of now, and say how fair that was. Needs a key of all pools."""
    require_all_pools(principal, "service shares")
    history = _history(control)
    since_ms, until_ms = _times(wanted)
    meant = Filter(since_ms=since_ms, until_ms=until_ms)
    weights = await _weights(control)
    return _told(await _ask(control, partial(history.shares, meant, wanted.step_s, weights)))


@router.get("/gateways", response_model=list[GatewayRows], responses=errors(404))
async def read_gateways(principal: Observer, control: Here) -> Response:
    """Say for each gateway when the last row of its requests was written. Needs a key of all pools."""
    require_all_pools(principal, "the history of gateways")
    return _told(await _ask(control, _history(control).gateways))


@router.get("/verify", response_model=Verification, responses=errors(404))
async def verify_history(principal: Observer, control: Here, part: Annotated[Part, Query()]) -> Response:
    """Hold counters, endings stream and rows against each other, a part of the stream at a time.

    Counters and numbers of rows are in the first part's answer alone. Needs a key of all pools.
    """
    require_all_pools(principal, "the history's check")
    history = _history(control)
    page = await control.group.run(fabric_snapshot("endings", cursor=part.cursor, limit=part.limit))
    pools = [] if part.cursor else await _all_pools(control)
    return _told(await _ask(control, partial(verification, history, page, pools, first=not part.cursor)))


def _history(control: Control) -> History:
    if control.history is None:
        raise HistoryOff(_OFF)
    return control.history


async def _ask(control: Control, question: Callable[[], T]) -> T:
    """Ask in a thread. The history bounds the question; one that hangs all the same is not waited for."""
    try:
        with anyio.fail_after(_ANSWER_S):
            return await anyio.to_thread.run_sync(question, limiter=control.questions, abandon_on_cancel=True)
    except TimeoutError:
        raise HistoryUnavailable(f"the history has not answered for {_ANSWER_S:g} s") from None


def _told(answer: Any) -> Response:
    # Written here: a long list would be copied several times on its way through the framework's model.
    return as_response(Answer(200, list(JSON_FIELDS), msgspec.json.encode(answer)))


def _times(wanted: Span) -> tuple[int, int]:
    until_ms = time.time_ns() // 1_000_000 if wanted.until_ms is None else wanted.until_ms
    return (max(0, until_ms - _HOUR_MS) if wanted.since_ms is None else wanted.since_ms), until_ms


def _meant(principal: Principal, wanted: Facts) -> Filter:
    since_ms, until_ms = _times(wanted)
    return Filter(
        since_ms=since_ms, until_ms=until_ms, pools=_pools(principal, wanted.pool), pool_id=wanted.pool,
        model=wanted.model, ending=wanted.ending, gateway_id=wanted.gateway_id, endpoint_id=wanted.endpoint_id,
        producer_id=wanted.producer_id, error_type=wanted.error_type,
    )  # fmt: skip


def _pools(principal: Principal, pool: str) -> tuple[str, ...] | None:
    """Which pools the key may see, None = all.

    Raises:
        NotAllowed: it may not see the one that is asked for.
    """
    if pool:
        require_pool(principal, pool)
    return None if allows_all_pools(principal) else tuple(allowed_pools(principal))


async def _weights(control: Control) -> dict[str, int]:
    return {row["pool_id"]: row["quantum"] for row in await _all_pools(control)}


async def _all_pools(control: Control) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cursor = ""
    while True:
        call = fabric_snapshot("pools", cursor=cursor, limit=LIMITS["snapshot_page_max"])
        page = await control.group.run(call)
        rows += page["rows"]
        cursor = page["cursor"]
        if not cursor:
            return rows
