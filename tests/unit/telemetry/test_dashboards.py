"""The alert rules and the dashboard: true PromQL over metrics that exist, and rules that fire when they should."""

from __future__ import annotations

import itertools
import json
from importlib import resources
from typing import Any

import promql_parser
import pytest
import yaml

from dispatch.fabric.schema import ENDINGS
from dispatch.telemetry import dashboards
from dispatch.telemetry.metrics.catalogue import CATALOGUE
from dispatch.telemetry.metrics.group import BREAKER_STATES, DROPPED, GATE_STATES, POOL_STATES, REFUSALS, SKIPS
from tests.support.promql import Samples, evaluate, nodes, selectors

FILES = resources.files(dashboards)
GROUPS = yaml.safe_load(FILES.joinpath("alerts.yaml").read_text("utf-8"))["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
DASHBOARD = json.loads(FILES.joinpath("dashboard.json").read_text("utf-8"))
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}
SCRAPED = {"instance", "job"}
OTHERS = {"process_cpu_seconds_total": frozenset[str]()}
"""Metrics of the Prometheus client's own."""
WORDS = {
    ("llm_dispatch_pool_state", "state"): POOL_STATES,
    ("llm_dispatch_endpoint_breaker_state", "state"): BREAKER_STATES,
    ("llm_dispatch_endpoint_gate_state", "state"): GATE_STATES,
    ("llm_dispatch_pool_endings_total", "ending"): ENDINGS,
    ("llm_dispatch_pool_drops_total", "reason"): DROPPED,
    ("llm_dispatch_pool_refused_total", "reason"): REFUSALS,
    ("llm_dispatch_pool_skips_total", "reason"): SKIPS,
    ("llm_dispatch_group_retry_budget", "kind"): ("first_attempts", "retries", "allowed"),
}


KNOWN = OTHERS | {
    name: frozenset(label.replace(".", "_") for label in family.labels)
    | ({"le"} if name.endswith("_bucket") else set())
    for family in CATALOGUE.values()
    for name in family.shown()
}


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"].replace("$__rate_interval", "5m") for target in panel["targets"]]


EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=name) for name, rule in RULES.items()),
    *(pytest.param(query, id=title) for title, panel in PANELS.items() for query in queries(panel)),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_promql_over_metrics_and_labels_that_exist(expression: str) -> None:
    found = selectors(expression)
    assert found
    labels = set[str](SCRAPED)
    for selector in found:
        assert selector.name in KNOWN, selector.name
        labels |= KNOWN[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in KNOWN[selector.name] | SCRAPED, (selector.name, matcher.name)
            words = WORDS.get((selector.name, matcher.name))
            if words is not None:
                assert set(matcher.value.split("|")) <= set(words), matcher.value
    for node in nodes(promql_parser.parse(expression)):
        modifier = getattr(node, "modifier", None)
        assert set(getattr(modifier, "labels", ())) <= labels


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_is_wrong_and_where_to_look_first(name: str) -> None:
    rule = RULES[name]
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "look_first"}
    assert all(len(text) > 20 for text in rule["annotations"].values())


def test_names_of_rules_and_groups_are_their_own() -> None:
    assert len(RULES) == sum(len(group["rules"]) for group in GROUPS)
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)


def test_panels_have_places_of_their_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(PANELS) == sum(panel["type"] != "row" for panel in DASHBOARD["panels"])


def test_the_issues_signals_are_on_the_dashboard() -> None:
    shown = {selector.name for panel in PANELS.values() for query in queries(panel) for selector in selectors(query)}
    for word in (
        "pending", "in_flight", "oldest_age", "deficit", "head_cost", "skips", "endings", "drops", "queue_wait",
        "execution", "request_duration", "delivery", "admitted", "refused", "lease_losses", "retries", "retry_budget",
        "breaker", "gate", "slots", "function_duration", "wakeups", "chunks", "history_drops", "gen_ai",
    ):  # fmt: skip
        assert any(word in name for name in shown), word


BOTH = ({"instance": "a"}, {"instance": "b"})


def alike(name: str, value: float, before: float = 0.0, **labels: str) -> Samples:
    """Return a value of the group, as two gateways export it."""
    samples = Samples()
    for each in BOTH:
        samples.put(f"llm_dispatch_{name}", value, before, **each, **labels)
    return samples


def together(*parts: Samples) -> Samples:
    found = Samples()
    for part in parts:
        found.now |= part.now
        found.before |= part.before
    return found


def endings(**counts: float) -> Samples:
    return together(*(alike("pool_endings_total", 100 + n, 100, pool="p", ending=word) for word, n in counts.items()))


def drops(reason: str, count: float) -> Samples:
    return alike("pool_drops_total", 7 + count, 7, pool="p", reason=reason)


def budget(retries: float, allowed: float) -> Samples:
    return together(
        alike("group_retry_budget", retries, kind="retries"), alike("group_retry_budget", allowed, kind="allowed")
    )


def calls(fast: float, slow: float) -> Samples:
    parts = [("0.01", fast), ("1.0", fast + slow), ("+Inf", fast + slow)]
    return together(*(alike("function_duration_seconds_bucket", n, function="f", le=bound) for bound, n in parts))


def builds(*libraries: str) -> Samples:
    samples = Samples()
    for at, library in enumerate(libraries):
        samples.put(
            "llm_dispatch_build_info", 1, instance=str(at), library=library, contract="1", version="v", python="3"
        )
    return samples


def pool(pending: float, state: str, **more: float) -> Samples:
    states = [alike("pool_state", int(one == state), pool="p", state=one) for one in POOL_STATES]
    return together(
        alike("pool_pending", pending, pool="p"), *states, *(alike(f"pool_{k}", v, pool="p") for k, v in more.items())
    )


