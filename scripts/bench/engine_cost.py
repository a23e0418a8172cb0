"""What one claim-and-settle costs the server, and whether that grows with pools, keys or waiting requests.

Server time is the server's own statistic. Each ratio compares two groups that are measured in turn, several times, in
one run; the medians are divided. The million waiting requests are entries behind a few thousand real ones: what is
measured is that the length of the list does not matter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

from dispatch.fabric.schema import LIMITS
from scripts.bench.line import Line
from scripts.bench.server import BenchServer, bench_server

LARGE_BODY = b"y" * (1 << 20)
GOALS = {
    "pools_1000_over_4": 1.3, "pools_64_over_4": 1.3, "active_4_of_1000_over_4": 1.3, "capped_1000_over_0": 1.3,
    "backlog_1e4_over_1": 1.1, "backlog_1e6_over_1": 1.1, "keys_10000_over_1": 1.3,
    "claim_settle_over_empty_fcall": 25.0, "batch16_over_single": 0.65, "large_body_over_small": 1.5,
}  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds, and requests in each."""

    rounds: int
    requests: int

    @property
    def supply(self) -> int:
        """How many requests have to wait in each group."""
        return self.rounds * self.requests + 200


class Comparison:
    """Groups that are measured in turn."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._measures: dict[str, Callable[[], float]] = {}
        self.samples: dict[str, list[float]] = {}

    def add(self, name: str, measure: Callable[[], float]) -> None:
        """Measure `name` in each round."""
        self._measures[name] = measure

    def run(self) -> dict[str, float]:
        """Measure all in turn; returns the medians."""
        for number in range(self._effort.rounds):
            say(f"round {number + 1} of {self._effort.rounds}")
            for name, measure in self._measures.items():
                self.samples.setdefault(name, []).append(measure())
        return {name: statistics.median(values) for name, values in self.samples.items()}


def main() -> None:
    """Run the benchmark and print what it found; exit code 1 when a goal is missed and --enforce is given."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench/engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: scripts/bench/engine --quick --json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="under 45 seconds")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 when a ratio misses its goal")
    arguments = parser.parse_args()
    effort = Effort(5, 300) if arguments.quick else Effort(11, 1000)
    with bench_server() as server:
        result = measure(server, effort)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result["ratios"].items():
            print(f"{name:34} {value:8.2f}   goal <= {GOALS[name]}")
        for name, value in result["us"].items():
            print(f"{name:34} {value:8.1f} us")
    missed = [name for name, value in result["ratios"].items() if value > GOALS[name]]
    if arguments.enforce and missed:
        sys.exit(f"missed: {', '.join(missed)}")


def measure(server: BenchServer, effort: Effort) -> dict[str, dict[str, float]]:
    """Fill the groups, measure them in turn, return ratios, medians and spreads."""
    comparison = Comparison(effort)
    add = comparison.add
    for name, active, configured in (("pools_4", 4, 4), ("pools_64", 64, 64), ("pools_1000", 1000, 1000),
                                     ("active_4_of_1000", 4, 1000)):  # fmt: skip
        say(f"filling {name}")
        add(name, steps(many_pools(server, active, configured, effort), effort))
    for capped in (0, 1000):
        say(f"filling capped_{capped}")
        add(f"capped_{capped}", steps(beside_capped(server, capped, effort), effort))
    for name, depth in (("backlog_1e4", 10_000), ("backlog_1e6", 1_000_000)):
        say(f"filling {name}")
        add(name, steps(deep(server, depth, effort), effort))
    add("backlog_1", shallow(server, effort))
    for keys in (1, 10_000):
        say(f"filling keys_{keys}")
        add(f"keys_{keys}", steps(keyed(server, keys, effort), effort))
    single = many_pools(server, 4, 4, effort, times=17)
    add("single", steps(single, effort))
    add("batch16", steps(single, effort, batch=16))
    add("small_body", steps(bodies(server, b"x" * 1024, effort), effort))
    add("large_body", steps(bodies(server, LARGE_BODY, effort), effort, part=8))
    add("empty_fcall", empty(server))
    server.slowest_ms()
    medians = comparison.run()
    slowest = server.slowest_ms()
    spread = {name: (round(min(values), 2), round(max(values), 2)) for name, values in comparison.samples.items()}
    pairs = {
        "pools_1000_over_4": ("pools_1000", "pools_4"), "pools_64_over_4": ("pools_64", "pools_4"),
        "active_4_of_1000_over_4": ("active_4_of_1000", "pools_4"), "capped_1000_over_0": ("capped_1000", "capped_0"),
        "backlog_1e4_over_1": ("backlog_1e4", "backlog_1"), "backlog_1e6_over_1": ("backlog_1e6", "backlog_1"),
        "keys_10000_over_1": ("keys_10000", "keys_1"), "claim_settle_over_empty_fcall": ("single", "empty_fcall"),
        "batch16_over_single": ("batch16", "single"), "large_body_over_small": ("large_body", "small_body"),
    }  # fmt: skip
    return {
        "ratios": {name: round(medians[over] / medians[under], 3) for name, (over, under) in pairs.items()},
        "us": {name: round(value, 2) for name, value in medians.items()},
        "spread_us": spread,
        "slowest_call_ms": slowest,
    }  # fmt: skip


