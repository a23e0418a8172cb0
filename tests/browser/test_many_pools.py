"""A thousand pools and ten thousand waiting requests: soon there, cheap to update, and still readable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opens
from tests.support.groups import configure, unique_group
from tests.support.studio import Hand, address_of, studio
from tests.support.valkey import ValkeyProcess

POOLS, WAITING = 1_000, 10_000

PATCHES = """async ([patches, rows]) => {
  const ids = Object.keys(fdStudio.S.pools), took = [];
  let long = 0;
  const note = list => { for (const one of list.getEntries()) long = Math.max(long, one.duration); };
  const seen = new PerformanceObserver(note);
  seen.observe({ entryTypes: ["longtask"] });
  for (let n = 0; n < patches; n++) {
    const set = {};
    for (let k = 0; k < rows; k++) {
      set[ids[(n * 37 + k * 5) % ids.length]] = { waiting: n + k, share: k / 1000, arriving: n };
    }
    const began = performance.now();
    fdStudio.take({ at: Date.now(), set: { pools: set } });
    await Vue.nextTick();
    document.body.offsetHeight;
    took.push(performance.now() - began);
    await new Promise(later => setTimeout(later, 50));
  }
  seen.disconnect();
  took.sort((a, b) => a - b);
  return { middle: took[took.length >> 1], most: took[took.length - 1], long };
}"""


def big_document(pools: int) -> dict[str, Any]:
    return {
        "policy": "drr", "total_concurrent_dispatch": 64, "max_queued": 1_000_000,
        "pools": [{"pool_id": f"tenant-{at:04d}", "quantum": 1 + at % 5, "max_concurrent": 4} for at in range(pools)],
        "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def crowd(valkey: ValkeyProcess) -> Iterator[tuple[str, Hand]]:
    """A thousand pools with work in a tenth of them."""
    group = unique_group()
    configure(valkey.url, group, big_document(POOLS))
    hand = Hand(valkey.url, group)
    for at in range(100):
        hand.submit(f"tenant-{at * 10:04d}", WAITING // 100)
    hand.claim(40)
    with studio(valkey.url, group, allow_anonymous_writes=True) as process:
        yield address_of(process), hand


def test_a_thousand_pools_are_there_soon_and_cheap_to_update(
    crowd: tuple[str, Hand], opens: Opens, shot: Callable[[Page, str], None]
) -> None:
    url, hand = crowd
    page = opens(f"{url}/g/{hand.group}")  # the first load fills the browser's cache
    expect(page.locator(".heat i")).to_have_count(POOLS)
    began = time.monotonic()
    page.reload()
    expect(page.locator(".total", has_text="Waiting")).to_contain_text("\u202f")
    took = time.monotonic() - began
    expect(page.locator(".lane[data-id]")).to_have_count(20)
    expect(page.locator(".states")).to_contain_text("flowing")
    shot(page, "overview-1000-pools")
    cost = page.evaluate(PATCHES, [20, 200])
    print(f"first content {took:.2f} s, patch of 200 rows {cost}")  # noqa: T201 - what was measured
    assert took < 10, took  # usually well under 2 s
    assert cost["middle"] < 250, cost  # usually about 10 ms


def test_all_of_them_can_be_found_and_read(crowd: tuple[str, Hand], opens: Opens) -> None:
    url, hand = crowd
    page = opens(f"{url}/g/{hand.group}/pools?f=tenant-05")
    expect(page.locator(".lane[data-id]")).to_have_count(100)
    page.locator("#pool-filter").fill("tenant-0999")
    expect(page.locator(".lane[data-id]")).to_have_count(1)
    page.locator("#pool-filter").fill("")
    page.locator(".heat").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "sel=tenant-0001" in page.url


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_stays_flat_over_ten_minutes_of_updates(crowd: tuple[str, Hand], opens: Opens) -> None:
    url, hand = crowd
    page = opens(f"{url}/g/{hand.group}")
    expect(page.locator(".heat i")).to_have_count(POOLS)
    session = page.context.new_cdp_session(page)

    def used() -> float:
        session.send("HeapProfiler.collectGarbage")
        return float(session.send("Runtime.getHeapUsage")["usedSize"])

    page.evaluate(PATCHES, [100, 200])
    before = used()
    for _ in range(10):
        page.evaluate(PATCHES, [900, 200])
    after = used()
    assert after < before * 1.3 + 5_000_000, (before, after)
