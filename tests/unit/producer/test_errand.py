"""How long a caller waits is counted from when its submit was sent, however late the answer came."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from dispatch.contract import Call, Operation
from dispatch.fabric.records import Admitted
from dispatch.producer.blocking_errand import BlockingErrand, Submit
from dispatch.producer.draft import make_draft
from dispatch.producer.errand import GRACE_S
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.session import Session


@pytest.mark.parametrize(("took_s", "expected_s"), [(0.0, 3.0 + GRACE_S), (1.5, 1.5 + GRACE_S), (60.0, 0.0)])
def test_the_time_an_answer_took_has_passed(took_s: float, expected_s: float) -> None:
    session = Session.begin(ClientOptions(fabric_group="g"))
    call = Call(operation=Operation.CHAT_COMPLETIONS, body=b"{}", model="m")
    errand = BlockingErrand(
        draft=make_draft(session, call, CallOptions()), slot=Future(), timeout_ms=3000, admission_s=3.0
    )
    errand.attempt = Submit(sent_at=time.monotonic() - took_s)
    reply_s = errand.judge(Admitted(deadline_ms=1_003_000, server_ms=1_000_000))
    assert reply_s == pytest.approx(expected_s, abs=0.5)
    assert reply_s >= 0
