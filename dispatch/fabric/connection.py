"""The small protocol every Valkey client is used through. Nothing above this package knows which client it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from dispatch.errors import DispatchError
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.streams import Claimed, Reading, StreamEntry

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0

REQUEST_TIMEOUT_S = 5.0
"""How long a call may take before Valkey counts as unavailable: enough for a 16 MiB body on a busy server."""

WAIT_MIN_S, WAIT_MAX_S = 0.05, 60.0
"""Bounds of one blocking wait. The server takes 0 for "for ever", and a forgotten wait has to end by itself."""

WAIT_MARGIN_S = 2.0
"""How much later than asked a waiting server may answer before it counts as unavailable."""

SUBSCRIBED_MAX = 1_000
"""Messages that a subscriber keeps for its task; of more, the oldest are lost."""


def bounded_wait(seconds: float) -> float:
    """Return `seconds` within the bounds of one blocking wait (not a number counts as the least)."""
    return min(max(WAIT_MIN_S, seconds), WAIT_MAX_S)


class Waiter(Protocol):
    """A connection of its own for one blocking wait on wake tokens."""

    async def wait(self, key: str, seconds: float) -> bool:
        """Wait for a token on `key`, at most about `seconds` (never less than 0.05, never for ever).

        Returns whether a token came. Tokens may be lost, so a False means "look again", not "nothing happened".
        When cancelled or failed the connection is thrown away (an abandoned pop would swallow the next token) and the
        next call opens a new one.

        Raises:
            FabricUnavailable: no connection.
        """
        ...

    async def wait_then_read(self, key: str, seconds: float, list_key: str, count: int) -> list[bytes]:
        """Wait as `wait` does, then read the first `count` elements of a list of the same group, in one round trip.

        Elements come also when no token did. Raises as `wait`; what was read is lost then, and can be read again.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection; a wait under way ends with `FabricUnavailable` or False."""
        ...


class Subscriber(Protocol):
    """A connection of its own that hears one channel, for one task."""

    async def next(self, seconds: float) -> bytes | None:
        """Return the next message, or None when none came for about `seconds`. The first call subscribes.

        Messages may be lost, and are while nobody listens: who needs all looks again. Safe to cancel: what comes
        meanwhile is kept, as far as `SUBSCRIBED_MAX`.

        Raises:
            FabricUnavailable: there is no connection; the next call opens a new one.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection. Repeatable."""
        ...


class Connection(Protocol):
    """One logical connection to a fabric's Valkey (standalone or cluster), safe for many tasks at once.

    Every method raises `FabricUnavailable` when the server did not answer: for a mutating call it is then unknown
    whether it was done. Calls are never repeated by the connection itself.
    """

    async def run(self, group: str, call: FunctionCall[T]) -> T:
        """Run one function for `group` and decode its answer. Raises the errors `functions.py` names."""
        ...

    async def run_many(self, group: str, calls: Sequence[FunctionCall[T]]) -> list[T | DispatchError]:
        """Run calls in one round trip, in order, not atomically; a call's own error stands at its place."""
        ...

    async def get(self, key: str) -> bytes | None:
        """Read a string."""
        ...

    async def put(self, key: str, value: bytes, *, ttl_ms: int) -> None:
        """Store a string with an expiry."""
        ...

    async def read_frames(self, key: str, count: int) -> list[bytes]:
        """Read (not remove) the first `count` elements of a list."""
        ...

    async def run_then_read(self, group: str, call: FunctionCall[T], key: str, count: int) -> tuple[T, list[bytes]]:
        """Run one function, then read the first `count` elements of a list of `group`, in one round trip.

        Raises the errors of `run`; what was read is lost then, and can be read again.
        """
        ...

    async def keep_alive(
        self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int
    ) -> None:
        """Write a producer's liveness marker and renew the expiry of its reply list, in one round trip."""
        ...

    async def push_token(self, key: str) -> None:
        """Hand a wake token on (a gateway that cannot use it gives it back)."""
        ...

    async def read_records(self, keys: Sequence[str], reading: Reading) -> list[StreamEntry]:
        """Read what no consumer of the group has read yet, without waiting; it is pending until acknowledged.

        Raises:
            FabricError: a stream or its consumer group is not there (`records_watch` makes them).
        """
        ...

    async def claim_records(self, key: str, reading: Reading, *, idle_ms: int, cursor: str = "0-0") -> Claimed:
        """Take over what other consumers have read and not acknowledged for `idle_ms`, from `cursor` on.

        Raises:
            FabricError: as of `read_records`.
        """
        ...

    async def ack_records(self, key: str, reader: str, entry_ids: Sequence[str]) -> None:
        """Acknowledge records: nobody gets them again. Repeatable."""
        ...

    async def primaries(self) -> list[str]:
        """Addresses of all primaries, for the admin tool and status pages."""
        ...

    def waiter(self) -> Waiter:
        """A waiter with a connection of its own to the same server."""
        ...

    def subscriber(self, channel: str) -> Subscriber:
        """A subscriber to `channel` with a connection of its own to the same server."""
        ...

    async def aclose(self) -> None:
        """Close everything. Repeatable."""
        ...
