"""`dispatch keys`: what is printed once, listed without secrets, and revoked."""

from __future__ import annotations

import json

import pytest

from dispatch.fabric import functions
from dispatch.fabric.api_keys import read_record, read_token
from dispatch.fabric.sync import BlockingConnection
from tests.support.commands import Commands
from tests.support.groups import unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

DONE, REFUSED, TROUBLE = 0, 1, 2


@pytest.fixture
def dispatch(valkey: ValkeyProcess, group: str) -> Commands:
    return Commands(valkey.url, group)


def records(valkey: ValkeyProcess, group: str) -> dict[str, bytes]:
    with BlockingConnection(valkey.url) as connection:
        return connection.run(group, functions.key_read())


def test_create_prints_the_key_alone_and_once(valkey: ValkeyProcess, group: str, dispatch: Commands) -> None:
    done = dispatch(
        "keys", "create", "--name", "team a", "--role", "submit", "--role", "observe", "--pool", "backfill", "--pool",
        "interactive", "--fix-pool", "backfill", "--fairness-key", "team-a", "--cost", "3",
    )  # fmt: skip
    token = read_token(done.out.removesuffix("\n"))
    assert (done.code, token is not None) == (DONE, True)
    assert token is not None
    secret = done.out.strip().split("_", 2)[2]
    for words in ("(team a)", group, "submit, observe; pools backfill, interactive", "cannot be shown again",
                  "pool backfill, fairness key team-a, cost 3 for every call"):  # fmt: skip
        assert words in done.err
    assert secret not in done.err
    [(key_id, encoded)] = records(valkey, group).items()
    record = read_record(encoded)
    assert (key_id, record.hash) == (token.key_id, token.hash)
    assert (record.roles, record.pools, record.pool) == (("submit", "observe"), ("backfill", "interactive"), "backfill")
    assert (record.fairness_key, record.cost, record.name) == ("team-a", 3, "team a")
    with eye(valkey.url) as server:
        for name in server.scan_iter(match=f"{{{group}}}:*"):
            assert secret.encode() not in (server.dump(name) or b"")


def test_a_key_may_everything_in_every_pool_that_it_is_not_told_to_leave(dispatch: Commands) -> None:
    made = dispatch("keys", "create", "--name", "x", "--json").json
    assert (made["roles"], made["pools"], made["pool"], made["cost"]) == (["submit"], None, None, None)
    assert read_token(made["token"]) is not None
    assert "hash" not in made


def test_the_list_shows_what_each_key_allows_and_no_secret(
    valkey: ValkeyProcess, group: str, dispatch: Commands
) -> None:
    first = dispatch("keys", "create", "--name", "the first", "--pool", "backfill", "--json").json
    second = dispatch("keys", "create", "--name", "odd\u200b", "--role", "admin", "--fix-pool", "default").code
    assert second == TROUBLE  # a name is for people
    third = dispatch("keys", "create", "--name", "third", "--role", "admin", "--fix-pool", "default", "--json").json
    listed = dispatch("keys", "list")
    heading, *rows = listed.out.splitlines()
    assert heading.split() == ["key", "name", "roles", "pools", "fixed", "created"]
    assert [row.split()[0] for row in rows] == [first["key_id"], third["key_id"]]
    assert "all" in rows[1].split()
    assert "pool default" in rows[1]
    as_json = dispatch("keys", "list", "--json")
    assert [row["name"] for row in as_json.json["keys"]] == ["the first", "third"]
    for record in records(valkey, group).values():
        for said in (listed.out, as_json.out):
            assert read_record(record).hash not in said
    for key in (first, third):
        assert key["token"] not in listed.out + as_json.out


def test_revoke_takes_ids_or_whole_keys_and_repeats_no_secret(
    valkey: ValkeyProcess, group: str, dispatch: Commands
) -> None:
    keys = [dispatch("keys", "create", "--name", str(number), "--json").json for number in range(3)]
    done = dispatch("keys", "revoke", keys[0]["key_id"], keys[1]["token"])
    assert (done.code, done.out) == (DONE, "".join(f"{key['key_id']}: revoked\n" for key in keys[:2]))
    assert list(records(valkey, group)) == [keys[2]["key_id"]]
    again = dispatch("keys", "revoke", keys[1]["token"], keys[2]["key_id"], "--json")
    assert again.code == REFUSED
    assert again.json == {"group": group, "revoked": [keys[2]["key_id"]], "unknown": [keys[1]["key_id"]]}
    assert keys[1]["token"].split("_", 2)[2] not in again.err
    assert f"{keys[1]['key_id']}: is no key of group {group}" in again.err


def test_who_created_and_revoked_a_key_is_on_record(valkey: ValkeyProcess, group: str, dispatch: Commands) -> None:
    key_id = dispatch("keys", "create", "--name", "x", "--actor", "ann", "--json").json["key_id"]
    dispatch("keys", "revoke", key_id, "--actor", "bob")
    with BlockingConnection(valkey.url) as connection:
        rows = connection.run(group, functions.fabric_snapshot("events"))["rows"]
    told = [row for row in rows if row["kind"] == "key"]
    assert sorted((row["action"], row["actor"], row["key"]) for row in told) == [
        ("create", "ann", key_id), ("revoke", "bob", key_id),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--name", " "), "name is"),
        (("--name", "x", "--pool", "a b"), "pool 'a b' is not a name"),
        (("--name", "x", "--pool", "a", "--fix-pool", "b"), "none of the pools"),
        (("--name", "x", "--cost", "0"), "cost is 0: a whole number from 1"),
        (("--name", "x", "--fairness-key", "a:b"), "fairness_key 'a:b' is not a name"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_created(
    valkey: ValkeyProcess, group: str, dispatch: Commands, words: tuple[str, ...], told: str
) -> None:
    done = dispatch("keys", "create", *words)
    assert (done.code, done.out) == (TROUBLE, "")
    assert told in done.err
    assert records(valkey, group) == {}


def test_a_pool_that_is_not_there_is_said_and_the_key_created(dispatch: Commands) -> None:
    done = dispatch("keys", "create", "--name", "x", "--pool", "nowhere", "--pool", "default", "--json")
    assert "note: pool 'nowhere' is not configured" in done.err
    assert "'default'" not in done.err
    assert done.json["pools"] == ["nowhere", "default"]


def test_a_group_has_keys_before_it_has_a_config(valkey: ValkeyProcess) -> None:
    dispatch = Commands(valkey.url, unique_group())
    made = dispatch("keys", "create", "--name", "x", "--pool", "default")
    assert made.code == DONE
    assert json.loads(dispatch("keys", "list", "--json").out)["keys"][0]["name"] == "x"
