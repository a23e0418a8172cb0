"""A gateway with its control API on a group of its own, keys of every kind, and HTTP clients that show them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from dispatch.config import GatewaySettings
from dispatch.fabric.api_keys import Grant, Role, new_key
from dispatch.fabric.connecting import connect
from dispatch.fabric.functions import key_change, key_read
from dispatch.gateway import Gateway
from dispatch.ingress import IngressSettings, IngressState, create_app
from dispatch.ingress.authority import Authority
from dispatch.producer.client import DispatchClient
from dispatch.telemetry.history.store import HistoryStore
from tests.support.by_hand import ByHand
from tests.support.front import FakeGateway, serving
from tests.support.groups import configure, default_document, unique_group

BASE = "/api/v1"
PATIENT = IngressSettings(admission_ms=10_000, control_timeout_s=10.0, events_every_s=0.1)
"""Bounds that a busy machine keeps."""

ROLES: dict[str, Grant] = {
    "admin": Grant(name="admin", roles=(Role.ADMIN,)),
    "observe": Grant(name="observe", roles=(Role.OBSERVE,)),
    "submit": Grant(name="submit", roles=(Role.SUBMIT,)),
    "admin-of-backfill": Grant(name="admin of backfill", roles=(Role.ADMIN,), pools=("backfill",)),
    "observe-backfill": Grant(name="observe backfill", roles=(Role.OBSERVE,), pools=("backfill",)),
    "submit-backfill": Grant(name="submit backfill", roles=(Role.SUBMIT,), pools=("backfill",)),
    "other-submit": Grant(name="other", roles=(Role.SUBMIT,)),
}


@dataclass
class ControlStack:
    """A running gateway. `http(role)` is a client that shows the key of that name; "" shows none."""

    url: str
    group: str
    hand: ByHand
    gateway: Gateway | FakeGateway
    client: DispatchClient
    tokens: dict[str, str]
    key_ids: dict[str, str]
    exits: AsyncExitStack
    watch: Any
    opened: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    history: Any = None

    def http(self, role: str = "admin") -> httpx.AsyncClient:
        if role not in self.opened:
            headers = {"authorization": f"Bearer {self.tokens[role]}"} if self.tokens and role else {}
            opened = httpx.AsyncClient(base_url=f"{self.url}{BASE}", timeout=30, headers=headers)
            self.exits.push_async_callback(opened.aclose)
            self.opened[role] = opened
        return self.opened[role]

    async def get(self, path: str, role: str = "admin", **params: Any) -> httpx.Response:
        return await self.http(role).get(path, params=params)

    async def rows(self, path: str, role: str = "admin", **params: Any) -> list[dict[str, Any]]:
        """Read a list to its end."""
        rows: list[dict[str, Any]] = []
        cursor = ""
        while True:
            answer = await self.get(path, role, **params, **({"cursor": cursor} if cursor else {}))
            assert answer.status_code == 200, answer.text
            page = answer.json()
            assert page["truncated"] is (page["cursor"] != "")
            rows += page["rows"]
            cursor = page["cursor"]
            if not cursor:
                return rows


@asynccontextmanager
async def control_stack(
    valkey_url: str,
    endpoint_url: str = "http://127.0.0.1:9/v1",
    *,
    keys: bool = True,
    runs: bool = False,
    settings: IngressSettings = PATIENT,
    history: HistoryStore | None = None,
    **document: Any,
) -> AsyncIterator[ControlStack]:
    """Start an HTTP front. `runs`: with a gateway behind it, else tests claim by hand. `document`: other config.

    `history`: the one that it asks, which the caller closes.
    """
    group = unique_group()
    configure(valkey_url, group, default_document(endpoint_url) | document)
    hand = ByHand(valkey_url, group)
    tokens: dict[str, str] = {}
    key_ids: dict[str, str] = {}
    for name, grant in ROLES.items() if keys else ():
        made = new_key(grant)
        assert hand.run(key_change("create", made.key_id, made.record, actor="test")) == "CREATED"
        tokens[name], key_ids[name] = made.token, made.key_id
    async with AsyncExitStack() as exits:
        exits.callback(hand.close)
        connection = await connect(valkey_url)
        exits.push_async_callback(connection.aclose)
        gateway: Gateway | FakeGateway = FakeGateway(facts={"fabric_group": group})
        if runs:
            made_of = GatewaySettings(valkey_url=valkey_url, fabric_group=group, drain_timeout_ms=500)
            gateway = await exits.enter_async_context(Gateway(made_of))
        client = await exits.enter_async_context(
            DispatchClient(valkey_url, fabric_group=group, connection=connection, close_ms=200)
        )
        authority = Authority(lambda: connection.run(group, key_read()), "auto")
        exits.push_async_callback(authority.aclose)
        state = IngressState(
            client=client,
            gateway=gateway,
            authority=authority,
            settings=settings,
            connection=connection,
            history=history,
        )
        app = create_app(state)
        [mounted] = [route for route in app.routes if getattr(route, "path", "") == BASE]
        port = await exits.enter_async_context(serving(app))
        url = f"http://127.0.0.1:{port}"
        watch = mounted.app.state.control.watch  # type: ignore[attr-defined]  # it is a mount
        yield ControlStack(url, group, hand, gateway, client, tokens, key_ids, exits, watch)


def told(answer: httpx.Response) -> tuple[int, str]:
    """Return status and code of an error, which has the one form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"]
    assert answer.headers["x-request-id"]
    assert answer.headers["x-dispatch-reason"].startswith(("rejected-", "ended-"))
    return answer.status_code, error["code"]


def document_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the document of a config answer."""
    found: dict[str, Any] = json.loads(answer.content)["document"]
    return found
