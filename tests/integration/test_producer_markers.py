"""The asynchronous client when its liveness marker vanishes, when memory is full, and while the library is loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dispatch import DispatchClient
from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from dispatch.fabric.schema import key
from dispatch.sync import DispatchClient as BlockingClient
from tests.conftest import load_library
from tests.support.producing import MESSAGES, eye, owner, until, wide_group
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

LIVENESS_MS = 900


async def test_callers_are_told_soon_when_the_marker_of_their_producer_vanished(
    valkey: ValkeyProcess, group: str
) -> None:
    endings: list[str] = []

    async def wait(client: DispatchClient) -> None:
        with pytest.raises(RequestEnded) as caught:
            await client.complete(model="m", messages=MESSAGES, request_id="r", timeout=60)
        endings.append(caught.value.reply.ending)

    async with DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=LIVENESS_MS) as client:
        with anyio.fail_after(5), eye(valkey.url) as look:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, client)
                await until(lambda: bool(look.exists(key(group, "request", id="r"))))
                # Deleted and met in one step, or the marker could be back in between.
                with look.pipeline(transaction=True) as step:
                    step.delete(key(group, "alive", producer="p"))
                    step.fcall("dispatch_lease_claim", 1, f"{{{group}}}", "g", "g/1", "n", 1)
                    step.execute()
    assert endings == ["producer_gone"]


async def test_a_producer_stays_alive_while_memory_is_full(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    async with DispatchClient(server.url, fabric_group=group, producer_id="p", liveness_ms=LIVENESS_MS):
        session = owner(server.url, group, "p")
        with eye(server.url) as look:
            look.config_set("maxmemory", 1)
            await anyio.sleep(2.5 * LIVENESS_MS / 1000)
            assert owner(server.url, group, "p") == session
            look.config_set("maxmemory", 0)


async def test_a_caller_that_leaves_while_the_library_is_loaded_ends_its_request(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    async with DispatchClient(server.url, fabric_group=group) as client:
        with eye(server.url) as look:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_complete, client)
                await until(lambda: bool(look.exists(key(group, "request", id="r"))))
                look.function_flush()
                tasks.cancel_scope.cancel()
            await anyio.sleep(0.3)
            load_library(server.url)
            await until(lambda: look.hget(key(group, "request", id="r"), "ending") == b"cancelled", within_s=2)


async def _complete(client: DispatchClient) -> None:
    await client.complete(model="m", messages=MESSAGES, request_id="r", timeout=60)


@pytest.mark.parametrize("kind", ["asynchronous", "blocking"])
async def test_a_marker_that_vanished_is_noticed_by_the_next_submit(
    valkey: ValkeyProcess, group: str, kind: str
) -> None:
    """Long before the next sign of life, which would find the marker there: the submit has written it again."""
    endings: list[str] = []

    async def dropped(complete: Callable[..., Awaitable[Reply]]) -> None:
        with pytest.raises(RequestEnded) as caught:
            await complete(model="m", messages=MESSAGES, request_id="r", timeout=60)
        endings.append(caught.value.reply.ending)

    def drop() -> None:
        with eye(valkey.url) as look, look.pipeline(transaction=True) as step:
            step.delete(key(group, "alive", producer="p"))
            step.fcall("dispatch_lease_claim", 1, f"{{{group}}}", "g", "g/1", "n", 1)
            step.execute()

    async def play(complete: Callable[..., Awaitable[Reply]]) -> None:
        with eye(valkey.url) as look:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(dropped, complete)
                await until(lambda: bool(look.exists(key(group, "request", id="r"))))
                drop()
                assert endings == []
                with pytest.raises(RequestEnded):  # nobody runs it
                    await complete(model="m", messages=MESSAGES, timeout=1.5)
                assert endings == ["producer_gone"]

    if kind == "asynchronous":
        async with DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client:
            await play(client.complete)
        return
    blocking = BlockingClient(valkey.url, fabric_group=group, producer_id="p")
    await anyio.to_thread.run_sync(blocking.__enter__)

    async def complete(**arguments: Any) -> Reply:
        return await anyio.to_thread.run_sync(partial(blocking.complete, **arguments))

    await play(complete)
    await anyio.to_thread.run_sync(blocking.close)
