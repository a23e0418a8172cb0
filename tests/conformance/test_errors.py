"""What goes wrong is told as this package's errors, in one sentence, without secrets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from dispatch import errors
from dispatch.errors import ConfigurationError, FabricError, FabricUnavailable, LibraryProblem, ScriptFault
from dispatch.fabric import functions as f
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connecting import connect
from dispatch.fabric.library import current_library
from dispatch.fabric.records import LibraryVersion
from dispatch.fabric.verifying import require_same, verify_library
from tests.support.fake_server import FakeServer
from tests.support.valkey import free_port

pytestmark = pytest.mark.anyio

ERRORS = {
    'POOL_UNKNOWN pool "x" is not configured; known: a, b-c': (errors.PoolUnknown, 'pool "x" is not configured'),
    "GROUP_UNKNOWN group x": (errors.GroupUnknown, "group x"),
    "CONTRACT_MISMATCH caller speaks contract 1": (errors.ContractMismatch, "contract 1"),
    "BAD_ARGUMENT want is 0: allowed: 1 to 9": (errors.BadArgument, "want is 0: allowed: 1 to 9"),
    "STATE_CONFLICT it has ended": (errors.StateConflict, "it has ended"),
    "LEASE_LOST": (errors.LeaseLost, ""),
    "ERR Function not found": (LibraryProblem, "'thing' is not on the server; run: dispatch scripts load"),
    "READONLY You can't write against a read only replica.": (FabricUnavailable, "read-only replica"),
    "UNBLOCKED force unblock from blocking operation": (FabricUnavailable, "become a replica"),
    "LOADING Valkey is loading the dataset in memory": (FabricUnavailable, "still loading"),
    "MASTERDOWN Link with MASTER is down": (FabricUnavailable, "replica without its primary"),
    "CLUSTERDOWN Hash slot not served": (FabricUnavailable, "does not serve this slot"),
    "OOM command not allowed when used memory > 'maxmemory'.": (errors.FabricFull, "memory is full"),
    "BUSY Valkey is busy running a script.": (FabricUnavailable, "busy with a script"),
    "MISCONF Valkey is configured to save": (FabricUnavailable, "cannot save to disk"),
    "NOREPLICAS Not enough good replicas to write.": (FabricUnavailable, "too few replicas"),
    "NOAUTH Authentication required.": (ConfigurationError, "check user and password"),
    "WRONGPASS invalid username-password pair": (ConfigurationError, "check user and password"),
    "NOPERM User x has no permissions to run the 'fcall' command": (ConfigurationError, "lacks a right: User x"),
    "ERR ACL failure in script: User x has no permissions script: on @user_function:9.": (
        ConfigurationError,
        "lacks a right inside thing: ACL failure",
    ),
    "ERR user_function:99999: boom script: on @user_function:99999.": (
        ScriptFault,
        "line 99999 of the joined library (thing): boom",
    ),
    "WRONGTYPE Operation against a key script: on @user_function:1.": (
        ScriptFault,
        "line 1 of the joined library (thing): WRONGTYPE Operation against a key",
    ),
    "ERR something else entirely": (FabricError, "Valkey answered: ERR something else entirely"),
    "NEWCODE of a later version": (FabricError, "Valkey answered: NEWCODE of a later version"),
}

THING: FunctionCall[Any] = FunctionCall("thing", [], lambda answer: answer)


@pytest.mark.parametrize("text", ERRORS)
async def test_every_error_of_the_server_has_its_meaning(open_connection, text) -> None:
    kind, words = ERRORS[text]
    with FakeServer(f"-{text}\r\n".encode()) as server:
        connection = await connect_without_look(open_connection, server)
        with pytest.raises(errors.DispatchError) as caught:
            await connection.run("g", THING)
        assert type(caught.value) is kind
        assert words in str(caught.value)


async def connect_without_look(open_connection: Any, server: FakeServer) -> Any:
    answer, server.answer = server.answer, b"$-1\r\n"
    connection = await open_connection(server.url)
    server.answer = answer
    return connection


async def test_known_pools_are_read_out_of_the_text(open_connection) -> None:
    with FakeServer(b'-POOL_UNKNOWN pool "x" is not configured; known: a, b-c\r\n') as server:
        connection = await connect_without_look(open_connection, server)
        with pytest.raises(errors.PoolUnknown) as caught:
            await connection.run("g", THING)
        assert caught.value.known == ("a", "b-c")


async def test_full_memory_refuses_a_submit(open_connection) -> None:
    with FakeServer(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n") as server:
        connection = await connect_without_look(open_connection, server)
        with pytest.raises(errors.RequestRefused) as caught:
            await connection.run("g", FunctionCall("request_submit", [], lambda answer: answer))
        assert caught.value.reason == "memory_full"


@pytest.mark.container
async def test_a_missing_library_names_the_command(start_valkey, open_connection) -> None:
    connection = await open_connection(start_valkey(library=False).url)
    with pytest.raises(LibraryProblem, match="run: dispatch scripts load"):
        await connection.run("g", f.library_version())
    with pytest.raises(LibraryProblem, match="run: dispatch scripts load"):
        await verify_library(connection, "g")


@pytest.mark.container
async def test_a_different_library_names_the_command(start_valkey, open_connection) -> None:
    server = start_valkey(library=False)
    text = current_library().text.replace(f'digest = "{current_library().digest}"', 'digest = "0123456789abcdef0123"')
    with redis.Redis(port=server.port) as eye:
        eye.function_load(text)
    connection = await open_connection(server.url)
    with pytest.raises(LibraryProblem, match=r"digest 0123456789abcdef\) is not this .* run: dispatch scripts load"):
        await verify_library(connection, "g")


def test_another_contract_is_refused_before_the_digest_is_looked_at() -> None:
    require_same(LibraryVersion(1, current_library().digest, "9.9.9"))
    with pytest.raises(LibraryProblem, match=r"speaks contract 2, this version speaks 1; run: dispatch scripts load"):
        require_same(LibraryVersion(2, current_library().digest, "9.9.9"))


async def test_a_script_fault_names_lua_file_and_line(start_valkey, open_connection) -> None:
    server = start_valkey()
    with redis.Redis(port=server.port) as eye:
        eye.set("{g}:hash:llm:group", "not a hash")
    connection = await open_connection(server.url)
    with pytest.raises(ScriptFault, match=r"lua/state/[a-z]+\.lua:\d+ \(fabric_snapshot\): WRONGTYPE"):
        await connection.run("g", f.fabric_snapshot("group"))


async def test_nothing_listens(open_connection) -> None:
    url = f"valkey://someone:geheim@127.0.0.1:{free_port()}"
    with pytest.raises(
        FabricUnavailable, match=r"^Valkey at valkey://someone:\*\*\*@127\.0\.0\.1:\d+/0 does not answer"
    ):
        await open_connection(url)


async def test_an_unknown_host(open_connection) -> None:
    with pytest.raises(FabricUnavailable, match="does not answer: the host name is unknown"):
        await open_connection("valkey://nowhere.invalid:6379")


async def test_a_server_without_tls(open_connection) -> None:
    with FakeServer(b"+x\r\n") as server, pytest.raises(FabricUnavailable, match="does not answer"):
        await open_connection(server.url.replace("valkey://", "valkeys://"))


@pytest.mark.parametrize("login", ["", ":falsch@", "nobody:falsch@", "default:falsch@"])
async def test_a_refused_login(start_valkey, open_connection, login) -> None:
    server = start_valkey(library=False, options=("--requirepass", "richtig"))
    with pytest.raises(ConfigurationError, match="check user and password") as caught:
        await open_connection(f"valkey://{login}127.0.0.1:{server.port}")
    assert_tells_no_secret(caught.value, "falsch")


@pytest.mark.container
async def test_the_right_login(start_valkey, open_connection) -> None:
    server = start_valkey(library=False, options=("--requirepass", "s3:/@ö"))
    for login in (":s3%3A%2F%40%C3%B6", "default:s3%3A%2F%40%C3%B6"):
        connection = await open_connection(f"valkey://{login}@127.0.0.1:{server.port}")
        await connection.put("{g}:x", b"1", ttl_ms=1000)
        assert await connection.get("{g}:x") == b"1"


async def test_a_database_number_selects_and_a_wrong_one_is_a_setting(start_valkey, open_connection) -> None:
    server = start_valkey(library=False)
    connection = await open_connection(f"{server.url}/3")
    await connection.put("{g}:x", b"1", ttl_ms=30_000)
    with redis.Redis(port=server.port, db=3) as eye:
        assert eye.exists("{g}:x")
    with pytest.raises(ConfigurationError, match="database"):
        await open_connection(f"{server.url}/99")


async def test_a_user_without_rights_is_a_setting(start_valkey, open_connection) -> None:
    server = start_valkey()
    with redis.Redis(port=server.port) as eye:
        eye.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@connection", "+info", "+get", "+fcall")
    connection = await open_connection(f"valkey://u:p@127.0.0.1:{server.port}")
    with pytest.raises(ConfigurationError, match="lacks a right"):
        await connection.put("{g}:x", b"1", ttl_ms=1000)
    with pytest.raises(ConfigurationError, match="lacks a right inside lease_reap"):
        await connection.run("g", f.lease_reap(limit=1))


async def test_an_unknown_client() -> None:
    with pytest.raises(ConfigurationError, match="'jedis' is unknown; known: glide, redis"):
        await connect("valkey://127.0.0.1", client="jedis")


def assert_tells_no_secret(error: BaseException, secret: str) -> None:
    seen: BaseException | None = error
    while seen is not None:
        assert not re.search(secret, f"{seen!r} {seen}")
        seen = seen.__cause__ or seen.__context__
