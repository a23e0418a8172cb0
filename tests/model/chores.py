"""Which work a group has for gateways beside their runs, and when each is due. What it comes to is in `watching.py`."""

from __future__ import annotations

from tests.model.records import Endpoint, Group


def set_due(group: Group, kind: str, endpoint: Endpoint, due_ms: int) -> None:
    """Have `kind` (`probe` or `sample`) done for the endpoint."""
    group.chores[f"{kind}:{endpoint.name}"] = due_ms


def clear(group: Group, kind: str, endpoint: Endpoint) -> None:
    group.chores.pop(f"{kind}:{endpoint.name}", None)


def due_in(group: Group) -> int | None:
    """Return how long no chore is due, ms; None if there is none at all."""
    due = min(group.chores.values(), default=None)
    return None if due is None else max(0, due - group.now)
