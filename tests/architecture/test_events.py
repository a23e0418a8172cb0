"""Events of the log are named in one list, and each line says who and what in the same words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatch
from dispatch.telemetry.events import EVENTS

PACKAGE = Path(dispatch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LOGGERS = {"log", "_log"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
OTHER_WORDS = {"pool_id": "pool", "endpoint_id": "endpoint", "gateway_id": "gateway", "id": "request_id"}
"""Members that lines do not have, and what they have in their place."""
NEVER = {
    "body",
    "payload",
    "prompt",
    "messages",
    "content",
    "completion",
    "headers",
    "url_with_password",
    "api_key",
    "token",
}


def events(path: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Every line that a file logs: where, the event's name ("" = no plain text), and its members."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if node.func.attr in LEVELS and isinstance(owner, ast.Name) and owner.id in LOGGERS:
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            yield node.lineno, str(name), {word.arg or "**" for word in node.keywords}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def logged() -> set[str]:
    """Every event of the code; those that are written through a variable stand as text beside it."""
    found = {name for path in FILES for _, name, _ in events(path)}
    return found | {name for name in EVENTS if any(f'"{name}",' in path.read_text("utf-8") for path in FILES)}


def test_the_list_and_the_code_agree() -> None:
    found = logged()
    assert found - set(EVENTS) == set(), "add them to dispatch/telemetry/events.py, with what they say"
    assert set(EVENTS) - found == set(), "nobody logs them"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_lines_use_one_word_for_a_thing_and_none_for_content(path: Path) -> None:
    for line, name, members in events(path):
        assert name, f"{name_of(path)}:{line}: an event is a plain word"
        assert not members & OTHER_WORDS.keys(), f"{name_of(path)}:{line}: {OTHER_WORDS}"
        assert not members & NEVER, f"{name_of(path)}:{line}"
