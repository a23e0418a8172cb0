"""How a group is drawn in a terminal, and told in lines and as a document elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dispatch.cli.operating import moment, one_line
from dispatch.cli.signs import row as finding_row
from dispatch.cli.top.state import Screen
from dispatch.fabric.view import EndpointRow, FabricView, GatewayRow, PoolRow
from dispatch.studio.looking import is_live
from dispatch.studio.verdict import attention
from dispatch.studio.words import FLOWING, NOT_KNOWN, REASONS, UNKNOWN, count, duration, percent, plural, rate

_KEYS = "q quit   s sort   j k select   p pause or resume the pool"
_ENDINGS, _ATTENTION, _SHORT = 8, 5, 3
_TONES = {"broken": "bold red", "hold": "yellow", "held": "yellow", "capped": "yellow", "person": "magenta",
          "work": "", "grey": "dim", "unknown": "dim", "note": "dim"}  # fmt: skip

POOL_HEADINGS = ("pool", "weight", "waiting", "oldest", "in flight", "share", "rate", "why")


def drawn(screen: Screen, height: int) -> RenderableType:
    """Draw the screen for a terminal of so many lines; what does not fit is said."""
    view = screen.view
    if view is None:
        return Text(screen.problem or f"Reading {screen.group}...")
    parts: list[RenderableType] = [Text(headline(view), style="bold"), *_attention(screen)]
    if screen.problem:
        parts.append(Text(f"{one_line(screen.problem)}; figures are as of {moment(view.server_ms)}", style="bold red"))
    room = max(_SHORT, height - 12 - _ENDINGS - len(view.gateways or ()) - len(view.endpoints or ()))
    parts += [_pools(screen, room), _endpoints(view, room), _gateways(view, room), _ended(view)]
    parts.append(_footer(screen))
    return Group(*parts)


def told(screen: Screen) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """Return the tables for a pipe: headings and rows, nothing cut."""
    view = screen.view
    if view is None:
        return []
    return [
        (POOL_HEADINGS, [pool_cells(screen, row) for row in screen.pools()]),
        (("endpoint", "breaker", "in flight", "engine queue", "ms per token", "address"),
         [_endpoint_cells(row) for row in view.endpoints or ()]),
        (("gateway", "state", "in flight", "heartbeat"), [_gateway_cells(view, row) for row in view.gateways or ()]),
    ]  # fmt: skip


def document(screen: Screen) -> dict[str, Any]:
    """Return everything for programs."""
    view = screen.view
    trends = screen.trend.pools if screen.trend else {}
    known: dict[str, Any] = {} if view is None else msgspec.to_builtins(view)
    return known | {
        "truncated": sorted(view.truncated) if view else [],
        "trend": {name: msgspec.to_builtins(each) for name, each in trends.items()},
        "findings": [finding_row(each) for each in screen.found],
    }


def headline(view: FabricView) -> str:
    """Return the totals in a line."""
    group = view.group
    if group is None:
        return f"{view.name}   totals {UNKNOWN}   {moment(view.server_ms)}"
    live = f"gateways {UNKNOWN}"
    if view.gateways is not None:
        live = plural(sum(is_live(view, row) for row in view.gateways), "gateway", "gateways")
    return (
        f"{view.name}   {count(group.pending)} waiting   {count(group.in_flight)} of "
        f"{count(group.total_concurrent_dispatch)} in flight   {count(group.delayed)} delayed   {count(group.dead)} "
        f"dead   {live}   generation {group.generation}   {moment(view.server_ms)}"
    )


def pool_cells(screen: Screen, row: PoolRow) -> tuple[str, ...]:
    """Return what is said of a pool."""
    trend, view = screen.trend_of(row), screen.view
    cap = "no cap" if row.max_concurrent is None else str(row.max_concurrent)
    waits = row.head_submitted_ms is not None and view is not None
    oldest = duration(max(1, view.server_ms - row.head_submitted_ms)) if waits and view and row.head_submitted_ms else (
        "none" if row.pending == 0 else UNKNOWN)  # fmt: skip
    share = "measuring" if trend is None else _shares(trend.share, trend.fair_share)
    launched = "measuring" if trend is None else rate(trend.launched_per_s)
    return (row.pool_id, count(row.quantum), _waiting(row), oldest, f"{count(row.in_flight)} of {cap}", share, launched,
            why(row))  # fmt: skip


def why(row: PoolRow) -> str:
    """Return what a pool waits for."""
    note = row.paused or row.draining
    if note:
        reason = f' "{one_line(note.reason)}"' if note.reason else ""
        return f"{'Paused' if row.paused else 'Draining'} by {one_line(note.by)}{reason}"
    if row.block_reason is None:
        return "" if row.pending == 0 else FLOWING.why
    return REASONS.get(row.block_reason, NOT_KNOWN).why


def _shares(had: float | None, fair: float | None) -> str:
    if had is None and fair is None:
        return "-"
    return f"{'-' if had is None else percent(had)} of {'-' if fair is None else percent(fair)}"


def _waiting(row: PoolRow) -> str:
    return count(row.pending) + (f" +{count(row.delayed)} delayed" if row.delayed else "")


def _tone(row: PoolRow) -> str:
    if row.paused or row.draining:
        return _TONES["person"]
    return _TONES[REASONS[row.block_reason].tone] if row.block_reason in REASONS else ""


def _attention(screen: Screen) -> list[RenderableType]:
    rows, more = attention(screen.found, _ATTENTION)
    if not rows:
        return [Text("Nothing needs attention.", style="dim")]
    view = screen.view
    lines: list[RenderableType] = []
    for each in rows:
        lasts = f" for {duration(max(1, view.server_ms - each.since_ms))}" if view and each.since_ms else ""
        lines.append(Text(f"{each.kind}: {one_line(each.sentence)}{lasts}", style=_TONES[each.kind]))
    return [*lines, Text(f"{more} more", style="dim")] if more else lines


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(*headings, title=title, title_justify="left", box=None, pad_edge=False, expand=False)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _pools(screen: Screen, room: int) -> Table:
    rows = screen.pools()
    at = min(screen.selected, max(0, len(rows) - 1))
    start = max(0, min(at - room // 2, len(rows) - room))
    shown = rows[start : start + room]
    cut = "" if len(shown) == len(rows) else f", {len(shown)} of {len(rows)} shown"
    table = _table(f"pools by {screen.sort}{cut}", POOL_HEADINGS)
    for number, row in enumerate(shown, start):
        style = f"{_tone(row)} reverse" if number == at else _tone(row)
        table.add_row(*(Text(cell) for cell in pool_cells(screen, row)), style=style.strip())
    return table


def _endpoint_cells(row: EndpointRow) -> tuple[str, ...]:
    cap = "no cap" if row.max_concurrent is None else str(row.max_concurrent)
    gate = row.gate
    queue = "-" if gate is None else f"{count(gate.waiting)} of {count(gate.target)}"
    tokens = "-" if gate is None else duration(gate.token_ms)
    word = row.breaker or UNKNOWN
    if row.block_reason == "endpoint_gated":
        word += ", holding"
    return row.endpoint_id, word, f"{count(row.in_flight)} of {cap}", queue, tokens, row.url or UNKNOWN


def _endpoints(view: FabricView, room: int) -> RenderableType:
    if view.endpoints is None:
        return Text(f"endpoints {UNKNOWN}", style="dim")
    table = _table("endpoints", ("endpoint", "breaker", "in flight", "engine queue", "ms per token", "address"))
    for row in view.endpoints[:room]:
        style = "" if row.breaker == "closed" else _TONES["broken"]
        table.add_row(*(Text(cell) for cell in _endpoint_cells(row)), style=style)
    return table


def _gateway_cells(view: FabricView, row: GatewayRow) -> tuple[str, ...]:
    state = ("draining" if row.draining else "live") if is_live(view, row) else "silent"
    beat = UNKNOWN if row.beat_ms is None else f"{duration(max(1, view.server_ms - row.beat_ms))} ago"
    return row.gateway_id, state, f"{count(row.in_flight)} of {count(row.slots)}", beat


def _gateways(view: FabricView, room: int) -> RenderableType:
    if view.gateways is None:
        return Text(f"gateways {UNKNOWN}", style="dim")
    table = _table("gateways", ("gateway", "state", "in flight", "heartbeat"))
    for row in view.gateways[:room]:
        style = "" if is_live(view, row) else _TONES["broken"]
        table.add_row(*(Text(cell) for cell in _gateway_cells(view, row)), style=style)
    return table


def _ended(view: FabricView) -> RenderableType:
    if view.endings is None:
        return Text(f"recent endings {UNKNOWN}", style="dim")
    table = _table("recent endings", ("ended", "request", "pool", "ending", "run", "error"))
    for row in view.endings[:_ENDINGS]:
        run = "-" if row.claimed_ms is None or row.ended_ms is None else duration(row.ended_ms - row.claimed_ms)
        cells = (moment(row.ended_ms), row.request_id or "-", row.pool or "-", row.ending or UNKNOWN, run,
                 one_line(row.error_type or ""))  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _footer(screen: Screen) -> Text:
    if screen.asking is not None:
        return Text(f"{screen.asking.action} pool {screen.asking.pool_id}? y = yes, any other key = no", style="bold")
    return Text(screen.said or _KEYS, style="dim")
