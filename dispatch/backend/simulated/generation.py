"""Serving one generation: times, slots, streaming, and the scripted faults in their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio

from dispatch.backend.simulated.behaviour import Behaviour, Place
from dispatch.backend.simulated.calls import CallRefused, SimulatedCall
from dispatch.backend.simulated.engine import Engine, Plan
from dispatch.backend.simulated.exchange import Exchange, error_body
from dispatch.backend.simulated.metrics import EngineMetrics
from dispatch.backend.simulated.replies import DONE, Event, Generation, generate, reply_body, stream_events
from dispatch.contract import Operation

_GARBAGE = {
    "html": (b"text/html", b"<!doctype html><title>Busy</title><p>Please come back later."),
    "json": (b"application/json", b'{"id":"sim-1","object":"chat.completion","choices":[{"index":0,"mess'),
    "text": (b"text/plain", b"upstream connect error"),
    "bytes": (b"application/octet-stream", bytes(range(256))),
    "empty": (b"application/json", b""),
}
_SIMULATED_ERROR = CallRefused(500, "a simulated error inside the answer", code="simulated")
_FOREVER_S = 24 * 3600.0


class Service:
    """Answers calls from an engine's slots."""

    def __init__(self, engine: Engine, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def answer_at_once(self, exchange: Exchange, call: SimulatedCall) -> None:
        """Answer a plain call of an engine that takes no time."""
        generation = generate(call, self._engine.plan(call).tokens)
        await exchange.json(reply_body(generation))
        self._engine.stats.note_finished(call, generation.completion_tokens)

    async def answer(self, exchange: Exchange, call: SimulatedCall) -> None:
        """Answer a call with everything it asks for."""
        behaviour = call.behaviour
        if behaviour.has_fault:
            self._engine.stats.faults += 1
            await anyio.sleep(behaviour.delay_ms / 1000)
        if await _ended(exchange, behaviour, "start"):
            return
        if behaviour.error_status is not None:
            await self._answer_error(exchange, call, behaviour.error_status)
            return
        asked_at = anyio.current_time()
        async with self._engine.slot(call):
            plan = self._engine.plan(call)
            generation = generate(call, plan.tokens)
            streamed = call.stream and call.operation is not Operation.EMBEDDINGS
            await (self._stream if streamed else self._reply)(exchange, generation, plan, asked_at)
            if not exchange.dropped:
                self._engine.stats.note_finished(call, 0 if streamed else generation.completion_tokens)

    async def _answer_error(self, exchange: Exchange, call: SimulatedCall, status: int) -> None:
        behaviour = call.behaviour
        retry_after = (
            [] if behaviour.retry_after is None else [(b"retry-after", behaviour.retry_after.encode("latin-1"))]
        )
        body = error_body(CallRefused(status, f"a simulated {status}", code="simulated"))
        await _send_whole(exchange, behaviour, status, [*_label(behaviour, b"application/json"), *retry_after], body)

    async def _reply(self, exchange: Exchange, generation: Generation, plan: Plan, asked_at: float) -> None:
        await anyio.sleep(plan.first_s)
        first_s = anyio.current_time() - asked_at
        token_s = self._engine.token_s(plan)
        await anyio.sleep(token_s * (len(generation.tokens) - 1))
        self._metrics.observe(first_s, token_s)
        behaviour = generation.call.behaviour
        label, body = b"application/json", reply_body(generation)
        if behaviour.error_in_200:
            body = error_body(_SIMULATED_ERROR)
        elif behaviour.garbage is not None:
            label, body = _GARBAGE[behaviour.garbage]
        await _send_whole(exchange, behaviour, 200, _label(behaviour, label), body)

    async def _stream(self, exchange: Exchange, generation: Generation, plan: Plan, asked_at: float) -> None:
        behaviour = generation.call.behaviour
        events, middle = stream_events(generation), -1
        if behaviour.has_fault:
            planned = list(events)
            middle = len(planned) // 2
            events = _with_faults(planned, middle, behaviour)
        await anyio.sleep(plan.first_s)
        next_at = anyio.current_time()
        self._metrics.observe(next_at - asked_at, self._engine.token_s(plan))
        await exchange.start(200, [*_label(behaviour, b"text/event-stream"), (b"cache-control", b"no-cache")])
        if await _ended(exchange, behaviour, "head"):
            return
        for number, event in enumerate(events):
            if number == middle and await _ended(exchange, behaviour, "body"):
                return
            if event.token:
                await anyio.sleep(max(0.0, next_at - anyio.current_time()))
                next_at += self._engine.token_s(plan)
                self._engine.stats.output_tokens += generation.call.choices
            await exchange.write(event.data, more=True)
        await exchange.write(b"")


def _with_faults(events: list[Event], middle: int, behaviour: Behaviour) -> Iterator[Event]:
    for number, event in enumerate(events):
        if number == middle:
            if behaviour.garbage is not None:
                yield Event(b"data: " + _GARBAGE[behaviour.garbage][1].replace(b"\n", b" ") + b"\n\n")
            if behaviour.error_in_200:
                yield Event(b"data: " + error_body(_SIMULATED_ERROR) + b"\n\n")
                yield Event(DONE)
                return
        yield event


async def _send_whole(
    exchange: Exchange, behaviour: Behaviour, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> None:
    await exchange.start(status, [*headers, (b"content-length", b"%d" % len(body))])
    if not (behaviour.hang or behaviour.cut):
        await exchange.write(body)
        return
    await exchange.write(b"", more=True)
    if await _ended(exchange, behaviour, "head"):
        return
    half = len(body) // 2
    await exchange.write(body[:half], more=True)
    if await _ended(exchange, behaviour, "body"):
        return
    await exchange.write(body[half:])


async def _ended(exchange: Exchange, behaviour: Behaviour, place: Place) -> bool:
    """Hang or cut if that is scripted for this place; say whether the connection is gone."""
    if behaviour.hang == place:
        await anyio.sleep(_FOREVER_S)
    if behaviour.cut == place:
        await exchange.drop(reset=behaviour.reset)
        return True
    return False


def _label(behaviour: Behaviour, usual: bytes) -> list[tuple[bytes, bytes]]:
    value = usual if behaviour.content_type is None else behaviour.content_type.encode("latin-1", "replace")
    return [(b"content-type", value)]
