"""Tables for a person at a terminal, aligned plain columns for everything else. Nothing is ever cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def output() -> Console:
    """Return the standard output as a console: no escape codes in pipes, in a dumb terminal, or with NO_COLOR set."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(highlight=False, markup=False, soft_wrap=True, color_system=None if plain else "auto")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` to stdout: a drawn table in a terminal that can show one, else columns two blanks apart."""
    console = output()
    if console.is_terminal and not console.is_dumb_terminal:
        table = Table(*headings)
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row)
        console.print(table, soft_wrap=False)
        return
    widths = [max(len(row[at]) for row in (headings, *rows)) for at in range(len(headings))]
    for row in (headings, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
