"""Who may do what: how old what is known of keys may be, and what is said while nothing can be asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog.testing

from dispatch.errors import DispatchError, FabricUnavailable, KeyRefused, LibraryProblem, NotAllowed
from dispatch.fabric.api_keys import Grant, NewKey, Role, new_key
from dispatch.ingress import authority as module
from dispatch.ingress.authority import ANYBODY, Authority, Principal
from dispatch.producer.options import CallOptions

pytestmark = pytest.mark.anyio

ADMIN = new_key(Grant(name="boss", roles=(Role.ADMIN,)))
TEAM = new_key(Grant(name="team", pools=("a", "b"), fairness_key="team", cost=5))


class Keys:
    """The keys of a group as a gateway reads them; what a read meets can be said."""

    def __init__(self, *keys: NewKey) -> None:
        self.records = {key.key_id: key.record for key in keys}
        self.reads = 0
        self.problem: DispatchError | None = None
        self.silent = False

    async def __call__(self) -> dict[str, bytes]:
        self.reads += 1
        await anyio.lowlevel.checkpoint()
        if self.silent:
            await anyio.sleep_forever()
        if self.problem is not None:
            raise self.problem
        return dict(self.records)


class Clock:
    """The time, as far as the authority sees it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(module, "_now", clock)
    monkeypatch.setattr(module.anyio, "sleep", sleep)
    monkeypatch.setattr(module.anyio, "move_on_after", lambda _: anyio.CancelScope())
    return clock


@asynccontextmanager
async def checking(keys: Keys, mode: Any = "auto") -> AsyncIterator[Authority]:
    authority = Authority(keys, mode)
    try:
        yield authority
    finally:
        await authority.aclose()


def shown(key: NewKey | str) -> dict[bytes, tuple[bytes, ...]]:
    token = key if isinstance(key, str) else key.token
    return {b"authorization": (b"Bearer " + token.encode(),)}


async def refusal(authority: Authority, headers: dict[bytes, tuple[bytes, ...]]) -> KeyRefused:
    with pytest.raises(KeyRefused) as error:
        await authority.principal(headers)
    assert error.value.status == 401
    return error.value


# ---- who is asked


async def test_nobody_is_asked_where_keys_are_off_or_there_is_none(clock: Clock) -> None:
    keys = Keys(TEAM)
    assert await Authority().principal({}) is ANYBODY
    assert await Authority(keys, "off").principal({}) is ANYBODY
    assert keys.reads == 0
    async with checking(Keys()) as authority:
        assert await authority.principal({}) is ANYBODY
        assert await authority.principal(shown("whatever")) is ANYBODY
    assert clock.now == 1_000


async def test_the_first_key_of_a_group_shuts_the_door_and_the_last_one_opens_none(clock: Clock) -> None:
    keys = Keys()
    async with checking(keys) as authority:
        assert await authority.principal({}) is ANYBODY
        keys.records = {TEAM.key_id: TEAM.record}
        clock.now += module.FRESH_S + 0.1
        assert (await refusal(authority, {})).code == "missing_api_key"
        assert (await authority.principal(shown(TEAM))).name == "team"
        keys.records = {}
        clock.now += module.FRESH_S + 0.1
        await refusal(authority, shown(TEAM))
        await refusal(authority, {})


async def test_where_keys_are_required_a_group_without_any_lets_nobody_in(clock: Clock) -> None:
    async with checking(Keys(), "required") as authority:
        await refusal(authority, {})
        await refusal(authority, shown(TEAM))
    assert clock.now < 1_001


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic dTpw",
        b"Token " + TEAM.token.encode(),
        TEAM.token.encode(),
        b"Bearer " + TEAM.token.encode() + b" x",
        b"Bearer " + TEAM.token.encode() + b"\xe9",
        b"Bearer sk-1234567890123456789012345678901234567890",
        b"Bearer " + b"x" * 5_000,
    ],
    ids=range(10),  # a token is drawn anew in each process, so it can be no part of a test's name
)
async def test_what_shows_no_token_is_refused(clock: Clock, value: bytes) -> None:
    async with checking(Keys(TEAM), "required") as authority:
        assert (await refusal(authority, {b"authorization": (value,)})).code == "invalid_api_key"
        two = b"Bearer " + TEAM.token.encode()
        assert (await refusal(authority, {b"authorization": (two, two)})).code == "invalid_api_key"
        assert (await authority.principal({b"authorization": (two.replace(b"Bearer", b" bEARER "),)})).name == "team"
    assert clock.now < 1_001


