"""What the dashboard and the alert rules name is what a live gateway exports, and so is all of the catalogue."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import httpx
import pytest
import yaml

from dispatch.fabric.functions import pool_pause
from dispatch.fabric.sync import BlockingConnection
from dispatch.telemetry import dashboards
from dispatch.telemetry.metrics import reading
from dispatch.telemetry.metrics.catalogue import CATALOGUE
from dispatch.telemetry.recorder import RecorderStats
from tests.support.engines import BROKEN, OK, Engine, text_of
from tests.support.producing import say, until
from tests.support.promql import selectors
from tests.support.scrape import Scrape, scrape
from tests.support.stack import stack
from tests.support.streams import DONE, HEAD, chunk, data
from tests.support.stub import Fin, Script, SeenRequest, Write
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
PAGE = b"vllm:num_requests_waiting 1\nvllm:generation_tokens_total 5\n"
STREAM = Script((Write(HEAD + data(chunk("a", "stop")) + DONE), Fin()))
FILES = resources.files(dashboards)
RARE = {
    "llm_dispatch_function_errors_total": "no call has failed",
    "llm_dispatch_endpoint_gate_token_seconds": "takes two samples while tokens come",
}
"""What even the gateway of this test does not export, and why."""


def named() -> set[str]:
    """Return every metric that the files name."""
    rules = yaml.safe_load(FILES.joinpath("alerts.yaml").read_text("utf-8"))["groups"]
    panels = json.loads(FILES.joinpath("dashboard.json").read_text("utf-8"))["panels"]
    queries = [rule["expr"] for group in rules for rule in group["rules"]]
    queries += [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return {one.name for query in queries for one in selectors(query.replace("$__rate_interval", "5m"))}


async def busy_page(url: str, engine: Engine) -> Scrape:
    """Scrape a gateway that has seen some of everything."""

    def answer(request: SeenRequest) -> Script:
        if json.loads(request.body).get("stream"):
            return STREAM
        return BROKEN if text_of(request) == "break" else OK

    engine.calls = answer
    endpoint = {
        "endpoint_id": "default", "url": engine.url, "max_concurrent": 1, "breaker_failures": 100, "gate": "vllm",
        "gate_target": 50, "gate_poll_ms": 100,
    }  # fmt: skip
    pools = [{"pool_id": "default", "max_concurrent": 5}, {"pool_id": "waits"}, {"pool_id": "shut", "enabled": False}]
    document: dict[str, Any] = {"endpoints": [endpoint], "pools": pools, "total_concurrent_dispatch": 2}
    async with (
        stack(url, engine.url, metrics=True, **document) as path,
        httpx.AsyncClient(base_url=path.url, timeout=60) as client,
    ):
        assert path.metrics is not None
        path.metrics.watch(lambda: RecorderStats(sink="history", lag=0, pending=0))
        path.metrics.counting.delivered("default", 0.01)
        for text, stream in (("a", False), ("break", False), ("b", True)):
            body = {"model": "m", "messages": say(text), "stream": stream}
            await client.post(CHAT, json=body)
        await client.post(f"/pools/shut{CHAT}", json={"model": "m", "messages": say("x")})
        with BlockingConnection(url) as connection:
            connection.run(path.group, pool_pause("waits", "pause", actor="test"))
        await path.client.submit(model="m", messages=say("x"), pool="waits")
        await until(lambda: path.section("endpoints")["rows"][0]["gate"]["waiting"] is not None)
        return await scrape(path.url)


async def test_what_is_named_is_exported(valkey: ValkeyProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FRESH_S", 0.0)
    async with Engine(page=PAGE) as engine:
        page = await busy_page(valkey.url, engine)
    assert len(named()) > 40
    assert named() - page.names() <= RARE.keys()
    shown = {name for family in CATALOGUE.values() for name in family.shown()}
    assert shown - page.names() == RARE.keys()
    assert {name for name in page.names() if name.startswith(("llm_", "gen_ai_"))} <= shown
    assert all(page.helps.values())
    kinds = {family.shown()[0]: family.kind for family in CATALOGUE.values()}
    for name in page.names() & kinds.keys():
        base = name.removesuffix("_bucket").removesuffix("_total")
        assert page.kinds[base] == kinds[name], name
