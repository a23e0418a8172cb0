"""The web application: one page for all addresses of a group, signing in and out, and what keeps strangers out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from nicegui import Client, ui
from nicegui.events import GenericEventArguments

from dispatch.config.loopback import is_loopback_name
from dispatch.errors import AccessRefused, DispatchError
from dispatch.studio.acts import ACTS
from dispatch.studio.asking import Counter, Question
from dispatch.studio.looks import LOOKS
from dispatch.studio.past import PAST, keep_facts
from dispatch.studio.reader import Reader
from dispatch.studio.stage import HEAD, STYLE, Stage
from dispatch.studio.visitors import SESSION_S, Door, Sessions, Visitor
from dispatch.telemetry.history.queries import History

log = structlog.get_logger(__name__)

COOKIE = "fabric-studio"
_FORM_BYTES = 8_192
_CHECK_AGAIN_S = 2.0
_FIRST_LOOK_S = 3.0
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'"
)
"""NiceGUI starts pages by inline scripts and compiles templates; nothing may be loaded from, or sent, elsewhere."""


@dataclass(slots=True)
class Studio:
    """What the pages work with, by group: a reader, a door, and the history unless that is off."""

    readers: Mapping[str, Reader]
    doors: Mapping[str, Door]
    histories: Mapping[str, History] = field(default_factory=dict)
    sessions: Sessions = field(default_factory=Sessions)


def create_app(studio: Studio) -> FastAPI:
    """Make the application; its lifespan runs the readers."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        async with AsyncExitStack() as stack:
            tasks = [
                asyncio.create_task(reader.run(), name=f"reader {name}") for name, reader in studio.readers.items()
            ]
            for group, history in studio.histories.items():
                tasks.append(asyncio.create_task(keep_facts(studio.readers[group], history), name="history facts"))
            stack.push_async_callback(_end, tasks)
            with suppress(TimeoutError):  # whoever comes first finds the group read
                async with asyncio.timeout(_FIRST_LOOK_S):
                    await asyncio.gather(*(reader.tried.wait() for reader in studio.readers.values()))
            yield

    app = FastAPI(title="Fabric Dispatch Studio", lifespan=lifespan, openapi_url=None)
    app.middleware("http")(_guarded)
    pages = _Pages(studio)
    app.post("/sign-in")(pages.sign_in)
    app.post("/sign-out")(pages.sign_out)
    for path in ("/", "/signals", "/g/{group}", "/g/{group}/{rest:path}"):
        ui.page(path, title="Studio", response_timeout=20)(pages.builder())
    ui.run_with(
        app, title="Studio", dark=None, tailwind=False, reconnect_timeout=60, binding_refresh_interval=None,
        show_welcome_message=False, favicon=_FAVICON, language="en-US",
    )  # fmt: skip
    return app


