"""A function call as data: what to send and how to read the answer, for any client, blocking or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Argument = str | bytes | int


@dataclass(frozen=True, slots=True)
class FunctionCall(Generic[T]):
    """One FCALL. `function` is without the `dispatch_` prefix; `decode` turns the server's answer into a record."""

    function: str
    args: Sequence[Argument]
    decode: Callable[[Any], T]
    read_only: bool = False
