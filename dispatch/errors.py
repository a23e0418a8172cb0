"""Every exception the package raises on purpose, as one tree.

DispatchError
├── ConfigurationError      a setting is missing or wrong; names it
├── ContractError           what was sent does not follow the contract
│   ├── InvalidRequest      a call's body or options; names the member
│   └── ContractMismatch    the other side speaks another contract version
├── FabricError             something between this process and the fabric group
│   ├── FabricUnavailable   Valkey did not answer; it is not known whether the call was done
│   │   ├── FabricFull      Valkey's memory is full: nothing was written; what frees memory still works
│   │   └── OutcomeUnknown  the request was admitted; how it ended is not known
│   ├── LibraryProblem      the function library is missing or another one
│   ├── StreamBroken        chunks of a stream are missing; what came before them stands
│   ├── PoolUnknown  GroupUnknown  BadArgument  LeaseLost
│   ├── RequestUnknown      the group knows no such request any more, or keeps no reply of it
│   ├── StateConflict       the request or the client is in a state that does not allow the call
│   │   ├── RequestInProgress    the same call runs already under this idempotency key or request id
│   │   └── IdempotencyConflict  another call has used this idempotency key or request id
│   └── ScriptFault         the library itself failed; names Lua file and line
├── HistoryError            something between this process and the history of what has ended
│   ├── HistoryOff          no history is configured here
│   └── HistoryUnavailable  ClickHouse did not answer or refused; what was written may or may not be there
├── AccessRefused           nothing was read or done
│   ├── KeyRefused          no key, or not one of this group
│   └── NotAllowed          the key does not allow this; says what it allows
├── RequestRefused          not admitted; nothing was queued
├── RequestEnded            admitted, and ended otherwise than `succeeded`
├── StreamTooSlow           a stream was read too slowly; the request was told to stop
└── BackendError            a direct call (no queue) failed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.contract.reply import Reply


class DispatchError(Exception):
    """Base of every error this package raises on purpose. Can be copied and pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls the class with `args`, which are its text, whatever its parameters are.
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(kind: type[DispatchError], args: tuple[Any, ...], state: dict[str, Any]) -> DispatchError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigurationError(DispatchError):
    """A setting is missing or wrong; the text names it and says what is allowed."""


class ContractError(DispatchError):
    """Something sent or received does not follow the contract."""


class InvalidRequest(ContractError):
    """A call's body or options are wrong. `param` names the member, `status` is the HTTP answer (400 to 422)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class ContractMismatch(ContractError):
    """The other side speaks another contract version; nothing was done."""


class FabricError(DispatchError):
    """Base of what can go wrong between this process and the fabric group."""


class FabricUnavailable(FabricError):
    """Valkey did not answer in time or refused the connection. The call may or may not have been done."""


class FabricFull(FabricUnavailable):
    """Valkey refused a write because its memory is full. Nothing was written; settling and the like still work."""


class OutcomeUnknown(FabricUnavailable):
    """The request was admitted and may have run; how it ended cannot be learnt any more."""


class LibraryProblem(FabricError):
    """The function library on the server is missing or is not this version's; the text names the command to run."""


class PoolUnknown(FabricError):
    """The pool is not configured in this group; `known` lists those that are (at most 20)."""

    def __init__(self, message: str, *, known: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.known = known


class GroupUnknown(FabricError):
    """The group has no configuration yet."""


class RequestUnknown(FabricError):
    """The group knows no such request (any more), or has no reply of it to give away.

    `ending` says how the request ended, "" if that is not known either.
    """

    def __init__(self, message: str, *, ending: str = "") -> None:
        super().__init__(message)
        self.ending = ending


class BadArgument(FabricError):
    """A function was called with an argument out of its range."""


class StateConflict(FabricError):
    """The request is in a state that does not allow the call."""


class RequestInProgress(StateConflict):
    """The same call was submitted before under this idempotency key or request id and has not ended; ask again later.

    Nothing was queued. `request_id` is the earlier request's, `state` where that one is.
    """

    def __init__(self, message: str, *, request_id: str = "", state: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id
        self.state = state


class IdempotencyConflict(StateConflict):
    """Another call (operation, pool or body differ) has used this idempotency key or request id. Nothing was queued.

    `request_id` is the earlier request's.
    """

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class StreamBroken(FabricError):
    """Chunks of a stream are missing: Valkey has lost data. The chunks given out before are whole and in order."""


class LeaseLost(FabricError):
    """The caller no longer holds the lease; nothing was changed."""


class ScriptFault(FabricError):
    """The Lua library failed; the text names the Lua file and line. Always a bug."""


class HistoryError(DispatchError):
    """Base of what can go wrong between this process and the history."""


class HistoryOff(HistoryError):
    """No history is configured here; the text says how to have one."""


class HistoryUnavailable(HistoryError):
    """The history did not answer, or refused. The text has its address, without credentials, and what to do."""


class AccessRefused(DispatchError):
    """A caller may not do what it asks for; nothing was read or done. `status` is the HTTP answer, `code` a word."""

    status = 403

    def __init__(self, message: str, *, code: str = "not_allowed", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class KeyRefused(AccessRefused):
    """The caller shows no key, or none that this group knows."""

    status = 401


class NotAllowed(AccessRefused):
    """The caller's key does not allow this; the text says what it allows."""


class RequestRefused(DispatchError):
    """The request was not admitted and nothing is queued.

    `reason` is one of the schema's refusals, `pool_id` (or `pool`) where, `value` (or `depth`) what was found there
    (requests or bytes), `limit` what is allowed, `retry_after_ms` (or `retry_after`, in seconds) when to come back,
    None = unknown.
    """

    def __init__(  # noqa: PLR0913 - the fields of the refusal
        self,
        reason: str,
        *,
        pool_id: str = "",
        value: int | None = None,
        limit: int | None = None,
        retry_after_ms: int | None = None,
        message: str | None = None,
    ) -> None:
        super().__init__(message or f"refused ({reason}): pool {pool_id!r} has {value}, allowed {limit}")
        self.reason = reason
        self.pool_id = pool_id
        self.value = value
        self.limit = limit
        self.retry_after_ms = retry_after_ms

    @property
    def pool(self) -> str:
        """The pool that was asked for."""
        return self.pool_id

    @property
    def depth(self) -> int | None:
        """How many requests (or bytes, for a bound on those) were there."""
        return self.value

    @property
    def retry_after(self) -> float | None:
        """Seconds until there may be room, by how fast the pool drains; None = unknown."""
        return None if self.retry_after_ms is None else self.retry_after_ms / 1000


class RequestEnded(DispatchError):
    """The request was admitted and ended otherwise than `succeeded`; `reply` says how."""

    def __init__(self, reply: Reply) -> None:
        error = reply.error
        detail = f": {error.message}" if error is not None else ""
        super().__init__(f"request {reply.request_id} ended {reply.ending}{detail}")
        self.reply = reply


class StreamTooSlow(DispatchError):
    """More of a stream waited to be read than is allowed; what was not read is dropped and the request told to stop."""

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class BackendError(DispatchError):
    """A direct call (no queue) did not succeed; `reply` says how."""

    def __init__(self, reply: Reply) -> None:
        error, address = reply.error, reply.head.backend_address
        message = error.message if error is not None else f"the endpoint answered {reply.status}"
        # Whoever gave a URL wants to see which one it was; the address has no credentials and no query.
        super().__init__(message if address is None or address in message else f"{message} ({address})")
        self.reply = reply
