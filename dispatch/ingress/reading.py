"""What is the same for a call that is waited for and one that is fetched later: whether it is taken, and reading it."""

from __future__ import annotations

import anyio.lowlevel

from dispatch.contract import Call, Operation, read_call
from dispatch.errors import RequestRefused
from dispatch.ingress.body import Held
from dispatch.ingress.state import Host, IngressSettings

_LARGE_BYTES = 256 * 1024


def check_serving(gateway: Host) -> None:
    """Refuse calls that another gateway should get.

    Raises:
        RequestRefused: this process is on its way out.
    """
    if gateway.draining:
        raise RequestRefused("draining", message="this gateway is shutting down; try another or again")
    if not gateway.running:
        raise RequestRefused("not_running", message="this gateway does not run")


def admission_ms(settings: IngressSettings, body_bytes: int) -> int:
    """Return how long Valkey may take to admit a call whose body has `body_bytes`."""
    return settings.admission_ms + body_bytes * 1000 // settings.upload_rate


async def read_in_turn(operation: Operation, body: bytes, held: Held) -> Call:
    """Read the call. Large ones take turns, each followed by a turn of the event loop: together they would stop it.

    Raises:
        InvalidRequest: see `read_call`.
    """
    if len(body) < _LARGE_BYTES:
        return read_call(operation, body)
    async with held.turn:
        call = read_call(operation, body)
        await anyio.lowlevel.checkpoint()
    return call
