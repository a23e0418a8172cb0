"""Files and functions stay small, public names are true, and every exception from a rule has its reason."""

from __future__ import annotations

import ast
import importlib
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatch
from dispatch.fabric.schema import lua_root

PACKAGE = Path(dispatch.__file__).parent
TESTS = Path(__file__).parents[1]
PYTHON = sorted(PACKAGE.rglob("*.py"))
LUA = sorted(lua_root().rglob("*.lua"))
OWN_TESTS = sorted(path for path in TESTS.rglob("*.py") if "corpus" not in path.relative_to(TESTS).parts)

LINES_MAX = 400
PARAMETERS_MAX = 5
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}

EXPORTING = sorted(path for path in PYTHON if re.search(r"^__all__ = ", path.read_text("utf-8"), re.MULTILINE))

NOQA = re.compile(r"#\s*noqa\b(?P<rest>.*)")
TYPE_IGNORE = re.compile(r"#\s*type:\s*ignore(?P<rest>.*)")
REASONED = re.compile(r":\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*\s+-\s+\S+")
REASONED_IGNORE = re.compile(r"\[[a-z-]+(,\s*[a-z-]+)*\]\s+[#-]\s+\S+")


def name_of(path: Path) -> str:
    return "/".join(path.parts[-3:])


@pytest.mark.parametrize("path", [*PYTHON, *LUA, *OWN_TESTS], ids=name_of)
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", [*PYTHON, *LUA, *OWN_TESTS], ids=name_of)
def test_names_say_something(path: Path) -> None:
    assert path.stem not in EMPTY_NAMES


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_functions_take_few_parameters(path: Path) -> None:
    """Keyword-only ones count too. An exception is a lint exception, on its line, with its reason."""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            assert count <= PARAMETERS_MAX or "PLR0913" in lines[node.lineno - 1], f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", EXPORTING, ids=name_of)
def test_export_list_is_true(path: Path) -> None:
    dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    exported = module.__all__
    for name in exported:
        assert getattr(module, name) is not None
    assert len(set(exported)) == len(exported)
    tree = ast.parse(path.read_text("utf-8"))
    brought = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dispatch")
        for alias in node.names
    }
    assert {name for name in brought if not name.startswith("_")} <= set(exported), "imported to be exported"


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


@pytest.mark.parametrize("path", [*PYTHON, *OWN_TESTS], ids=name_of)
def test_every_exception_has_code_and_reason(path: Path) -> None:
    for line, comment in comments(path):
        if found := NOQA.search(comment):
            assert REASONED.match(found["rest"]), f"{name_of(path)}:{line}: {comment}"
        if found := TYPE_IGNORE.search(comment):
            assert REASONED_IGNORE.match(found["rest"]), f"{name_of(path)}:{line}: {comment}"