def endpoint_state(what: str, state: str, states: tuple[str, ...]) -> Samples:
    return together(*(alike(f"endpoint_{what}_state", int(one == state), endpoint="e", state=one) for one in states))


def group(pending: float, in_flight: float) -> Samples:
    return together(alike("group_pending", pending), alike("group_in_flight", in_flight))


NOTHING = Samples()
CASES: dict[str, tuple[list[Samples], list[Samples]]] = {
    "DispatchNoGateway": ([NOTHING], [alike("gateway_slots", 64)]),
    "DispatchFabricDown": (
        [Samples().put("llm_dispatch_gateway_fabric_up", 0, instance="a")],
        [alike("gateway_fabric_up", 1), NOTHING],
    ),
    "DispatchStateUnreadable": (
        [alike("snapshot_up", 0, section="pools")],
        [
            together(
                Samples().put("llm_dispatch_snapshot_up", 0, instance="c", section="pools"),
                alike("snapshot_up", 1, section="pools"),
            )
        ],
    ),
    "DispatchHeartbeatLate": (
        [alike("gateway_heartbeat_age_seconds", 31)],
        [alike("gateway_heartbeat_age_seconds", 9)],
    ),
    "DispatchValkeySlow": ([calls(90, 10)], [calls(1000, 1), calls(0, 0)]),
    "DispatchVersionsMixed": ([builds("x", "y", "x")], [builds("x", "x")]),
    "DispatchQueueOld": (
        [alike("pool_oldest_age_seconds", 301, pool="p")],
        [alike("pool_oldest_age_seconds", 299, pool="p"), NOTHING],
    ),
    "DispatchPoolNearlyFull": (
        [pool(91, "enabled", queue_limit=100)],
        [pool(90, "enabled", queue_limit=100), pool(0, "enabled", queue_limit=0)],
    ),
    "DispatchRefusing": (
        [
            together(
                alike("pool_refused_total", 12, 6, pool="p", reason="pool_full"),
                alike("pool_refused_total", 5, 0, pool="p", reason="group_full"),
            )
        ],
        [
            alike("pool_refused_total", 110, 100, pool="p", reason="pool_full"),
            alike("pool_refused_total", 99, 0, pool="p", reason="pool_disabled"),
        ],
    ),
    "DispatchStuck": ([group(1, 0)], [group(0, 0), group(5, 1)]),
    "DispatchPausedWithWork": ([pool(1, "paused")], [pool(0, "paused"), pool(5, "enabled"), pool(5, "draining")]),
    "DispatchExpiring": (
        [together(endings(succeeded=94, expired=6), drops("expired", 6))],
        [
            together(endings(succeeded=95, expired=5), drops("expired", 5)),
            together(endings(succeeded=0), drops("expired", 0)),
        ],
    ),
    "DispatchFailing": (
        [endings(succeeded=80, failed=15, lost=5), endings(failed=1)],
        [
            endings(succeeded=90, failed=10),
            endings(succeeded=1, failed=0),
            endings(succeeded=0, failed=0),
            endings(cancelled=9, failed=0),
        ],
    ),
    "DispatchWorkLost": ([drops("lost", 1), drops("dead", 1)], [drops("lost", 0), drops("expired", 5)]),
    "DispatchLeasesLost": (
        [alike("lease_losses_total", 3, 2, pool="p", reason="fenced")],
        [alike("lease_losses_total", 3, 3, pool="p", reason="fenced")],
    ),
    "DispatchProducersGone": (
        [together(drops("producer_gone", 6), drops("reply_dropped", 5))],
        [drops("producer_gone", 10), drops("lost", 50)],
    ),
    "DispatchRetryBudgetSpent": ([budget(10, 10), budget(11, 10)], [budget(9, 10), budget(0, 0)]),
    "DispatchBreakerOpen": (
        [endpoint_state("breaker", "open", BREAKER_STATES), endpoint_state("breaker", "half_open", BREAKER_STATES)],
        [endpoint_state("breaker", "closed", BREAKER_STATES)],
    ),
    "DispatchEndpointHolds": (
        [alike("endpoint_hold_seconds", 1, endpoint="e")],
        [alike("endpoint_hold_seconds", 0, endpoint="e")],
    ),
    "DispatchGateWithoutSample": (
        [endpoint_state("gate", "stale", GATE_STATES)],
        [endpoint_state("gate", "open", GATE_STATES), endpoint_state("gate", "closed", GATE_STATES)],
    ),
    "DispatchHistoryAway": (
        [
            together(
                Samples().put("llm_dispatch_history_up", 0, instance="c", sink="history"),
                alike("history_up", 1, sink="history"),
            )
        ],
        [alike("history_up", 1, sink="history"), NOTHING],
    ),
    "DispatchHistoryBehind": (
        [alike("history_lag", 50_001, sink="history")],
        [alike("history_lag", 50_000, sink="history")],
    ),
    "DispatchHistoryLoses": (
        [
            together(
                alike("history_drops_total", 2, 1, sink="history"), alike("history_lost_total", 0, sink="history")
            ),
            together(
                alike("history_drops_total", 1, 1, sink="history"), alike("history_lost_total", 1, sink="history")
            ),
        ],
        [
            together(
                alike("history_drops_total", 1, 1, sink="history"), alike("history_lost_total", 3, 3, sink="history")
            )
        ],
    ),
}


def test_every_rule_is_tried() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_when_it_should_and_once_however_many_gateways_there_are(name: str) -> None:
    fires, rests = CASES[name]
    for samples in fires:
        found = evaluate(RULES[name]["expr"], samples)
        assert found, samples
        if name not in {"DispatchFabricDown", "DispatchHeartbeatLate"}:
            assert len(found) == 1
    for samples in rests:
        assert evaluate(RULES[name]["expr"], samples) == {}
