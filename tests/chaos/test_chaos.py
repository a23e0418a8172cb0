"""Nothing is lost, leaked or left waiting, whatever is killed, stopped, cut off or slow: storms over real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.plan import FAILURES, MODES, make_plan
from tests.chaos.world import until

ROOT = Path(__file__).parents[2]
ZERO = (
    "ended_twice", "never_ended", "leaked_slots", "audit_differences", "late_callers", "lost_at_least_once",
    "missing_records", "excess_executions", "untold_attempts", "not_once_in_calm", "untold_callers", "wrong_replies",
    "crashes",
)  # fmt: skip
ORDINARY = [("at_most_once", 1, 700), ("at_least_once", 2, 700), ("both", 3, 700)]
LONG = [(mode, seed, 2500) for seed, mode in enumerate(MODES * 3, start=100)]


def chaos(mode: str, seed: int, requests: int, *more: str, folder: Path = ROOT) -> tuple[int, dict[str, Any], str]:
    """Run the harness that stands in `folder`; returns its exit code, its JSON and what it told."""
    options = ["--seed", str(seed), "--requests", str(requests), "--mode", mode, "--json", *more]
    command = [str(ROOT / "scripts" / "chaos")] if folder == ROOT else [sys.executable, "-m", "tests.chaos.run"]
    done = subprocess.run(
        [*command, *options], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def holds(mode: str, seed: int, requests: int) -> None:
    code, result, told = chaos(mode, seed, requests)
    assert {name: result[name] for name in ZERO} == dict.fromkeys(ZERO, 0), told
    assert code == 0
    assert result["requests"] >= requests  # a call that died with its process is made again
    assert result["admitted"] == sum(result["endings"].values())
    assert result["executions"] > 0
    assert sum(result["faults"].values()) > 5, result


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "seed", "requests"), ORDINARY)
def test_every_request_ends_once_whatever_happens(mode: str, seed: int, requests: int) -> None:
    holds(mode, seed, requests)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("begun", ["chaos-*/g0-1.log", "chaos-*/p0-1.json"], ids=["starting", "calling"])
def test_a_run_that_is_told_to_stop_leaves_nothing_behind(begun: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.run", "--requests", "2000"],
        cwd=ROOT,
        env=dict(os.environ) | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        try:
            until(lambda: bool(list(tmp_path.glob(begun))), 60, lambda: f"no {begun}")
            run.terminate()
            assert run.wait(30) == 128 + signal.SIGTERM
        finally:
            run.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
def test_every_request_is_executed_once_where_nothing_is_killed_or_frozen() -> None:
    code, result, told = chaos("both", 4, 200, "--calm")
    assert code == 0, told
    assert result["faults"] == {}
    assert result["attempts"] == {"1": result["executions"]} or result["endings"].get("expired", 0) > 0, result
    assert result["calm"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "seed", "requests"), LONG)
def test_every_request_of_a_long_storm_ends_once(mode: str, seed: int, requests: int) -> None:
    holds(mode, seed, requests)


@dataclass(frozen=True)
class Broken:
    """A rule that is wrong: the field that has to tell, where the rule stands, what stands there instead."""

    field: str
    file: str
    rule: str
    instead: str


BROKEN = [
    Broken("lost_at_least_once", "lua/state/delivery.lua", 'delivery ~= "at_least_once"', "delivery ~= nil"),
    Broken("missing_records", "lua/state/endings.lua", "  append(step, request, ending, facts)\n", ""),
    Broken("leaked_slots", "lua/state/slots.lua", "group.in_flight = step.group.in_flight - 1", "freed = step.now"),
]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broken", BROKEN, ids=[broken.field for broken in BROKEN])
def test_a_rule_that_is_broken_on_purpose_is_noticed(broken: Broken, tmp_path: Path) -> None:
    """The whole harness on a copy of the system in which a rule is wrong."""
    for name in ("dispatch", "lua", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "corpus"))
    text = (tmp_path / broken.file).read_text("utf-8")
    assert text.count(broken.rule) == 1, f"{broken.file} reads otherwise now: {broken.rule!r}"
    (tmp_path / broken.file).write_text(text.replace(broken.rule, broken.instead), "utf-8")
    code, result, told = chaos("at_least_once", 5, 700, "--only", "gateway stop", folder=tmp_path)
    assert code == 1
    assert result[broken.field] > 0, told
    assert "again: scripts/chaos --seed 5 --requests 700 --mode at_least_once --json --only 'gateway stop'" in told
    for line in told.splitlines():
        if "logs and evidence: " in line:
            shutil.rmtree(line.partition("evidence: ")[2])


# ---- the plan


def test_the_same_seed_makes_the_same_plan_and_another_seed_another() -> None:
    assert make_plan(7, 500, "both") == make_plan(7, 500, "both")
    assert make_plan(7, 500, "both").orders != make_plan(8, 500, "both").orders
    assert make_plan(7, 500, "both").faults != make_plan(8, 500, "both").faults


def test_every_kind_of_fault_is_in_the_plans_and_no_target_suffers_two_at_a_time() -> None:
    plans = [make_plan(seed, 2500, "both") for seed in range(100, 109)]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {(fault.target[0], fault.kind) for fault in faults} == {
        *(("g", kind) for kind in ("kill", "stop", "drain", "cut", "freeze", "refuse")),
        *(("p", kind) for kind in ("kill", "stop", "cut", "freeze", "refuse")),
        *(("v", kind) for kind in ("kill", "restart", "stop", "slow", "flush", "cut")),
        *(("b", kind) for kind in ("slow", "fail", "cut", "refuse")),
        *(("o", kind) for kind in ("cancel", "pause")),
    }
    assert {fault.detail for fault in faults if fault.kind == "fail"} == set(FAILURES)
    for plan in plans:
        free_at: dict[str, float] = {}
        for fault in plan.faults:
            assert fault.at_s >= free_at.get(fault.target, 0.0)
            free_at[fault.target] = fault.at_s + fault.for_s


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_decide_how_pools_deliver(mode: str) -> None:
    found = {pool["delivery"] for pool in make_plan(1, 10, mode).document["pools"] if pool["pool_id"] != "default"}
    assert found == ({"at_most_once", "at_least_once"} if mode == "both" else {mode})
