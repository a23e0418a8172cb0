"""Who may do what: bearer keys, checked before anything of a request is read.

    principal = await authority.principal(headers)
    principal.require(Role.OBSERVE)
    principal.require_pool("interactive")

The group's keys are read as a whole, because an id that does not exist must cost what a wrong secret costs, and made-up
ids must not become calls to Valkey. What was read is acted upon for at most 2 s, so a revoked key stops within 2 s; a
new one works at once, because a key that is not found is looked up anew. It is read again in the background before that
time is over, so calls that follow one another never wait for it.

While Valkey is away nobody is let in by what was read before. But it says for 60 s who would be: they are told that
Valkey is away (503), all others that their key is wrong (401). After that nobody can tell, and all are told 503.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

import anyio
import msgspec
import structlog

from dispatch.errors import DispatchError, FabricUnavailable, KeyRefused, NotAllowed
from dispatch.fabric.api_keys import KeyRecord, Role, Token, read_record, read_token
from dispatch.producer.call_headers import Headers
from dispatch.producer.options import DEFAULT_POOL, CallOptions

log = structlog.get_logger(__name__)

FRESH_S = 2.0
"""How long what was read is acted upon."""

KNOWN_S = 60.0
"""How long it is good for telling a right key from a wrong one while Valkey is away."""

_now = time.monotonic
_AHEAD_S = 1.0
_ANSWER_S = 0.6
_AGAIN_S = 0.2  # what is not found is looked up anew, but made-up keys shall not keep Valkey busy
_BEARER = re.compile(rb"bearer +([\x21-\x7e]{1,256})", re.IGNORECASE)
_NOBODYS_HASH = "0" * 64

KeysMode = Literal["auto", "required", "off"]
"""`auto`: keys are asked for as soon as the group has one."""

ReadKeys = Callable[[], Awaitable[dict[str, bytes]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whoever makes a request. `key_id` "" = nobody was asked for a key. `pools` None = all."""

    key_id: str
    name: str
    roles: frozenset[str]
    pools: frozenset[str] | None = None
    pool: str | None = None
    fairness_key: str | None = None
    cost: int | None = None

    def require(self, *roles: Role) -> None:
        """Make sure that one of `roles` is allowed.

        Raises:
            NotAllowed: none is.
        """
        if not self.roles.intersection(roles):
            wanted, has = " or ".join(roles), ", ".join(sorted(self.roles)) or "none"
            raise NotAllowed(f"this key has the roles: {has}; {wanted} is needed", code="role_not_allowed")

    def pool_allowed(self, pool: str) -> bool:
        """Say whether the key may do anything with `pool`."""
        if self.pool is not None:
            return pool == self.pool
        return self.pools is None or pool in self.pools

    def require_pool(self, pool: str) -> None:
        """Make sure that `pool` is allowed.

        Raises:
            NotAllowed: it is not; names those that are.
        """
        if not self.pool_allowed(pool):
            allowed = ", ".join(sorted(self.pools or ())) if self.pool is None else self.pool
            raise NotAllowed(
                f"pool {pool!r} is not allowed to this key; allowed: {allowed}", param="pool", code="pool_not_allowed"
            )

    @property
    def default_pool(self) -> str:
        """Where a call goes that names no pool: the one the key fixes, or the only one it allows, else `default`."""
        if self.pool is not None:
            return self.pool
        if self.pools is not None and len(self.pools) == 1:
            return next(iter(self.pools))
        return DEFAULT_POOL

    def limit(self, options: CallOptions) -> CallOptions:
        """Return `options` as the key has them: what it fixes goes before what the caller says.

        Raises:
            NotAllowed: the pool is not allowed.
        """
        self.require_pool(options.pool_id)
        if not self.key_id:
            return options
        cost, fairness_key = self.cost, self.fairness_key
        return replace(
            options,
            scope=self.key_id,
            fairness_key=options.fairness_key if fairness_key is None else fairness_key,
            estimated_cost_units=options.estimated_cost_units if cost is None else cost,
        )


ANYBODY = Principal(key_id="", name="anonymous", roles=frozenset(Role))
"""Whoever comes where keys are not asked for."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A key as it was read."""

    encoded: bytes
    hash: str
    principal: Principal


