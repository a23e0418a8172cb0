"""The server's whole surface on one screen: one typed builder per function of the Lua library.

Each returns a `FunctionCall`; a connection runs it. Names equal the Lua files in `lua/functions`.
Errors of every function (raised by the connection): `PoolUnknown`, `GroupUnknown`, `ContractMismatch`,
`BadArgument`, `StateConflict`, `LeaseLost`, `LibraryProblem`, `FabricUnavailable`, `ScriptFault`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatch.contract.envelope import CONTRACT_VERSION
from dispatch.errors import DispatchError
from dispatch.fabric import records as r
from dispatch.fabric.calls import Argument, FunctionCall
from dispatch.fabric.faults import ServerFault, to_error
from dispatch.fabric.streams import RecordsState, StreamState

_LEASE_FIELDS = 16
_CLAIM_FIELDS = 7
_SUBMIT_SENDER = 4
_ADMISSION_FIELDS = 5
_CONFIGURED_FIELDS = 4
_STREAM_FIELDS = 8


Admission = r.Admitted | r.Exists | r.Replayed | r.Refused


def request_submit(submission: r.Submission) -> FunctionCall[Admission]:
    """Queue a request, or say why not. The same id and nonce again answers as the first time."""
    return FunctionCall("request_submit", [*_sender(submission), 1, *_submission(submission)], _admission)


def submit_together(calls: Sequence[FunctionCall[Admission]]) -> FunctionCall[list[Admission | DispatchError]]:
    """Join submits of one producer into one call (at most `submit_max`); a fault of one stands at its place.

    Saves the group's record being read and written for each. Like all calls, answers the same when repeated.

    Raises:
        ValueError: they are not submits of one producer and session.
    """
    sender = list(calls[0].args[:_SUBMIT_SENDER])
    args: list[Argument] = [*sender, len(calls)]
    for call in calls:
        if call.function != "request_submit" or list(call.args[:_SUBMIT_SENDER]) != sender:
            raise ValueError("only submits of one producer and session can be joined")
        args += call.args[_SUBMIT_SENDER + 1 :]
    return FunctionCall("request_submit", args, _admissions)


def request_cancel(
    request_id: str, *, actor: str, reason: str = "", only_waiting: bool = False
) -> FunctionCall[r.Cancellation]:
    """End a waiting request at once; flag a running one and tell its gateway (or leave it alone). Repeatable."""
    scope = "waiting" if only_waiting else ""
    return FunctionCall("request_cancel", [request_id, actor, reason, scope], _cancellation)


def lease_claim(gateway_id: str, dispatcher_id: str, *, nonce: str, want: int) -> FunctionCall[r.Claim]:
    """Claim up to `want` requests. A repeat with the same nonce lists those leases that are still current."""
    return FunctionCall("lease_claim", [gateway_id, dispatcher_id, nonce, want], _claim)


def lease_settle(
    gateway_id: str, dispatcher_id: str, *, nonce: str, want: int, items: Sequence[r.Settlement]
) -> FunctionCall[r.Settled]:
    """End leases, push their replies and claim up to `want` next ones (0 = none) in the same step."""
    args: list[Argument] = [gateway_id, dispatcher_id, nonce, want, len(items)]
    for item in items:
        args += [
            item.request_id, item.fence, item.outcome.value, _optional(item.status), item.error_type,
            item.error_message, item.verdict.value, item.hold_ms, _optional(item.input_tokens),
            _optional(item.output_tokens), item.head, item.body, int(item.by_reference),
            _optional(item.actual_cost_units), int(item.retryable), item.details,
        ]  # fmt: skip
    return FunctionCall("lease_settle", args, _settled)


def lease_renew(beat: r.Heartbeat) -> FunctionCall[r.Renewal]:
    """Register, renew every named lease, and learn which are lost, cancelled or unknown to the caller."""
    args: list[Argument] = [
        beat.gateway_id, beat.host, beat.pid, beat.version, beat.slots, beat.started_ms, int(beat.draining),
        len(beat.nonces), *beat.nonces, len(beat.held),
    ]  # fmt: skip
    for request_id, fence in beat.held:
        args += [request_id, fence]
    return FunctionCall("lease_renew", args, _renewal)


def endpoint_report(gateway_id: str, report: r.ChoreReport | None = None) -> FunctionCall[r.Chore]:
    """Take a chore (a probe of an endpoint, a sample of its metrics), after telling what the last one came to."""
    args: list[Argument] = [gateway_id, "next", "", ""]
    if report is not None:
        args = [gateway_id, report.kind, report.endpoint_id, report.token]
        if report.kind == "probe":
            args += [report.verdict.value, report.hold_ms, report.error_type]
        else:
            args += [_decimal(report.waiting), _decimal(report.token_ms)]
    return FunctionCall("endpoint_report", args, _chore)


def lease_reap(*, limit: int) -> FunctionCall[r.Reaped]:
    """End or give back leases that ran out, and end requests past their deadline; at most `limit` of each."""
    return FunctionCall("lease_reap", [limit], _reaped)


def reply_append(gateway_id: str, items: Sequence[r.Chunks]) -> FunctionCall[tuple[str, ...]]:
    """Send chunks of running streams to their producers. Answers a word for each item; repeatable."""
    args: list[Argument] = [gateway_id, len(items)]
    for item in items:
        args += [item.request_id, item.fence, item.number, item.count, item.payload]
    return FunctionCall("reply_append", args, _words)


def reply_ack(producer_id: str, session: str, *, upto: int) -> FunctionCall[r.Acknowledged]:
    """Trim the producer's frames up to sequence `upto`; only the session that owns the producer may."""
    return FunctionCall("reply_ack", [producer_id, session, upto], _acknowledged)


