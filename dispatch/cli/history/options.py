"""Options that the history commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from dispatch.fabric.schema import ENDINGS
from dispatch.telemetry.history.target import FORMS


def _one_of_the_endings(value: str) -> str:
    if value and value not in ENDINGS:
        raise typer.BadParameter(f"{value!r} is no ending; there are {', '.join(ENDINGS)}")
    return value


HistoryUrl = Annotated[str, typer.Option("--history", envvar="DISPATCH_HISTORY_URL", help=f"The history: {FORMS}.")]
PasswordEnv = Annotated[
    str,
    typer.Option(
        "--password-env", envvar="DISPATCH_HISTORY_PASSWORD_ENV", metavar="NAME",
        help="The environment variable that holds the history's password.",
    ),
]  # fmt: skip
Days = Annotated[
    int,
    typer.Option(
        "--ttl-days", envvar="DISPATCH_HISTORY_TTL_DAYS", min=1, max=36_500, help="How many days rows are kept."
    ),
]
Since = Annotated[str, typer.Option(help="What ended from then on: 15m, 2h or 7d ago, or 2026-12-01T10:00Z.")]
Until = Annotated[str, typer.Option(help="What ended before: as --since.", show_default="now")]
Pool = Annotated[str, typer.Option(help="Only those of this pool.", show_default=False)]
Model = Annotated[str, typer.Option(help="Only those for this model.", show_default=False)]
Ending = Annotated[
    str,
    typer.Option(
        help="Only those that ended so: succeeded, failed, expired, ...",
        show_default=False,
        callback=_one_of_the_endings,
    ),
]
Gateway = Annotated[str, typer.Option("--gateway-id", help="Only those that this gateway ran.", show_default=False)]
Endpoint = Annotated[str, typer.Option(help="Only those of this endpoint.", show_default=False)]
Producer = Annotated[str, typer.Option(help="Only those of this producer.", show_default=False)]
ErrorType = Annotated[str, typer.Option(help="Only those with this error type.", show_default=False)]
Step = Annotated[int, typer.Option("--step", min=1, metavar="SECONDS", help="Length of a step, in seconds.")]