class Authority:
    """Knows the keys of one group. Belongs to one event loop; close it.

    Once it has asked for a key it goes on asking: revoking the last key opens no door.
    """

    def __init__(self, read: ReadKeys | None = None, mode: KeysMode = "auto") -> None:
        """Check the keys that `read` returns (their records by id). Without `read`, or `off`, ask nobody for a key."""
        self._read = None if mode == "off" else read
        self._asks = mode == "required"
        self._known: dict[str, _Known] = {}
        self._sent_at = self._read_at = float("-inf")
        self._problem: DispatchError | None = None
        self._reading: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """Stop reading. Repeatable."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({reading})

    async def principal(self, headers: Headers) -> Principal:
        """Say who makes the request with these header fields.

        Raises:
            KeyRefused: nobody that is known.
            FabricUnavailable, DispatchError: that cannot be said now; what Valkey answered, or that it did not.
        """
        if self._read is None:
            return ANYBODY
        if not self._asks:
            if not await self._have(_now() - FRESH_S):
                raise self._why_not()
            if not self._asks:  # the group has no key
                return ANYBODY
        token = _shown(headers)
        came_at = _now()
        fresh = await self._have(came_at - FRESH_S)
        principal = self._of(token)
        if principal is None and fresh and await self._have(came_at):
            principal = self._of(token)
        if principal is None and came_at - self._read_at < KNOWN_S:
            log.info("key_refused", key_id=token.key_id if token.key_id in self._known else None)
            raise KeyRefused("this key is not valid for this group; it may have been revoked", code="invalid_api_key")
        if principal is None or not fresh:
            raise self._why_not()
        return principal

    def remembered(self, headers: Headers) -> Principal | None:
        """Say who makes the request by the keys as they were last read, however long ago that was. Asks nobody.

        Raises:
            KeyRefused: it shows no key, and the group has asked for keys.
        """
        if self._asks:
            return self._of(_shown(headers))
        return ANYBODY if self._read_at > float("-inf") else None

    def _of(self, token: Token) -> Principal | None:
        known = self._known.get(token.key_id)
        # Compared in any case, and in constant time, so that how long a refusal takes says nothing.
        same = hmac.compare_digest(token.hash, _NOBODYS_HASH if known is None else known.hash)
        return known.principal if known is not None and same else None

    async def _have(self, since: float) -> bool:
        """Have the keys as they stood at `since` or later; returns whether that is so."""
        if _now() - self._read_at > _AHEAD_S:
            self._begin()
        while self._read_at < since:
            before = self._read_at
            await asyncio.wait({self._begin()})
            if self._read_at == before:
                return False
        return True

    def _begin(self) -> asyncio.Task[None]:
        """Read the keys; everybody who waits for that waits for the same task."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_all(), name="keys")
        return self._reading

    async def _read_all(self) -> None:
        assert self._read is not None  # noqa: S101 - for the type checker: nothing calls this without it
        try:
            await anyio.sleep(max(0.0, self._sent_at + _AGAIN_S - _now()))
            self._sent_at = sent_at = _now()
            self._problem = None
            with anyio.move_on_after(_ANSWER_S):
                records = await self._read()
                self._take(records, sent_at)
        except DispatchError as error:
            self._problem = error
        finally:
            self._reading = None

    def _take(self, records: dict[str, bytes], sent_at: float) -> None:
        before, self._known = self._known, {}
        for key_id, encoded in records.items():
            known = before.get(key_id)
            if known is None or known.encoded != encoded:
                known = _known(key_id, encoded)
            if known is not None:
                self._known[key_id] = known
        self._asks = self._asks or bool(records)
        self._read_at = sent_at

    def _why_not(self) -> DispatchError:
        problem = self._problem
        if problem is None or isinstance(problem, FabricUnavailable):
            return FabricUnavailable("keys cannot be checked now: Valkey does not answer")
        return problem


def _shown(headers: Headers) -> Token:
    """Return the token that the request shows.

    Raises:
        KeyRefused: it shows none, or what it shows is none.
    """
    values = headers.get(b"authorization", ())
    if not values:
        raise KeyRefused("a key is needed: send the header 'Authorization: Bearer <key>'", code="missing_api_key")
    found = _BEARER.fullmatch(values[0].strip()) if len(values) == 1 else None
    token = None if found is None else read_token(found[1].decode("ascii"))
    if token is None:
        raise KeyRefused(
            "this is no key of a fabric group: 'Authorization: Bearer <key>' is needed once, with a key as "
            "'dispatch keys create' makes it",
            code="invalid_api_key",
        )
    return token


def _known(key_id: str, encoded: bytes) -> _Known | None:
    try:
        record = read_record(encoded)
    except msgspec.MsgspecError as error:
        log.warning("key_unreadable", key_id=key_id, problem=str(error))
        return None
    if len(record.hash) != len(_NOBODYS_HASH) or not record.hash.isascii():
        log.warning("key_unreadable", key_id=key_id, problem="its hash is none")
        return None
    return _Known(encoded, record.hash, _principal(key_id, record))


def _principal(key_id: str, record: KeyRecord) -> Principal:
    roles = frozenset(record.roles)
    return Principal(
        key_id=key_id,
        name=record.name,
        roles=roles | {Role.OBSERVE} if Role.ADMIN in roles else roles,
        pools=None if record.pools is None else frozenset(record.pools),
        pool=record.pool,
        fairness_key=record.fairness_key,
        cost=record.cost,
    )
