"""What a process's log looks like; each in a process of its own, because logging is set up for good."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import logging, structlog
from dispatch.telemetry.logs import set_up_logging

set_up_logging({form!r}, {level!r})
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
"""


def said(form: str, level: str = "info") -> str:
    script = SCRIPT.format(form=form, level=level)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_elsewhere_than_on_a_terminal_each_event_is_one_line_of_json() -> None:
    hello, boom, words = (json.loads(line) for line in said("auto").splitlines())
    assert (hello["event"], hello["level"], hello["logger"], hello["number"]) == ("hello", "info", "dispatch.x", 1)
    assert hello["timestamp"].endswith("Z")
    assert "ZeroDivisionError" in boom["exception"]
    assert (words["event"], words["level"]) == ("words here", "warning")


def test_for_people_there_are_no_escape_codes_off_a_terminal_and_no_local_variables() -> None:
    text = said("console")
    assert "\x1b" not in text
    assert "hello" in text
    assert "ZeroDivisionError" in text
    assert "do-not-show-me" not in text
    assert "chatter" not in text
    assert "hidden" not in text


def test_the_level_is_obeyed() -> None:
    assert [json.loads(line)["event"] for line in said("json", "warning").splitlines()] == ["boom", "words here"]
