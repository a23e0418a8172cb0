"""Starting everything in order, saying so, and stopping it whatever happens."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import typer

from dispatch.cli.dev import probe
from dispatch.cli.dev.children import Child, Children, Program
from dispatch.cli.dev.load import REQUESTS_PER_S, run_load
from dispatch.cli.dev.plan import Options, Plan, make_plan, model_of
from dispatch.cli.dev.server import GROUP, STAGE, start_valkey
from dispatch.cli.dev.workspace import workspace
from dispatch.errors import DispatchError

T = TypeVar("T")

_READY_S = 30.0
_DRAIN_MS = 5_000
_SECRET_IN = "DISPATCH_DEV_HISTORY_PASSWORD"  # noqa: S105 - the name of the variable that holds it
_STOP_MARGIN_S = 3.0
_SAME_SIGNAL_S = 0.5
"""A terminal and a wrapper (timeout, make) both pass a Ctrl-C on; that is one signal, not two."""
_BACKEND_STAGE = 1
_GATEWAY_STAGE = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run(options: Options) -> None:
    """Run until a signal comes. Returns when everything it started is gone, processes and files.

    Raises:
        ConfigurationError: nothing was started; says what is wrong.
        DispatchError: something did not start or ended by itself; everything was stopped.
    """
    with anyio.open_signal_receiver(*_SIGNALS) as signals:
        async with anyio.create_task_group() as tasks:
            children = Children(tasks, echo=_echo if options.logs else None)
            work = anyio.CancelScope()

            async def obey() -> None:
                first: float | None = None
                async for _ in signals:
                    if first is None:
                        first = anyio.current_time()
                        work.cancel()
                        with contextlib.suppress(OSError):  # nobody may read it any more
                            typer.echo("\nStopping (once more to kill)...", err=True)
                    elif anyio.current_time() - first > _SAME_SIGNAL_S:
                        children.hurry()

            tasks.start_soon(obey)
            with work:
                plan = await make_plan(options)
                with workspace() as folder:
                    try:
                        await _serve(children, plan, folder)
                    finally:
                        await children.stop()
            tasks.cancel_scope.cancel()


async def _serve(children: Children, plan: Plan, folder: Path) -> None:
    valkey_url = await _unless_one_ends(children, lambda: start_valkey(children, plan, folder))
    secret = secrets.token_hex(16)
    # Not waited for yet: its engine takes seconds to load, and the gateways open it when they need it.
    history = None if plan.history_problem else await children.start(_history(plan, folder, secret))
    model = plan.model
    if plan.simulated:
        child = await children.start(_backend(plan))
        answer = await _ready(children, child, f"{plan.endpoint_url}/models")
        model = model_of(answer.json())
    gateways = [
        await children.start(_gateway(plan, valkey_url, secret, number)) for number in range(len(plan.gateway_ports))
    ]
    for child, url in zip(gateways, plan.gateway_urls, strict=True):
        await _ready(children, child, f"{url}/readyz")
    if plan.studio_port:
        page = await children.start(_studio(plan, valkey_url, secret))
        await _ready(children, page, f"{_studio_url(plan)}/g/{GROUP}")
    if history is not None:
        await _ready(children, history, f"http://{probe.LOOPBACK}:{plan.history_port}/ping")
    typer.echo(_ready_text(plan, valkey_url, model or "MODEL"))
    sys.stdout.flush()
    async with anyio.create_task_group() as tasks:
        if plan.options.load:
            tasks.start_soon(run_load, valkey_url, GROUP, model or "MODEL")
        await children.watch()


async def _ready(children: Children, child: Child, url: str) -> probe.Answer:
    async def answer() -> probe.Answer:
        try:
            return await probe.wait_for(url, child.program.name, seconds=_READY_S)
        except DispatchError as error:
            raise DispatchError(f"{error}{child.last_words()}") from error

    return await _unless_one_ends(children, answer)


async def _unless_one_ends(children: Children, step: Callable[[], Awaitable[T]]) -> T:
    """Do one step of the start; a child that ends meanwhile ends the step with the child's story."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(children.watch)
        result = await step()
        tasks.cancel_scope.cancel()
    return result


