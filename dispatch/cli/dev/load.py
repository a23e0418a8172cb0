"""The demo load of `dispatch dev --load`: a few requests a second, of every pool, small and larger ones."""

from __future__ import annotations

import random
from dataclasses import dataclass

import anyio
import structlog

from dispatch.errors import DispatchError
from dispatch.producer.client import DispatchClient

REQUESTS_PER_S = 3.0
_IN_FLIGHT_MAX = 24
_RETRY_S = 2.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    pool: str
    share: int
    tokens: tuple[int, int]
    prompt: str


_MIX = (
    _Work("interactive", 5, (16, 64), "Answer in one sentence: what is waiting in the queue?"),
    _Work("document-extract", 3, (64, 200), "Extract sender, date and total from this page. " * 20),
    _Work("backfill", 3, (32, 128), "Summarise this record for the archive. " * 8),
    _Work("default", 1, (16, 64), "Say hello."),
)


async def run_load(url: str, group: str, model: str) -> None:
    """Send requests until cancelled. What becomes of each is for the operator's views; a lost Valkey only pauses it."""
    chance = random.Random()  # noqa: S311 - a demo, no secret
    room = anyio.CapacityLimiter(_IN_FLIGHT_MAX)
    while True:
        try:
            async with DispatchClient(url, fabric_group=group) as client, anyio.create_task_group() as tasks:
                while True:
                    [work] = chance.choices(_MIX, [item.share for item in _MIX])
                    if room.available_tokens:
                        tasks.start_soon(_send, client, room, model, work, chance.randint(*work.tokens))
                    await anyio.sleep(chance.expovariate(REQUESTS_PER_S))
        except* DispatchError as problems:
            _log.warning("demo_load_interrupted", error=str(problems.exceptions[0]))
        await anyio.sleep(_RETRY_S)


async def _send(client: DispatchClient, room: anyio.CapacityLimiter, model: str, work: _Work, tokens: int) -> None:
    async with room:
        try:
            await client.complete(
                model=model,
                messages=[{"role": "user", "content": work.prompt}],
                pool=work.pool,
                metadata={"source": "demo-load"},
                max_tokens=tokens,
            )
        except DispatchError as error:
            _log.debug("demo_request_ended", pool=work.pool, error=str(error))
