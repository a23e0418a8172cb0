"""`dispatch metrics`: what Prometheus and Grafana need to make use of a gateway's `/metrics`."""

from __future__ import annotations

import json
from importlib import resources
from typing import Annotated, Any

import typer
import yaml

from dispatch.telemetry import dashboards
from dispatch.telemetry.metrics.catalogue import CATALOGUE

_HELP = """Print the Grafana dashboard, the Prometheus alert rules, or the list of metrics.

\b
Example:
  dispatch metrics dashboard > fabric-dispatch.json
  dispatch metrics alerts > fabric-dispatch.yaml
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)

_AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command("dashboard")
def dashboard(
    as_json: Annotated[bool, typer.Option("--json", help="The same: a dashboard is JSON.")] = False,  # noqa: ARG001 - every command has it
) -> None:
    r"""Print the dashboard for Grafana, to be imported there (Dashboards, New, Import).

    \b
    Example:
      dispatch metrics dashboard > fabric-dispatch.json
    """
    typer.echo(_text("dashboard.json"), nl=False)


@app.command("alerts")
def alerts(as_json: _AsJson = False) -> None:
    r"""Print alert rules for Prometheus, whose configuration names the file under rule_files.

    \b
    Example:
      dispatch metrics alerts > fabric-dispatch.yaml
    """
    text = _text("alerts.yaml")
    typer.echo(json.dumps(yaml.safe_load(text), indent=2) if as_json else text.rstrip("\n"))


@app.command("list")
def list_metrics(as_json: _AsJson = False) -> None:
    r"""Print every metric, as Prometheus knows it, with its kind, unit, labels and what it says.

    \b
    Example:
      dispatch metrics list | grep lease
    """
    rows: list[dict[str, Any]] = [
        {
            "name": one.shown()[0].removesuffix("_bucket"),
            "kind": one.kind,
            "unit": one.unit,
            "labels": list(one.labels),
            "says": one.says,
        }
        for one in CATALOGUE.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        kind = ", ".join(filter(None, (row["kind"], row["unit"])))
        labels = f" by {', '.join(row['labels'])}" if row["labels"] else ""
        typer.echo(f"{row['name']} ({kind}){labels}\n    {row['says']}")


def _text(name: str) -> str:
    return resources.files(dashboards).joinpath(name).read_text("utf-8")
