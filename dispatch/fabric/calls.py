"""A function call as data: what to send and how to read the answer, for any client, blocking or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dispatch.errors import DispatchError
from dispatch.fabric.schema import root

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Argument = str | bytes | int

FUNCTION_PREFIX = "dispatch_"
"""Function names are global on a server, so ours carry this prefix."""


@dataclass(frozen=True, slots=True)
class FunctionCall(Generic[T_co]):
    """One FCALL. `function` is without the `dispatch_` prefix; `decode` turns the server's answer into a record.

    `decode` raises what the answer says of a broken promise (the fault of one submit).
    """

    function: str
    args: Sequence[Argument]
    decode: Callable[[Any], T_co]
    read_only: bool = False

    def command(self, group: str) -> list[Argument]:
        """Return the whole server command that runs this call for `group`."""
        name = "FCALL_RO" if self.read_only else "FCALL"
        return [name, FUNCTION_PREFIX + self.function, 1, root(group), *self.args]

    def outcome(self, answer: Any) -> T_co | DispatchError:
        """Decode the answer; an error that it tells of is returned, not raised (one of many in a round trip)."""
        try:
            return self.decode(answer)
        except DispatchError as error:
            return error
