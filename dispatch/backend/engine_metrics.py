"""What an engine says of itself on its metrics page: how many requests wait there, and how long a token takes.

Read with prometheus-client's parser: labels and escapes of the text format have corners. It gets the lines that are
wanted and no others, few and short ones, so that a page of any size or content costs no more than splitting it. What
cannot be read is unknown (None), never a guess and never an exception: a part of the lines would be too small a sum.

Names change between versions of an engine, so a name has alternatives, the newer first: the first that is there counts.
Values of all label sets (models, parallel engines) are added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_LINES_MAX = 1_000
_LINE_BYTES_MAX = 4_096
_WAITING_MAX = 1_000_000_000


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Which metrics to look at: a gauge of waiting requests; a histogram (or gauge) of seconds per output token.

    A name that ends in `_ms` or `_milliseconds` is taken as milliseconds.
    """

    waiting: tuple[str, ...] = ()
    token: tuple[str, ...] = ()


PRESETS = {
    "vllm": MetricNames(
        ("vllm:num_requests_waiting",), ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    ),
    "sglang": MetricNames(
        ("sglang:num_queue_reqs",), ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")
    ),
    "tgi": MetricNames(("tgi_queue_size",), ("tgi_request_mean_time_per_token_duration",)),
    "llamacpp": MetricNames(("llamacpp:requests_deferred",)),
    "custom": MetricNames(),
}
"""By the `gate` word of an endpoint's config. llama.cpp has no time per token; of TGI it is that of ended requests."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One look at the page. Tokens: their time and number since the engine started, or their time now (a gauge)."""

    waiting: int | None = None
    tokens_ms: float | None = None
    tokens: float | None = None
    token_ms: float | None = None


def read_metrics(page: bytes, names: MetricNames) -> EngineReading:
    """Return what `page` says of `names`; whatever it is made of, this does not raise."""
    wanted = {*names.waiting, *(name + end for name in names.token for end in ("", "_sum", "_count"))}
    sums = _sums(page, wanted)
    waiting = next((sums[name] for name in names.waiting if name in sums), None)
    for name in names.token:
        factor = 1 if name.endswith(("_ms", "_milliseconds")) else 1000
        if f"{name}_sum" in sums and f"{name}_count" in sums:
            return EngineReading(_whole(waiting), sums[f"{name}_sum"] * factor, sums[f"{name}_count"])
        if name in sums:
            return EngineReading(_whole(waiting), token_ms=sums[name] * factor)
    return EngineReading(_whole(waiting))


def token_ms_between(before: EngineReading | None, now: EngineReading) -> float | None:
    """Return the mean time of the tokens that came between two readings, in ms; None = unknown.

    Unknown also where no token came, and where the engine was started anew in between.
    """
    if now.token_ms is not None:
        return now.token_ms
    if before is None or None in (before.tokens, before.tokens_ms, now.tokens, now.tokens_ms):
        return None
    tokens = (now.tokens or 0.0) - (before.tokens or 0.0)
    spent_ms = (now.tokens_ms or 0.0) - (before.tokens_ms or 0.0)
    return spent_ms / tokens if tokens > 0 and spent_ms >= 0 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else min(math.ceil(value), _WAITING_MAX)


def _sums(page: bytes, wanted: set[str]) -> dict[str, float]:
    """Return the sum of each wanted sample over its label sets; nothing when a line of them cannot be read."""
    starts = tuple(name.encode() for name in wanted)
    lines = [line for line in page.split(b"\n") if line.startswith(starts)] if starts else []
    lines = [line for line in lines if _name(line) in starts]
    if len(lines) > _LINES_MAX or any(len(line) > _LINE_BYTES_MAX for line in lines):
        return {}
    sums: dict[str, float] = {}
    try:
        text = b"\n".join(lines).replace(b"\r", b"").decode() + "\n"
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except (ValueError, LookupError, AttributeError, TypeError):  # the parser promises nothing about other text
        return {}
    if not all(math.isfinite(value) and value >= 0 for value in sums.values()):
        return {}
    return sums


def _name(line: bytes) -> bytes:
    """Return the sample's name, as far as a line has one."""
    end = min((at for at in (line.find(b"{"), line.find(b" "), line.find(b"\t")) if at >= 0), default=len(line))
    return line[:end]
