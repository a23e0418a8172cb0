"""`dispatch simulate`: a simulated OpenAI-compatible backend."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import anyio
import typer

from dispatch.backend.simulated import SimulatorOptions, Spread, serve_simulator
from dispatch.cli.listening import listen, url_of
from dispatch.errors import ConfigurationError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Run a simulated OpenAI-compatible backend until Ctrl-C: chat completions, completions, embeddings, responses
(also streamed), /v1/models, and /metrics with vLLM's names. It behaves like a batching engine: so many sequences run at
once, others wait, tokens take time. Equal requests get equal text.

Faults are scripted by a call's own body member "simulate", or for coming calls by POST /control/faults; what happened
is at GET /control/stats.

\b
Examples:
  dispatch simulate
  dispatch simulate --port 9001 --slots 2 --ttft-ms 800 --token-ms 40
  dispatch simulate --instant
  curl -s http://127.0.0.1:9000/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "m",
    "messages": [{"role": "user", "content": "hi"}], "simulate": {"status": 503, "retry_after": "2"}}'
  curl -s http://127.0.0.1:9000/control/faults -d '{"simulate": {"cut": "body"}, "probability": 0.1}'
"""

_DEFAULT = SimulatorOptions()


@app.command(help=_HELP)
def simulate(  # noqa: PLR0913 - a command's options are its parameters
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 = a free one.")] = 9000,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that is listed; may be repeated. Calls may name any.")
    ] = None,
    strict_models: Annotated[bool, typer.Option("--strict-models", help="Serve the listed models only.")] = False,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = _DEFAULT.slots,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 503. 0 = any number.")] = 1_000,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Median time to the first token.")] = 150,
    token_ms: Annotated[float, typer.Option(min=0, help="Median time of each further token.")] = 15,
    spread: Annotated[float, typer.Option(min=0, help="Sigma of these lognormal values. 0 = always the median.")] = 0.3,
    output_tokens: Annotated[int, typer.Option(min=1, help="Median length of a reply.")] = 64,
    slowdown: Annotated[
        float, typer.Option(min=0, help="A token's extra time for each other running sequence, as a share.")
    ] = _DEFAULT.slowdown,
    instant: Annotated[
        bool, typer.Option("--instant", help="No times at all, replies of equal length: for benchmarks.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides what is drawn: equal seeds give equal runs.")] = 0,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable that holds the key to ask for.")
    ] = "",
) -> None:
    """Run a simulated OpenAI-compatible backend."""
    sigma = 0.0 if instant else spread
    options = SimulatorOptions(
        models=tuple(model or _DEFAULT.models),
        strict_models=strict_models,
        slots=slots,
        queue_limit=0 if instant else queue,
        ttft_ms=Spread(0 if instant else ttft_ms, sigma),
        token_ms=Spread(0 if instant else token_ms, sigma),
        output_tokens=Spread(output_tokens, sigma),
        slowdown=slowdown,
        seed=seed,
        api_key=_key(api_key_env),
    )
    with listen(host, port) as listener:
        url = f"{url_of(listener)}/v1"

        def ready() -> None:
            typer.echo(url)
            typer.echo(f"A simulated backend with {slots} slots answers at {url}. Ctrl-C stops it.", err=True)

        anyio.run(serve_simulator, options, listener, ready, backend_options={"use_uvloop": sys.platform != "win32"})


def _key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigurationError(f"environment variable {variable} (--api-key-env) is not set or empty")
    return key
