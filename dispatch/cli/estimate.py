"""`dispatch estimate`: how long a request that is submitted now would wait."""

from __future__ import annotations

from typing import Annotated

import typer

from dispatch.cli.operating import DEFAULT_GROUP, DEFAULT_URL, Group, Json, Url, fabric_group, write_json
from dispatch.fabric.functions import pool_estimate
from dispatch.fabric.records import Estimate

app = typer.Typer(add_completion=False)


@app.command()
def estimate(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    json: Json = False,
) -> None:
    r"""Say how long a request that is submitted to a pool now would wait, going by how fast the pool drains.

    Exit code: 0 also when that is not known (nothing was launched lately, or the pool is paused); 2 no answer.

    \b
    Example:
      dispatch estimate interactive
    """
    with fabric_group(url, group) as fabric:
        found: Estimate = fabric.run(pool_estimate(pool))
    if json:
        write_json({
            "group": group, "pool_id": pool, "pending": found.pending, "delayed": found.delayed,
            "running": found.in_flight, "per_second": found.per_second, "wait_ms": found.wait_ms,
            "reason": found.reason or None,
        })  # fmt: skip
        return
    rate = "not known how fast it drains" if found.per_second is None else f"{found.per_second:g} launched per second"
    stand = f"{found.pending} wait, {found.in_flight} run, {rate}"
    why = f"; {found.reason}" if found.reason else ""
    typer.echo(f"pool {pool}: {_wait_told(found.wait_ms)} ({stand}{why})")


def _wait_told(wait_ms: int | None) -> str:
    if wait_ms is None:
        return "how long a new request would wait is not known"
    return "a new request would start at once" if wait_ms == 0 else f"a new request would wait {wait_ms / 1000:.1f} s"
