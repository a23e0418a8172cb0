"""What recorders say of themselves, as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dispatch.telemetry.metrics import catalogue as c
from dispatch.telemetry.metrics.tallies import Reading
from dispatch.telemetry.recorder import RecorderStats


def read_recorders(stats: Sequence[RecorderStats]) -> Iterator[Reading]:
    """Return what recorders say, by sink. What is not known yet is missing."""
    yield c.SINK_UP, {(one.sink,): int(not one.away) for one in stats}
    yield c.RECORDED, {(one.sink,): one.records for one in stats}
    yield c.SPANS_DROPPED, {(one.sink,): one.dropped for one in stats}
    yield c.RECORDS_LOST, {(one.sink,): one.lost for one in stats}
    yield c.RECORDS_LAG, {(one.sink,): one.lag for one in stats if one.lag is not None}
    yield c.RECORDS_PENDING, {(one.sink,): one.pending for one in stats if one.pending is not None}