def _backend(plan: Plan) -> Program:
    command = [*_dispatch(), "simulate", "--host", probe.LOOPBACK, "--port", str(plan.backend_port)]
    return Program(
        name="simulated backend", stage=_BACKEND_STAGE, command=command, environment=plan.environment(), stop_s=3.0
    )


def _history(plan: Plan, folder: Path, secret: str) -> Program:
    command = [
        *_dispatch(), "history", "serve", "--path", str(folder / "history"), "--port", str(plan.history_port),
        "--password-env", _SECRET_IN,
    ]  # fmt: skip
    environment = plan.environment() | {_SECRET_IN: secret}
    return Program(name="history", stage=STAGE, command=command, environment=environment)


def _of_history(plan: Plan, secret: str) -> dict[str, str]:
    """Return the variables by which a process finds the history."""
    if plan.history_problem:
        return {}
    url = f"clickhouse://{probe.LOOPBACK}:{plan.history_port}"
    return {"DISPATCH_HISTORY_URL": url, "DISPATCH_HISTORY_PASSWORD_ENV": _SECRET_IN, _SECRET_IN: secret}


def _gateway(plan: Plan, valkey_url: str, secret: str, number: int) -> Program:
    port = plan.gateway_ports[number]
    settings = {
        "VALKEY_URL": valkey_url,
        "FABRIC_GROUP": GROUP,
        "GATEWAY_ID": f"dev-{number + 1}",
        "HOST": probe.LOOPBACK,
        "PORT": str(port),
        "KEYS": "off",
        # The group has no config yet: the first gateway makes it, as anywhere else.
        "ENDPOINT_URL": plan.endpoint_url,
        "ENDPOINT_API_KEY_ENV": plan.options.api_key_env,
        "DRAIN_TIMEOUT_MS": str(_DRAIN_MS),
        "LOG_FORMAT": "console",
    }
    environment = plan.environment() | {f"DISPATCH_{name}": value for name, value in settings.items()}
    environment |= _of_history(plan, secret)
    return Program(
        name=f"gateway dev-{number + 1} (port {port})",
        stage=_GATEWAY_STAGE,
        command=[*_dispatch(), "gateway"],
        environment=environment,
        stop_s=_DRAIN_MS / 1000 + _STOP_MARGIN_S,
    )


def _studio(plan: Plan, valkey_url: str, secret: str) -> Program:
    command = [*_dispatch(), "studio", "--url", valkey_url, "--group", GROUP, "--host", probe.LOOPBACK]
    command += ["--port", str(plan.studio_port), "--keys", "off", "--allow-anonymous-writes", "--log-format", "console"]
    return Program(
        name=f"studio (port {plan.studio_port})", stage=_GATEWAY_STAGE, command=command,
        environment=plan.environment() | _of_history(plan, secret), stop_s=_STOP_MARGIN_S,
    )  # fmt: skip


def _studio_url(plan: Plan) -> str:
    return f"http://{probe.LOOPBACK}:{plan.studio_port}"


def _dispatch() -> list[str]:
    # -P: a folder called `dispatch` where the user stands is not this program.
    return [sys.executable, "-P", "-m", "dispatch"]


def _ready_text(plan: Plan, valkey_url: str, model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    first = plan.gateway_urls[0]
    backend = f"{plan.endpoint_address}  ({'simulated' if plan.simulated else 'yours'}, model {model})"
    rows = [
        ("gateways", "  ".join(f"{url}/v1" for url in plan.gateway_urls)),
        ("backend", backend),
        ("valkey", f"{valkey_url}  (group {GROUP}; the data goes when this stops)"),
    ]
    if plan.studio_port:
        rows.append(("studio", f"{_studio_url(plan)}  (the operators' page)"))
    rows.append(("history", plan.history_problem or f"dispatch history stats --gateway {first}"))
    if plan.options.load:
        rows.append(("load", f"about {REQUESTS_PER_S:g} requests per second over all pools"))
    table = "\n".join(f"  {name:<10}{value}" for name, value in rows)
    return (
        f"Fabric Dispatch is ready.\n\n{table}\n\nTry it:\n\n"
        f"  curl -s {first}/v1/chat/completions -H 'Content-Type: application/json'"
        f" -H 'X-Dispatch-Pool: interactive' -d '{body}'\n\n"
        "Ctrl-C stops everything."
    )


def _echo(line: str) -> None:
    typer.echo(line, err=True)
