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
    """One kept connection. `greeted` is done when it has its first answer, `over` when it has its last one.

    The greeting makes sure that the target has taken the connection before the run begins: event loops accept one at a
    time, between everything else they do, and those that come late would be counted as slow.
    """

    def __init__(self, run: Run, tally: Tally, request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self._run = run
        self._tally = tally
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._asked_at = 0.0
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is TCP
        """Greet."""
        self._transport = transport
        address = urlsplit(self._run.url)
        transport.write(f"GET {self._run.greeting} HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())

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
        if not self.greeted.done():
            if (status := self._parser.get_status_code()) == 200:
                self.greeted.set_result(None)
            else:
                self._fail(f"answered {status} to {self._run.greeting}")
        elif wrong := wrong_answer(self._run, self._parser.get_status_code(), b"".join(self._pieces)):
            self._fail(wrong)
        elif self._tally.answered(now - self._asked_at, self._first_at - self._asked_at):
            self.ask()
        else:
            self._end()

    def ask(self) -> None:
        """Ask, and again with each answer until the run is over."""
        if self._transport is None or self.over.done():
            return
        self._pieces.clear()
        self._asked_at = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, problem: str) -> None:
        self._tally.failed(problem)
        self._end()

    def _end(self) -> None:
        for done in (self.greeted, self.over):
            if not done.done():
                done.set_result(None)
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
    connections = [Connection(run, tally, request, loop) for _ in range(run.connections)]
    for each in connections:
        await loop.create_connection(functools.partial(_same, each), address.hostname or "", address.port or 80)
    await asyncio.gather(*(each.greeted for each in connections))
    gc.collect()
    gc.disable()  # a collection would be told as the target's slowest answer
    try:
        tally.begin()
        for each in connections:
            each.ask()
        await asyncio.gather(*(each.over for each in connections))
    finally:
        gc.enable()
    return tally.outcome()


def _same(connection: Connection) -> Connection:
    return connection


if __name__ == "__main__":
    obey(perform)
