"""The Valkey of `dispatch dev`: a real server on loopback, with the library in it. The gateways bring the config."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from dispatch.cli.dev.children import Child, Children, Program
from dispatch.cli.dev.plan import Plan
from dispatch.cli.dev.probe import LOOPBACK, free_ports
from dispatch.errors import DispatchError
from dispatch.fabric.deploy import load
from dispatch.fabric.library import current_library
from dispatch.fabric.sync import BlockingConnection

GROUP = "default"
STAGE = 0
_START_S = 10.0
_POLL_S = 0.01
_ATTEMPTS = 3


async def start_valkey(children: Children, plan: Plan, folder: Path) -> str:
    """Start the server and load the library; returns the server's URL.

    Raises:
        DispatchError: one of these failed; says which and why.
    """
    port = plan.options.valkey_port
    for attempt in range(1, _ATTEMPTS + 1):
        chosen = port or free_ports(1)[0]
        child = await children.start(_program(plan, chosen, folder))
        if await _answers(child, chosen):
            url = f"valkey://{LOOPBACK}:{chosen}"
            await anyio.to_thread.run_sync(_load_library, url)
            return url
        # A port that was free a moment ago may have been taken by somebody else meanwhile.
        if port or attempt == _ATTEMPTS or not child.ended.is_set():
            raise DispatchError(f"the Valkey server did not start{child.last_words()}")
        children.forget(child)
    raise AssertionError("the last attempt returns or raises")


def _program(plan: Plan, port: int, folder: Path) -> Program:
    # Throw-away data: nothing is saved, and nothing is thrown out when memory is short.
    command = [
        str(plan.server_binary), "--port", str(port), "--bind", LOOPBACK, "--dir", str(folder),
        "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    return Program(name="valkey", stage=STAGE, command=command, environment=plan.environment())


async def _answers(child: Child, port: int) -> bool:
    with anyio.move_on_after(_START_S):
        while not child.ended.is_set():
            try:
                async with await anyio.connect_tcp(LOOPBACK, port) as wire:
                    await wire.send(b"PING\r\n")
                    if (await wire.receive()).startswith(b"+PONG"):
                        return True
            except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                pass
            await anyio.sleep(_POLL_S)
    return False


def _load_library(url: str) -> None:
    with BlockingConnection(url) as connection:
        for report in load(connection, current_library()):
            if report.problem:
                raise DispatchError(f"the library could not be loaded into {report.address}: {report.problem}")
