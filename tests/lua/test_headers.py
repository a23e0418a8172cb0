"""The headers of the function files are true, and so is the schema about the files it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dispatch.contract.envelope import CONTRACT_VERSION
from dispatch.fabric import functions as builders
from dispatch.fabric.headers import FIELDS, Header, read_header
from dispatch.fabric.schema import document, lua_root

LUA = lua_root()
FILES = sorted((LUA / "functions").glob("*.lua"))
SCHEMA = document()

_MOVE = re.compile(r"(?P<before>[a-z]+) -> (?P<after>[a-z]+)")
_WORD = re.compile(r"\b[A-Z][A-Z_]+\b")

# Files that read keys of others, and why that is in order.
READERS = {
    "state/audit.lua": "an audit compares every structure and changes nothing",
    "state/sections.lua": "a snapshot shows everything and changes nothing",
    "state/rotation.lua": "a pool that parks leaves the rotation for its endpoint's waiting list in one move",
    "state/readers.lua": "consumer groups are made and judged alike on every stream of records",
    "state/gateways.lua": "the registry says how many leases a gateway holds",
}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    file: Path = request.param
    return file


@pytest.fixture
def header(path: Path) -> Header:
    return read_header(path)


def test_there_are_functions() -> None:
    assert FILES


def test_header_is_complete_and_in_order(header: Header) -> None:
    assert tuple(header.fields) == FIELDS
    assert all(header.fields.values())
    assert header.purpose.endswith(".")


def test_answer_words_are_the_schemas(header: Header) -> None:
    words = set(_WORD.findall(re.sub(r"\bJSON\b", "", header.fields["Answers"])))
    assert words == set(SCHEMA["answers"].get(header.name, ()))


def test_error_codes_are_the_schemas(header: Header) -> None:
    assert set(header.words("Errors")) - {"(none)"} <= set(SCHEMA["errors"])


def test_error_codes_that_the_file_raises_are_told(path: Path, header: Header) -> None:
    raised = {name.upper() for name in re.findall(r"faults\.(?:texts\.)?([a-z_]+)\(", path.read_text("utf-8"))}
    assert raised <= set(header.words("Errors"))


def test_moves_are_legal(header: Header) -> None:
    text = header.fields["Moves"]
    if text == "(none)":
        return
    for move in text.split(","):
        found = _MOVE.fullmatch(move.strip())
        assert found is not None, move
        assert found["after"] in SCHEMA["states"][found["before"]]


def test_touched_names_are_keys(header: Header) -> None:
    assert set(header.words("Touches")) - {"(none)"} <= set(SCHEMA["keys"])


def test_read_only_is_the_same_in_python_and_lua(header: Header) -> None:
    source = Path(builders.__file__).read_text("utf-8")
    body = source.partition(f"def {header.name}(")[2].partition("\ndef ")[0]
    assert body, f"dispatch/fabric/functions.py has no builder {header.name}"
    assert ("read_only=True" in body) == ("no-writes" in header.flags)


def test_contract_version_is_one_number() -> None:
    assert SCHEMA["contract"]["version"] == CONTRACT_VERSION


@pytest.mark.parametrize("name", SCHEMA["keys"])
def test_every_key_has_an_owner_that_uses_it(name: str) -> None:
    owner = LUA / SCHEMA["keys"][name]["owner"]
    assert owner.is_file()
    assert f'"{name}"' in owner.read_text("utf-8")


def test_every_key_template_is_well_formed_and_unique() -> None:
    templates = [entry["key"] for entry in SCHEMA["keys"].values()]
    assert len(set(templates)) == len(templates)
    for template in templates:
        assert re.fullmatch(r"[a-z]+(:([a-z]+|<[a-z]+>))+", template), template


def test_only_owners_name_a_key() -> None:
    for path in sorted(LUA.glob("*/*.lua")):
        file = path.relative_to(LUA).as_posix()
        for name in re.findall(r'keys\.of\([^",\n]*, "([a-z_]+)"', path.read_text("utf-8")):
            assert name in SCHEMA["keys"], f"{file}: {name}"
            assert SCHEMA["keys"][name]["owner"] == file or file in READERS, f"{file} reaches for {name!r}"


def test_no_other_file_holds_a_key_string() -> None:
    kinds = "|".join(sorted({entry["key"].partition(":")[0] for entry in SCHEMA["keys"].values()}))
    raw_key = re.compile(rf"\b(?:{kinds}):llm\b")
    package = Path(builders.__file__).parents[1]
    for path in (*LUA.rglob("*.lua"), *package.rglob("*.py")):
        assert raw_key.search(path.read_text("utf-8")) is None, path
