"""From the arguments of `complete()` to a `Call` and its options. No I/O; both clients use it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from dispatch.contract import Call, Operation, Scalar, read_call
from dispatch.errors import InvalidRequest
from dispatch.producer.options import DEFAULT_POOL, CallOptions, timeout_ms

_OPTION_NAMES = frozenset(
    {
        "pool", "metadata", "timeout", "cost", "request_id", "fairness_key", "priority", "max_wait", "wait_for_room",
        "extra_body",
    }
)  # fmt: skip


def build_completion(arguments: Mapping[str, Any], *, stream: bool = False) -> tuple[Call, CallOptions]:
    """Make a chat completion call of the arguments of `complete()`, or of `stream()`.

    `pool metadata timeout cost request_id fairness_key priority max_wait wait_for_room` become options; `messages`,
    `model` and every other argument become members of the body in the order given, `extra_body`'s members last.

    Raises:
        InvalidRequest: an argument is missing, wrong or cannot be JSON; names it.
    """
    for name in ("messages", "model"):
        if name not in arguments:
            raise InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    body: dict[str, Any] = {"messages": arguments["messages"], "model": arguments["model"]}
    if stream:
        body["stream"] = True
    body.update((name, value) for name, value in arguments.items() if name not in _OPTION_NAMES)
    body.update(arguments.get("extra_body") or {})
    options = CallOptions(
        pool_id=arguments.get("pool", DEFAULT_POOL),
        request_id=arguments.get("request_id"),
        timeout_ms=timeout_ms(arguments.get("timeout")),
        metadata=_metadata(arguments.get("metadata")),
        estimated_cost_units=arguments.get("cost"),
        fairness_key=arguments.get("fairness_key"),
        priority=arguments.get("priority"),
        max_wait_ms=timeout_ms(arguments.get("max_wait"), "max_wait"),
        wait_for_room=_flag(arguments, "wait_for_room"),
    )
    return read_call(Operation.CHAT_COMPLETIONS, encode_body(body)), options


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Encode `body` as JSON in the order of its members.

    The standard library's encoder, because it refuses non-finite numbers (msgspec writes them as null). Objects with a
    `model_dump` (the OpenAI package's messages) are taken as what they dump.

    Raises:
        InvalidRequest: a value is no JSON or not finite; `param` is its path.
    """
    try:
        text = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)
        return text.encode()
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply, or contains itself", code="invalid_body") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body holds half a surrogate pair, which is no text", code="invalid_body") from error
    except (TypeError, ValueError) as error:
        path = _path_of_not_finite(body)
        reason = f"{path} is not a finite number" if path else f"the body cannot be JSON: {error}"
        raise InvalidRequest(reason, param=path or None, code="invalid_body") from error


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", exclude_unset=True)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _path_of_not_finite(body: Mapping[str, Any]) -> str:
    try:
        return _not_finite(body, "")
    except RecursionError:  # a body that contains itself: no path, and no walk through all of its branches
        return ""


def _not_finite(value: Any, path: str) -> str:
    """Return the path of the first non-finite number in `value`, "" if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else path
    members: Any = ()
    if isinstance(value, Mapping):
        members = ((f"{path}.{name}" if path else str(name), item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        members = ((f"{path}[{at}]", item) for at, item in enumerate(value))
    return next((found for name, item in members if (found := _not_finite(item, name))), "")


def _flag(arguments: Mapping[str, Any], name: str) -> bool:
    value = arguments.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r}: True or False is expected", param=name, code="invalid_type")
    return value


def _metadata(metadata: Mapping[str, Scalar] | None) -> Mapping[str, Scalar]:
    if metadata is None:
        return {}
    if isinstance(metadata, Mapping):
        return metadata
    raise InvalidRequest(f"metadata is {type(metadata).__name__}, an object is expected", param="metadata")
