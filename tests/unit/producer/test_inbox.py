from __future__ import annotations

from concurrent.futures import Future

import pytest

from dispatch.contract import Reply
from dispatch.errors import ContractError, ContractMismatch, FabricError, StateConflict
from dispatch.fabric.frames import Frame
from dispatch.producer.inbox import Inbox, Outcome


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(clock: Clock) -> Inbox:
    return Inbox(clock)


def frame(sequence: int, request_id: str, *, contract: int = 1, kind: str = "terminal", large: bool = False) -> bytes:
    head = f"{contract}|{sequence}|{kind}|{request_id}|succeeded|default|1|2|3|{int(large)}\n{{}}\n"
    return head.encode() + b"body\nwith\nlines"


def expect(inbox: Inbox, request_id: str) -> Future[Outcome]:
    slot: Future[Outcome] = Future()
    inbox.expect(request_id, slot)
    return slot


def test_frames_go_to_those_who_wait_for_them(inbox: Inbox) -> None:
    a, b = expect(inbox, "a"), expect(inbox, "b")
    assert inbox.receive([frame(7, "b"), frame(8, "a")]) == 8
    first, second = a.result(0), b.result(0)
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert (first.request_id, second.request_id) == ("a", "b")
    assert first.body == b"body\nwith\nlines"
    assert not inbox.busy()


def test_nothing_to_read_is_nothing_to_acknowledge(inbox: Inbox) -> None:
    assert inbox.receive([]) is None


def test_frames_nobody_waits_for_are_dropped_and_counted(inbox: Inbox) -> None:
    slot = expect(inbox, "a")
    assert inbox.receive([frame(1, "x"), frame(2, "a", kind="chunk"), frame(3, "a"), frame(3, "a")]) == 3
    assert inbox.dropped == 3  # an unknown id, a kind not known yet, and a frame that came twice
    assert slot.done()


def test_a_large_reply_is_handed_over_as_its_frame(inbox: Inbox) -> None:
    slot = expect(inbox, "a")
    inbox.receive([frame(1, "a", large=True)])
    assert isinstance(slot.result(0), Frame)


def test_another_contract_or_damage_fails_that_request_only(inbox: Inbox) -> None:
    a, b, c = expect(inbox, "a"), expect(inbox, "b"), expect(inbox, "c")
    damaged = b"1|2|terminal|b|succeeded|default|one|2|3|0\n{}\n"
    assert inbox.receive([frame(1, "a", contract=2), damaged, b"no frame at all", frame(4, "c")]) == 4
    assert isinstance(a.result(0), ContractMismatch)
    assert "contract 2" in str(a.result(0))
    assert isinstance(b.result(0), ContractError)
    assert isinstance(c.result(0), Reply)


def test_one_id_is_awaited_once(inbox: Inbox) -> None:
    slot, other = expect(inbox, "a"), Future[Outcome]()
    with pytest.raises(StateConflict, match="'a'"):
        inbox.expect("a", other)
    inbox.withdraw("a", other)
    inbox.abandon("a", other, 10.0)
    inbox.receive([frame(1, "a")])
    assert slot.done()
    assert not inbox.busy()


def test_the_first_outcome_counts(inbox: Inbox) -> None:
    slot = expect(inbox, "a")
    assert inbox.settle("a", FabricError("first"))
    assert not inbox.settle("a", FabricError("second"))
    assert str(slot.result(0)) == "first"


def test_an_abandoned_reply_is_due_until_it_comes_or_its_time_is_over(inbox: Inbox, clock: Clock) -> None:
    inbox.abandon("a", expect(inbox, "a"), 10.0)
    inbox.abandon("b", expect(inbox, "b"), 10.0)
    assert inbox.outstanding() == []
    assert inbox.busy()
    inbox.receive([frame(1, "a")])
    assert inbox.busy()
    clock.now = 11.0
    assert not inbox.busy()
    assert inbox.dropped == 1


def test_outstanding_tells_apart_what_the_group_has(inbox: Inbox) -> None:
    expect(inbox, "a")
    expect(inbox, "b")
    inbox.admitted("b")
    inbox.admitted("gone")
    assert inbox.outstanding() == ["a", "b"]
    assert inbox.outstanding(admitted_only=True) == ["b"]
    assert inbox.fail_all(lambda: FabricError("over")) == 2
    assert not inbox.busy()