_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="none" stroke="#4d9be6" stroke-width="1.9">'
    '<path d="M2 4h4.2L9 8 6.2 12H2M2 8h9"/><circle cx="13.4" cy="8" r="1.6" fill="#4d9be6"/></svg>'
)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _guarded(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "same-origin"
    return response


class _Pages:
    """Builds pages and answers what they ask."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._counter = Counter(looks={**LOOKS, **PAST}, acts=ACTS)

    def builder(self) -> Callable[..., Awaitable[Response | None]]:
        """Return a page builder of its own: NiceGUI knows pages by their function."""

        async def build(request: Request, client: Client, group: str = "") -> Response | None:
            return await self._build(request, client, group)

        return build

    async def _build(self, request: Request, client: Client, group: str) -> Response | None:
        groups = list(self._studio.readers)
        if not group and request.url.path.rstrip("/") != "/signals" and len(groups) == 1:
            return RedirectResponse(f"{_prefix(request)}/g/{quote(groups[0], safe='')}")
        if not group and len(groups) == 1:
            group = groups[0]
        ui.add_head_html(HEAD)
        ui.add_css(STYLE)
        props: dict[str, Any] = {"prefix": _prefix(request), "group": group, "groups": groups, "view": "group"}
        if not group:
            Stage(props | {"view": "groups"}, lambda _: None)
            return None
        try:
            visitor = await self._visitor(request, group)
        except AccessRefused as error:
            client.status_code = 401
            failed = request.query_params.get("refused") == "1" or self._token(request, group) is not None
            Stage(props | {"view": "sign-in", "problem": str(error) if failed else ""}, lambda _: None)
            return None
        except DispatchError as error:
            client.status_code = 503
            Stage(props | {"view": "away", "problem": str(error)}, lambda _: None)
            return None
        seat = _Seat(self._studio, group, self._token(request, group), visitor, client)
        seat.stage = Stage(props | {"me": visitor.shown()}, lambda event: self._asked(seat, event))
        client.on_connect(seat.sit)
        client.on_disconnect(seat.leave)
        client.on_delete(seat.leave)
        return None

    async def _asked(self, seat: _Seat, event: GenericEventArguments) -> None:
        asked = event.args if isinstance(event.args, dict) else {}
        number, what, args = asked.get("n"), asked.get("what"), asked.get("args")
        if not isinstance(number, int) or not isinstance(what, str) or not isinstance(args, dict):
            return
        try:
            visitor = await seat.check()
        except DispatchError as error:
            answer: dict[str, Any] = {"ok": False, "result": {"message": str(error), "kind": type(error).__name__}}
        else:
            question = Question(self._studio.readers[seat.group], visitor, args, self._studio.histories.get(seat.group))
            answer = await self._counter.answer(what, question)
        seat.tell("answer", json.dumps({"n": number, **answer}))

    async def _visitor(self, request: Request, group: str) -> Visitor:
        door = self._studio.doors.get(group)
        if door is None:
            raise AccessRefused(f"No group {group[:80]} that you can read.")
        visitor = await door.visitor(self._token(request, group), _address(request))
        if visitor.anonymous:
            _require_own_host(request)
        return visitor

    def _token(self, request: Request, group: str) -> str | None:
        return self._studio.sessions.token(request.cookies.get(COOKIE), group)

    async def sign_in(self, request: Request) -> Response:
        """Take a key from the form, and go back to where it was asked for."""
        form = await _form(request)
        group, token, target = (form.get(name, "") for name in ("group", "key", "next"))
        back = target if target.startswith("/") and not target.startswith(("//", "/\\")) else "/"
        door = self._studio.doors.get(group)
        if door is None:
            return RedirectResponse(_with_mark(back), status_code=303)
        try:
            await door.visitor(token.strip(), _address(request))
        except AccessRefused:
            log.info("sign_in_refused", group=group[:80])
            return RedirectResponse(_with_mark(back), status_code=303)
        except DispatchError:
            return RedirectResponse(back, status_code=303)
        response = RedirectResponse(_without_mark(back), status_code=303)
        name = self._studio.sessions.sign_in(request.cookies.get(COOKIE), group, token.strip())
        secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        response.set_cookie(COOKIE, name, max_age=SESSION_S, httponly=True, samesite="lax", secure=secure)
        return response

    async def sign_out(self, request: Request) -> Response:
        """Forget what this browser has shown."""
        self._studio.sessions.sign_out(request.cookies.get(COOKIE))
        response = RedirectResponse(f"{_prefix(request)}/", status_code=303)
        response.delete_cookie(COOKIE)
        return response


@dataclass(slots=True)
class _Seat:
    """One open page: what it is told, and who sits there."""

    studio: Studio
    group: str
    token: str | None
    visitor: Visitor
    client: Client
    stage: Stage | None = None
    stop: Callable[[], None] | None = None
    watch: asyncio.Task[None] | None = None

    def sit(self) -> None:
        """Tell the page everything, and then what changes. A page that was away begins anew."""
        self.leave()
        self.stop = self.studio.readers[self.group].listen(lambda text: self.tell("take", text))
        self.watch = asyncio.create_task(self._stay_known(), name="seat")

    def leave(self) -> None:
        """Stop telling."""
        if self.stop is not None:
            self.stop()
            self.stop = None
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None

    def tell(self, method: str, text: str) -> None:
        """Call a function of the page with JSON, which is also JavaScript."""
        if not self.client.is_deleted:
            self.client.run_javascript(f"window.fdStudio.{method}({text})")

    async def check(self) -> Visitor:
        """Say anew who sits here: his key may have been revoked.

        Raises:
            DispatchError: he is not known any more, or it cannot be said now.
        """
        self.visitor = await self.studio.doors[self.group].visitor(self.token, self.client.ip)
        return self.visitor

    async def _stay_known(self) -> None:
        """Send whoever's key is revoked to the sign-in. While keys cannot be checked, he may go on looking."""
        while True:
            await asyncio.sleep(_CHECK_AGAIN_S)
            before = self.visitor
            with suppress(DispatchError):
                try:
                    visitor = await self.check()
                except AccessRefused:
                    self.tell("signedOut", "{}")
                    self.leave()
                    return
                if visitor != before:
                    self.tell("greet", json.dumps(visitor.shown()))


def _prefix(request: Request) -> str:
    forwarded = quote(request.headers.get("X-Forwarded-Prefix", ""), safe="/-._~")
    return f"{forwarded}{request.scope.get('root_path', '')}".rstrip("/")


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"


def _require_own_host(request: Request) -> None:
    """Refuse a name that another site lets point here (DNS rebinding): a loopback listener has loopback names."""
    server = request.scope.get("server")
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    if server and is_loopback_name(str(server[0])) and host and not is_loopback_name(host):
        raise AccessRefused(
            f"Studio listens on loopback and is not known as {host[:100]!r}; behind a proxy it needs keys"
        )


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _FORM_BYTES:
            return {}
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _with_mark(target: str) -> str:
    return f"{_without_mark(target)}{'&' if '?' in _without_mark(target) else '?'}refused=1"


def _without_mark(target: str) -> str:
    return target.replace("?refused=1", "").replace("&refused=1", "")
