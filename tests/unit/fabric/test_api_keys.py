"""Keys: what may stand in one, and that what is kept of it cannot be shown as it."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from dispatch.errors import InvalidRequest
from dispatch.fabric.api_keys import Grant, KeyRecord, Role, new_key, read_record, read_token
from dispatch.fabric.schema import LIMITS


def test_a_token_leads_to_its_record_and_the_record_not_to_the_token() -> None:
    made = new_key(Grant(name="a", roles=(Role.SUBMIT, Role.ADMIN), pools=("p", "q"), pool="q", cost=3))
    token = read_token(made.token)
    assert token is not None
    assert made.token.startswith(f"fd_{made.key_id}_")
    record = read_record(made.record)
    assert (token.key_id, token.hash) == (made.key_id, record.hash)
    secret = made.token.split("_", 2)[2]
    assert record.hash == hashlib.sha256(secret.encode()).hexdigest()
    assert secret.encode() not in made.record
    assert made.token not in repr(made)
    assert (record.roles, record.pools, record.pool, record.cost) == (("submit", "admin"), ("p", "q"), "q", 3)
    assert "hash" not in record.shown("id")
    assert record.hash not in str(record.shown("id"))


def test_no_two_keys_are_alike_and_a_secret_has_enough_of_chance() -> None:
    made = [new_key(Grant(name="a")) for _ in range(50)]
    assert len({one.key_id for one in made}) == len({one.token for one in made}) == 50
    assert all(len(one.token.split("_", 2)[2]) * 6 >= 128 for one in made)
    assert all(read_token(one.token) is not None for one in made)  # whatever letters it is made of


@pytest.mark.parametrize(
    "text",
    ["", "fd_", "fd__", "fd_a", "fd_a_", "fd_a_short", "sk_a_" + "x" * 43, "fd_a_" + "x" * 43 + " ", "fd_é_" + "x" * 43,
     "fd_a_" + "x" * 42 + "é", "fd_a_" + "x" * 200, "fd_" + "a" * 100 + "_" + "x" * 43, "fd_a{b}_" + "x" * 43],
)  # fmt: skip
def test_what_is_no_token_is_none(text: str) -> None:
    assert read_token(text) is None


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "  "}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"roles": ()}, "role"),
        ({"pools": ()}, "pool"),
        ({"pools": ("a{b}",)}, "pool"),
        ({"pools": tuple(f"p{number}" for number in range(101))}, "pool"),
        ({"pool": "a:b"}, "pool"),
        ({"pools": ("a",), "pool": "b"}, "fix_pool"),
        ({"fairness_key": "a b"}, "fairness_key"),
        ({"cost": 0}, "cost"),
        ({"cost": 2**31}, "cost"),
    ],
)
def test_what_a_key_may_not_allow_is_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Grant(**({"name": "a"} | wrong))
    assert error.value.param == param


def test_a_record_that_the_group_would_not_take_is_refused_before() -> None:
    pools = tuple(f"{number:03}".rjust(128, "p") for number in range(100))
    assert len(new_key(Grant(name="a", pools=pools)).record) <= LIMITS["key_record_bytes"]


def test_a_record_of_a_later_version_can_be_read() -> None:
    record = read_record(b'{"hash": "x", "roles": ["submit", "fly"], "wings": 2}')
    assert record == KeyRecord(hash="x", roles=("submit", "fly"))
    for encoded in (b"", b"{}", b"[]", b'{"hash": 1, "roles": []}'):
        with pytest.raises(msgspec.MsgspecError):
            read_record(encoded)
