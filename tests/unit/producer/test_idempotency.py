"""When two submits are the same call: keys, fingerprints, and what a client makes of the group's answers."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.contract import Call, Operation, Reply
from dispatch.errors import ContractError, IdempotencyConflict, InvalidRequest, OutcomeUnknown, StateConflict
from dispatch.errors import RequestInProgress as InProgress
from dispatch.fabric.frames import Frame
from dispatch.fabric.records import Exists, Replayed
from dispatch.producer.draft import Draft, make_draft, refusal
from dispatch.producer.errand import REPLAY_S, Errand
from dispatch.producer.idempotency import KeyKind, fingerprint, key_hash
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.session import Session

SESSION = Session.begin(ClientOptions(fabric_group="g", producer_id="p"))


def call(body: bytes = b"{}", operation: Operation = Operation.CHAT_COMPLETIONS) -> Call:
    return Call(operation=operation, body=body, model="m")


def draft(of: Call | None = None, **options: Any) -> Draft:
    return make_draft(SESSION, of or call(), CallOptions(**options))


def test_a_call_without_key_or_id_is_never_the_same_as_another() -> None:
    submission = draft().submission
    assert (submission.idempotency, submission.fingerprint) == ("", "")
    assert not draft().repeatable


def test_an_id_and_a_key_are_remembered_as_digests_that_never_meet() -> None:
    by_id, by_key, both = draft(request_id="x"), draft(idempotency_key="x"), draft(request_id="y", idempotency_key="x")
    assert by_id.submission.idempotency == key_hash("", KeyKind.REQUEST_ID, "x")
    assert by_key.submission.idempotency == key_hash("", KeyKind.HEADER, "x")
    assert both.submission.idempotency == by_key.submission.idempotency
    assert draft(idempotency_key="x", scope="caller").submission.idempotency != by_key.submission.idempotency
    assert len({each.submission.idempotency for each in (by_id, by_key)}) == 2
    assert all(len(each.submission.idempotency) == 64 for each in (by_id, by_key))
    assert [each.repeatable for each in (by_id, by_key)] == [True, True]


def test_parts_of_a_key_cannot_be_shifted_into_each_other() -> None:
    assert key_hash("a", KeyKind.HEADER, "b") != key_hash("", KeyKind.HEADER, "ab")
    assert fingerprint(call(b"b"), "a") != fingerprint(call(b"ab"), "")


def test_only_a_key_outlives_the_caller() -> None:
    assert (draft(request_id="x").lasting, draft(idempotency_key="x").lasting) == (False, True)


def test_the_fingerprint_is_of_operation_pool_and_every_byte_of_the_body() -> None:
    prints = {
        draft(of, request_id="x", pool_id=pool).submission.fingerprint
        for of, pool in [
            (call(b'{"a":1}'), "p"),
            (call(b'{"a": 1}'), "p"),
            (call(b'{"a":1}', Operation.RESPONSES), "p"),
            (call(b'{"a":1}'), "q"),
        ]
    }
    assert len(prints) == 4
    again = draft(call(b'{"a":1}'), request_id="x", pool_id="p", timeout_ms=5, priority=0, metadata={"a": 1})
    assert again.submission.fingerprint in prints


@pytest.mark.parametrize("key", ["", " ", "é", "a\nb", "a\r\n", "\x00", "k" * 256, 7])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CallOptions(idempotency_key=key)
    assert caught.value.param == "idempotency_key"


@pytest.mark.parametrize("option", ["request_id", "idempotency_key"])
def test_answers_about_an_earlier_call_are_errors_of_their_own(option: str) -> None:
    made = draft(**{option: "x"})
    running = refusal(made, Exists("leased", "first", same=True))
    other = refusal(made, Exists("leased", "first", same=False))
    other_ended = refusal(made, Exists("ended", "first", same=False))
    assert isinstance(running, InProgress)
    assert (running.request_id, running.state) == ("first", "leased")
    assert "that request is leased" in str(running)
    for conflict in (other, other_ended):
        assert isinstance(conflict, IdempotencyConflict)
        assert conflict.request_id == "first"
        assert "used for another call (request first)" in str(conflict)
    for error in (running, other):
        assert isinstance(error, StateConflict)
        assert "nothing was queued" in str(error)


def test_an_ended_call_without_a_stored_reply_is_told_as_such() -> None:
    by_key = refusal(draft(idempotency_key="x"), Exists("ended", "first", same=True))
    assert isinstance(by_key, OutcomeUnknown)
    assert "its reply is gone" in str(by_key)
    by_id = refusal(draft(request_id="x"), Exists("ended", "x", ending="expired"))
    assert type(by_id) is StateConflict
    assert "that request is ended" in str(by_id)


class Slot:
    def done(self) -> bool:
        return False

    def set_result(self, result: object, /) -> None:
        raise AssertionError(result)

    def result(self) -> Reply:
        raise AssertionError


def errand() -> Errand[Any, Any]:
    return Errand(draft=draft(request_id="x"), slot=Slot(), timeout_ms=None, admission_s=1.0)


def test_a_stored_reply_is_marked_as_replayed() -> None:
    line = b"1|0|terminal|first|failed|default|2|3|4|%d|1,5,6,,lost,g,e\n{}\n"
    small, large = errand(), errand()
    assert small.judge(Replayed("first", line % 0 + b"body")) == REPLAY_S
    assert large.judge(Replayed("first", line % 1)) == REPLAY_S
    assert isinstance(small.replay, Reply)
    assert (small.replay.replayed, small.replay.ending, small.replay.body) == (True, "failed", b"body")
    assert isinstance(large.replay, Frame)
    assert (large.replay.by_reference, large.replay.reply.replayed) == (True, True)
    assert [len(reply.tries) for reply in (small.replay, large.replay.reply)] == [1, 1]


def test_a_stored_reply_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ContractError):
        errand().judge(Replayed("first", b"rubbish"))
