"""The ingress benchmark: it counts only right answers, compares within rounds, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.bench.children import Child, Failed, children, cpu_seconds
from scripts.bench.ingress_result import Cell, missed, ratios_of, report, result_of
from scripts.bench.ingress_run import BODY_BYTES, WORD, Outcome, Run, Tally, request_body, wrong_answer

ROOT = Path(__file__).resolve().parents[2]
RUN = Run(url="http://127.0.0.1:9/v1", greeting="/", connections=2, stream=False, seconds=0.05, tokens=3)
STREAM = msgspec.structs.replace(RUN, stream=True)


@pytest.mark.parametrize(
    ("run", "status", "body", "wrong"),
    [
        (RUN, 200, WORD * 3, ""),
        (RUN, 200, WORD * 2, "gave 2 of 3 tokens"),
        (RUN, 200, WORD * 4, "gave 4 of 3 tokens"),
        (RUN, 500, WORD * 3, "answered 500"),
        (STREAM, 200, WORD * 3 + b"\n\ndata: [DONE]\n\n", ""),
        (STREAM, 200, WORD * 3, "did not end its stream with [DONE]"),
    ],
)
def test_only_a_right_answer_counts(run: Run, status: int, body: bytes, wrong: str) -> None:
    assert wrong_answer(run, status, body).startswith(wrong)
    assert bool(wrong_answer(run, status, body)) == bool(wrong)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_the_size_that_is_told(stream: bool) -> None:
    body = request_body(stream=stream)
    assert len(body) == BODY_BYTES
    assert json.loads(body)["stream"] is stream


def test_a_run_is_counted_from_when_as_many_answers_as_connections_have_come_until_its_time_is_over() -> None:
    tally = Tally(RUN)
    tally.begin()
    assert tally.answered(9.0, 9.0)
    time.sleep(0.2)
    assert tally.answered(9.0, 9.0)  # the second one: it counts from here
    for _ in range(4):
        assert tally.answered(0.002, 0.001)
    time.sleep(0.06)
    assert not tally.answered(9.0, 9.0)
    assert not tally.answered(9.0, 9.0)
    outcome = tally.outcome()
    assert (outcome.count, outcome.p50_ms, outcome.p99_ms, outcome.first_p50_ms) == (4, 2.0, 2.0, 1.0)
    assert outcome.problem == ""
    assert outcome.seconds >= 0.05


def test_a_run_goes_on_until_it_has_as_many_answers_as_connections() -> None:
    tally = Tally(msgspec.structs.replace(RUN, connections=1, seconds=0.0))
    assert tally.answered(0.001, 0.001)
    assert tally.answered(0.001, 0.001)
    assert not tally.answered(0.001, 0.001)
    assert tally.outcome().count == 1


def test_a_run_with_a_wrong_answer_does_not_count() -> None:
    tally = Tally(RUN)
    tally.failed("answered 500")
    tally.failed("closed a connection")
    assert not tally.answered(0.001, 0.001)
    assert tally.outcome() == Outcome(problem="answered 500")


def outcome(count: int, p50_ms: float, **cpu_s: float) -> Outcome:
    return Outcome(count, 1.0, p50_ms, 2 * p50_ms, p50_ms, {"load": 0.1, **cpu_s})


def one_round(speed: float, *, litellm: bool = True) -> dict[str, Outcome]:
    """A round of a machine that is `speed` times as fast as usual."""
    found = {
        "direct": outcome(int(9000 * speed), 1.0 / speed),
        "bare_client": outcome(int(2000 * speed), 5.0 / speed),
        "gateway": outcome(int(1000 * speed), 11.0 / speed, gateway=0.8, valkey=0.2),
        "litellm": outcome(int(200 * speed), 101.0 / speed, litellm=1.0),
    }
    return found if litellm else {name: one for name, one in found.items() if name != "litellm"}


def test_ratios_are_taken_within_rounds_so_that_a_slower_machine_does_not_change_them() -> None:
    cell = Cell(16, stream=True, rounds=[one_round(1.0), one_round(0.5), one_round(2.0)])
    assert cell.name == "stream_16"
    assert {name: set(values) for name, values in ratios_of(cell).items()} == {
        "rps_per_core_over_litellm": {5.0},
        "added_p50_over_litellm": {0.1},
        "rate_over_bare_client": {0.5},
    }


def test_the_result_tells_medians_with_their_spread_and_what_misses_its_goal() -> None:
    result = result_of([Cell(16, stream=False, rounds=[one_round(1.0), one_round(0.5), one_round(2.0)])])
    gateway = result["cells"]["whole_16"]["gateway"]
    assert gateway["rate"] == {"median": 1000, "spread": [500, 2000]}
    assert gateway["added_p50_ms"]["median"] == 10.0
    assert gateway["rps_per_core"]["median"] == 1000  # with Valkey's share
    assert gateway["rps_per_core_without_valkey"]["median"] == 1250
    assert result["missed"] == missed(result["ratios"]) == ["rate_over_bare_client.whole_16"]
    assert "rate_over_bare_client" in report(result)


def test_a_target_that_took_part_in_some_rounds_is_compared_in_those() -> None:
    cell = Cell(16, stream=True, rounds=[one_round(1.0), one_round(0.5, litellm=False)])
    assert ratios_of(cell)["rps_per_core_over_litellm"] == [5.0]
    assert len(ratios_of(cell)["rate_over_bare_client"]) == 2
    assert result_of([cell])["cells"]["stream_16"]["litellm"]["requests"] == 200


def test_without_litellm_there_are_no_ratios_with_it() -> None:
    result = result_of([Cell(16, stream=False, rounds=[one_round(1.0, litellm=False)])])
    assert set(result["ratios"]) == {"rate_over_bare_client"}


def test_a_child_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with children(tmp_path) as owned:
        child = owned.start("talker", [sys.executable, "-c", "import sys; sys.exit('no such thing')"], is_asked=True)
        with pytest.raises(Failed, match=r"talker ended[^$]*no such thing"):
            child.hear(30.0)


def test_children_are_stopped_at_the_end_and_their_cpu_time_can_be_read(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.1: pass\nprint('done', flush=True)\ntime.sleep(600)"
    with children(tmp_path) as owned:
        child: Child = owned.start("busy", [sys.executable, "-c", busy], is_asked=True)
        assert child.hear(30.0) == b"done"
        if sys.platform == "linux":
            assert cpu_seconds(child.pid) >= 0.05
    assert not is_running(child.pid)


@pytest.mark.timeout(180)
def test_a_tiny_run_tells_ratios_figures_versions_and_commands_and_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "scripts.bench.ingress_over_http", "--json", "--without-litellm"]
    effort = ["--rounds", "1", "--seconds", "0.05", "--connections", "2", "--tokens", "4"]
    done = subprocess.run([*command, *effort], capture_output=True, text=True, timeout=150, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result["cells"]) == {"whole_2", "stream_2"}
    for cell in result["cells"].values():
        assert list(cell) == ["direct", "bare_client", "gateway"]
        assert all(target["requests"] > 0 for target in cell.values())
    assert set(result["ratios"]["rate_over_bare_client"]) == {"whole_2", "stream_2"}
    assert {"python", "valkey", "aiohttp"} <= set(result["versions"])
    assert {"backend", "gateway", "load", "bare_client"} == set(result["commands"])
    assert "warming up gateway" in done.stderr
    ports = re.findall(r"--port (\d+)|valkey://127\.0\.0\.1:(\d+)", result["commands"]["gateway"])
    assert len(ports) == 2
    for port in (int("".join(found)) for found in ports):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5.0)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
