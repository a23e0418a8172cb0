"""Each act from the page, with its effect read back from Valkey; who may not act cannot, by the page or past it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Locator, Page, expect

from dispatch.fabric.api_keys import NewKey, Role
from dispatch.fabric.functions import key_change, pool_pause
from tests.browser.conftest import Opens, Watched, document
from tests.support.groups import configure, unique_group
from tests.support.studio import Hand, address_of, studio
from tests.support.valkey import ValkeyProcess


@dataclass(frozen=True)
class Office:
    """A group whose Studio asks for keys."""

    url: str
    hand: Hand
    admin: NewKey
    observer: NewKey
    submitter: NewKey

    def at(self, path: str = "") -> str:
        return f"{self.url}/g/{self.hand.group}{path}"


@pytest.fixture(scope="module")
def office(valkey: ValkeyProcess) -> Iterator[Office]:
    group = unique_group()
    configure(valkey.url, group, document())
    hand = Hand(valkey.url, group)
    keys = {role: hand.key(f"{role} of tests", role) for role in Role}
    hand.submit("eval-nightly", 6)
    with studio(valkey.url, group, keys="required") as page:
        yield Office(address_of(page), hand, keys[Role.ADMIN], keys[Role.OBSERVE], keys[Role.SUBMIT])


def sign_in(page: Page, key: NewKey) -> None:
    page.get_by_label("Key").fill(key.token)
    page.get_by_role("button", name="Sign in").click()


@pytest.fixture
def admin(office: Office, opens: Opens, watched: Watched) -> Page:
    watched.allowed = ("401",)
    page = opens(office.at())
    sign_in(page, office.admin)
    expect(page.locator(".studio[data-fresh=fresh]")).to_be_visible()
    return page


def act(page: Page, pool: str, name: str) -> Locator:
    """Open an act of a pool's menu, and return its dialog."""
    page.get_by_role("button", name=f"Acts of {pool}").click()
    page.get_by_role("menuitem", name=name).click()
    return page.get_by_role("dialog")


def test_pause_and_resume_are_told_with_who_and_why(office: Office, admin: Page) -> None:
    dialog = act(admin, "eval-nightly", "Pause…")
    expect(dialog).to_contain_text("6 requests wait in it")
    pause = dialog.get_by_role("button", name="Pause", exact=True)
    expect(pause).to_be_disabled()  # without a reason
    dialog.get_by_label("Reason").fill("free GPUs for the demo")
    pause.click()
    expect(admin.get_by_text("eval-nightly is paused.")).to_be_visible()
    note = office.hand.pool("eval-nightly")["paused"]
    assert note["reason"] == "free GPUs for the demo"
    assert note["by"] == f"admin of tests (key {office.admin.key_id})"
    expect(admin.locator(".lane[data-id=eval-nightly] .why")).to_contain_text("Paused by admin of tests")
    expect(admin.locator(".event", has_text="paused eval-nightly")).to_be_visible()
    dialog = act(admin, "eval-nightly", "Resume…")
    dialog.get_by_role("button", name="Resume", exact=True).click()
    expect(admin.get_by_text("eval-nightly is active again.")).to_be_visible()
    assert "paused" not in office.hand.pool("eval-nightly")


def test_a_drain_wants_the_name_typed(office: Office, admin: Page) -> None:
    dialog = act(admin, "backfill", "Drain…")
    drain = dialog.get_by_role("button", name="Drain", exact=True)
    dialog.get_by_label("Reason").fill("it moves")
    dialog.get_by_label("Type the pool's name").fill("backfil")
    expect(drain).to_be_disabled()
    dialog.get_by_label("Type the pool's name").fill("backfill")
    drain.click()
    expect(admin.get_by_text("backfill drains.")).to_be_visible()
    assert office.hand.pool("backfill")["draining"]["reason"] == "it moves"
    office.hand.run(pool_pause("backfill", "resume", actor="test"))


