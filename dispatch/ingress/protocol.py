"""The server's HTTP protocol, with our form of answer to what is no HTTP at all."""

from __future__ import annotations

import uuid
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatch.ingress.answers import answer_of_problem, rejected


class HttpProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`. Bytes that cannot be parsed get an OpenAI error, and the connection ends."""

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser gave up on; `msg` is the server's word for it."""
        answer = answer_of_problem(rejected(HTTPStatus.BAD_REQUEST, "invalid_http", msg))
        fields = [*answer.fields, ("x-request-id", uuid.uuid4().hex), ("content-length", str(len(answer.body)))]
        lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in fields), "connection: close"]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + answer.body)
        self.transport.close()
