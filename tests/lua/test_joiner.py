"""The joiner: what it makes of small trees, what it refuses, and that the server agrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from dispatch.errors import LibraryProblem, ScriptFault
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.faults import ServerFault, to_error
from dispatch.fabric.library import Library, Place, current_library, digest_of, join_library, version_of
from dispatch.fabric.sync import BlockingConnection
from tests.support.lua_tree import LuaTree
from tests.support.valkey import ValkeyProcess

EMPTY = "return { run = function(keys, args) return 1 end }"


@pytest.fixture
def tree(tmp_path: Path) -> LuaTree:
    return LuaTree(tmp_path)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as process:
        yield process


def run(server: ValkeyProcess, library: Library, function: str, *args: str) -> Any:
    """Load `library` and call one of its functions."""
    with BlockingConnection(server.url) as connection:
        for _, client in connection.primary_clients():
            with client:
                client.function_load(library.text, replace=True)
        return connection.run("g", FunctionCall(function, args, lambda answer: answer))


def failure(server: ValkeyProcess, library: Library, function: str) -> str:
    """Load `library`, call a function that fails, and say how the failure is told with this library's line table."""
    with BlockingConnection(server.url) as connection:
        ((_, client),) = connection.primary_clients()
        with client:
            client.function_load(library.text, replace=True)
            with pytest.raises(ResponseError) as caught:
                client.fcall(f"dispatch_{function}", 1, "{g}")
    code, text = caught.value.status_code, str(caught.value)
    if code is None:
        code, _, text = text.partition(" ")
    return str(to_error(ServerFault(code, text, function), library))


def refusal(tree: LuaTree) -> str:
    with pytest.raises(ScriptFault) as caught:
        join_library(tree.folder)
    return str(caught.value)


def test_modules_reach_each_other_and_the_schema(tree: LuaTree, server: ValkeyProcess) -> None:
    tree.module("lib.twice", "local twice = {}", "function twice.of(n) return 2 * n end", "return twice")
    tree.module("state.things", "local schema = require('schema')", "return { key = schema.keys.thing.key }")
    tree.function(
        "show",
        'local schema = require("schema")',
        'local things = require("state.things")',
        'local twice = require "lib.twice"',
        "return { run = function(keys, args)",
        "  return { twice.of(args[1]), things.key, schema.limits.most, schema.contract.pattern, keys[1] }",
        "end }",
    )
    answer = run(server, join_library(tree.folder), "show", "21")
    assert answer == [42, b"key:llm:thing:<id>", 3, b'^[a-z]+"$', b"{g}"]


def test_registration_takes_name_flags_and_description_from_the_file(tree: LuaTree, server: ValkeyProcess) -> None:
    tree.function("read_it", EMPTY, flags="no-writes")
    tree.function("clean_it", EMPTY, flags="allow-oom")
    library = join_library(tree.folder)
    assert library.functions == ("dispatch_clean_it", "dispatch_read_it")
    run(server, library, "read_it")
    with BlockingConnection(server.url) as connection:
        ((_, client),) = connection.primary_clients()
        with client:
            (listed,) = client.execute_command("FUNCTION LIST")
    functions = {row[1]: row for row in listed[5]}
    assert functions[b"dispatch_read_it"][5] == [b"no-writes"]
    assert functions[b"dispatch_clean_it"][5] == [b"allow-oom"]
    assert functions[b"dispatch_read_it"][3] == b"a function of a test."


def test_same_files_give_the_same_text(tree: LuaTree) -> None:
    tree.module("lib.a", "return {}")
    tree.function("one", EMPTY)
    assert join_library(tree.folder) == join_library(tree.folder)


def test_digest_covers_lua_and_schema_but_not_the_version(tree: LuaTree) -> None:
    tree.function("one", EMPTY)
    first, other = join_library(tree.folder, version="1.0"), join_library(tree.folder, version="2.0")
    assert first.digest == other.digest == digest_of(first.text) == digest_of(other.text)
    assert (version_of(first.text), version_of(other.text), version_of("x")) == ("1.0", "2.0", "")
    schema = tree.folder / "schema.toml"
    schema.write_text(schema.read_text().replace("most = 3", "most = 4"))
    assert join_library(tree.folder).digest != first.digest


def test_build_module_tells_the_library_who_it_is(tree: LuaTree, server: ValkeyProcess) -> None:
    tree.function(
        "who",
        'local build = require("build")',
        "return { run = function() return { build.contract, build.digest, build.version } end }",
    )
    library = join_library(tree.folder, version="3.2.1")
    assert run(server, library, "who") == [7, library.digest.encode(), b"3.2.1"]


def test_dependencies_stand_before_what_requires_them(tree: LuaTree) -> None:
    tree.module("lib.b", "return {}")
    tree.module("lib.a", 'local b = require("lib.b")', "return {}")
    text = join_library(tree.folder).text
    assert text.index('modules["lib.b"] =') < text.index('modules["lib.a"] =')


def test_line_table_leads_to_every_line_of_every_file(tree: LuaTree) -> None:
    tree.module("lib.a", "local a = {}", "", "function a.f() return 1 end", "return a")
    tree.function("one", 'local a = require("lib.a")', EMPTY)
    library = join_library(tree.folder)
    for number, line in enumerate(library.text.splitlines(), start=1):
        place = library.place(number)
        if place is None or line.startswith(("modules[", "end)()", "server.register_function")):
            continue
        assert (tree.folder / place.file).read_text().splitlines()[place.line - 1] == line
    assert library.place(0) is None
    assert library.place(len(library.places) + 1) is None


