"""What a process's log looks like; each in a process of its own, because logging is set up for good."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dispatch.telemetry.logs import HIDDEN, hide_secrets

SECRETS = {
    "valkey://user:pa@ss@host:6379/0": "valkey://[redacted]@host:6379/0",
    "GET https://h/v1?api_key=abcdefgh&x=1": "GET https://h/v1?api_key=[redacted]&x=1",
    "Authorization: Bearer abcdefgh.ijkl": "Authorization: Bearer [redacted]",
    "key sk-abcdefghijkl was refused": "key [redacted] was refused",
    "{'api_key': 'abcd1234'}": "{'api_key': '[redacted]'}",
    "fd_0123456789abcdef_secret": "[redacted]",
    "http://host:80/v1 with 3 tokens, error_type=x": "http://host:80/v1 with 3 tokens, error_type=x",
    "user@example.com wrote to valkey://host:6379": "user@example.com wrote to valkey://host:6379",
}


@pytest.mark.parametrize(("text", "shown"), SECRETS.items())
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str) -> None:
    assert hide_secrets(None, "info", {"event": text})["event"] == shown
    assert hide_secrets(None, "info", {"event": "e", "facts": [{"a": text}]})["facts"] == [{"a": shown}]
    assert hide_secrets(None, "info", {"event": "e", "error": ValueError(text)})["error"] == shown


def test_members_that_are_named_like_a_secret_are_hidden_and_others_are_not() -> None:
    event = {"event": "e", "Authorization": "x", "api_key": "x", "set_cookie": "x", "nested": {"password": "x"}}
    hidden = hide_secrets(None, "info", dict(event))
    assert [hidden["Authorization"], hidden["api_key"], hidden["set_cookie"]] == [HIDDEN] * 3
    assert hidden["nested"] == {"password": HIDDEN}
    plain = {"event": "e", "key_id": "1f", "keys": "auto", "output_tokens": 7, "api_key": None, "ok": True}
    assert hide_secrets(None, "info", dict(plain)) == plain


def test_what_is_nested_without_end_is_cut() -> None:
    deep: list[object] = []
    deep.append(deep)
    assert HIDDEN in str(hide_secrets(None, "info", {"event": "e", "deep": deep}))


SCRIPT = """
import logging, structlog
from dispatch.telemetry.logs import set_up_logging

set_up_logging({form!r}, {level!r}, gateway="gw")
log = structlog.get_logger("dispatch.x")
log.debug("hidden")
log.info("hello", number=1, odd=object)
secret_body = "do-not-show-me"
try:
    1 / 0
except ZeroDivisionError:
    log.exception("boom")
logging.getLogger("uvicorn.error").info("chatter")
logging.getLogger("library").warning("words %s", "here")
logging.getLogger("urllib3.connectionpool").warning("Retrying, its-own-chatter")
logging.getLogger("library").info("Authorization: Bearer its-own-chatter")
try:
    raise ValueError("login at valkey://me:planted@host failed")
except ValueError:
    log.exception("boom_again", token="planted", gateway="other")
"""


def said(form: str, level: str = "info") -> str:
    script = SCRIPT.format(form=form, level=level)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_elsewhere_than_on_a_terminal_each_event_is_one_line_of_json() -> None:
    hello, boom, words, again = (json.loads(line) for line in said("auto").splitlines())
    assert (hello["event"], hello["level"], hello["logger"], hello["number"]) == ("hello", "info", "dispatch.x", 1)
    assert hello["timestamp"].endswith("Z")
    assert "ZeroDivisionError" in boom["exception"]
    assert (words["event"], words["level"]) == ("words here", "warning")
    assert [line["gateway"] for line in (hello, boom, words, again)] == ["gw", "gw", "gw", "other"]
    assert again["token"] == HIDDEN
    assert "valkey://[redacted]@host" in again["exception"]


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("level", ["debug", "info"])
def test_no_secret_and_no_chatter_of_libraries_comes_through(form: str, level: str) -> None:
    text = said(form, level)
    assert "boom_again" in text
    assert "planted" not in text
    assert "its-own-chatter" not in text


def test_for_people_there_are_no_escape_codes_off_a_terminal_and_no_local_variables() -> None:
    text = said("console")
    assert "\x1b" not in text
    assert "hello" in text
    assert "ZeroDivisionError" in text
    assert "do-not-show-me" not in text
    assert "chatter" not in text
    assert "hidden" not in text


def test_the_level_is_obeyed() -> None:
    assert [json.loads(line)["event"] for line in said("json", "warning").splitlines()] == [
        "boom",
        "words here",
        "boom_again",
    ]
