"""The small protocol through which running code says what it does, so that nothing but telemetry knows who counts it.

Every method is called from the event loop on the hot path: it counts and returns, never waits and never raises.
"""

from __future__ import annotations

from dispatch.contract.envelope import RequestEnvelope
from dispatch.contract.reply import ReplyHead
from dispatch.fabric.records import Lease, Settlement


class Observer:
    """Takes no notice of anything. Whoever counts overrides what it counts."""

    def called(self, functions: tuple[str, ...], seconds: float, error: str) -> None:
        """Note a round trip to Valkey that carried these functions. `error`: the exception's class name, "" = none."""

    def claimed(self, wanted: int, got: int) -> None:
        """Note the answer to a claim of `wanted` (> 0) requests."""

    def ran(self, envelope: RequestEnvelope, head: ReplyHead, seconds: float, first_chunk_s: float | None) -> None:
        """Note that an attempt at an endpoint is over. `first_chunk_s`: of a stream, None where no chunk came."""

    def settled(self, lease: Lease, item: Settlement, word: str, server_ms: int) -> None:
        """Note the server's word for a result, and its clock in that step (= when the request ended, if it did)."""

    def lease_lost(self, lease: Lease, reason: str) -> None:
        """Note a lease that was taken from this gateway while it held it (`lost`), or that it gave up (`fenced`)."""

    def woke(self, source: str) -> None:
        """Note a wake token (`work`, `own`) or that a wait was broken (`reconnect`)."""

    def streamed(self, chunks: int, size_bytes: int) -> None:
        """Note chunks of streams that the fabric has taken."""

    def answered(self, operation: str, status: int, reason: str) -> None:
        """Note an HTTP answer; `reason`: the word of `x-dispatch-reason`, "" where there is none."""


NOBODY = Observer()
"""Counts nothing."""
