"""Reading an engine's metrics page, whatever it is made of."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.backend.engine_metrics import PRESETS, EngineReading, MetricNames, read_metrics, token_ms_between
from dispatch.backend.simulated.engine import Engine
from dispatch.backend.simulated.metrics import EngineMetrics
from dispatch.backend.simulated.options import SimulatorOptions

VLLM = b"""# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a/b \\"c\\" {x} 9"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{reason="capacity"} 100.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{le="0.01",model_name="m"} 7.0
vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="m"} 10.0
vllm:inter_token_latency_seconds_count{model_name="m"} 10.0
vllm:inter_token_latency_seconds_sum{model_name="m"} 0.5
vllm:time_per_output_token_seconds_count{model_name="m"} 99.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 99.0
"""
TGI = b"""# TYPE tgi_queue_size gauge
tgi_queue_size 1
tgi_request_mean_time_per_token_duration_sum 0.2
tgi_request_mean_time_per_token_duration_count 4
"""


@pytest.mark.parametrize(
    ("preset", "page", "reading"),
    [
        ("vllm", VLLM, EngineReading(7, 500.0, 10.0)),
        ("vllm", VLLM.replace(b"\n", b"\r\n"), EngineReading(7, 500.0, 10.0)),
        ("vllm", b"vllm:num_requests_waiting 2 1700000000000\n", EngineReading(2)),
        ("vllm", b"vllm:num_requests_waiting\t2", EngineReading(2)),
        (
            "vllm",
            b"vllm:time_per_output_token_seconds_sum 3\nvllm:time_per_output_token_seconds_count 30\n",
            EngineReading(None, 3000.0, 30.0),
        ),
        ("sglang", b'sglang:num_queue_reqs{model_name="m"} 5\n', EngineReading(5)),
        (
            "tgi",
            TGI,
            EngineReading(1, 200.0, 4.0),
        ),
        ("llamacpp", b"llamacpp:requests_deferred 0\n", EngineReading(0)),
    ],
    ids=["vllm", "crlf", "timestamp", "tab, no end", "older name", "sglang", "tgi", "llamacpp"],
)
def test_presets_read_their_engines_page(preset: str, page: bytes, reading: EngineReading) -> None:
    assert read_metrics(page, PRESETS[preset]) == reading


def test_the_simulated_engine_is_read_by_the_vllm_preset() -> None:
    metrics = EngineMetrics(Engine(SimulatorOptions()), "m")
    metrics.observe(0.5, 0.25)
    reading = read_metrics(metrics.text(), PRESETS["vllm"])
    assert (reading.waiting, reading.tokens, reading.tokens_ms) == (0, 1.0, 250.0)


@pytest.mark.parametrize(
    ("names", "page", "reading"),
    [
        (MetricNames(("q",), ("t",)), b"q 1.2\nt 0.25\n", EngineReading(2, token_ms=250.0)),
        (MetricNames(("q",), ("t_ms",)), b"t_ms 40\n", EngineReading(token_ms=40.0)),
        (
            MetricNames((), ("t_milliseconds",)),
            b"t_milliseconds_sum 40\nt_milliseconds_count 2\n",
            EngineReading(None, 40.0, 2.0),
        ),
        (MetricNames(), b"q 1\n", EngineReading()),
    ],
    ids=["gauge", "gauge in ms", "histogram in ms", "no names"],
)
def test_names_of_the_config_are_read(names: MetricNames, page: bytes, reading: EngineReading) -> None:
    assert read_metrics(page, names) == reading


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>not found</html>",
        b"\xff\xfe\x00",
        b"q{",
        b'q{a="b" 3',
        b"q three",
        b"q NaN",
        b"q +Inf",
        b"q -1",
        b'q{a="1"} 1\nq{a="2"} garbage\n',
        b"q 1\n" * 1001,
        b'q{a="' + b"x" * 5000 + b'"} 1\n',
        b"q{" + b'a="b",' * 300_000 + b"} 1\n",
        b"q{\xff} 1\n",
        b"q_total 1\nqq 2\n",
    ],
    ids=str,
)
def test_what_cannot_be_read_is_unknown(page: bytes) -> None:
    started = time.perf_counter()
    assert read_metrics(page, MetricNames(("q",))) == EngineReading()
    assert time.perf_counter() - started < 1


def test_a_page_of_any_size_costs_little() -> None:
    page = b'other_metric{label="value",le="0.5"} 12345\n' * 45_000 + b"q 3\n"
    started = time.perf_counter()
    assert read_metrics(page, MetricNames(("q",))) == EngineReading(3)
    assert time.perf_counter() - started < 0.2  # 10 ms on an idle machine


@given(st.one_of(st.binary(max_size=200), st.text('q{}="\\, \t\n1.eE+-_#naif', max_size=80).map(str.encode)))
def test_no_bytes_make_an_exception(noise: bytes) -> None:
    for page in (noise, b"q" + noise, b"q{" + noise, b'q{a="' + noise + b'"} 1\n', b"q " + noise):
        reading = read_metrics(page, MetricNames(("q",), ("q",)))
        assert reading.waiting is None or reading.waiting >= 0


@pytest.mark.parametrize(
    ("before", "now", "token_ms"),
    [
        (None, EngineReading(0, 100.0, 10.0), None),
        (EngineReading(0, 100.0, 10.0), EngineReading(0, 160.0, 13.0), 20.0),
        (EngineReading(0, 100.0, 10.0), EngineReading(0, 100.0, 10.0), None),
        (EngineReading(0, 100.0, 10.0), EngineReading(0, 5.0, 1.0), None),
        (EngineReading(0, 100.0, 10.0), EngineReading(0, 5.0, 11.0), None),
        (EngineReading(0), EngineReading(0, 5.0, 11.0), None),
        (EngineReading(0, 1.0, 1.0), EngineReading(0), None),
        (None, EngineReading(token_ms=30.0), 30.0),
    ],
    ids=["first", "between", "no token", "restarted", "odd", "unknown before", "unknown now", "gauge"],
)
def test_time_per_token_is_that_between_two_looks(
    before: EngineReading | None, now: EngineReading, token_ms: float | None
) -> None:
    assert token_ms_between(before, now) == token_ms
