"""Undoing the content encoding of a stream as it comes, without ever making more of it than asked for.

By zlib itself: httpx's decoders give out all that a piece holds, and 16 KiB can hold 16 MiB. Streams are asked for
without any encoding; some backends and proxies compress all the same.
"""

from __future__ import annotations

import zlib

import httpx

PIECE_BYTES = 64 * 1024
_AUTOMATIC = 47  # gzip and zlib, told apart by their head, windows of any size
_NONE = frozenset({"", "identity"})
_KNOWN = frozenset({"gzip", "x-gzip", "deflate"})


class Inflater:
    """Undoes one layer of gzip or zlib; several gzip members in a row are one body."""

    def __init__(self) -> None:
        self._layer = zlib.decompressobj(_AUTOMATIC)
        self._held = b""
        self._may_hold_more = False  # what was taken in may be more than what was given out

    def feed(self, piece: bytes) -> None:
        """Take encoded bytes, once `take` has given out all of those before."""
        self._held += piece

    def take(self) -> bytes:
        """Return up to 64 KiB of what was fed, b"" when more has to be fed.

        Raises:
            httpx.DecodingError: it is not encoded as it says.
        """
        while self._held or self._may_hold_more:
            if self._layer.eof:
                self._layer = zlib.decompressobj(_AUTOMATIC)
            try:
                decoded = self._layer.decompress(self._held, PIECE_BYTES)
            except zlib.error as error:
                raise httpx.DecodingError("the body is not encoded as its head says") from error
            self._held = self._layer.unused_data if self._layer.eof else self._layer.unconsumed_tail
            self._may_hold_more = len(decoded) == PIECE_BYTES and not self._layer.eof
            if decoded:
                return decoded
        return b""


def inflater_for(content_encoding: str) -> Inflater | None:
    """Return what undoes a body's content encoding, None where there is none to undo.

    Raises:
        httpx.DecodingError: it is none that we can undo.
    """
    name = content_encoding.strip().lower()
    if name in _NONE:
        return None
    if name not in _KNOWN:
        raise httpx.DecodingError("the content encoding is not known")
    return Inflater()