def test_cancelling_one_and_many(office: Office, admin: Page) -> None:
    [one, *rest] = office.hand.submit("interactive", 4)
    admin.goto(office.at(f"/requests/{one}"))
    admin.get_by_role("button", name="Cancel…").click()
    dialog = admin.get_by_role("dialog")
    expect(dialog).to_contain_text("It waits: it is removed from the queue")
    dialog.get_by_role("button", name="Cancel request").click()
    expect(admin.get_by_text("Cancelled: it was waiting.")).to_be_visible()
    assert office.hand.section("request", subject=one)["rows"][0]["ending"] == "cancelled"
    admin.goto(office.at("/pools/interactive"))
    expect(admin.locator(".c-wait b")).to_have_text("3")
    admin.get_by_role("button", name="Cancel what waits…").click()
    dialog = admin.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("wrong prompt")
    dialog.get_by_label("Type 3 to go on").fill("3")
    dialog.get_by_role("button", name="Cancel 3").click()
    expect(admin.get_by_text("3 of 3 waiting requests were cancelled.")).to_be_visible()
    assert {office.hand.section("request", subject=each)["rows"][0]["ending"] for each in rest} == {"cancelled"}


def test_many_are_not_cancelled_when_their_number_has_changed(office: Office, admin: Page) -> None:
    office.hand.submit("interactive", 3)
    admin.goto(office.at("/pools/interactive"))
    expect(admin.locator(".c-wait b")).to_have_text("3")
    admin.get_by_role("button", name="Cancel what waits…").click()
    dialog = admin.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("wrong prompt")
    dialog.get_by_label("Type 3 to go on").fill("3")
    office.hand.submit("interactive", 5)
    dialog.get_by_role("button", name="Cancel 3").click()
    expect(dialog.get_by_role("alert")).to_contain_text("8 wait in interactive by now, not 3: nothing was cancelled")
    assert office.hand.pool("interactive")["pending"] == 8


def test_a_weight_is_edited_with_preview_and_reason_and_taken_back(office: Office, admin: Page) -> None:
    before = office.hand.generation()
    dialog = act(admin, "interactive", "Edit weight and caps…")
    weight = dialog.get_by_label("Weight")
    expect(weight).to_have_value("4")
    weight.fill("0")
    expect(dialog).to_contain_text("a whole number from 1 to 1000000")
    weight.fill("6")
    expect(dialog.locator(".change")).to_contain_text("pools[interactive].quantum4 → 6")
    apply = dialog.get_by_role("button", name="Apply", exact=True)
    expect(apply).to_be_disabled()
    dialog.get_by_label("Reason").fill("chat feels slow")
    apply.click()
    expect(admin.get_by_text(f"Done, generation {before + 1}.")).to_be_visible()
    config = office.hand.section("config")
    assert (config["reason"], config["actor"]) == ("chat feels slow", f"admin of tests (key {office.admin.key_id})")
    assert office.hand.pool("interactive")["quantum"] == 6
    expect(admin.locator(".lane[data-id=interactive]")).to_contain_text("weight 6")
    admin.get_by_role("button", name="Undo…").click()
    dialog = admin.get_by_role("dialog")
    expect(dialog.locator(".change")).to_contain_text("6 → 4")
    dialog.get_by_label("Reason").fill("it was not that")
    dialog.get_by_role("button", name="Go back").click()
    expect(admin.get_by_text(f"Done, generation {before + 2}.")).to_be_visible()
    assert office.hand.pool("interactive")["quantum"] == 4


def test_what_the_library_refuses_stands_at_its_field(admin: Page) -> None:
    dialog = act(admin, "interactive", "Edit weight and caps…")
    dialog.get_by_label("Protected slots").fill("9")  # more than its cap of 8
    expect(dialog.locator("label.bad")).to_contain_text("9 is not allowed; allowed: at most max_concurrent (8)")
    expect(dialog.get_by_role("button", name="Apply", exact=True)).to_be_disabled()