async def test_a_wrong_secret_and_an_unknown_id_are_told_and_looked_up_alike(clock: Clock) -> None:
    keys = Keys(TEAM)
    other = new_key(Grant(name="other"))
    wrong = f"fd_{TEAM.key_id}_{other.token.split('_', 2)[2]}"
    async with checking(keys) as authority:
        await authority.principal(shown(TEAM))
        told = []
        for headers in (shown(wrong), shown(other)):
            clock.now += 0.5
            reads = keys.reads
            error = await refusal(authority, headers)
            told.append((str(error), error.code, keys.reads - reads))
        assert told[0] == told[1]
        assert TEAM.key_id not in told[0][0]


# ---- how old it may be


async def test_a_revoked_key_stops_within_two_seconds(clock: Clock) -> None:
    keys = Keys(TEAM, ADMIN)
    async with checking(keys) as authority:
        await authority.principal(shown(TEAM))
        del keys.records[TEAM.key_id]
        clock.now += module.FRESH_S - 0.01
        await authority.principal(shown(TEAM))
        await anyio.wait_all_tasks_blocked()
        clock.now += 0.02
        await refusal(authority, shown(TEAM))
    assert module.FRESH_S == 2


async def test_a_new_key_works_at_once(clock: Clock) -> None:
    keys = Keys(ADMIN)
    async with checking(keys) as authority:
        await authority.principal(shown(ADMIN))
        for number in range(5):
            fresh = new_key(Grant(name=str(number)))
            keys.records[fresh.key_id] = fresh.record
            clock.now += 0.001
            assert (await authority.principal(shown(fresh))).key_id == fresh.key_id
    assert clock.now < 1_002


async def test_calls_that_follow_one_another_never_wait_and_seldom_read(clock: Clock) -> None:
    keys = Keys(TEAM)
    async with checking(keys) as authority:
        await authority.principal(shown(TEAM))
        keys.silent = True  # whoever waits for a read now waits for ever
        for _ in range(150):
            clock.now += 0.01
            await authority.principal(shown(TEAM))
            await anyio.lowlevel.checkpoint()
        assert keys.reads == 2  # the second one in the background, after a second


async def test_made_up_keys_do_not_keep_valkey_busy(clock: Clock) -> None:
    keys = Keys(TEAM)
    async with checking(keys) as authority:
        await authority.principal(shown(TEAM))
        started, reads = clock.now, keys.reads

        async def one() -> None:
            await refusal(authority, shown(new_key(Grant(name="x"))))

        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(50):
                    tasks.start_soon(one)
        assert keys.reads - reads <= (clock.now - started) / 0.2 + 1


async def test_a_record_that_cannot_be_read_lets_nobody_in_and_holds_nobody_up(clock: Clock) -> None:
    keys = Keys(TEAM)
    keys.records |= {"odd": b"no json", "none": b'{"hash": "x", "roles": ["submit"]}'}
    async with checking(keys) as authority:
        assert (await authority.principal(shown(TEAM))).name == "team"
        for key_id in ("odd", "none"):
            await refusal(authority, shown(f"fd_{key_id}_{'x' * 43}"))
    assert clock.now < 1_001


# ---- while nothing can be asked


