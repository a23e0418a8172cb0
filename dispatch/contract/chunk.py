"""One chunk of a stream, as the endpoint wrote it."""

from __future__ import annotations

from typing import Any

import msgspec


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One chunk: `data` is its JSON in one line, byte for byte. `event` is its name, "" where events have none."""

    data: bytes
    event: str = ""

    def json(self) -> Any:
        """Decode the data.

        Raises:
            msgspec.DecodeError: it is JSON of a kind that has no Python form (half a surrogate pair).
        """
        return msgspec.json.decode(self.data)

    @property
    def text(self) -> str:
        """What this chunk adds to the text of the first choice, or of a response; "" if nothing."""
        document = self.json()
        if document.get("type") == "response.output_text.delta":
            return _text(document.get("delta"))
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index", 0) == 0:
                delta = choice.get("delta")
                return _text(delta.get("content")) if isinstance(delta, dict) else _text(choice.get("text"))
        return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
