"""Chaos: real processes under a seeded storm of faults, and a check of everything that must hold afterwards.

Three gateways, three producers, one Valkey (AOF, fsync always) and two backends run while gateways and producers are
killed, stopped and cut off, Valkey is killed, restarted, stopped and slowed down, its library is flushed, and backends
fail in every way they can. Then every request must have ended exactly once, told, recorded, with every counter at zero.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from typing import Any

import msgspec

from tests.chaos import findings
from tests.chaos.plan import KINDS, MODES, RATE, Plan, make_plan
from tests.chaos.storm import Storm
from tests.chaos.verdict import Verdict, judge
from tests.chaos.world import World, say

_SHOWN = 20


def main() -> None:
    """Run, tell, and say by the exit code whether everything held."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: scripts/chaos --seed 7 --requests 2000 --json\nexit code: 0 all held, 1 something did not",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="what the whole plan is made from (1)")
    parser.add_argument("--requests", type=int, default=2000, help="how many calls the producers make (2000)")
    parser.add_argument("--mode", choices=MODES, default="both", help="delivery mode of the pools (both: some of each)")
    parser.add_argument("--rate", type=float, default=RATE, help=f"calls per second of all producers ({RATE:g})")
    parser.add_argument("--only", default="", help=f"a comma-separated part of the faults: {', '.join(KINDS)}")
    parser.add_argument("--calm", action="store_true", help="the same calls without any fault")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--keep", action="store_true", help="keep logs and evidence also when everything held")
    arguments = parser.parse_args()
    if not 1 <= arguments.requests <= 50_000:
        parser.error("--requests: 1 to 50000 (the endings stream keeps 100000 records)")
    only = [kind.strip() for kind in arguments.only.split(",") if kind.strip()]
    if unknown := set(only) - set(KINDS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is no fault; there are {', '.join(KINDS)}")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that everything is cleaned up
    plan = make_plan(arguments.seed, arguments.requests, arguments.mode, arguments.rate, only)
    if arguments.calm:
        plan = msgspec.structs.replace(plan, faults=[])
    result, verdict = run(plan, arguments)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.writelines(f"{name:20} {value}\n" for name, value in result.items())
    if not verdict.clean:
        raise SystemExit(1)


def run(plan: Plan, arguments: argparse.Namespace) -> tuple[dict[str, Any], Verdict]:
    """Do the plan and judge what came of it."""
    started = time.monotonic()
    again = f"scripts/chaos --seed {plan.seed} --requests {arguments.requests} --mode {plan.mode} --json"
    if arguments.rate != RATE:
        again += f" --rate {arguments.rate:g}"
    if arguments.only:
        again += f" --only '{arguments.only}'"
    if arguments.calm:
        again += " --calm"
    say(f"seed {plan.seed}: {arguments.requests} calls in {plan.duration_s:.0f} s, {len(plan.faults)} faults")
    with World(plan) as world:
        storm = Storm(world)
        storm.run()
        say("waiting for quiet")
        quiet_s = findings.wait_for_quiet(world.valkey.url)
        world.stop_gateways()
        evidence = findings.gather(world, storm.troubles)
        verdict = judge(evidence)
        if not verdict.clean:
            world.keep_writes()
    result = {
        "seed": plan.seed, "mode": plan.mode, **verdict.counts(), **findings.counts(evidence), "calm": verdict.calm,
        **_totals(storm), "faults": dict(sorted(storm.done.items())), "quiet_s": round(quiet_s, 1),
        "seconds": round(time.monotonic() - started, 1), "replay": again,
    }  # fmt: skip
    for name, sentences in verdict.fields().items():
        for sentence in sentences[:_SHOWN]:
            say(f"{name}: {sentence}")
        if len(sentences) > _SHOWN:
            say(f"{name}: and {len(sentences) - _SHOWN} more")
    if verdict.clean and not arguments.keep:
        shutil.rmtree(world.folder, ignore_errors=True)
    else:
        (world.folder / "evidence.json").write_bytes(findings.as_json(evidence))
        say(f"logs and evidence: {world.folder}")
    if not verdict.clean:
        say(f"again: {again}")
    return result, verdict


def _totals(storm: Storm) -> dict[str, int]:
    """Return how often was done what was done."""
    done = storm.done
    return {
        "kills": sum(count for name, count in done.items() if name.endswith(" kill")),
        "stops": sum(count for name, count in done.items() if name.endswith(" stop")),
        "restarts": done["valkey restart"] + done["valkey kill"],
        "cuts": sum(count for name, count in done.items() if name.endswith((" cut", " freeze", " refuse"))),
    }


if __name__ == "__main__":
    main()