def group_configure(
    document: bytes, *, expected_generation: int, actor: str, reason: str, nonce: str
) -> FunctionCall[r.Configured]:
    """Apply a whole config (JSON), all or nothing, if the generation in force is `expected_generation` (0 = none)."""
    args: list[Argument] = [CONTRACT_VERSION, expected_generation, document, actor, reason, nonce, "apply"]
    return FunctionCall("group_configure", args, _configured)


def group_check(document: bytes, *, expected_generation: int) -> FunctionCall[r.Configured]:
    """Say what applying `document` would answer and change, and change nothing. VALID stands for APPLIED."""
    args: list[Argument] = [CONTRACT_VERSION, expected_generation, document, "", "", "", "check"]
    return FunctionCall("group_configure", args, _configured)


def pool_pause(pool_id: str, action: str, *, actor: str, reason: str = "") -> FunctionCall[r.PoolState]:
    """Pause, resume or drain a pool (`action`). Repeatable."""
    return FunctionCall("pool_pause", [pool_id, action, actor, reason], _pool_state)


def dead_change(action: str, request_id: str, *, actor: str, new_id: str = "") -> FunctionCall[r.DeadChange]:
    """Drop a request that is kept in the dead list, or retry it (`action`): submit it anew as `new_id`, detached."""
    return FunctionCall("dead_change", [action, request_id, actor, new_id], _dead_change)


def dead_content(request_id: str) -> FunctionCall[r.DeadContent | None]:
    """Read envelope and body of a request in the dead list; None = it is not there."""
    return FunctionCall("dead_content", [request_id], _dead_content, read_only=True)


def fabric_snapshot(section: str, *, cursor: str = "", limit: int = 100, subject: str = "") -> FunctionCall[Any]:
    """Read one section of the group's state, a page at a time, as a decoded JSON document.

    Sections: group, config, generation, generations, pools, endpoints, gateways, leases, waiting, delayed, dead,
    request, endings, events. `subject` is the pool (waiting; pools, delayed and dead, if only that one is wanted), the
    request id (request) or the number (generation).
    """
    return FunctionCall("fabric_snapshot", [section, cursor, limit, subject], msgspec.json.decode, read_only=True)


def fabric_audit(part: str, *, cursor: str = "", limit: int = 200, subject: str = "") -> FunctionCall[Any]:
    """Hold what is stored against the structures, part by part (`subject` = the pool, for entries).

    Parts: group, pools, endpoints, entries, leases, timers, chores, requests, dead.
    """
    return FunctionCall("fabric_audit", [part, cursor, limit, subject], msgspec.json.decode, read_only=True)


def fabric_repair(repair: r.Repair, *, actor: str) -> FunctionCall[bool]:
    """Put right what an audit found wrong, if it still is what the audit saw. Answers whether it was done."""
    args: list[Argument] = [repair.kind, repair.name, repair.field, repair.seen, repair.value, actor]
    return FunctionCall("fabric_repair", args, _repaired)


def pool_estimate(pool_id: str) -> FunctionCall[r.Estimate]:
    """Say how long a request that is submitted to the pool now would wait."""
    return FunctionCall("pool_estimate", [pool_id], _estimate, read_only=True)


