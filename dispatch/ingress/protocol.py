"""The server's HTTP protocol, with two differences: the form of its own errors, and offers to upgrade are ignored.

Some clients (Java's, by default) offer HTTP/2 with the first request on a plain connection. A server may ignore that
(RFC 9110 section 7.8), but this parser ends the message at the offer and drops its body.
"""

from __future__ import annotations

import uuid
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatch.ingress.answers import answer_of_problem, rejected

_OFFER = frozenset({b"upgrade", b"http2-settings"})


class HttpProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`. No WebSockets."""

    def data_received(self, data: bytes) -> None:
        """Take bytes off the connection."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("the bytes received are no HTTP request")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser gave up on with an OpenAI error; the connection ends."""
        answer = answer_of_problem(rejected(HTTPStatus.BAD_REQUEST, "invalid_http", msg))
        fields = [*answer.fields, ("x-request-id", uuid.uuid4().hex), ("content-length", str(len(answer.body)))]
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in fields), "connection: close"]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + answer.body)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Hold a request with an offer back: it is parsed again without it."""
        return True

    def _decline(self, rest: bytes) -> None:
        """Parse the request again without its offer; `rest` is what followed its head."""
        method = self.scope["method"].encode("ascii")
        if method == b"CONNECT":  # asks for a tunnel, not for an upgrade
            self.send_400_response("this server is no proxy")
            return
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token for token in value.split(b",") if token.strip().lower() not in _OFFER]
                lines.append(b"connection:" + b",".join(tokens))
            elif name not in _OFFER:
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))
