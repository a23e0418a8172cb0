"""The page before a whole running fabric: a gateway process, a simulated backend, callers over HTTP."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PLANTED, Opens, Watched
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.studio import Hand, Process, address_of, studio
from tests.support.valkey import ValkeyProcess


@dataclass(frozen=True)
class Fabric:
    """A running fabric and its page; `call` makes a call whose answer comes later: its status."""

    page: str
    hand: Hand
    gateway: GatewayProcess
    callers: ThreadPoolExecutor

    def call(self, pool: str, tokens: int) -> Future[int]:
        return self.callers.submit(_call, f"{self.gateway.url}/pools/{pool}/v1/chat/completions", tokens)


def _call(url: str, tokens: int) -> int:
    body = {"model": "m", "max_tokens": tokens, "messages": [{"role": "user", "content": PLANTED}]}
    asked = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return int(refused.code)


@pytest.fixture(scope="module")
def fabric(valkey: ValkeyProcess) -> Iterator[Fabric]:
    group = unique_group()
    with ExitStack() as exits:
        words = ("--port", "0", "--ttft-ms", "5", "--token-ms", "50", "--spread", "0", "--output-tokens", "2000")
        backend = exits.enter_context(Process("simulate", *words)).first_line
        document: dict[str, Any] = default_document(backend)
        configure(valkey.url, group, document | {"lease_ms": 4_000, "total_concurrent_dispatch": 2})
        gateway = GatewayProcess(valkey.url, group, gateway_id="gw-fra-1").launch()
        exits.callback(gateway.close)
        ends = time.monotonic() + 60
        while gateway.event("listening") is None:
            assert gateway.code is None, gateway.stderr
            assert time.monotonic() < ends, gateway.stderr
            time.sleep(0.05)
        page = exits.enter_context(studio(valkey.url, group, allow_anonymous_writes=True))
        callers = exits.enter_context(ThreadPoolExecutor(8))
        yield Fabric(f"{address_of(page)}/g/{group}", Hand(valkey.url, group), gateway, callers)


def test_a_running_call_is_seen_cancelled_and_its_caller_told(fabric: Fabric, opens: Opens, watched: Watched) -> None:
    page = opens(f"{fabric.page}/inflight")
    answer = fabric.call("interactive", 2_000)
    row = page.locator("tbody tr[data-request]")
    expect(row).to_have_count(1, timeout=20_000)
    expect(row).to_contain_text("gw-fra-1")
    request_id = row.get_attribute("data-request")
    row.get_by_role("button", name="Cancel…").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("wrong prompt")
    page.get_by_role("button", name="Cancel request").click()
    expect(page.get_by_text("Asked to stop; the backend may still finish.")).to_be_visible()
    assert answer.result(60) == 503
    expect(row).to_have_count(0)
    page.goto(f"{fabric.page}/requests/{request_id}")
    expect(page.locator(".page-head")).to_contain_text("cancelled")
    assert not [frame for frame in watched.frames if PLANTED in frame]


def test_what_finished_and_where_the_time_went(fabric: Fabric, opens: Opens) -> None:
    page = opens(fabric.page)
    answers = [fabric.call(pool, 3) for pool in ("interactive", "backfill", "default") for _ in range(2)]
    assert [answer.result(60) for answer in answers] == [200] * 6
    expect(page.locator(".total.time")).to_contain_text("run", timeout=20_000)
    expect(page.locator(".gateway[data-id=gw-fra-1]")).to_contain_text("0 / 64")
    page.goto(f"{fabric.page}/pools/backfill")
    expect(page.get_by_role("table", name="Requests that ended lately").locator("tbody tr")).to_have_count(2)
    assert fabric.hand.pool("backfill")["endings"] == {"succeeded": 2}


def test_a_gateway_that_dies_is_missed(fabric: Fabric, opens: Opens) -> None:
    page = opens(fabric.page)
    fabric.call("interactive", 2_000)
    expect(page.locator(".longest")).to_have_count(1, timeout=20_000)
    fabric.gateway.signal(signal.SIGKILL)
    gateway = page.locator(".gateway[data-id=gw-fra-1]")
    expect(gateway).to_contain_text("gone", timeout=60_000)
    expect(page.locator(".attention")).to_contain_text("gw-fra-1 is gone", timeout=20_000)
