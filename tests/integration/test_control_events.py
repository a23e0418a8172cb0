"""The event stream: what changes is told once and in order, also to who comes back; the stream ends when it should."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import pytest

from dispatch.fabric.functions import snapshot_publish
from dispatch.fabric.schema import key
from dispatch.ingress.control import watching
from tests.support.control import PATIENT, ControlStack, control_stack, told
from tests.support.producing import eye, until
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio


@dataclass
class Heard:
    """What came of one stream. `comments` counts the lines that say nothing."""

    events: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)
    comments: int = 0
    ended: bool = False
    changed: anyio.Event = field(default_factory=anyio.Event)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [data for kind, _, data in self.events if kind == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not holds():
                await self.changed.wait()
                self.changed = anyio.Event()

    def take(self, lines: list[str]) -> None:
        fields = dict(line.partition(": ")[::2] for line in lines if not line.startswith(":"))
        self.comments += sum(line.startswith(":") for line in lines)
        if "data" in fields:
            self.events.append((fields["event"], fields.get("id"), json.loads(fields["data"])))
        self.changed.set()


async def listen(answer: httpx.Response, heard: Heard) -> None:
    lines: list[str] = []
    try:
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
            else:
                heard.take(lines)
                lines = []
    except httpx.ReadError:
        pass
    heard.ended = True
    heard.changed.set()


@asynccontextmanager
async def watching_events(control: ControlStack, role: str = "observe", **headers: str) -> AsyncIterator[Heard]:
    heard = Heard()
    async with (
        control.http(role).stream("GET", "/events", headers=headers) as answer,
        anyio.create_task_group() as tasks,
    ):
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        tasks.start_soon(listen, answer, heard)
        await heard.until(lambda: heard.of("snapshot") != [])
        yield heard
        tasks.cancel_scope.cancel()


@pytest.fixture
async def control(valkey: ValkeyProcess) -> AsyncIterator[ControlStack]:
    async with control_stack(valkey.url) as running:
        yield running


async def pause(control: ControlStack, pool: str, reason: str = "") -> None:
    assert (await control.http().post(f"/pools/{pool}/pause", json={"reason": reason})).status_code == 200


async def resume(control: ControlStack, pool: str) -> None:
    assert (await control.http().post(f"/pools/{pool}/resume")).status_code == 200


async def test_changes_come_as_they_happen_with_their_id(control: ControlStack) -> None:
    async with watching_events(control) as heard:
        first = heard.of("snapshot")[0]
        assert (first["pending"], first["generation"], first["in_flight"]) == (0, 1, 0)
        assert heard.of("change") == []  # what was before is not told
        await pause(control, "backfill", "why")
        await heard.until(lambda: heard.of("change") != [])
        [(_, event_id, change)] = [one for one in heard.events if one[0] == "change"]
        assert (change["kind"], change["pool"], change["reason"], change["event_id"]) == (
            "pause", "backfill", "why", event_id,
        )  # fmt: skip
        control.hand.submit("default", 3)
        await heard.until(lambda: heard.of("snapshot")[-1]["pending"] == 3)
        assert heard.of("gap") == []


async def test_who_comes_back_goes_on_after_what_it_saw(control: ControlStack) -> None:
    async with watching_events(control) as heard:
        await pause(control, "backfill")
        await heard.until(lambda: heard.of("change") != [])
        last = heard.of("change")[-1]["event_id"]
    for number in range(70):  # more than one look brings
        await (resume if number % 2 else pause)(control, "default")
    await resume(control, "backfill")
    async with watching_events(control, **{"last-event-id": last}) as heard:
        await heard.until(lambda: len(heard.of("change")) == 71)
        rows = heard.of("change")
        assert [row["kind"] for row in rows] == [*["pause", "resume"] * 35, "resume"]
        assert rows[-1]["pool"] == "backfill"
        assert heard.of("gap") == []
    answer = await control.http().get("/events", headers={"last-event-id": "nonsense"})
    assert told(answer) == (400, "invalid_value")


async def test_what_may_be_missing_is_told(control: ControlStack) -> None:
    await pause(control, "backfill")
    with eye(control.hand.url) as look:
        [(oldest, _)] = look.xrange(key(control.group, "events"), count=1)
        await resume(control, "backfill")
        look.xdel(key(control.group, "events"), oldest)
        async with watching_events(control, **{"last-event-id": oldest.decode()}) as heard:
            await heard.until(lambda: len(heard.of("change")) >= 2)
            assert heard.events[1][0] == "gap"
    async with watching_events(control, **{"last-event-id": "999999999999999-0"}) as heard:  # of a server that is gone
        await heard.until(lambda: heard.of("gap") != [])
        await pause(control, "backfill")
        await heard.until(lambda: heard.of("change") != [])


async def test_a_key_of_certain_pools_hears_only_of_them(control: ControlStack) -> None:
    async with watching_events(control, "observe-backfill") as heard:
        assert set(heard.of("snapshot")[0]) == {"server_ms"}
        await pause(control, "default")
        await control.http().post("/keys", json={"name": "new"})
        await pause(control, "backfill")
        await heard.until(lambda: heard.of("change") != [])
        assert [row["pool"] for row in heard.of("change")] == ["backfill"]


async def test_a_revoked_key_hears_no_more(control: ControlStack) -> None:
    async with watching_events(control, "observe") as heard:
        await control.http().delete(f"/keys/{control.key_ids['observe']}")
        await heard.until(lambda: heard.ended)


async def test_a_stream_does_not_hold_up_a_gateway_that_stops(control: ControlStack) -> None:
    async with watching_events(control) as heard:
        control.gateway.facts["draining"] = True  # type: ignore[union-attr]  # it is the fake one
        await heard.until(lambda: heard.ended)


async def test_an_idle_stream_is_kept_alive_with_comments(
    control: ControlStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.05)
    async with watching_events(control) as heard:
        await heard.until(lambda: heard.comments >= 3)
        assert len(heard.events) == 1


async def test_many_watch_for_the_price_of_one_up_to_a_bound(
    control: ControlStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.ingress.control.events.WATCHERS_MAX", 3)
    watch = control_watch(control)
    async with watching_events(control), watching_events(control), watching_events(control):
        answer = await control.http().get("/events")
        assert told(answer) == (503, "too_many_watchers")
        looks = watch.looks
        began = anyio.current_time()
        await until(lambda: watch.looks >= looks + 5, within_s=20)
        assert watch.looks - looks <= (anyio.current_time() - began) / watch.every_s + 2
    await until(lambda: watch.watchers == 0, within_s=20)


async def test_the_groups_channel_wakes_the_stream(valkey: ValkeyProcess) -> None:
    patient = dataclasses.replace(PATIENT, events_every_s=600.0)
    async with (
        control_stack(valkey.url, keys=False, settings=patient) as control,
        watching_events(control, "") as heard,
    ):
        channel = key(control.group, "snapshot_channel")
        with eye(valkey.url) as look:
            await until(lambda: look.pubsub_numsub(channel)[0][1] == 1)
            for number in (1, 2, 3):
                control.hand.submit("default")
                assert control.hand.run(snapshot_publish("g")).status == "PUBLISHED"
                await heard.until(lambda number=number: heard.of("snapshot")[-1]["pending"] == number)
            await pause(control, "backfill")
            control.hand.run(snapshot_publish("g"))
            await heard.until(lambda: [row["kind"] for row in heard.of("change")] == ["pause"])
    with eye(valkey.url) as look:
        await until(lambda: look.pubsub_numsub(channel)[0][1] == 0)


def control_watch(control: ControlStack) -> Any:
    """Return the watch of the running application, which counts its looks."""
    watch = control.watch
    plain = watching.Watch._look

    async def counted() -> watching.Look:
        watch.looks += 1
        return await plain(watch)

    watch.looks = 0
    watch._look = counted
    return watch


async def test_an_outage_is_told_and_its_end(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(aof=True)
    async with control_stack(server.url, keys=False) as control, watching_events(control, "") as heard:
        server.kill()
        await heard.until(lambda: heard.of("fabric") != [])
        assert heard.of("fabric")[0]["answers"] is False
        assert heard.of("fabric")[0]["problem"]
        server.start()
        await heard.until(lambda: len(heard.of("fabric")) == 2)
        assert heard.of("fabric")[1] == {"answers": True, "problem": None}
        assert not heard.ended
