"""A gateway's control API in place of a connection to Valkey: the same function calls, the same answers.

So a command is one piece of code, whether it goes straight to Valkey or to a gateway. A call is data (`FunctionCall`);
each function that commands use stands here with the request that asks for the same.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from dispatch.contract.answers import REFUSALS
from dispatch.errors import (
    BadArgument,
    ConfigurationError,
    DispatchError,
    FabricError,
    FabricUnavailable,
    GroupUnknown,
    HistoryOff,
    HistoryUnavailable,
    InvalidRequest,
    KeyRefused,
    NotAllowed,
    PoolUnknown,
    RequestRefused,
    RequestUnknown,
)
from dispatch.fabric.api_keys import Grant, KeyRecord, NewKey
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.faults import plain_reason
from dispatch.fabric.records import (
    Cancellation,
    Configured,
    DeadChange,
    DeadContent,
    Estimate,
    FieldChange,
    FieldProblem,
    PoolState,
)

KEY_VARIABLE = "DISPATCH_API_KEY"
BASE = "/api/v1"
_GROUP_HEADER = "x-dispatch-fabric-group"  # which group is meant; what has succeeded says for which
_TIMEOUT_S = 3.0  # a gateway tells within 2 s that Valkey does not answer
_IDLE_S = 5.0
_BATCH = 100
_NOT_OF_THE_ROW = {"server_ms", "queue", "reply"}

Query = dict[str, str | int]

_LISTS: dict[str, tuple[str, Query]] = {
    "pools": ("/pools", {}),
    "endpoints": ("/endpoints", {}),
    "gateways": ("/gateways", {}),
    "dead": ("/dead", {}),
    "leases": ("/requests", {"state": "running"}),
    "waiting": ("/requests", {"state": "queued"}),
    "delayed": ("/requests", {"state": "delayed"}),
    "generations": ("/config/generations", {}),
}
"""By section: where it is listed. Any other is a part of `/snapshot`."""


def is_gateway(url: str) -> bool:
    """Say whether `url` is a gateway's address and no Valkey's."""
    return urlsplit(url).scheme in {"http", "https"}


class RemoteConnection:
    """The part of a blocking connection that commands use, over one HTTP connection. Calls are never repeated.

    Raises what a connection to Valkey would; `FabricUnavailable` also when the gateway does not answer, `KeyRefused`
    and `NotAllowed` when the key (DISPATCH_API_KEY) does not do.
    """

    def __init__(self, url: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ConfigurationError(f"{url!r} is no gateway's address: http://host:port or https://host is expected")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._base = parts.path.rstrip("/").removesuffix(BASE) + BASE
        self._headers = {"accept": "application/json"}
        if token := os.environ.get(KEY_VARIABLE, ""):
            self._headers["authorization"] = f"Bearer {token}"
        self._wire = _wire(parts.scheme, parts.hostname, parts.port, timeout_s)
        self._used = time.monotonic()
        self._functions: dict[str, Callable[..., Any]] = {
            "fabric_snapshot": self._snapshot,
            "request_cancel": self._cancel,
            "pool_pause": self._pause,
            "pool_estimate": self._estimate,
            "dead_change": self._dead_change,
            "dead_content": self._dead_content,
            "group_configure": self._configure,
            "key_change": self._key_change,
            "key_read": self._key_read,
        }

    def run(self, group: str, call: FunctionCall[Any]) -> Any:
        """Ask the gateway for what the function does."""
        return self._functions[call.function](group, *call.args)

    def run_many(self, group: str, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        """Ask for each in order; its own error stands at its place. Requests are cancelled many at a time."""
        if calls and all(call.function == "request_cancel" and call.args[1:] == calls[0].args[1:] for call in calls):
            return self._cancel_many(group, calls)
        return [self._attempt(group, call) for call in calls]

    def get(self, _key: str) -> bytes | None:
        """Read nothing: what a gateway gives comes whole."""
        return None

    def read(self, group: str, path: str, query: Query) -> Any:
        """Return what the control API answers at `path`."""
        return self._ask(group, "GET", path, query=query)

    def make_key(self, group: str, grant: Grant, actor: str) -> NewKey:
        """Have the gateway make a key."""
        asked = {name: value for name, value in msgspec.to_builtins(grant).items() if value is not None}
        made = self._ask(group, "POST", "/keys", body={**asked, "actor": actor})
        return NewKey(made["key"]["key_id"], made["token"], _record(made["key"]))

    def close(self) -> None:
        """Close the connection. Repeatable."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _attempt(self, group: str, call: FunctionCall[Any]) -> Any:
        try:
            return self.run(group, call)
        except FabricUnavailable:
            raise
        except DispatchError as error:
            return error

    def _snapshot(self, group: str, section: str, cursor: str, limit: int, subject: str) -> Any:
        if section == "generation":
            return self._generation(group, subject)
        if section == "request" or (section == "pools" and subject):
            return self._one(group, f"/{section.rstrip('s')}s/{quote(subject, safe='')}")
        if section == "config":
            return {"section": section, **self._ask(group, "GET", "/config")}
        path, query = _LISTS.get(section, ("/snapshot", {"section": section}))
        query = (
            query | {"limit": limit} | ({"cursor": cursor} if cursor else {}) | ({"pool": subject} if subject else {})
        )
        found = self._ask(group, "GET", path, query=query)
        return found if section in _LISTS else {"server_ms": found["server_ms"], **found[section]}

    def _one(self, group: str, path: str) -> dict[str, Any]:
        """Return one thing as a page of one row, or of none."""
        try:
            found = self._ask(group, "GET", path)
        except (PoolUnknown, RequestUnknown, InvalidRequest):
            return {"rows": [], "cursor": ""}
        row = {name: value for name, value in found.items() if name not in _NOT_OF_THE_ROW}
        return {"rows": [row], "cursor": ""}

    def _generation(self, group: str, number: str) -> Any:
        try:
            found = self._ask(group, "GET", f"/config/generations/{number}")
        except (InvalidRequest, BadArgument) as error:
            raise BadArgument(str(error)) from error
        return {"section": "generation", **found} | {
            "changes": [[one["field"], one["before"], one["after"]] for one in found["changes"]]
        }

    def _cancel(self, group: str, request_id: str, actor: str, reason: str, scope: str) -> Cancellation:
        body = {"actor": actor, "reason": reason, "only_waiting": scope == "waiting"}
        try:
            return _cancellation(self._ask(group, "POST", f"/requests/{quote(request_id, safe='')}/cancel", body=body))
        except RequestUnknown:
            return Cancellation("UNKNOWN")

    def _cancel_many(self, group: str, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        answers: list[Any] = []
        _, actor, reason, scope = calls[0].args
        asked = {"actor": actor, "reason": reason, "only_waiting": scope == "waiting"}
        for at in range(0, len(calls), _BATCH):
            ids = [call.args[0] for call in calls[at : at + _BATCH]]
            found = self._ask(group, "POST", "/requests/cancel", body={"request_ids": ids, **asked})
            answers += [_cancellation(one) for one in found["requests"]]
        return answers

    def _pause(self, group: str, pool: str, action: str, actor: str, reason: str) -> PoolState:
        path = f"/pools/{quote(pool, safe='')}/{action}"
        found = self._ask(group, "POST", path, body={"actor": actor, "reason": reason})
        return PoolState(found["changed"], found["state"], found["pending"], found["in_flight"])

    def _estimate(self, group: str, pool: str) -> Estimate:
        found = self._ask(group, "GET", f"/pools/{quote(pool, safe='')}/estimate")
        del found["pool_id"]
        return Estimate(**found | {"reason": found["reason"] or ""})

    def _dead_change(self, group: str, action: str, request_id: str, actor: str, _new_id: str) -> DeadChange:
        path = f"/dead/{quote(request_id, safe='')}"
        try:
            if action == "drop":
                self._ask(group, "DELETE", path, query={"actor": actor})
                return DeadChange("DROPPED")
            return DeadChange("RETRIED", self._ask(group, "POST", f"{path}/retry", body={"actor": actor})["new_id"])
        except RequestUnknown:
            return DeadChange("UNKNOWN")
        except RequestRefused as refusal:
            return DeadChange("REFUSED", reason=refusal.reason)

    def _dead_content(self, group: str, request_id: str) -> DeadContent | None:
        try:
            found = self._ask(group, "GET", f"/dead/{quote(request_id, safe='')}", query={"content": "true"})
        except RequestUnknown:
            return None
        body = found["body"].encode()
        return DeadContent(envelope=found["envelope"].encode(), body=body, nonce="", body_bytes=len(body))

    def _configure(self, group: str, *args: Any) -> Configured:
        _, expected, document, actor, reason, nonce, mode = args
        change: dict[str, Any] = {"document": msgspec.Raw(document), "expected_generation": expected}
        if mode == "check":
            status, found = self._exchange(group, "POST", "/config/check", body=change)
        else:
            change |= {"actor": actor, "reason": reason}
            status, found = self._exchange(group, "PUT", "/config", body=change, once=nonce)
        if status not in {200, 409, 422}:
            raise _error(status, found, self.url)
        who: dict[str, Any] = {"actor": found["actor"] or "", "changed_ms": found["changed_ms"] or 0}
        if status == http.HTTPStatus.CONFLICT:
            return Configured("CONFLICT", found["generation"], **who)
        if status == http.HTTPStatus.UNPROCESSABLE_ENTITY:
            problems = tuple(FieldProblem(**one) for one in found["problems"])
            return Configured("INVALID", found["generation"], problems=problems)
        changes = tuple(FieldChange(**one) for one in found["changes"])
        return Configured(
            found["status"].upper(), found["generation"], changed=found["changed"], changes=changes, **who
        )

    def _key_change(self, group: str, action: str, key_id: str, _record: bytes, actor: str) -> str:
        if action != "revoke":
            raise InvalidRequest("a gateway makes keys itself")
        try:
            self._ask(group, "DELETE", f"/keys/{quote(key_id, safe='')}", query={"actor": actor})
        except (InvalidRequest, RequestUnknown):
            return "UNKNOWN"
        return "REVOKED"

    def _key_read(self, group: str, _key_id: str) -> dict[str, bytes]:
        rows = self._ask(group, "GET", "/keys")["keys"]
        return {row["key_id"]: _record(row) if row["readable"] else b"" for row in rows}

    def _ask(self, group: str, method: str, path: str, *, query: Query | None = None, body: Any = None) -> Any:
        """Return the answer.

        Raises:
            DispatchError: it is an error; or none came.
        """
        where = f"{path}?{urlencode(query)}" if query else path
        status, found = self._exchange(group, method, where, body=body)
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise _error(status, found, self.url)
        return found

    def _exchange(self, group: str, method: str, where: str, *, body: Any = None, once: str = "") -> tuple[int, Any]:
        headers = self._headers | {_GROUP_HEADER: group}
        headers |= {"content-type": "application/json"} if body is not None else {}
        headers |= {"idempotency-key": once} if once else {}
        content = None if body is None else msgspec.json.encode(body)
        if time.monotonic() - self._used > _IDLE_S:  # the other side may have closed it
            self._wire.close()
        try:
            self._wire.request(method, self._base + where, body=content, headers=headers)
            answer = self._wire.getresponse()
            status, text, ours = answer.status, answer.read(), answer.getheader(_GROUP_HEADER) is not None
        except (OSError, http.client.HTTPException) as error:
            self._wire.close()
            raise FabricUnavailable(f"the gateway at {self.url} does not answer: {plain_reason(error)}") from error
        self._used = time.monotonic()
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            if ours or status >= http.HTTPStatus.BAD_REQUEST:
                return status, msgspec.json.decode(text)
        raise FabricError(f"what answers at {self.url} is no gateway's control API (status {status})")


def _wire(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    if scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _cancellation(found: dict[str, Any]) -> Cancellation:
    return Cancellation(found["result"].upper(), found["ending"] or found["gateway_id"] or "")


def _record(row: dict[str, Any]) -> bytes:
    """Return the record of a key as far as a gateway shows it: without its hash."""
    members = {name: row[name] for name in ("name", "roles", "pools", "pool", "fairness_key", "cost")}
    return msgspec.json.encode(KeyRecord(hash="", created_ms=row["created_ms"] or 0, **members))


_KINDS: dict[str, type[DispatchError]] = {
    "pool_unknown": PoolUnknown,
    "request_unknown": RequestUnknown,
    "group_unknown": GroupUnknown,
    "generation_unknown": BadArgument,
    "another_group": ConfigurationError,
    "history_off": HistoryOff,
    "history_unavailable": HistoryUnavailable,
}


def _error(status: int, found: Any, url: str) -> DispatchError:
    try:
        error = found["error"]
        message, code, param = error["message"], error["code"] or "", error["param"]
    except (KeyError, TypeError):
        return FabricError(f"what answers at {url} is no gateway's control API (status {status})")
    if code in _KINDS:
        return _KINDS[code](message)
    if code in REFUSALS:
        return RequestRefused(code, message=message)
    return _plain_error(status, InvalidRequest(message, param=param, code=code, status=status), url)


def _plain_error(status: int, error: InvalidRequest, url: str) -> DispatchError:
    code = error.code or ""
    if status == http.HTTPStatus.UNAUTHORIZED:
        return KeyRefused(f"{error.message}; the variable {KEY_VARIABLE} holds the key that is shown", code=code)
    if status == http.HTTPStatus.FORBIDDEN:
        return NotAllowed(error.message, code=code, param=error.param)
    if code == "not_found":
        return FabricError(f"the gateway at {url} has no such part of the control API; it may be another version")
    return FabricUnavailable(error.message) if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR else error