def test_odd_line_separators_inside_a_file_do_not_shift_lines(tree: LuaTree, server: ValkeyProcess) -> None:
    tree.module("lib.a", "local a = {}", 'a.text = "\u2028\x0c"', "function a.f() return a.b.c end", "return a")
    tree.function("one", 'local a = require("lib.a")', "return { run = function() return a.f() end }")
    assert failure(server, join_library(tree.folder), "one").startswith("lua/lib/a.lua:3 (one): attempt to index")


def test_a_circle_is_refused_with_file_and_line(tree: LuaTree) -> None:
    tree.module("state.a", "-- first", 'local b = require("state.b")', "return {}")
    tree.module("state.b", 'local c = require("state.c")', "return {}")
    tree.module("state.c", "", "", 'local a = require("state.a")', "return {}")
    assert refusal(tree) == (
        "lua/state/c.lua:3: modules require each other in a circle: state.a > state.b > state.c > state.a"
    )


def test_a_file_that_requires_itself_is_a_circle(tree: LuaTree) -> None:
    tree.module("lib.a", 'local a = require("lib.a")', "return {}")
    assert refusal(tree) == "lua/lib/a.lua:1: modules require each other in a circle: lib.a > lib.a"


def test_an_unknown_module_is_refused(tree: LuaTree) -> None:
    tree.module("lib.a", "local x = 1", 'local b = require("lib.b")', "return {}")
    assert refusal(tree) == "lua/lib/a.lua:2: there is no module 'lib.b'"


@pytest.mark.parametrize(
    ("lower", "upper"),
    [("lib.a", "state.b"), ("lib.a", "functions.b"), ("state.a", "functions.b"), ("functions.a", "functions.b")],
)
def test_a_require_that_points_upwards_is_refused(tree: LuaTree, lower: str, upper: str) -> None:
    tree.function("b", EMPTY)
    tree.module("state.b", "return {}")
    if lower == "functions.a":
        tree.function("a", f'local b = require("{upper}")', EMPTY)
    else:
        tree.module(lower, f'local b = require("{upper}")', "return {}")
    assert f"{lower} may not require '{upper}'" in refusal(tree)
    assert refusal(tree).startswith(f"lua/{lower.replace('.', '/')}.lua:")


def test_a_computed_require_is_refused(tree: LuaTree) -> None:
    tree.module("lib.a", "local function f(name)", "  return require(name)", "end", "return {}")
    assert refusal(tree) == "lua/lib/a.lua:2: require takes the module's name as a literal"


def test_require_in_comments_and_strings_is_no_dependency(tree: LuaTree) -> None:
    tree.module(
        "lib.a",
        '-- local x = require("nowhere")',
        "--[[ require('nowhere')",
        "require(name) ]]",
        "--[==[ require('nowhere') ]==]",
        "local text = \"require('nowhere')\"",
        "local long = [[require('nowhere')]]",
        "local field = text.require",
        "return {}",
    )
    join_library(tree.folder)


def test_a_file_that_returns_nothing_is_refused(tree: LuaTree) -> None:
    tree.module("lib.a", "local a = {}")
    assert refusal(tree) == "lua/lib/a.lua: a module ends with 'return <table>'; none is there"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["local x = 1"], "lua/functions/f.lua:1: the file has to begin with '--- f: <purpose>.'"),
        (["--- g: another name."], "lua/functions/f.lua:1: the header names 'g', the file 'f'"),
        (["--- f: it.", "-- Flags: no-reads"], "lua/functions/f.lua: flag 'no-reads' is unknown"),
        (["--- f: it.", "-- Cost: a", "-- Cost: b"], "lua/functions/f.lua:3: field 'Cost' stands twice"),
        (["--- f: it.", "-- just talk"], "lua/functions/f.lua:2: a header line is '-- Field: text'"),
    ],
)
def test_a_function_file_needs_a_well_formed_header(tree: LuaTree, lines: list[str], problem: str) -> None:
    tree.module("functions.f", *lines, EMPTY)
    assert refusal(tree).startswith(problem)


def test_a_runtime_error_names_the_lua_file_and_line(tree: LuaTree, server: ValkeyProcess) -> None:
    tree.module("lib.deep", "local deep = {}", "function deep.fall(x)", "  return x.y.z", "end", "return deep")
    tree.function("fall", 'local deep = require("lib.deep")', "return { run = function() return deep.fall({}) end }")
    tree.function(
        "clash",
        "return { run = function(keys)",
        '  server.call("SET", keys[1], 1)',
        '  return server.call("HGET", keys[1], "f")',
        "end }",
    )
    library = join_library(tree.folder)
    assert failure(server, library, "fall") == "lua/lib/deep.lua:3 (fall): attempt to index field 'y' (a nil value)"
    assert failure(server, library, "clash").startswith("lua/functions/clash.lua:13 (clash): WRONGTYPE Operation")


def test_a_function_that_is_not_there_is_a_library_problem(server: ValkeyProcess, tree: LuaTree) -> None:
    tree.function("one", EMPTY)
    with pytest.raises(LibraryProblem, match="function 'other' is not on the server; run: dispatch scripts load"):
        run(server, join_library(tree.folder), "other")


def test_this_versions_library_joins_and_places_are_real() -> None:
    library = current_library()
    assert "dispatch_library_version" in library.functions
    assert Place("functions/library_version.lua", 1) in library.places
