"""A gateway process and keys: it opens no door to other machines by accident."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.calls import COMPLETION
from tests.support.commands import Commands
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BODY: dict[str, Any] = {"model": "m", "messages": []}
START_S = 40.0


def a_group(valkey: ValkeyProcess, endpoint: str = "http://127.0.0.1:9/v1") -> str:
    group = unique_group()
    configure(valkey.url, group, default_document(endpoint))
    return group


def create(valkey: ValkeyProcess, group: str) -> str:
    return Commands(valkey.url, group)("keys", "create", "--name", "one").out.strip()


async def refused(valkey: ValkeyProcess, group: str, **settings: Any) -> str:
    """Start a gateway that must not start; returns what it said."""
    gateway = GatewayProcess(valkey.url, group, **settings).launch()
    try:
        assert await gateway.ended(START_S) == 1
        assert gateway.event("gateway_started") is None
        return gateway.stderr
    finally:
        gateway.close()


async def ask(gateway: GatewayProcess, token: str = "") -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = gateway.url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")
    async with httpx.AsyncClient(timeout=30) as client:
        return (await client.post(f"{url}/v1/chat/completions", json=BODY, headers=headers)).status_code


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_it_does_not_start_where_others_can_connect_and_there_is_no_key(valkey: ValkeyProcess, host: str) -> None:
    group = a_group(valkey)
    said = await refused(valkey, group, host=host)
    assert f"other machines can connect to {host}, and the fabric group '{group}' has no key" in said
    assert f"dispatch keys create --name NAME --group {group}" in said
    assert "--insecure (DISPATCH_INSECURE=true)" in said
    assert said.count("\n") == 1


async def test_it_does_not_start_there_with_keys_off_either(valkey: ValkeyProcess) -> None:
    group = a_group(valkey)
    create(valkey, group)
    said = await refused(valkey, group, host="0.0.0.0", keys="off")
    for words in ("keys are off (DISPATCH_KEYS=off, --no-keys)", "dispatch keys create", "--insecure"):
        assert words in said


async def test_it_starts_there_when_the_group_has_a_key_and_asks_for_it_even_when_the_last_one_goes(
    valkey: ValkeyProcess,
) -> None:
    async with StubBackend(lambda _: json_answer(COMPLETION)) as stub:
        group = a_group(valkey, f"{stub.url}/v1")
        token = create(valkey, group)
        async with GatewayProcess(valkey.url, group, host="0.0.0.0") as gateway:
            assert [await ask(gateway), await ask(gateway, token)] == [401, 200]
            Commands(valkey.url, group)("keys", "revoke", token)
            while await ask(gateway, token) == 200:
                pass
            assert [await ask(gateway), await ask(gateway, token)] == [401, 401]


async def test_it_starts_there_when_told_so_and_says_so(valkey: ValkeyProcess) -> None:
    async with StubBackend(lambda _: json_answer(COMPLETION)) as stub:
        group = a_group(valkey, f"{stub.url}/v1")
        async with GatewayProcess(valkey.url, group, host="0.0.0.0", insecure="true") as gateway:
            assert await ask(gateway) == 200
            assert gateway.event("no_key_is_asked_for") is not None


async def test_required_keys_let_it_start_before_there_is_one(valkey: ValkeyProcess) -> None:
    async with StubBackend(lambda _: json_answer(COMPLETION)) as stub:
        group = a_group(valkey, f"{stub.url}/v1")
        async with GatewayProcess(valkey.url, group, host="0.0.0.0", keys="required") as gateway:
            assert await ask(gateway) == 401
            assert await ask(gateway, create(valkey, group)) == 200


async def test_on_loopback_keys_are_asked_for_when_there_is_one_unless_they_are_off(valkey: ValkeyProcess) -> None:
    async with StubBackend(lambda _: json_answer(COMPLETION)) as stub:
        group = a_group(valkey, f"{stub.url}/v1")
        token = create(valkey, group)
        async with (
            GatewayProcess(valkey.url, group) as asking,
            GatewayProcess(valkey.url, group, keys="off") as open_one,
        ):
            assert [await ask(asking), await ask(asking, token), await ask(open_one)] == [401, 200, 200]
            said = asking.stderr + open_one.stderr
        assert token.split("_", 2)[2] not in said
