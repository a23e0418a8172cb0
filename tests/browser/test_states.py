"""What a page shows when something is away: Valkey, Studio, gateways, the config. Nothing old passes for new."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opens, Watched, document
from tests.support.groups import configure, unique_group
from tests.support.studio import Hand, address_of, studio
from tests.support.valkey import ValkeyProcess

BROKEN_OFF = ("WebSocket", "ERR_CONNECTION", "Failed to load resource", "net::")


def filled(server: ValkeyProcess) -> Hand:
    group = unique_group()
    configure(server.url, group, document() | {"lease_ms": 3_600_000})
    hand = Hand(server.url, group)
    hand.submit("eval-nightly", 3)
    return hand


def test_valkey_stops_and_comes_back(
    start_valkey: Callable[..., ValkeyProcess], opens: Opens, shot: Callable[[Page, str], None]
) -> None:
    server = start_valkey(aof=True)
    hand = filled(server)
    with studio(server.url, hand.group, allow_anonymous_writes=True) as process:
        page = opens(f"{address_of(process)}/g/{hand.group}")
        waiting = page.locator(".lane[data-id=eval-nightly] .c-wait b")
        expect(waiting).to_have_text("3")
        page.evaluate("window.kept = true")
        server.stop()
        banner = page.locator(".banner")
        expect(banner).to_contain_text("Valkey does not answer since", timeout=20_000)
        expect(banner).to_contain_text(re.compile(r"Figures are as of \d\d:\d\d:\d\d"))
        expect(page.locator(".pill")).to_contain_text("Stale since")
        expect(page.locator(".studio.stale")).to_be_visible()
        expect(waiting).to_have_text("3")  # the last figure, dimmed
        page.get_by_role("button", name="Acts of eval-nightly").click()
        expect(page.get_by_role("menuitem", name="Pause…")).to_be_disabled()
        page.keyboard.press("Escape")
        shot(page, "valkey-away")
        server.start()
        expect(page.locator(".studio[data-fresh=fresh]")).to_be_visible(timeout=30_000)
        expect(banner).to_have_count(0)
        hand.submit("eval-nightly")
        expect(waiting).to_have_text("4")
        assert page.evaluate("window.kept") is True  # it was never loaded anew


def test_studio_goes_and_the_page_says_so(valkey: ValkeyProcess, opens: Opens, watched: Watched) -> None:
    watched.allowed = BROKEN_OFF
    hand = filled(valkey)
    with studio(valkey.url, hand.group) as process:
        page = opens(f"{address_of(process)}/g/{hand.group}")
        expect(page.locator(".studio[data-fresh=fresh]")).to_be_visible()
        process.end(signal.SIGKILL)
        expect(page.locator(".banner")).to_contain_text("Studio does not answer since", timeout=30_000)
        expect(page.locator(".lane[data-id=eval-nightly] .c-wait b")).to_have_text("3")


def test_it_ends_in_order(valkey: ValkeyProcess) -> None:
    hand = filled(valkey)
    with studio(valkey.url, hand.group) as process:
        assert process.end() == 0


def test_without_gateways_and_without_a_config(valkey: ValkeyProcess, opens: Opens) -> None:
    hand = filled(valkey)
    nobody = unique_group()
    with studio(valkey.url, hand.group, nobody) as process:
        page = opens(f"{address_of(process)}/g/{hand.group}")
        expect(page.locator(".lane[data-id=eval-nightly] .why")).to_have_text("No gateway is live")
        expect(page.locator(".attention")).to_contain_text("No gateway is live", timeout=20_000)
        expect(page.get_by_text(f"dispatch gateway --group {hand.group}")).to_be_visible()
        page.goto(f"{address_of(process)}/g/{nobody}")
        expect(page.get_by_text(f"{nobody} has no pools yet.")).to_be_visible()
        page.goto(f"{address_of(process)}/")
        page.get_by_role("link", name=hand.group).click()
        expect(page.locator("h1")).to_contain_text(hand.group)


def test_history_that_is_off_or_away_leaves_live_pages_alone(valkey: ValkeyProcess, opens: Opens) -> None:
    hand = filled(valkey)
    with studio(valkey.url, hand.group) as process:
        page = opens(f"{address_of(process)}/g/{hand.group}/history")
        expect(page.get_by_text("History is off. Set history.url to keep finished requests.")).to_be_visible()
        page.close()
    with studio(valkey.url, hand.group, history="clickhouse://127.0.0.1:9/x") as process:
        page = opens(f"{address_of(process)}/g/{hand.group}/history")
        expect(page.get_by_role("alert")).to_contain_text("Live pages are not affected.")
        page.get_by_role("link", name=re.compile("^Overview$")).click()
        expect(page.locator(".lane[data-id=eval-nightly] .c-wait b")).to_have_text("3")


def test_who_was_asked_for_no_key_may_look_and_not_change(valkey: ValkeyProcess, opens: Opens) -> None:
    hand = filled(valkey)
    with studio(valkey.url, hand.group) as process:
        page = opens(f"{address_of(process)}/g/{hand.group}/pools/eval-nightly")
        expect(page.get_by_role("button", name="Pause…")).to_be_disabled()
        args = '{ pool: "eval-nightly", action: "pause", reason: "x" }'
        said = page.evaluate(f'fdStudio.ask("stop_pool", {args}).then(() => "done", error => error.message)')
        assert said.startswith("You can look, not change")
        assert "paused" not in hand.pool("eval-nightly")


def test_another_site_s_name_for_this_machine_is_refused(valkey: ValkeyProcess) -> None:
    hand = filled(valkey)
    with studio(valkey.url, hand.group, allow_anonymous_writes=True) as process:
        asked = urllib.request.Request(f"{address_of(process)}/g/{hand.group}", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(asked, timeout=20)


def test_many_who_only_knock_cost_valkey_nothing(valkey: ValkeyProcess, opens: Opens, tmp_path: Path) -> None:
    """Field report 57a: pages that were loaded and never opened, and tabs that are gone."""
    hand = filled(valkey)
    with studio(valkey.url, hand.group, log=tmp_path / "log") as process:
        url = f"{address_of(process)}/g/{hand.group}"
        page = opens(url)
        expect(page.locator(".studio[data-fresh=fresh]")).to_be_visible()
        alone = calls_in_3_s(valkey, page)
        for _ in range(60):
            with urllib.request.urlopen(url, timeout=20) as answer:
                assert answer.status == 200
        tabs = [page.context.new_page() for _ in range(4)]
        for tab in tabs:
            tab.goto(url)
            expect(tab.locator(".studio[data-fresh=fresh]")).to_be_visible()
        together = calls_in_3_s(valkey, page)
        for tab in tabs:
            tab.close()
        assert together < alone * 2 + 10, (alone, together)
        assert "Traceback" not in (tmp_path / "log").read_text()


def calls_in_3_s(valkey: ValkeyProcess, page: Page) -> int:
    """Count snapshot calls of three seconds on the server."""

    def calls() -> int:
        with redis.Redis(host="127.0.0.1", port=valkey.port) as client:
            stats = client.info("commandstats")
            return int(stats.get("cmdstat_fcall_ro", {"calls": 0})["calls"])

    before = calls()
    page.wait_for_timeout(3_000)
    return calls() - before


def test_behind_a_prefix_nothing_is_asked_for_outside_it(valkey: ValkeyProcess, opens: Opens, watched: Watched) -> None:
    hand = filled(valkey)
    with studio(valkey.url, hand.group) as process:
        page = opens("about:blank", extra_http_headers={"X-Forwarded-Prefix": "/ops/studio"})
        base = address_of(process)
        page.route("**/ops/studio/**", lambda route: route.continue_(url=route.request.url.replace("/ops/studio", "")))
        watched.allowed = ("WebSocket", "socket.io")
        page.goto(f"{base}/ops/studio/g/{hand.group}")
        expect(page.locator(".bar nav a").first).to_have_attribute("href", f"/ops/studio/g/{hand.group}")
        outside = [url for url in watched.addresses if url.startswith("http") and "/ops/studio/" not in url]
        assert outside == []
