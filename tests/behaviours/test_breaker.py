"""One breaker for each endpoint, in the group: all pools and gateways see it, and only its own rules move it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import Chore, ChoreReport, Lease, Outcome, Settlement, Verdict
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from tests.behaviours.scene import assert_settled, change, gateway_on, section
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.groups import configure, unique_group
from tests.support.producing import MESSAGES, eye, wide_group
from tests.support.stub import Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

OPEN_MS = 1000
ADDRESS = {"url": "http://127.0.0.1:9/v1", "breaker_failures": 2, "open_ms": OPEN_MS, "close_after": 2}
POOLS = [{"pool_id": "a", "quantum": 4}, {"pool_id": "b"}, {"pool_id": "elsewhere", "endpoint": "other"}]


@pytest.fixture
def shared(valkey: ValkeyProcess) -> Iterator[ByHand]:
    """Two pools on one endpoint, weights 4 to 1, and a third on another one."""
    group = unique_group()
    document = {
        "total_concurrent_dispatch": 100,
        "default_endpoint": "default",
        "pools": POOLS,
        "endpoints": [{"endpoint_id": "default"} | ADDRESS, {"endpoint_id": "other", "url": "http://127.0.0.1:9/v1"}],
    }
    configure(valkey.url, group, document)
    hand = ByHand(valkey.url, group)
    yield hand
    hand.close()


def endpoint(hand: ByHand) -> dict[str, Any]:
    [row] = [row for row in hand.section("endpoints")["rows"] if row["endpoint_id"] == "default"]
    return dict(row)


def end(hand: ByHand, leases: Iterable[Lease], verdict: Verdict, gateway: str = "g", **more: Any) -> None:
    outcome = Outcome.SUCCEEDED if verdict is Verdict.GOOD else Outcome.FAILED
    items = [
        Settlement(request_id=lease.request_id, fence=lease.fence, outcome=outcome, verdict=verdict, **more)
        for lease in leases
    ]
    call = f.lease_settle(gateway, f"{gateway}/1", nonce=uuid.uuid4().hex, want=0, items=items)
    assert set(hand.run(call).answers) == {"OK"}


def break_it(hand: ByHand) -> None:
    """Let it fail as often in a row as opens it, once at each of two gateways and once for each pool."""
    hand.submit("a")
    hand.submit("b")
    for gateway in ("one", "two"):
        end(hand, hand.claim(1, gateway), Verdict.FAILURE, gateway, error_type="endpoint_unreachable")
    assert endpoint(hand)["breaker"] == "open"


def until_half_open(hand: ByHand) -> None:
    while endpoint(hand)["breaker"] != "half_open":
        time.sleep(0.01)


def test_failures_of_different_pools_at_different_gateways_open_it_for_all(shared: ByHand) -> None:
    hand = shared
    break_it(hand)
    hand.submit("a", 2)
    hand.submit("b", 2)
    hand.submit("elsewhere", 2)
    for gateway in ("one", "two", "three"):
        assert {lease.pool_id for lease in hand.claim(8, gateway)} <= {"elsewhere"}
    assert hand.pool("a")["block_reason"] == hand.pool("b")["block_reason"] == "endpoint_open"
    assert hand.pool("elsewhere")["in_flight"] == 2


def test_after_its_time_there_is_one_probe_at_a_time_and_good_ones_close_it(shared: ByHand) -> None:
    hand = shared
    break_it(hand)
    hand.submit("a", 4)
    hand.submit("b", 4)
    assert hand.claim(8) == []
    until_half_open(hand)
    for good in (1, 2):
        leases = [lease for gateway in ("one", "two", "three") for lease in hand.claim(8, gateway)]
        [probe] = leases
        assert probe.probe_until_ms > 0
        assert endpoint(hand)["probe"]["request_id"] == probe.request_id
        end(hand, [probe], Verdict.GOOD, "one")
        assert endpoint(hand)["breaker"] == ("half_open" if good == 1 else "closed")
    assert len(hand.claim(8)) == 6


def test_a_probe_that_fails_opens_it_again(shared: ByHand) -> None:
    hand = shared
    break_it(hand)
    hand.submit("a", 2)
    until_half_open(hand)
    end(hand, hand.claim(1), Verdict.FAILURE)
    assert endpoint(hand)["breaker"] == "open"
    assert hand.claim(1) == []


@pytest.mark.parametrize("verdict", [Verdict.GOOD, Verdict.FAILURE])
def test_what_began_before_it_opened_moves_it_no_more(shared: ByHand, verdict: Verdict) -> None:
    hand = shared
    hand.submit("a", 2)
    old = hand.claim(2, "old")
    break_it(hand)
    before = endpoint(hand)
    end(hand, old, verdict, "old")
    after = endpoint(hand)
    assert (after["breaker"], after["open_until_ms"]) == (before["breaker"], before["open_until_ms"])


def test_callers_faults_and_overload_do_not_open_it(shared: ByHand) -> None:
    hand = shared
    for verdict in (Verdict.NEUTRAL, Verdict.BACKPRESSURE) * 3:
        hand.submit("a")
        end(hand, hand.claim(1), verdict)
    assert endpoint(hand)["breaker"] == "closed"
    for verdict in (Verdict.FAILURE, Verdict.GOOD) * 3:  # never two in a row
        hand.submit("a")
        end(hand, hand.claim(1), verdict)
    assert endpoint(hand)["breaker"] == "closed"
    hand.submit("a")
    end(hand, hand.claim(1), Verdict.BACKPRESSURE, hold_ms=60_000)
    assert endpoint(hand)["breaker"] == "closed"
    hand.submit("a")
    assert hand.claim(1) == []
    assert hand.pool("a")["block_reason"] == "endpoint_gated"


def test_it_survives_a_new_config(shared: ByHand) -> None:
    hand = shared
    break_it(hand)
    before = endpoint(hand)
    change(hand.url, hand.group, "pools.a.quantum=5", "endpoints.default.max_concurrent=50", "policy=fifo")
    after = endpoint(hand)
    assert (after["breaker"], after["open_until_ms"]) == ("open", before["open_until_ms"])
    hand.submit("a")
    assert hand.claim(8) == []
    until_half_open(hand)
    [probe] = hand.claim(8)
    change(hand.url, hand.group, "policy=drr", "endpoints.default.close_after=1")
    assert endpoint(hand)["probe"]["request_id"] == probe.request_id
    hand.submit("b")
    assert hand.claim(8) == []
    end(hand, [probe], Verdict.GOOD)
    assert endpoint(hand)["breaker"] == "closed"


def test_pools_that_wait_for_it_keep_their_credit_and_their_order(shared: ByHand) -> None:
    hand = shared
    change(hand.url, hand.group, "endpoints.default.close_after=1")
    hand.submit("a", 20)
    hand.submit("b", 20)
    leases = hand.claim(3)  # in the middle of a visit
    order = [lease.pool_id for lease in leases]
    end(hand, leases[:2], Verdict.FAILURE)
    credit = hand.pool("a")["deficit"], hand.pool("b")["deficit"]
    for _ in range(10):  # passes on which both are waiting
        assert hand.claim(8) == []
    assert (hand.pool("a")["deficit"], hand.pool("b")["deficit"]) == credit
    until_half_open(hand)
    [probe] = hand.claim(8)
    end(hand, [probe], Verdict.GOOD)
    order += [probe.pool_id, *(lease.pool_id for lease in hand.claim(11))]
    assert "".join(order) == "aaaab" * 3


def test_a_probe_of_a_gateway_that_lost_it_moves_nothing_any_more(shared: ByHand) -> None:
    hand = shared
    change(hand.url, hand.group, "endpoints.default.probe_timeout_ms=600", "endpoints.default.close_after=1")
    break_it(hand)
    taken: list[Chore] = []
    while len(taken) < 2:  # nobody waits, so gateways ask; the first is never heard of again and the next one gets it
        chore = hand.run(f.endpoint_report(f"gateway-{len(taken)}"))
        if chore.kind == "PROBE":
            taken.append(chore)
        time.sleep(0.01)
    late, current = taken

    def report(chore: Chore, gateway: str) -> str:
        good = ChoreReport(kind="probe", endpoint_id="default", token=chore.token, verdict=Verdict.GOOD)
        hand.run(f.endpoint_report(gateway, good))
        return str(endpoint(hand)["breaker"])

    assert report(late, "gateway-0") == "half_open"
    assert report(current, "gateway-1") == "closed"
    assert report(current, "gateway-1") == "closed"


@pytest.mark.anyio
async def test_gateways_see_it_open_probe_once_and_close_it(valkey: ValkeyProcess) -> None:
    well = False

    def answer(_request: SeenRequest) -> Script:
        return json_answer(COMPLETION) if well else json_answer(b"{}", status="500 Internal Server Error")

    async with StubBackend(answer) as stub:
        address = {"endpoint_id": "default"} | ADDRESS | {"url": f"{stub.url}/v1"}
        group = wide_group(valkey.url, pools=[{"pool_id": "a"}, {"pool_id": "b"}], endpoints=[address])
        async with (
            gateway_on(valkey.url, group),
            gateway_on(valkey.url, group),
            DispatchClient(valkey.url, fabric_group=group) as client,
        ):
            call: Callable[..., Any] = client.complete
            for pool in ("a", "b"):
                with pytest.raises(Exception, match="failed"):
                    await call(model="m", messages=MESSAGES, pool=pool, timeout=20)
            assert len(stub.requests) == 2
            waiting = [call(model="m", messages=MESSAGES, pool=pool, timeout=30) for pool in "ab" * 5]
            well = True
            replies = await asyncio.gather(*waiting)
        assert {reply.ending for reply in replies} == {"succeeded"}
        [row] = section(valkey.url, group, "endpoints")["rows"]
        assert row["breaker"] == "closed"
        with eye(valkey.url) as look:
            events = [fields for _, fields in look.xrange(key(group, "events")) if fields[b"kind"] == b"breaker"]
        assert [(event[b"from"], event[b"to"]) for event in events] == [
            (b"closed", b"open"), (b"open", b"half_open"), (b"half_open", b"closed"),
        ]  # fmt: skip
        assert_settled(valkey.url, group)
