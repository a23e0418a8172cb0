"""Whose a request is, who may see it, and what the record says of who changed something."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.errors import NotAllowed
from dispatch.fabric.api_keys import Role
from dispatch.ingress.authority import ANYBODY, Principal
from dispatch.ingress.control.access import actor_of, allowed_pools, changes, owns, require_all_pools, sees
from dispatch.producer.request_ids import is_made_for, make_request_id

ID = "0123456789abcdef0123456789abcdef"


def principal(*roles: Role, key_id: str = "k1", **more: Any) -> Principal:
    return Principal(key_id=key_id, name="one", roles=frozenset(roles), **more)


def row(request_id: str = ID, pool_id: str = "a") -> dict[str, Any]:
    return {"request_id": request_id, "pool_id": pool_id}


@pytest.mark.parametrize(
    ("scope", "request_id", "whose"),
    [
        ("k1", f"k1.{ID}", True),
        ("k1", f"k2.{ID}", False),
        ("k1", f"k1.x.{ID}", False),
        ("k1.x", f"k1.x.{ID}", True),
        ("k1", f"k1.{ID[:-1]}", False),
        ("k1", "k1.mine", False),
        ("k1", ID, False),
        ("", f".{ID}", False),
        ("", ID, False),
    ],
)
def test_an_id_tells_for_which_key_it_was_made(scope: str, request_id: str, whose: bool) -> None:
    assert is_made_for(scope, request_id) is whose


def test_ids_are_new_each_time() -> None:
    made = {make_request_id("k1") for _ in range(100)} | {make_request_id("") for _ in range(100)}
    assert len(made) == 200
    assert sum(is_made_for("k1", name) for name in made) == 100


def test_a_request_is_seen_by_its_key_and_by_observers_of_its_pool() -> None:
    own = row(f"k1.{ID}")
    submit, observe, admin = (principal(role) for role in (Role.SUBMIT, Role.OBSERVE, Role.ADMIN))
    assert (owns(submit, own["request_id"]), owns(observe, own["request_id"])) == (True, False)
    assert [sees(one, own) for one in (submit, observe, principal(Role.SUBMIT, key_id="k2"))] == [True, True, False]
    assert [changes(one, own) for one in (submit, observe, admin)] == [True, False, True]
    of_pool_b = principal(Role.OBSERVE, Role.ADMIN, pools=frozenset({"b"}))
    assert (sees(of_pool_b, row()), changes(of_pool_b, row()), sees(of_pool_b, row(pool_id="b"))) == (
        False,
        False,
        True,
    )
    assert (sees(ANYBODY, row()), changes(ANYBODY, row()), owns(ANYBODY, f".{ID}")) == (True, True, False)


def test_what_belongs_to_the_group_is_for_keys_of_all_pools() -> None:
    require_all_pools(ANYBODY, "the config")
    for one in (principal(Role.ADMIN, pools=frozenset({"b", "a"})), principal(Role.ADMIN, pool="a")):
        assert allowed_pools(one)[0] == "a"
        with pytest.raises(NotAllowed, match="the config is for keys of all pools; this key allows: a"):
            require_all_pools(one, "the config")


def test_the_record_names_the_key_beside_what_is_said() -> None:
    one = principal(Role.ADMIN)
    assert actor_of(one, "anna") == "anna with key one (k1)"
    assert actor_of(one, "") == "key one (k1)"
    assert (actor_of(ANYBODY, "anna"), actor_of(ANYBODY, "")) == ("anna", "anonymous")
