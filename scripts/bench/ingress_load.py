"""The load: so many connections over HTTP/1.1, one request at a time on each.

asyncio's protocols with httptools' parser, and nothing on top: a client of convenience (aiohttp) takes longer for a
request than the backend it asks, and would be what is measured.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from urllib.parse import urlsplit

import httptools

from scripts.bench.ingress_run import Outcome, Run, Tally, obey, request_body, wrong_answer


class Connection(asyncio.Protocol):
    """One kept connection. `over` is done when it has asked for the last time and has its answer."""

    def __init__(self, run: Run, tally: Tally, request: bytes, over: asyncio.Future[None]) -> None:
        self.over = over
        self._run = run
        self._tally = tally
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._asked_at = 0.0
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is TCP
        """Ask for the first time."""
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"sent no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell it, unless we closed it."""
        if not self.over.done():
            self._fail(f"closed a connection with a request on it ({exc or 'no error'})")

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the answer."""
        if not self._pieces:
            self._first_at = time.perf_counter()
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Check the answer, and ask again unless the run is over."""
        now = time.perf_counter()
        if wrong := wrong_answer(self._run, self._parser.get_status_code(), b"".join(self._pieces)):
            self._fail(wrong)
        elif self._tally.answered(now - self._asked_at, self._first_at - self._asked_at):
            self._ask()
        else:
            self._end()

    def _ask(self) -> None:
        assert self._transport is not None  # noqa: S101 - called when there is one
        self._pieces.clear()
        self._asked_at = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, problem: str) -> None:
        self._tally.failed(problem)
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def perform(run: Run) -> Outcome:
    """Make one run.

    Raises:
        OSError: no connection.
    """
    loop = asyncio.get_running_loop()
    address = urlsplit(run.url)
    body = request_body(stream=run.stream)
    request = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    tally = Tally(run)
    gc.collect()
    gc.disable()  # a collection would be told as the target's slowest answer
    try:
        connections = []
        for _ in range(run.connections):
            made = Connection(run, tally, request, loop.create_future())
            connections.append(made)
            await loop.create_connection(functools.partial(_same, made), address.hostname or "", address.port or 80)
        await asyncio.gather(*(each.over for each in connections))
    finally:
        gc.enable()
    return tally.outcome()


def _same(connection: Connection) -> Connection:
    return connection


if __name__ == "__main__":
    obey(perform)
