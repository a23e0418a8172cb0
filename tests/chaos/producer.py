"""A producer process of the chaos harness: makes the calls of its orders and notes, line by line, what came of each.

    python -m tests.chaos.producer job.json log.jsonl

The log is written unbuffered, so it says what was known when the process was killed. SIGUSR1 shows all stacks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from dispatch import DispatchClient
from dispatch.contract import Call, Reply
from dispatch.errors import (
    ConfigurationError,
    ContractError,
    DispatchError,
    FabricError,
    GroupUnknown,
    PoolUnknown,
    RequestInProgress,
    RequestRefused,
    StateConflict,
)
from dispatch.producer.completion import build_completion
from dispatch.producer.options import CallOptions
from dispatch.sync import DispatchClient as BlockingClient
from tests.chaos.backend import expected_text
from tests.chaos.evidence import Ended, LogLine, Order, Stalled, Started

_PULSE_S = 0.05
_STALL_S = 0.08
_THREADS = 64
_OPEN_AGAIN_S = 0.2
_REPEAT_S, _REPEAT_FOR_S = 0.3, 20.0
_NOT_QUEUED = (RequestRefused, PoolUnknown, GroupUnknown, StateConflict, ContractError)
"""Errors that say that nothing was queued."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one producer process does. `began` is when the run began, on the wall clock; `kind` which client it uses."""

    url: str
    group: str
    kind: str
    began: float
    liveness_ms: int
    orders: list[Order]


