"""A scripted server that speaks just enough RESP to let a client connect, for errors a real one gives rarely."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from typing import Self

_HELLO = b"%3\r\n+server\r\n+valkey\r\n+version\r\n+9.1.0\r\n+proto\r\n:3\r\n"
_INFO = b"role:master\r\n"
_HANDSHAKE = {
    b"HELLO": _HELLO,
    b"CLIENT": b"+OK\r\n",
    b"SELECT": b"+OK\r\n",
    b"AUTH": b"+OK\r\n",
    b"PING": b"+PONG\r\n",
    b"INFO": b"$%d\r\n%s\r\n" % (len(_INFO), _INFO),
}


class FakeServer:
    """Answers every command but those of a handshake with `answer` (raw RESP), or hangs up when that is empty.

    `seen` are those commands, by their first word. Port of loopback, own threads.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.seen: list[bytes] = []
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _handler(self), bind_and_activate=True)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(fake: FakeServer) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                while words := self._read_command():
                    answer = _HANDSHAKE.get(words[0].upper())
                    if answer is None:
                        fake.seen.append(words[0].upper())
                        answer = fake.answer
                    if not answer:
                        return
                    self.wfile.write(answer)

        def _read_command(self) -> list[bytes]:
            line = self.rfile.readline().strip()
            if not line:
                return []
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline().strip()[1:])
                words.append(self.rfile.read(size + 2)[:-2])
            return words

    return Handler
