"""The log of a real gateway process: one line an event, in one form, and nothing in it that must not be there."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dispatch.fabric.api_keys import Grant, Role, new_key
from dispatch.fabric.functions import key_change
from dispatch.fabric.sync import BlockingConnection
from dispatch.telemetry.events import EVENTS
from tests.conftest import load_library
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.stub import Fin, Reset, Script, SeenRequest, StubBackend, Write, answer_bytes, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
PASSWORD, ENDPOINT_KEY, URL_USER = "valkey-passw0rd", "sk-endpoint-4711", "url-user-0815"
PROMPT = "the-prompt-nobody-may-read"
ANSWER = "the-answer-nobody-may-read"
PLANTED = (PASSWORD, ENDPOINT_KEY, URL_USER, PROMPT, ANSWER, "fd_wrong", "caller-cookie")

ECHO = json.dumps({"error": {"message": f"cannot do {PROMPT}", "type": "x", "param": PROMPT, "code": PROMPT}}).encode()
WHOLE = json.dumps({"choices": [{"message": {"role": "assistant", "content": ANSWER}}], "id": "c"}).encode()
SCRIPTS = {
    "echo": json_answer(ECHO, status="500 Oops"),
    "refuse": json_answer(ECHO, status=f"400 {PROMPT}"),
    "busy": json_answer(ECHO, status="503 Busy", headers=[("retry-after-ms", "10")]),
    "garbage": Script((Write(b"HTTP/1.1 200 OK\r\n\r\n" + PROMPT.encode()), Fin())),
    "no-http": Script((Write(PROMPT.encode() + b"\r\n\r\n"), Fin())),
    "html": Script((Write(answer_bytes(f"<p>{PROMPT}".encode(), headers=[("content-type", "text/html")])),)),
    "reset": Script((Reset(),)),
    "well": json_answer(WHOLE),
}
BODIES = (
    b'{"model": "m", "messages": [{"role": "user", "content": "' + PROMPT.encode(),
    b'{"model": "m", "messages": "' + PROMPT.encode() + b'"}',
    b'{"model": {"' + PROMPT.encode() + b'": 1}, "messages": []}',
    b'{"model": "m", "messages": [], "model": "' + PROMPT.encode() + b'"}',
    PROMPT.encode(),
    b"\xff\xfe" + PROMPT.encode(),
)


def answer(request: SeenRequest) -> Script:
    if request.target.endswith("/models"):
        return json_answer(ECHO, status="500 Oops")
    return SCRIPTS[json.loads(request.body)["model"]]


def calling(model: str, **members: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], **members}


async def misuse(client: httpx.AsyncClient, token: str) -> None:
    """Do everything that can go wrong with a call, and some that does not."""
    own = {"authorization": f"Bearer {token}", "cookie": "session=caller-cookie", "x-request-id": "mine"}
    for model in SCRIPTS:
        for stream in (False, True):
            await client.post(CHAT, json=calling(model, stream=stream), headers=own)
    for body in BODIES:
        heard = await client.post(CHAT, content=body, headers=own | {"content-type": "application/json"})
        assert heard.status_code in (200, 400, 404, 500, 502), heard.text
    for wrong in ("fd_wrong", f"fd_{token[3:]}x", PROMPT):
        heard = await client.post(CHAT, json=calling("well"), headers={"authorization": f"Bearer {wrong}"})
        assert heard.status_code == 401
    await client.get("/v1/models", headers=own)
    await client.post(
        "/api/v1/requests", json=calling("echo"), headers=own | {"x-dispatch-operation": "chat.completions"}
    )
    await client.put("/api/v1/config", json={"document": {"pools": PROMPT}, "actor": PROMPT}, headers=own)
    await client.get(f"/api/v1/requests/{PROMPT}", headers=own)


async def test_neither_secrets_nor_content_are_logged_whatever_goes_wrong(
    start_valkey: Callable[..., ValkeyProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", ENDPOINT_KEY)
    server = start_valkey(options=("--requirepass", PASSWORD), library=False)
    url = server.url.replace("//", f"//:{PASSWORD}@")
    load_library(url)
    group, key = unique_group(), new_key(Grant(name="one", roles=(Role.SUBMIT, Role.ADMIN)))
    async with StubBackend(answer) as stub:
        address = stub.url.replace("//", f"//{URL_USER}:x@")
        endpoints = [
            {"endpoint_id": "default", "url": f"{stub.url}/v1", "api_key_env": "PLANTED_KEY", "breaker_failures": 1000},
            {"endpoint_id": "odd", "url": f"{stub.url}/v1", "api_key_env": "NOT_SET"},
        ]
        configure(url, group, default_document(address) | {"endpoints": endpoints, "default_endpoint": "default"})
        with BlockingConnection(url) as connection:
            assert connection.run(group, key_change("create", key.key_id, key.record, actor="test")) == "CREATED"
        settings = {
            "log_level": "debug",
            "endpoint_url": f"{address}/v1",
            "gateway_id": "gw",
            "drain_timeout_ms": 500,
        }
        gateway = GatewayProcess(url, group, **settings)
        async with gateway:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                await misuse(client, key.token)
                server.kill()
                await client.post(CHAT, json=calling("well"), headers={"authorization": f"Bearer {key.token}"})
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended(within_s=60) == 0
            said = gateway.stderr
    for planted in (*PLANTED, key.token, key.token.rpartition("_")[2]):
        assert planted not in said
    lines = [json.loads(line) for line in said.splitlines()]
    assert {line["event"] for line in lines} <= set(EVENTS)
    assert {(line["gateway"], line["group"]) for line in lines} == {("gw", group)}
    settled = [line for line in lines if line["event"] == "attempt_settled"]
    assert {line["outcome"] for line in settled} == {"succeeded", "failed"}
    assert all(line["request_id"] and line["pool"] == "default" for line in settled)
    failed = [line for line in lines if line["event"] == "endpoint_call_failed"]
    assert failed
    assert all(line["request_id"] and line["pool"] == "default" for line in failed)
