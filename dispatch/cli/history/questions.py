"""The commands that ask: list, show, stats, series, errors, tokens, shares, gateways and verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from dispatch.cli.history import telling
from dispatch.cli.history.asking import Where, now_ms, read_time, source
from dispatch.cli.history.options import (
    Ending,
    Endpoint,
    ErrorType,
    Gateway,
    HistoryUrl,
    Model,
    PasswordEnv,
    Pool,
    Producer,
    Since,
    Step,
    Until,
)
from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    REFUSED,
    Group,
    Json,
    Url,
    complain,
    one_line,
    trouble_as_exit_code,
    write_json,
)
from dispatch.errors import RequestUnknown
from dispatch.telemetry.history.records import Filter, Verification

_PAGE = 500
T = TypeVar("T")


app = typer.Typer()


@app.command("list")
def list_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    since: Since = "",
    until: Until = "",
    pool: Pool = "",
    model: Model = "",
    ending: Ending = "",
    gateway_id: Gateway = "",
    endpoint: Endpoint = "",
    producer: Producer = "",
    error_type: ErrorType = "",
    request_id: Annotated[
        str, typer.Option("--id", help="Only this request, by its id or the one its caller gave.", show_default=False)
    ] = "",
    failed: Annotated[
        bool, typer.Option("--failed", help="Only what ended otherwise than succeeded or cancelled.")
    ] = False,
    wait_over: Annotated[int | None, typer.Option(metavar="MS", help="Only what waited longer.")] = None,
    run_over: Annotated[int | None, typer.Option(metavar="MS", help="Only what ran longer.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 50,
    json: Json = False,
) -> None:
    r"""List requests that have ended, the newest first.

    \b
    Example:
      dispatch history list --pool backfill --failed --since 2h
      dispatch history list --wait-over 5000 --gateway http://127.0.0.1:8080
    """
    with source(Where(history, password_env, url, group)) as asked:
        since_ms, until_ms = _times(since, until)
        wanted = Filter(
            since_ms=since_ms, until_ms=until_ms, pool_id=pool, model=model, ending=ending, gateway_id=gateway_id,
            endpoint_id=endpoint, producer_id=producer, error_type=error_type, request_id=request_id, failed=failed,
            wait_over_ms=wait_over, run_over_ms=run_over,
        )  # fmt: skip
        rows: list[Any] = []
        cursor = ""
        while True:
            page = asked.requests(wanted, limit=min(limit - len(rows), _PAGE), cursor=cursor)
            rows += page.rows
            cursor = page.cursor
            if not cursor or len(rows) >= limit:
                break
    if cursor:
        complain(f"there are more than these {len(rows)} (--limit)")
    if json:
        write_json({"group": group, "requests": rows, "truncated": cursor != ""})
        return
    telling.requests(rows)


@app.command("show")
def show_command(  # noqa: PLR0913, PLR0917 - as above
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="A request, by its id or the one its caller gave.", show_default=False
        ),
    ],
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    json: Json = False,
) -> None:
    r"""Tell of one request that has ended: how, each of its attempts, and when its reply was taken.

    \b
    Example:
      dispatch history show 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
    """
    with source(Where(history, password_env, url, group)) as asked:
        story = asked.request(request_id)
        if story is None:
            raise RequestUnknown(f"the history of group {group} has no request {one_line(request_id)}")
    _tell(telling.story, story, group if json else None)


@app.command("stats")
def stats_command(  # noqa: PLR0913, PLR0917 - as above
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    since: Since = "1h",
    until: Until = "",
    pool: Pool = "",
    model: Model = "",
    gateway_id: Gateway = "",
    endpoint: Endpoint = "",
    producer: Producer = "",
    json: Json = False,
) -> None:
    r"""Count what ended, with throughput and percentiles of waiting, running, the whole and delivery, for each pool.

    \b
    Example:
      dispatch history stats --since 24h
    """
    with source(Where(history, password_env, url, group)) as asked:
        found = asked.stats(
            _until_now(
                since,
                until,
                Filter(pool_id=pool, model=model, gateway_id=gateway_id, endpoint_id=endpoint, producer_id=producer),
            )
        )
    _tell(telling.stats, found, group if json else None)


@app.command("series")
def series_command(  # noqa: PLR0913, PLR0917 - as above
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    since: Since = "1h",
    until: Until = "",
    step: Step = 60,
    pool: Pool = "",
    model: Model = "",
    json: Json = False,
) -> None:
    r"""Count what ended step by step, for each pool.

    \b
    Example:
      dispatch history series --since 6h --step 300 --pool interactive
    """
    with source(Where(history, password_env, url, group)) as asked:
        found = asked.series(_until_now(since, until, Filter(pool_id=pool, model=model)), step)
    if found.truncated:
        complain("there is more than this; ask for less time or one pool")
    _tell(telling.series, found, group if json else None)


@app.command("errors")
def errors_command(  # noqa: PLR0913, PLR0917 - as above
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    since: Since = "1h",
    until: Until = "",
    pool: Pool = "",
    endpoint: Endpoint = "",
    json: Json = False,
) -> None:
    r"""Count failures by ending and error type, the most frequent first.

    \b
    Example:
      dispatch history errors --since 24h
    """
    with source(Where(history, password_env, url, group)) as asked:
        found = asked.errors(_until_now(since, until, Filter(pool_id=pool, endpoint_id=endpoint)))
    _tell(telling.errors, found, group if json else None, named="errors")


@app.command("tokens")
def tokens_command(  # noqa: PLR0913, PLR0917 - as above
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    since: Since = "24h",
    until: Until = "",
    pool: Pool = "",
    model: Model = "",
    json: Json = False,
) -> None:
    r"""Sum tokens by pool and model, as far as endpoints report them.

    \b
    Example:
      dispatch history tokens --since 7d
    """
    with source(Where(history, password_env, url, group)) as asked:
        found = asked.tokens(_until_now(since, until, Filter(pool_id=pool, model=model)))
    _tell(telling.tokens, found, group if json else None, named="tokens")


@app.command("shares")
def shares_command(  # noqa: PLR0913, PLR0917 - as above
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    since: Since = "1h",
    until: Until = "",
    step: Step = 60,
    json: Json = False,
) -> None:
    r"""Hold what each pool was served (in cost) against its weight, and say how fair that was.

    Weights are those of now. A pool counts for fairness while work of it waited all along; Jain's index is 1 where all
    such pools got their share. A cap, a pause or a slow endpoint keeps a pool below its share, too.

    \b
    Example:
      dispatch history shares --since 2h --step 300
    """
    with source(Where(history, password_env, url, group)) as asked:
        found = asked.shares(_until_now(since, until, Filter()), step)
    _tell(telling.shares, found, group if json else None)


@app.command("gateways")
def gateways_command(
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    json: Json = False,
) -> None:
    r"""Say for each gateway when the last row of its requests was written.

    \b
    Example:
      dispatch history gateways
    """
    with source(Where(history, password_env, url, group)) as asked:
        found = asked.gateways()
    _tell(telling.gateways, found, group if json else None, named="gateways")


@app.command("verify")
def verify_command(
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    json: Json = False,
) -> None:
    r"""Hold the group's counters, its stream of endings and the history's rows against each other.

    Every record that the stream still keeps (the last 100,000) is looked up; what ended less than 10 s ago may be on
    its way. Counters and rows differ where rows have become too old, or the group is older than its history.

    Exit code: 0 nothing is missing; 1 rows are missing; 2 no answer.

    \b
    Example:
      dispatch history verify
    """
    with source(Where(history, password_env, url, group)) as asked:
        parts: list[Verification] = []
        while not parts or parts[-1].cursor:
            parts.append(asked.verify(parts[-1].cursor if parts else ""))
    whole = telling.Whole.of(parts)
    if json:
        write_json({"group": group, **msgspec.to_builtins(whole)})
    else:
        telling.verification(whole)
    if whole.missing:
        raise typer.Exit(REFUSED)


def _times(since: str, until: str) -> tuple[int | None, int | None]:
    with trouble_as_exit_code():
        now = now_ms()
        return read_time("--since", since, now), read_time("--until", until, now)


def _until_now(since: str, until: str, wanted: Filter) -> Filter:
    """Return `wanted` of the time that these options say; without an end, what ended until now."""
    since_ms, until_ms = _times(since, until)
    return replace(wanted, since_ms=since_ms, until_ms=until_ms or now_ms())


def _tell(shown: Callable[[T], None], found: T, group: str | None, named: str = "") -> None:
    """Tell an answer: as a JSON document of `group` (its members, or one that is `named`), without one by `shown`."""
    if group is None:
        shown(found)
    else:
        write_json({"group": group, **({named: found} if named else msgspec.to_builtins(found))})
