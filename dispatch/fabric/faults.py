"""What the server's error texts mean: the one place that turns them into this package's exceptions.

A client hands an error over as its code (its first word) and the rest of the text.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from dispatch import errors
from dispatch.errors import ConfigurationError, DispatchError, FabricError, FabricUnavailable, LibraryProblem
from dispatch.fabric.library import Library, current_library

LOAD_COMMAND = "dispatch scripts load"
"""What an operator runs when the library on the server is missing or another one."""


def load_command(server: str = "") -> str:
    """Return the command that loads the library on `server` (a URL; "" = wherever the command goes by itself)."""
    return f"{LOAD_COMMAND} --url {server}" if server else LOAD_COMMAND


@dataclass(frozen=True, slots=True)
class ServerFault:
    """An error reply: its first word, the text behind it, and the function called (no prefix; "" = a plain command).

    `server` is who said it, as a URL without its password; "" = not known.
    """

    code: str
    text: str
    function: str = ""
    server: str = ""


def to_error(fault: ServerFault, library: Library | None = None) -> DispatchError:
    """Return the exception that `fault` means; script lines are mapped by `library` (default: this version's).

    Full memory refuses a submit and makes everything else unavailable: nothing is wrong with the call.
    """
    if fault.code == "OOM" and fault.function == "request_submit":
        return errors.RequestRefused("memory_full", message="refused (memory_full): Valkey's memory is full")
    if meaning := _MEANINGS.get(fault.code):
        return meaning(fault.text)
    if found := _SCRIPT_LINE.search(fault.text):
        line = int(found["run"] or found["load"])
        return _script_fault(fault, line, library or current_library())
    if fault.text.startswith("Function not found"):
        return LibraryProblem(f"function {fault.function!r} is not on the server; run: {load_command(fault.server)}")
    if fault.text.startswith("DB index is out of range"):
        return ConfigurationError("the Valkey URL names a database that the server does not have")
    return FabricError(f"Valkey answered: {fault.code} {fault.text}")


def plain_reason(error: BaseException) -> str:
    """Return in plain words why a peer does not answer, from whatever a client or the system raised."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case BaseExceptionGroup():
                return plain_reason(cause.exceptions[0])
            case socket.gaierror():
                return "the host name is unknown"
            case ssl.SSLError():
                return f"TLS failed ({cause.reason or cause})"
            case TimeoutError():
                return "it took too long"
            case OSError() if cause.errno:
                return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error).strip().rstrip(".") or type(error).__name__


# What the server appends to an error of a running script, and puts before one of a loading library.
_SCRIPT_LINE = re.compile(
    r" script: on @user_function:(?P<run>\d+)\.?$"
    r"|^Error (?:registering functions|compiling function): (?:ERR )?@?user_function:(?P<load>\d+):"
)
_NOISE = re.compile(r" script: on @user_function:\d+\.?$|^(?:Error \w+ functions?: )?(?:ERR )?@?user_function:\d+: ")
_KNOWN_POOLS = re.compile(r"known: (?P<names>.*)$", re.DOTALL)


def _script_fault(fault: ServerFault, line: int, library: Library) -> DispatchError:
    text = _NOISE.sub("", fault.text)
    if text.startswith("ACL failure"):
        return ConfigurationError(f"the Valkey user lacks a right inside {fault.function}: {text}")
    place = library.place(line) or f"line {line} of the joined library"
    called = f" ({fault.function})" if fault.function else ""
    return errors.ScriptFault(f"{place}{called}: {text if fault.code == 'ERR' else f'{fault.code} {text}'}")


def _pool_unknown(text: str) -> DispatchError:
    found = _KNOWN_POOLS.search(text)
    known = tuple(name for name in re.split(r",\s*", found["names"].strip()) if name) if found else ()
    return errors.PoolUnknown(text, known=known)


def _unavailable(why: str) -> Callable[[str], DispatchError]:
    return lambda _text: FabricUnavailable(f"Valkey cannot serve: {why}")


def _login_refused(text: str) -> DispatchError:
    return ConfigurationError(f"Valkey refused the login; check user and password of the Valkey URL ({text})")


def _right_missing(text: str) -> DispatchError:
    return ConfigurationError(f"the Valkey user lacks a right: {text}")


_MEANINGS: dict[str, Callable[[str], DispatchError]] = {
    "POOL_UNKNOWN": _pool_unknown,
    "GROUP_UNKNOWN": errors.GroupUnknown,
    "CONTRACT_MISMATCH": lambda text: errors.ContractMismatch(f"{text}; run: {LOAD_COMMAND}"),
    "BAD_ARGUMENT": errors.BadArgument,
    "STATE_CONFLICT": errors.StateConflict,
    "LEASE_LOST": errors.LeaseLost,
    "NOAUTH": _login_refused,
    "WRONGPASS": _login_refused,
    "NOPERM": _right_missing,
    "READONLY": _unavailable("it is a read-only replica, not a primary"),
    "UNBLOCKED": _unavailable("it has become a replica"),
    "LOADING": _unavailable("it is still loading its data"),
    "MASTERDOWN": _unavailable("it is a replica without its primary"),
    "CLUSTERDOWN": _unavailable("the cluster does not serve this slot"),
    "TRYAGAIN": _unavailable("the cluster is moving this slot"),
    "OOM": lambda _text: errors.FabricFull("Valkey cannot serve: its memory is full (maxmemory)"),
    "BUSY": _unavailable("it is busy with a script"),
    "MISCONF": _unavailable("it refuses writes because it cannot save to disk"),
    "NOREPLICAS": _unavailable("it refuses writes because too few replicas are connected"),
}