def key_change(action: str, key_id: str, record: bytes = b"", *, actor: str) -> FunctionCall[str]:
    """Create (with `record`, JSON) or revoke a caller's key. Answers CREATED, EXISTS, FULL, REVOKED or UNKNOWN."""
    return FunctionCall("key_change", [action, key_id, record, actor], lambda answer: _text(answer[0]))


def key_read(key_id: str = "") -> FunctionCall[dict[str, bytes]]:
    """Read the record of one caller's key, or of all, by key id."""
    return FunctionCall("key_read", [key_id], _key_records, read_only=True)


def records_watch(reader: str, *, prepare: bool = False) -> FunctionCall[RecordsState]:
    """Say how far `reader` (a consumer group) has read the record streams; `prepare` makes it where it is missing."""
    return FunctionCall("records_watch", [reader, int(prepare)], _records_state)


def snapshot_publish(gateway_id: str) -> FunctionCall[r.Publication]:
    """Tell those who watch the group if its state has changed, unless another gateway does it for all."""
    return FunctionCall("snapshot_publish", [gateway_id], _publication)


def library_version() -> FunctionCall[r.LibraryVersion]:
    """Say which library the server runs."""
    return FunctionCall("library_version", [], _library_version, read_only=True)


def _optional(value: int | None) -> Argument:
    return "" if value is None else value


def _decimal(value: float | None) -> Argument:
    return "" if value is None else f"{value:.3f}"


def _due(chore_ms: int) -> int | None:
    return None if chore_ms < 0 else chore_ms


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _sender(s: r.Submission) -> list[Argument]:
    return [CONTRACT_VERSION, s.producer_id, s.session, s.liveness_ms]


def _submission(s: r.Submission) -> list[Argument]:
    return [
        s.request_id, s.pool_id, s.nonce, s.model, _optional(s.message_count), s.images, s.pages,
        _optional(s.estimated_cost_units), _optional(s.timeout_ms), s.body_bytes, s.envelope, s.body,
        s.fairness_key, _optional(s.priority), s.idempotency, s.fingerprint, int(s.detached),
        _optional(s.max_wait_ms),
    ]  # fmt: skip


def _admission(answer: list[Any]) -> Admission:
    admission = _admissions(answer)[0]
    if isinstance(admission, DispatchError):
        raise admission
    return admission


def _admissions(answer: list[Any]) -> list[Admission | DispatchError]:
    return [_one_admission(answer[at : at + _ADMISSION_FIELDS]) for at in range(0, len(answer), _ADMISSION_FIELDS)]


def _one_admission(cells: list[Any]) -> Admission | DispatchError:
    match _text(cells[0]):
        case "ADMITTED":
            return r.Admitted(deadline_ms=cells[1], server_ms=cells[2], lapsed=cells[3] == 1)
        case "EXISTS":
            same = None if cells[2] == b"" else int(cells[2]) == 1
            return r.Exists(_text(cells[1]), _text(cells[3]), same, _text(cells[4]))
        case "REPLAY":
            return r.Replayed(_text(cells[1]), cells[2])
        case "REFUSED":
            retry = cells[4]
            return r.Refused(_text(cells[1]), cells[2], cells[3], None if retry < 0 else retry)
        case _:
            code, _, text = _text(cells[1]).partition(" ")
            return to_error(ServerFault(code, text, "request_submit"))


def _cancellation(answer: list[Any]) -> r.Cancellation:
    return r.Cancellation(_text(answer[0]), _text(answer[1]))


def _lease(row: list[Any]) -> r.Lease:
    return r.Lease(
        request_id=_text(row[0]), pool_id=_text(row[1]), producer_id=_text(row[2]), endpoint_id=_text(row[3]),
        fence=row[4], attempt=row[5], submitted_ms=row[6], claimed_ms=row[7], deadline_ms=row[8],
        lease_until_ms=row[9], cost=row[10], body_bytes=row[11], nonce=_text(row[12]), envelope=row[13], body=row[14],
        probe_until_ms=row[15],
    )  # fmt: skip


def _leases(flat: list[Any]) -> tuple[r.Lease, ...]:
    return tuple(_lease(flat[at : at + _LEASE_FIELDS]) for at in range(0, len(flat), _LEASE_FIELDS))


def _claim(answer: list[Any]) -> r.Claim:
    return r.Claim(
        server_ms=answer[0], generation=answer[1], sleep_ms=answer[2], again=answer[3] == 1, ended=answer[4],
        leases=_leases(answer[_CLAIM_FIELDS : _CLAIM_FIELDS + answer[6] * _LEASE_FIELDS]), chore_ms=_due(answer[5]),
    )  # fmt: skip


