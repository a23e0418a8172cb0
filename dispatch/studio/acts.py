"""What a person changes from a page. Each act has an actor and a reason, and is written to the group's record.

A config is changed by edits of the one in force, under compare-and-set of its generation: nobody's change is lost.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from dispatch.config import edited, encode_document
from dispatch.errors import BadArgument, DispatchError
from dispatch.fabric.functions import fabric_snapshot, group_check, group_configure, pool_pause, request_cancel
from dispatch.fabric.records import Configured
from dispatch.studio.asking import Question
from dispatch.studio.redacting import without_secrets

_CANCEL_MAX = 1_000
_BATCH = 100
_DRIFT = 0.10
"""By how much a count may differ from the one that was shown before many requests are cancelled."""
_EDITS_MAX = 200
_REASON_NEEDED = frozenset({"pause", "drain"})


async def stop_pool(question: Question) -> dict[str, Any]:
    """Pause, resume or drain a pool."""
    pool, action, reason = question.text("pool"), question.text("action"), question.text("reason")
    if action in _REASON_NEEDED and not reason:
        raise DispatchError("a reason is needed: whoever finds the pool like this wants to know why")
    actor = question.visitor.actor
    state = await question.run(pool_pause(pool, action, actor=actor, reason=reason))
    question.reader.wake()
    return {
        "changed": state.changed, "state": state.state, "waiting": state.waiting, "in_flight": state.in_flight,
    }  # fmt: skip


async def cancel(question: Question) -> dict[str, Any]:
    """Cancel one request."""
    call = request_cancel(question.text("id"), actor=question.visitor.actor, reason=question.text("reason"))
    answer = await question.run(call)
    question.reader.wake()
    return {"status": answer.status, "ending": answer.ending}


async def cancel_waiting(question: Question) -> dict[str, Any]:
    """Cancel what waits in a pool: at most as many as were shown, and none if their number has changed much since."""
    pool, shown, reason = question.text("pool"), question.number("count"), question.text("reason")
    if not reason:
        raise DispatchError("a reason is needed")
    [row] = (await question.run(fabric_snapshot("pools", subject=pool)))["rows"] or [{}]
    waits = row.get("pending", 0)
    if abs(waits - shown) > shown * _DRIFT:
        raise DispatchError(f"{waits} wait in {pool} by now, not {shown}: nothing was cancelled; look again")
    done, most, cursor = 0, min(shown, _CANCEL_MAX), ""
    while done < most:
        page = await question.run(fabric_snapshot("waiting", cursor=cursor, limit=_BATCH, subject=pool))
        ended = await _cancel_waiting(question, [one["request_id"] for one in page["rows"]][: most - done], reason)
        done += ended
        cursor = "" if ended else page["cursor"]  # what was cancelled has left the line, so places have changed
        if not (ended or cursor):
            break
    question.reader.wake()
    return {"cancelled": done, "waited": waits}


async def _cancel_waiting(question: Question, ids: list[str], reason: str) -> int:
    actor = question.visitor.actor
    calls = [request_cancel(one, actor=actor, reason=reason, only_waiting=True) for one in ids]
    answers = await question.reader.require().run_many(question.reader.group, calls) if calls else []
    return sum(not isinstance(each, DispatchError) and each.status == "CANCELLED" for each in answers)


async def check(question: Question) -> dict[str, Any]:
    """Say what edits would change, and what is wrong with them; change nothing."""
    generation, document = await _edited(question)
    answer = await question.run(group_check(encode_document(document), expected_generation=generation))
    return _told(answer, generation)


async def apply(question: Question) -> dict[str, Any]:
    """Bring edits into force if the generation that they were made for still is."""
    reason = question.text("reason")
    if not reason:
        raise DispatchError("a reason is needed")
    generation, document = await _edited(question)
    return await _configure(question, document, generation, reason)


async def roll_back(question: Question) -> dict[str, Any]:
    """Bring the document of an earlier generation into force again, as a new one."""
    number, expected = question.number("generation"), question.number("expected")
    document = await _document_of(question, number)
    reason = question.text("reason") or f"rollback to {number}"
    return await _configure(question, document, expected, reason)


async def check_rollback(question: Question) -> dict[str, Any]:
    """Say what a rollback would change."""
    expected = question.number("expected")
    document = await _document_of(question, question.number("generation"))
    return _told(await question.run(group_check(encode_document(document), expected_generation=expected)), expected)


async def _document_of(question: Question, number: int) -> dict[str, Any]:
    try:
        found = await question.run(fabric_snapshot("generation", subject=str(number)))
    except BadArgument:
        raise DispatchError(f"generation {number} is not kept any more") from None
    document: dict[str, Any] = found["document"]
    return document


async def _edited(question: Question) -> tuple[int, dict[str, Any]]:
    """Return the generation that the edits are for, and the document with them.

    It is the document in force that is edited: if that is of another generation, the server says so.
    """
    edits = question.args.get("edits")
    if not isinstance(edits, list) or not 0 < len(edits) <= _EDITS_MAX:
        raise DispatchError(f"1 to {_EDITS_MAX} edits are expected")
    found = await question.run(fabric_snapshot("config"))
    return question.number("expected"), edited(found["document"], [_assignment(edit) for edit in edits])


def _assignment(edit: Any) -> str:
    match edit:
        case [str() as path, value] if "=" not in path and (value is None or isinstance(value, str | int | float)):
            return f"{path}={json.dumps(value)}"
    raise DispatchError("an edit is a path and one value")


async def _configure(question: Question, document: dict[str, Any], expected: int, reason: str) -> dict[str, Any]:
    call = group_configure(
        encode_document(document), expected_generation=expected, actor=question.visitor.actor, reason=reason,
        nonce=uuid.uuid4().hex,
    )  # fmt: skip
    answer = await question.run(call)
    question.reader.wake()
    return _told(answer, expected)


def _told(answer: Configured, expected: int) -> dict[str, Any]:
    return {
        "status": answer.status,
        "generation": answer.generation,
        "expected": expected,
        "actor": answer.actor,
        "changed_ms": answer.changed_ms or None,
        "changed": answer.changed,
        "changes": [[one.field, without_secrets(one.before), without_secrets(one.after)] for one in answer.changes],
        "problems": [[one.field, without_secrets(one.value), one.message] for one in answer.problems],
    }


ACTS = {
    "stop_pool": stop_pool,
    "cancel": cancel,
    "cancel_waiting": cancel_waiting,
    "check": check,
    "apply": apply,
    "check_rollback": check_rollback,
    "roll_back": roll_back,
}