@pytest.mark.parametrize("problem", [FabricUnavailable("no answer"), None], ids=["away", "silent"])
async def test_while_valkey_is_away_the_right_ones_are_told_so_and_the_others_that_they_are_wrong(
    clock: Clock, problem: DispatchError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(TEAM)
    async with checking(keys) as authority:
        await authority.principal(shown(TEAM))
        keys.problem, keys.silent = problem, problem is None
        monkeypatch.setattr(module.anyio, "move_on_after", lambda _: anyio.CancelScope(deadline=float("-inf")))
        for _ in range(5):
            clock.now += module.KNOWN_S / 6
            with pytest.raises(FabricUnavailable):
                await authority.principal(shown(TEAM))
            await refusal(authority, shown(ADMIN))
            await refusal(authority, {})
        clock.now += module.KNOWN_S
        for key in (TEAM, ADMIN):  # nobody can tell any more
            with pytest.raises(FabricUnavailable):
                await authority.principal(shown(key))
        await refusal(authority, {})
        keys.problem, keys.silent = None, False
        monkeypatch.setattr(module.anyio, "move_on_after", lambda _: anyio.CancelScope())
        assert (await authority.principal(shown(TEAM))).name == "team"
        await refusal(authority, shown(ADMIN))


async def test_what_else_is_wrong_with_the_server_is_what_is_told(clock: Clock) -> None:
    keys = Keys()
    keys.problem = LibraryProblem("run: dispatch scripts load")
    for mode in ("auto", "required"):
        async with checking(keys, mode) as authority:
            with pytest.raises(LibraryProblem, match="scripts load"):
                await authority.principal(shown(TEAM))
    assert clock.now < 1_001


async def test_a_refusal_is_logged_without_what_was_shown(clock: Clock) -> None:
    unknown, wrong = new_key(Grant(name="x")), f"fd_{TEAM.key_id}_{'x' * 43}"
    async with checking(Keys(TEAM)) as authority:
        with structlog.testing.capture_logs() as logs:
            for key in (unknown, wrong):
                await refusal(authority, shown(key))
    assert [line["key_id"] for line in logs if line["event"] == "key_refused"] == [None, TEAM.key_id]
    assert unknown.token not in str(logs)
    assert "x" * 43 not in str(logs)
    assert clock.now < 1_001


# ---- what a key allows


async def principal_of(**grant: Any) -> Principal:
    key = new_key(Grant(name="one", **grant))
    async with checking(Keys(key)) as authority:
        return await authority.principal(shown(key))


async def test_roles_are_what_the_key_says_and_an_admin_may_look() -> None:
    submit, admin = await principal_of(), await principal_of(roles=(Role.ADMIN,))
    submit.require(Role.SUBMIT)
    admin.require(Role.OBSERVE)
    admin.require(Role.SUBMIT, Role.ADMIN)
    for principal, role in ((submit, Role.OBSERVE), (submit, Role.ADMIN), (admin, Role.SUBMIT)):
        with pytest.raises(NotAllowed, match=f"{role} is needed") as error:
            principal.require(role)
        assert (error.value.status, error.value.code) == (403, "role_not_allowed")


async def test_calls_go_where_the_key_allows() -> None:
    for grant, allowed, default in (
        ({}, "abc", "default"),
        ({"pools": ("a", "b")}, "ab", "default"),
        ({"pools": ("a",)}, "a", "a"),
        ({"pool": "b"}, "b", "b"),
        ({"pools": ("a", "b"), "pool": "b"}, "b", "b"),
    ):
        principal = await principal_of(**grant)
        assert principal.default_pool == default
        assert "".join(pool for pool in "abc" if principal.pool_allowed(pool)) == allowed
        for pool in set("abc") - set(allowed):
            with pytest.raises(NotAllowed, match=f"'{pool}' is not allowed") as error:
                principal.limit(CallOptions(pool_id=pool))
            assert (error.value.status, error.value.param) == (403, "pool")


async def test_what_a_key_fixes_goes_before_what_the_caller_says() -> None:
    asked = CallOptions(pool_id="a", fairness_key="mine", estimated_cost_units=1, scope="other")
    free, bound = await principal_of(), await principal_of(fairness_key="team", cost=7)
    assert (options := free.limit(asked)).fairness_key == "mine"
    assert (options.estimated_cost_units, options.scope) == (1, free.key_id)
    options = bound.limit(asked)
    assert (options.fairness_key, options.estimated_cost_units, options.scope) == ("team", 7, bound.key_id)
    assert ANYBODY.limit(asked) is asked
