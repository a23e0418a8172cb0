"""The yardstick: what the gateway's HTTP client alone reaches against the same backend, with nothing around it."""

from __future__ import annotations

import asyncio
import time

from dispatch.backend.client import EndpointClient
from dispatch.backend.endpoint import Endpoint
from dispatch.contract import Call, Operation, read_call
from scripts.bench.ingress_run import Outcome, Run, Tally, obey, request_body, wrong_answer

_DEADLINE_S = 60.0


async def perform(run: Run) -> Outcome:
    """Make one run."""
    tally = Tally(run)
    endpoint = Endpoint(endpoint_id="bench", url=run.url)
    call = read_call(Operation.CHAT_COMPLETIONS, request_body(stream=run.stream))

    async def repeat(client: EndpointClient) -> None:
        while True:
            asked_at = time.perf_counter()
            first_at, wrong = await (_stream if run.stream else _whole)(client, endpoint, call, run)
            now = time.perf_counter()
            if wrong:
                tally.failed(wrong)
            if not tally.answered(now - asked_at, (first_at or now) - asked_at):
                return

    tally.begin()
    async with EndpointClient() as client, asyncio.TaskGroup() as tasks:
        for _ in range(run.connections):
            tasks.create_task(repeat(client))
    return tally.outcome()


async def _whole(client: EndpointClient, endpoint: Endpoint, call: Call, run: Run) -> tuple[float, str]:
    execution = await client.execute(endpoint, call, deadline_s=_DEADLINE_S)
    return 0.0, wrong_answer(run, execution.head.status or 0, execution.body)


async def _stream(client: EndpointClient, endpoint: Endpoint, call: Call, run: Run) -> tuple[float, str]:
    first_at, count = 0.0, 0
    async with client.stream(endpoint, call, deadline_s=_DEADLINE_S) as stream:
        async for _ in stream:
            first_at = first_at or time.perf_counter()
            count += 1
        outcome = stream.execution.outcome
    wrong = "" if outcome == "succeeded" and count >= run.tokens else f"{outcome} after {count} chunks"
    return first_at, wrong


if __name__ == "__main__":
    obey(perform)
