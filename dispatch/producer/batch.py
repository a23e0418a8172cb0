"""Many completions at once with a bound, in order, each with its own outcome."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio

from dispatch.contract import Reply
from dispatch.errors import ConfigurationError, DispatchError

CONCURRENCY = 256
"""Items of one batch under way at one time, unless the caller says otherwise."""

Item = Mapping[str, Any]
"""The arguments of one `complete()`."""

Progress = Callable[[int, int], Awaitable[None] | None]
"""Called with (finished, total) after each item, in order, never twice at a time."""


async def run_batch(
    items: Sequence[Item],
    complete: Callable[[Item], Awaitable[Reply]],
    progress: Progress | None,
    concurrency: int,
) -> list[Reply | DispatchError]:
    """Run every item; the result at a place is that item's reply or the package's error that it raised.

    Raises:
        Exception: what `progress` raised; the items still under way are cancelled.
    """
    check_concurrency(concurrency)
    results: dict[int, Reply | DispatchError] = {}
    queue = iter(enumerate(items))
    finished = itertools.count(1)
    telling = anyio.Lock()

    async def work() -> None:
        for place, item in queue:
            try:
                results[place] = await complete(item)
            except DispatchError as error:
                results[place] = error
            if progress is not None:
                async with telling:
                    if inspect.isawaitable(pending := progress(next(finished), len(items))):
                        await pending

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(min(concurrency, len(items))):
                tasks.start_soon(work)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first is what went wrong; the caller knows nothing of a group
    return [results[place] for place in range(len(items))]


def check_concurrency(concurrency: int) -> None:
    """Make sure that the bound is one.

    Raises:
        ConfigurationError: it is not a whole number above 0.
    """
    if type(concurrency) is not int or concurrency < 1:
        raise ConfigurationError(f"concurrency is {concurrency!r}, a whole number above 0 is expected")
