"""Bearer keys of a group's callers: what a key allows, the token its holder shows, and the record the group keeps.

A token is `fd_<key id>_<secret>`. The id is no secret: it finds the record, and names the key in lists, logs and as the
scope of its holder's idempotency keys. The secret has 256 random bits, so a plain hash of it can be neither guessed nor
reversed; the record holds that hash only, and nobody can show the token again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from dispatch.contract.names import check_name
from dispatch.errors import InvalidRequest
from dispatch.fabric.schema import LIMITS

NAME_MAX = 128
POOLS_MAX = 100
_COST_MAX = 2**31 - 1
_SECRET_BYTES = 32
_ID_BYTES = 8
_TOKEN = re.compile(r"fd_([A-Za-z0-9.-]{1,64})_([A-Za-z0-9_-]{22,128})")


class Role(StrEnum):
    """What the holder of a key may do."""

    SUBMIT = "submit"
    """Make calls, and fetch or cancel its own."""
    OBSERVE = "observe"
    """See what waits and runs, and how it went."""
    ADMIN = "admin"
    """Change config, pools and keys, cancel anything; and observe."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a key allows. `pools` None = all of its group.

    `pool`, `fairness_key` and `cost` (units), where given, hold for every call made with the key, whatever it says.

    Raises:
        InvalidRequest: something in it is wrong; names it.
    """

    name: str
    roles: tuple[Role, ...] = (Role.SUBMIT,)
    pools: tuple[str, ...] | None = None
    pool: str | None = None
    fairness_key: str | None = None
    cost: int | None = None

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > NAME_MAX or not self.name.isprintable():
            raise _wrong("name", f"{self.name[:40]!r}: 1 to {NAME_MAX} printable characters are allowed")
        if not self.roles:
            raise _wrong("role", f"missing: one or more of {', '.join(Role)} are needed")
        if self.pools is not None and not 1 <= len(self.pools) <= POOLS_MAX:
            raise _wrong("pool", f"a list of {len(self.pools)}: 1 to {POOLS_MAX} pools are allowed, or none for all")
        for pool in (*(self.pools or ()), *([] if self.pool is None else [self.pool])):
            check_name("pool", pool)
        if self.pool is not None and self.pools is not None and self.pool not in self.pools:
            raise _wrong("fix_pool", f"{self.pool!r}, which is none of the pools that the key allows")
        if self.fairness_key is not None:
            check_name("fairness_key", self.fairness_key)
        if self.cost is not None and not 1 <= self.cost <= _COST_MAX:
            raise _wrong("cost", f"{self.cost}: a whole number from 1 to {_COST_MAX} is allowed")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the group keeps of a key: the hash of its secret, and what it allows (members as of `Grant`)."""

    hash: str
    roles: tuple[str, ...]
    pools: tuple[str, ...] | None = None
    pool: str | None = None
    fairness_key: str | None = None
    cost: int | None = None
    created_ms: int = 0
    name: str = ""

    def shown(self, key_id: str) -> dict[str, Any]:
        """Return what may be shown of the key with this id: everything but the hash."""
        return {
            "key_id": key_id,
            "name": self.name,
            "roles": list(self.roles),
            "pools": None if self.pools is None else list(self.pools),
            "pool": self.pool,
            "fairness_key": self.fairness_key,
            "cost": self.cost,
            "created_ms": self.created_ms,
        }


_RECORD = msgspec.json.Decoder(KeyRecord)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. `token` is for its holder alone: show it once and keep it nowhere."""

    key_id: str
    token: str
    record: bytes

    def __repr__(self) -> str:
        return f"NewKey({self.key_id!r})"


@dataclass(frozen=True, slots=True)
class Token:
    """A token as somebody showed it: the key it claims to be, and the hash of its secret."""

    key_id: str
    hash: str


def new_key(grant: Grant) -> NewKey:
    """Make a key that allows `grant`. Store `record` under `key_id` with `key_change("create", ...)`.

    Raises:
        InvalidRequest: the record would be too large.
    """
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    record = KeyRecord(hash=_hash(secret), created_ms=int(time.time() * 1000), **msgspec.structs.asdict(grant))
    encoded = msgspec.json.encode(record)
    if len(encoded) > LIMITS["key_record_bytes"]:
        allowed = LIMITS["key_record_bytes"]
        raise _wrong("pool", f"too long a list: the key's record has {len(encoded)} bytes, {allowed} are allowed")
    return NewKey(key_id, f"fd_{key_id}_{secret}", encoded)


def read_token(text: str) -> Token | None:
    """Read a token; None if it is none."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else Token(found[1], _hash(found[2]))


def read_record(encoded: bytes) -> KeyRecord:
    """Read the record of a key.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _RECORD.decode(encoded)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


def _wrong(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is {what}", param=param, code="invalid_value")