def test_two_who_edit_at_once_see_each_other(office: Office, admin: Page) -> None:
    generation = office.hand.generation()
    dialog = act(admin, "document-extract", "Edit weight and caps…")
    dialog.get_by_label("Cap").fill("5")
    expect(dialog.locator(".change")).to_contain_text("4 → 5")
    other = office.hand.document()
    other["total_concurrent_dispatch"] = 17
    configure(office.hand.url, office.hand.group, other, expected=generation)
    dialog.get_by_label("Reason").fill("more room")
    dialog.get_by_role("button", name="Apply", exact=True).click()
    conflict = dialog.locator(".conflict")
    expect(conflict).to_contain_text(f"{generation + 1} is in force")
    expect(conflict).to_contain_text("total_concurrent_dispatch16 → 17")
    expect(conflict).to_contain_text("pools.document-extract.max_concurrent5")
    conflict.get_by_role("button", name=f"Apply mine to {generation + 1}").click()
    dialog.get_by_label("Reason").fill("more room")
    dialog.get_by_role("button", name="Apply", exact=True).click()
    expect(admin.get_by_text(f"Done, generation {generation + 2}.")).to_be_visible()
    found = office.hand.document()
    assert found["total_concurrent_dispatch"] == 17
    assert office.hand.pool("document-extract")["max_concurrent"] == 5


def test_an_observer_looks_and_cannot_act_by_the_page_or_past_it(
    office: Office, opens: Opens, watched: Watched
) -> None:
    watched.allowed = ("401",)
    page = opens(office.at("/pools/eval-nightly"))
    sign_in(page, office.observer)
    expect(page.locator("h1")).to_have_text("eval-nightly")
    assert page.url.endswith("/pools/eval-nightly")
    pause = page.get_by_role("button", name="Pause…")
    expect(pause).to_be_disabled()
    expect(pause).to_have_attribute("title", "You can look, not change. Needs the role admin.")
    asks = {
        "stop_pool": {"pool": "eval-nightly", "action": "pause", "reason": "x"},
        "cancel": {"id": "r", "reason": "x"},
        "cancel_waiting": {"pool": "eval-nightly", "count": 6, "reason": "x"},
        "apply": {"edits": [["total_concurrent_dispatch", 1]], "expected": office.hand.generation(), "reason": "x"},
        "roll_back": {"generation": 1, "expected": office.hand.generation(), "reason": "x"},
    }
    generation = office.hand.generation()
    for what, args in asks.items():
        call = f"fdStudio.ask({json.dumps(what)}, {json.dumps(args)}).then(() => 'done', error => error.message)"
        assert page.evaluate(call) == "You can look, not change. Needs the role admin.", what
    assert "paused" not in office.hand.pool("eval-nightly")
    assert office.hand.generation() == generation


def test_nobody_comes_in_without_a_key_that_may_look(office: Office, opens: Opens, watched: Watched) -> None:
    watched.allowed = ("401",)
    page = opens(office.at("/inflight?f=x"))
    expect(page.get_by_text("with the role observe or admin is needed")).to_be_visible()
    assert page.evaluate("window.fdStudio?.S.loaded ?? false") is False
    for token in ("fd_nothing_" + "x" * 43, office.submitter.token):
        page.get_by_label("Key").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_be_visible()
    sign_in(page, office.observer)
    expect(page.locator("h1")).to_have_text("In flight")
    assert page.url.endswith("/inflight?f=x")
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Lax"
    assert office.observer.token not in cookie["value"]


def test_a_revoked_key_is_out_at_once(office: Office, opens: Opens, watched: Watched) -> None:
    watched.allowed = ("401",)
    key = office.hand.key("short lived", Role.ADMIN)
    page = opens(office.at())
    sign_in(page, key)
    expect(page.locator(".studio[data-fresh=fresh]")).to_be_visible()
    office.hand.run(key_change("revoke", key.key_id, actor="test"))
    expect(page.get_by_role("button", name="Sign in")).to_be_visible(timeout=20_000)


def test_another_group_and_none_look_the_same(office: Office, opens: Opens, watched: Watched) -> None:
    watched.allowed = ("401",)
    page = opens(f"{office.url}/g/somebody-elses")
    expect(page.locator("main")).to_contain_text(re.compile("A key of somebody-elses"))
    assert page.locator(".lane").count() == 0
