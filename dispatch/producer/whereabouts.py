"""Where a request is, in times that do not depend on this machine's clock."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatch.producer.recovery import row_of


class Whereabouts(msgspec.Struct, frozen=True):
    """`running_ms`: how long the attempt under way has been running, None while the request waits.

    `queue_ms`: how long it waited before that, None as long as it waits, and where there is no queue.
    """

    running_ms: int | None = None
    queue_ms: int | None = None


def whereabouts_in(answer: Any) -> Whereabouts:
    """Read them from the answer to `state_of`. A request that is unknown waits for all that is known."""
    row = row_of(answer)
    if row is None or row["state"] != "leased":
        return Whereabouts()
    claimed_ms = row["claimed_ms"]
    return Whereabouts(
        running_ms=max(0, answer["server_ms"] - claimed_ms), queue_ms=max(0, claimed_ms - row["submitted_ms"])
    )
