"""Writing a stream to its client. Nothing is kept for a slow one beyond what its connection and its stream may hold."""

from __future__ import annotations

import traceback
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from starlette.types import Send

from dispatch.contract.answer_fields import Ids, raw_fields
from dispatch.contract.answers import INTERNAL, Answer
from dispatch.producer.served import ServedStream
from dispatch.producer.streaming import ChunkStream

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamWriter:
    """Writes one stream. Leaving it, however, lets go of the stream: its request is cancelled unless it has ended."""

    stream: ChunkStream
    served: ServedStream
    caller_request_id: str | None

    async def write(self, send: Send) -> Answer | None:
        """Write the stream to its end; returns the answer of one that failed before its head, which is not written.

        Raises:
            DispatchError: nothing was queued, or how it ended is not known; nothing is written.
        """
        served, stream = self.served, self.stream
        async with aclosing(stream):
            answer = await served.open(stream)
            if served.over:
                return answer
            fields = raw_fields(answer, Ids(self.caller_request_id, stream.request_id))
            await send({"type": "http.response.start", "status": answer.status, "headers": fields})
            if not served.first:  # what follows may take a while, and the head goes out with the body's first piece
                await send({"type": "http.response.body", "body": b"", "more_body": True})
            while not served.over:
                piece = await self._next_piece()
                if piece or served.over:
                    await send({"type": "http.response.body", "body": piece, "more_body": not served.over})
        return None

    async def _next_piece(self) -> bytes:
        try:
            return await self.served.next_piece(self.stream)
        except Exception:  # noqa: BLE001 - a bug of ours; told in the form that every client can read
            # As text: where logging is not set up, structlog would show local variables, which hold content.
            trace = traceback.format_exc()
            log.error("stream_failed", request_id=self.stream.request_id, trace=trace)  # noqa: TRY400 - see above
            self.served.over = True
            return self.served.events.broken(INTERNAL)
