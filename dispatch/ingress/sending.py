"""Writing an answer to the wire."""

from __future__ import annotations

from starlette.types import Send

from dispatch.contract.answer_fields import Ids, raw_fields
from dispatch.contract.answers import Answer
from dispatch.ingress.body import Upload


async def send_answer(send: Send, answer: Answer, ids: Ids, upload: Upload | None = None) -> None:
    """Write `answer`. If the call's body has not come whole, the connection ends after it (see `Upload.drain`)."""
    fields = raw_fields(answer, ids)
    fields.append((b"content-length", b"%d" % len(answer.body)))
    early = upload is not None and not upload.complete
    if early:
        fields.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
    await send({"type": "http.response.body", "body": answer.body, "more_body": early})
    if early and upload is not None:
        await upload.drain()
        await send({"type": "http.response.body", "body": b""})