def _settled(answer: list[Any]) -> r.Settled:
    count = answer[0]
    return r.Settled(_words(answer[1 : 1 + count]), _claim(answer[1 + count :]))


def _renewal(answer: list[Any]) -> r.Renewal:
    at = 4
    lost = tuple(_text(item) for item in answer[at : at + answer[3]])
    at += len(lost)
    cancelled = tuple(_text(item) for item in answer[at + 1 : at + 1 + answer[at]])
    at += 1 + len(cancelled)
    return r.Renewal(answer[0], answer[1], lost, cancelled, _leases(answer[at:]), _due(answer[2]))


def _estimate(answer: list[Any]) -> r.Estimate:
    rate, wait_ms = _text(answer[3]), answer[4]
    return r.Estimate(
        pending=answer[0], delayed=answer[1], in_flight=answer[2], per_second=float(rate) if rate else None,
        wait_ms=None if wait_ms < 0 else wait_ms, reason=_text(answer[5]),
    )  # fmt: skip


def _key_records(answer: list[Any]) -> dict[str, bytes]:
    return {_text(answer[at]): answer[at + 1] for at in range(0, len(answer), 2)}


def _chore(answer: list[Any]) -> r.Chore:
    return r.Chore(_text(answer[0]), _text(answer[1]), answer[2], answer[3], _due(answer[4]))


def _reaped(answer: list[Any]) -> r.Reaped:
    return r.Reaped(answer[0], answer[1], answer[2], answer[3], answer[4] == 1)


def _words(answer: list[Any]) -> tuple[str, ...]:
    return tuple(_text(word) for word in answer)


def _acknowledged(answer: list[Any]) -> r.Acknowledged:
    if _text(answer[0]) != "OK":
        return r.Acknowledged(owner=False, trimmed=0, remaining=0)
    return r.Acknowledged(owner=True, trimmed=answer[1], remaining=answer[2])


def _configured(answer: list[Any]) -> r.Configured:
    word, generation = _text(answer[0]), answer[1]
    if word == "INVALID":
        cells = [_text(cell) for cell in answer[2:]]
        problems = tuple(r.FieldProblem(*cells[at : at + 3]) for at in range(0, len(cells), 3))
        return r.Configured(word, generation, problems=problems)
    changed = answer[4] if len(answer) > _CONFIGURED_FIELDS else 0
    cells = [_text(cell) for cell in answer[_CONFIGURED_FIELDS + 1 :]]
    changes = tuple(r.FieldChange(*cells[at : at + 3]) for at in range(0, len(cells), 3))
    return r.Configured(
        word, generation, actor=_text(answer[2]), changed_ms=answer[3], changed=changed, changes=changes
    )


def _pool_state(answer: list[Any]) -> r.PoolState:
    return r.PoolState(_text(answer[0]) == "APPLIED", _text(answer[1]), answer[2], answer[3])


def _dead_change(answer: list[Any]) -> r.DeadChange:
    word, first = _text(answer[0]), _text(answer[1])
    if word == "REFUSED":
        return r.DeadChange(word, reason=first, value=answer[2], limit=answer[3])
    return r.DeadChange(word, new_id=first)


def _dead_content(answer: list[Any]) -> r.DeadContent | None:
    if _text(answer[0]) != "CONTENT":
        return None
    return r.DeadContent(envelope=answer[1], body=answer[2], nonce=_text(answer[3]), body_bytes=answer[4])


def _repaired(answer: list[Any]) -> bool:
    return _text(answer[0]) == "REPAIRED"


def _records_state(answer: list[Any]) -> RecordsState:
    endings, deliveries = (_stream_state(answer[at : at + _STREAM_FIELDS]) for at in (1, 1 + _STREAM_FIELDS))
    return RecordsState(lost=answer[0], endings=endings, deliveries=deliveries)


def _stream_state(cells: list[Any]) -> StreamState:
    lag, pending = (None if cell in (b"", "") else cell for cell in cells[5:7])
    return StreamState(
        length=cells[0], added=cells[1], first_id=_text(cells[2]), last_id=_text(cells[3]), read_id=_text(cells[4]),
        lag=lag, pending=pending, lost_now=cells[7],
    )  # fmt: skip


def _publication(answer: list[Any]) -> r.Publication:
    return r.Publication(_text(answer[0]), answer[1], answer[2])


def _library_version(answer: list[Any]) -> r.LibraryVersion:
    return r.LibraryVersion(answer[0], _text(answer[1]), _text(answer[2]))
