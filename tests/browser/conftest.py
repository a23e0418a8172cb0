"""Real Chromium before a running Studio, which shows a group on a real Valkey, with a history behind it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Playwright, WebSocket, sync_playwright

from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.spans import spans_of
from tests.support.groups import configure, unique_group
from tests.support.history import PASSWORD, PASSWORD_ENV, RESOURCE, queued_only, record, served_history
from tests.support.studio import Hand, address_of, studio
from tests.support.valkey import ValkeyProcess

SHOTS = Path(__file__).parent / "shots"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
PLANTED = "PLANTED-PROMPT-9b1d"
SECRET = "PLANTED-SECRET-77aa"
HOSTILE = '<img src=x onerror="window.hit=1">{{7*7}}'
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(180))
            if not CHROMIUM:
                item.add_marker(pytest.mark.skip(reason="no Chromium is installed (Debian: apt-get install chromium)"))


def document() -> dict[str, Any]:
    """Return a config with something to see: bounds, a gate, an address with a secret in it."""
    return {
        "policy": "drr", "total_concurrent_dispatch": 16, "lease_ms": 3_600_000, "default_endpoint": "vllm-text",
        "pools": [
            {"pool_id": "interactive", "quantum": 4, "min_concurrent": 2, "max_concurrent": 8},
            {"pool_id": "document-extract", "quantum": 3, "max_concurrent": 4},
            {"pool_id": "backfill", "quantum": 1, "max_concurrent": 2, "endpoint": "litellm"},
            {"pool_id": "eval-nightly", "quantum": 1},
        ],
        "endpoints": [
            {"endpoint_id": "vllm-text", "url": "http://127.0.0.1:9/v1", "gate": "vllm", "max_concurrent": 12},
            {"endpoint_id": "litellm", "url": "http://127.0.0.1:9/v1", "api_key_env": "LITELLM_KEY"},
        ],
    }  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """A group with work in it, and the page that shows it."""

    url: str
    hand: Hand
    waiting: tuple[str, ...]
    running: tuple[str, ...]

    def at(self, path: str = "") -> str:
        return f"{self.url}/g/{self.hand.group}{path}"


@pytest.fixture(scope="module")
def scene(valkey: ValkeyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A group that was filled once; tests that change something use pools or groups of their own."""
    group = unique_group()
    configure(valkey.url, group, document())
    hand = Hand(valkey.url, group)
    body = f'{{"messages": [{{"content": "{PLANTED}"}}]}}'.encode()
    facts: dict[str, Any] = {"body": body, "body_bytes": len(body)}
    hand.submit("document-extract", 30, model=HOSTILE, producer_id="worker-11", **facts)
    hand.submit("backfill", 9, **facts)
    hand.submit("interactive", 12, **facts)
    waiting = hand.submit("eval-nightly", 7, **facts)
    running = hand.claim(12)
    with ExitStack() as exits:
        folder = tmp_path_factory.mktemp("studio")
        environment = {PASSWORD_ENV: PASSWORD, "LITELLM_KEY": SECRET}
        exits.enter_context(pytest.MonkeyPatch.context()).setenv(PASSWORD_ENV, PASSWORD)
        served = exits.enter_context(served_history(folder / "history"))
        _fill(served.url, group)
        page = studio(
            valkey.url, group, allow_anonymous_writes=True, history=f"{served.url}/default",
            history_password_env=PASSWORD_ENV, environment=environment, log=folder / "studio.log",
        )  # fmt: skip
        yield Scene(address_of(exits.enter_context(page)), hand, tuple(waiting), tuple(running))


def _fill(url: str, group: str) -> None:
    """Write some history, one of it with a message that quotes a prompt."""
    store = HistoryStore(f"{url}/default", password_env=PASSWORD_ENV)
    store.init(90)
    rows = [record(at, pool_id=("interactive", "backfill")[at % 2], request_id=f"past-{at:04d}") for at in range(40)]
    rows.append(record(41, request_id="past-failed", ending="failed", outcome="failed", status=500,
                       error_type="endpoint_failed", error_message=f"cannot read {PLANTED}"))  # fmt: skip
    rows.append(queued_only(42, request_id="past-expired"))
    store.write([span for row in rows for span in spans_of(row, group, RESOURCE)])
    store.close()


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    """Playwright, for one file: while it is on, its event loop runs in this thread, and no other one can."""
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
    yield started
    started.close()


class Watched:
    """What a page said and asked for. Checked when a test ends."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.frames: list[str] = []
        self.allowed: tuple[str, ...] = ()

    def follow(self, page: Page) -> None:
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.addresses.append(request.url))
        page.on("websocket", self._socket)

    def _socket(self, socket: WebSocket) -> None:
        self.addresses.append(socket.url)
        socket.on("framereceived", lambda frame: self.frames.append(str(frame)))

    def check(self) -> None:
        """Hold what every page promises: it complains of nothing, and talks to its own machine only."""
        told = [text for text in self.errors if not any(word in text for word in self.allowed)]
        assert not told, told
        hosts = {urlsplit(url).hostname for url in self.addresses if not url.startswith(("data:", "blob:"))}
        assert hosts <= {"127.0.0.1", "localhost"}, hosts


@pytest.fixture
def watched() -> Watched:
    return Watched()


Opens = Callable[..., Page]


@pytest.fixture
def opens(browser: Browser, watched: Watched) -> Iterator[Opens]:
    """Open an address in a context of its own; options are the context's (viewport, color_scheme)."""
    with ExitStack() as exits:

        def open_page(url: str, **options: Any) -> Page:
            usual: dict[str, Any] = {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"}
            context = browser.new_context(**usual | options)
            exits.callback(context.close)
            context.set_default_timeout(30_000)
            page = context.new_page()
            watched.follow(page)
            page.goto(url)
            return page

        yield open_page
        watched.check()


@pytest.fixture
def shot() -> Callable[[Page, str], None]:
    """Keep a picture of a page, in both themes, beside the tests."""

    def keep(page: Page, name: str) -> None:
        SHOTS.mkdir(exist_ok=True)
        for theme in ("light", "dark"):
            page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
            page.screenshot(path=SHOTS / f"{name}-{theme}.png", full_page=True)

    return keep