class _Log:
    """Appends lines; each is one write, so none is torn."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: LogLine) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def main() -> None:
    """Do the job of the first argument, write the log of the second."""
    faulthandler.register(signal.SIGUSR1)
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    log = _Log(Path(sys.argv[2]))
    if job.kind == "blocking":
        _run_blocking(job, log)
    else:
        anyio.run(_run, job, log, backend_options={"use_uvloop": job.kind == "glide"})


def _options(job: Job) -> dict[str, Any]:
    more = {} if job.kind == "blocking" else {"client": job.kind}
    return {"fabric_group": job.group, "liveness_ms": job.liveness_ms, "admission_ms": 6000, "close_ms": 1000} | more


def _call(order: Order) -> tuple[Call, CallOptions]:
    arguments: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "x" * order.size}],
        "user": order.tag,
        "pool": order.pool,
        "metadata": {"tag": order.tag},
        "timeout": None if order.timeout_ms is None else order.timeout_ms / 1000,
        "cost": order.cost,
        "fairness_key": order.fairness_key,
        "priority": order.priority,
    }
    if order.named:
        arguments["request_id"] = order.tag
    call, options = build_completion(arguments, stream=order.stream)
    return call, dataclasses.replace(options, idempotency_key=order.tag if order.keyed else None)


# -- with an event loop


async def _run(job: Job, log: _Log) -> None:
    async with anyio.create_task_group() as pulse:
        pulse.start_soon(_pulse, log)
        client = await _open(job)
        async with anyio.create_task_group() as calls:
            for order in job.orders:
                await anyio.sleep(max(0.0, job.began + order.at_s - time.time()))
                calls.start_soon(_one, client, order, log)
        await client.aclose()
        pulse.cancel_scope.cancel()


async def _open(job: Job) -> DispatchClient:
    while True:
        try:
            return await DispatchClient(job.url, **_options(job)).__aenter__()
        except (FabricError, ConfigurationError) as error:
            sys.stderr.write(f"not open: {error}\n")
            await anyio.sleep(_OPEN_AGAIN_S)


async def _one(client: DispatchClient, order: Order, log: _Log) -> None:
    call, options = _call(order)
    log.write(Started(order.tag, time.time()))
    try:
        with anyio.move_on_after(order.leave_after_s) as patience:
            if order.stream:
                log.write(await _read_stream(client, order, call, options))
            else:
                log.write(_told(order, await _insist(client, order, call, options)))
        if patience.cancelled_caught:
            log.write(Ended(call=order.tag, at=time.time(), how="left"))
    except Exception as error:  # noqa: BLE001 - whatever it is, the log has it
        log.write(_failed(order, error))


async def _read_stream(client: DispatchClient, order: Order, call: Call, options: CallOptions) -> Ended:
    text = ""
    async with client.stream_call(call, options) as stream:
        async for chunk in stream:
            text += chunk.text
    return _streamed(order, stream.reply, text)


async def _insist(client: DispatchClient, order: Order, call: Call, options: CallOptions) -> Reply:
    """Make the call; one that is repeated, again until the first one is over."""
    started = time.monotonic()
    while True:
        try:
            return await client.call(call, options)
        except RequestInProgress:
            if not order.repeat or time.monotonic() - started > _REPEAT_FOR_S:
                raise
            await anyio.sleep(_REPEAT_S)


async def _pulse(log: _Log) -> None:
    while True:
        before = time.time()
        await asyncio.sleep(_PULSE_S)
        _note_stall(log, before)


# -- with threads


def _run_blocking(job: Job, log: _Log) -> None:
    threading.Thread(target=_pulse_blocking, args=(log,), daemon=True).start()
    with _open_blocking(job) as client, ThreadPoolExecutor(_THREADS) as threads:
        for order in job.orders:
            time.sleep(max(0.0, job.began + order.at_s - time.time()))
            threads.submit(_one_blocking, client, order, log)


@contextmanager
def _open_blocking(job: Job) -> Iterator[BlockingClient]:
    while True:
        client = BlockingClient(job.url, **_options(job))
        try:
            client.__enter__()
        except (FabricError, ConfigurationError) as error:
            sys.stderr.write(f"not open: {error}\n")
            time.sleep(_OPEN_AGAIN_S)
            continue
        yield client
        client.close()
        return


def _one_blocking(client: BlockingClient, order: Order, log: _Log) -> None:
    call, options = _call(order)
    log.write(Started(order.tag, time.time()))
    try:
        if order.stream:
            log.write(_read_stream_blocking(client, order, call, options))
        else:
            log.write(_told(order, _insist_blocking(client, order, call, options)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the log has it
        log.write(_failed(order, error))


def _read_stream_blocking(client: BlockingClient, order: Order, call: Call, options: CallOptions) -> Ended:
    text = ""
    with client.stream_call(call, options) as stream:
        for chunk in stream:
            text += chunk.text
    return _streamed(order, stream.reply, text)


def _insist_blocking(client: BlockingClient, order: Order, call: Call, options: CallOptions) -> Reply:
    started = time.monotonic()
    while True:
        try:
            return client.call(call, options)
        except RequestInProgress:
            if not order.repeat or time.monotonic() - started > _REPEAT_FOR_S:
                raise
            time.sleep(_REPEAT_S)


def _pulse_blocking(log: _Log) -> None:
    while True:
        before = time.time()
        time.sleep(_PULSE_S)
        _note_stall(log, before)


# -- what came of it


def _note_stall(log: _Log, before: float) -> None:
    now = time.time()
    if now - before - _PULSE_S > _STALL_S:
        log.write(Stalled(before + _PULSE_S, now))


def _told(order: Order, reply: Reply) -> Ended:
    # A reply that the client made itself, of a deadline long passed, is the only `expired` without queue times.
    how = "gave_up" if reply.queue_ms is None and reply.ending == "expired" else "reply"
    right = order.stream or not reply.succeeded or reply.text().startswith(expected_text(order.tag))
    return Ended(
        call=order.tag,
        at=time.time(),
        how=how,
        ending=reply.ending,
        request_id=reply.request_id,
        attempt=reply.attempt,
        detail="" if reply.error is None else f"{reply.error.type}: {reply.error.message}"[:300],
        right=right and (not order.named or reply.request_id == order.tag),
    )


def _streamed(order: Order, reply: Reply, text: str) -> Ended:
    """Say how a stream ended: its chunks must be a beginning of the answer, all of it if it succeeded."""
    whole = expected_text(order.tag)
    right = text == whole if reply.succeeded else whole.startswith(text)
    return msgspec.structs.replace(_told(order, reply), right=right)


def _failed(order: Order, error: Exception) -> Ended:
    how = "fault"
    if isinstance(error, RequestInProgress):
        how = "in_progress"
    elif isinstance(error, _NOT_QUEUED):
        how = "refused"
    elif isinstance(error, FabricError):
        how = "gave_up"
    kind = type(error).__name__ if isinstance(error, DispatchError) else repr(error)
    return Ended(call=order.tag, at=time.time(), how=how, detail=f"{kind}: {error}"[:300])


if __name__ == "__main__":
    main()