def steps(line: Line, effort: Effort, *, batch: int = 1, part: int = 1) -> Callable[[], float]:
    """Return a measure of `line`; `part` measures a fraction of the effort's requests."""
    line.claim(batch)

    def measure_once() -> float:
        line.claim(max(0, batch - len(line.held)))
        cost = line.cost(max(1, effort.requests // part), batch)
        line.forget_replies()
        return cost

    return measure_once


def many_pools(server: BenchServer, active: int, configured: int, effort: Effort, times: int = 1) -> Line:
    """Return a group in which `active` of `configured` pools have work."""
    line = Line(server, [{"pool_id": f"p{at}", "quantum": 1 + at % 4} for at in range(configured)])
    for at in range(active):
        line.fill(f"p{at}", times * effort.supply // active + 4)
    return line


def beside_capped(server: BenchServer, capped: int, effort: Effort) -> Line:
    """Return a group with 4 active pools beside `capped` ones that are at their cap and have waiting work."""
    pools: list[dict[str, object]] = [{"pool_id": f"c{at}", "max_concurrent": 1} for at in range(capped)]
    pools += [{"pool_id": f"p{at}", "quantum": 1 + at % 4} for at in range(4)]
    line = Line(server, pools[:1000])
    for at in range(min(capped, 996)):
        line.fill(f"c{at}", 2)
    while capped and len(line.held) < min(capped, 996):
        line.claim(LIMITS["claim_max"])
    line.held.clear()
    for pool in pools[:1000][-4:]:
        line.fill(str(pool["pool_id"]), effort.supply)
    return line


def deep(server: BenchServer, depth: int, effort: Effort) -> Line:
    """Return a group whose one pool has `depth` waiting requests."""
    line = Line(server, [{"pool_id": "deep"}])
    line.fill("deep", effort.supply)
    line.deepen("deep", depth)
    return line


def shallow(server: BenchServer, effort: Effort) -> Callable[[], float]:
    """Return a measure of a pool in which 1 to 16 requests wait."""
    line = Line(server, [{"pool_id": "deep"}])

    def measure_once() -> float:
        costs = []
        for _ in range(0, effort.requests, 16):
            line.fill("deep", 17)
            line.claim(1)
            costs.append(line.cost(16))
            line.held.clear()
        line.forget_replies()
        return statistics.mean(costs)

    return measure_once


def keyed(server: BenchServer, keys: int, effort: Effort) -> Line:
    """Return a group whose one pool has waiting requests of `keys` fairness keys."""
    line = Line(server, [{"pool_id": "keyed"}])
    line.fill("keyed", max(effort.supply, keys), keys=keys)
    return line


def bodies(server: BenchServer, body: bytes, effort: Effort) -> Line:
    """Return a group whose waiting requests have this body; a large one is claimed by reference."""
    line = Line(server, [{"pool_id": "bodies"}])
    line.fill("bodies", effort.supply if len(body) <= 1024 else effort.supply // 8 + 16, bodies=body)
    return line


def empty(server: BenchServer) -> Callable[[], float]:
    """Return a measure of a pipelined FCALL that does nothing."""

    def measure_once() -> float:
        server.client.config_resetstat()
        pipeline = server.client.pipeline(transaction=False)
        for _ in range(2000):
            pipeline.execute_command("FCALL", "dispatch_noop", 1, "{g}")
        pipeline.execute()
        return server.function_us() / 2000

    return measure_once


def say(text: str) -> None:
    """Tell progress on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
