"""What the operators' page is made of: readers of the groups, and the doors that know who may look and change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from dispatch.errors import ConfigurationError, FabricUnavailable, NotAllowed
from dispatch.fabric.api_keys import Role
from dispatch.fabric.functions import key_read
from dispatch.ingress.authority import Authority, KeysMode
from dispatch.studio.app import Studio, create_app
from dispatch.studio.reader import Reader
from dispatch.studio.visitors import Visitor
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.store import HistoryStore

_NO_WRITES = (
    "You can look, not change: nobody was asked for a key. Start Studio with --allow-anonymous-writes, or use keys."
)
_OBSERVER = "You can look, not change. Needs the role admin."


@asynccontextmanager
async def open_studio(options: Mapping[str, Any], *, loopback: bool) -> AsyncIterator[FastAPI]:
    """Make the application of the page. `loopback`: only this machine can connect.

    Raises:
        ConfigurationError: other machines can connect and no key would be asked for.
    """
    mode: KeysMode = options["keys"]
    if not loopback and not options["insecure"]:
        if mode == "off":
            raise ConfigurationError(
                "other machines can connect and keys are off: leave --keys off out, or say --insecure"
            )
        mode = "required"
    async with AsyncExitStack() as stack:
        readers: dict[str, Reader] = {}
        doors: dict[str, KeyDoor] = {}
        for group in options["groups"]:
            readers[group] = Reader(options["url"], group, client=options["client"])
            doors[group] = KeyDoor(readers[group], mode, anonymous_writes=options["anonymous_writes"])
            stack.push_async_callback(doors[group].authority.aclose)
        histories: dict[str, History] = {}
        if options["history"]:
            store = HistoryStore(options["history"], password_env=options["history_password_env"])
            stack.callback(store.close)
            histories = {group: History(store, group) for group in options["groups"]}
        yield create_app(Studio(readers=readers, doors=doors, histories=histories))


class KeyDoor:
    """Lets in whoever holds a key of the group with the role observe or admin; anybody where no key is asked for."""

    def __init__(self, reader: Reader, mode: KeysMode, *, anonymous_writes: bool) -> None:
        self._reader = reader
        self._anonymous_writes = anonymous_writes
        self.authority = Authority(self._read, mode)

    async def visitor(self, token: str | None, address: str) -> Visitor:
        """Say who shows `token`, coming from `address`."""
        headers = {} if token is None else {b"authorization": (b"Bearer " + token.encode("utf-8", "replace"),)}
        principal = await self.authority.principal(headers)
        if not principal.key_id:
            why = "" if self._anonymous_writes else _NO_WRITES
            return Visitor(
                name="anonymous", actor=f"anonymous@{address}", role="admin" if not why else "observe",
                anonymous=True, why=why,
            )  # fmt: skip
        principal.require(Role.OBSERVE)
        if principal.pools is not None or principal.pool is not None:
            raise NotAllowed("this key is for certain pools; Studio shows a whole group and needs a key of all pools")
        admin = Role.ADMIN in principal.roles
        return Visitor(
            name=principal.name, actor=f"{principal.name} (key {principal.key_id})",
            role="admin" if admin else "observe", why="" if admin else _OBSERVER,
        )  # fmt: skip

    async def _read(self) -> dict[str, bytes]:
        if self._reader.connection is None:
            raise FabricUnavailable("keys cannot be checked now: Valkey does not answer")
        return await self._reader.connection.run(self._reader.group, key_read())
