"""The backends of a run: they answer after a while, slowly, wrongly or not at all, and note every request they got."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

from tests.chaos.evidence import Execution
from tests.support.stub import Fin, Hold, Pause, Reset, Script, SeenRequest, Step, StubBackend, Write, answer_bytes

_AFFECTED = 0.75
"""Part of the requests that a failing or slow backend does not answer as usual."""

_JSON = [("content-type", "application/json")]
_STATUSES = {
    "400": ("400 Bad Request", []),
    "500": ("500 Internal Server Error", []),
    "502": ("502 Bad Gateway", []),
    "503": ("503 Service Unavailable", []),
    "504": ("504 Gateway Timeout", []),
    "503-later": ("503 Service Unavailable", [("retry-after", "1")]),
    "429": ("429 Too Many Requests", [("retry-after", "1")]),
}
_DELAYS_S = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8, 2.5)
_DELAY_WEIGHTS = (20, 20, 20, 15, 12, 8, 5)
"""How long an answer takes, some of them longer than a lease: 0.3 s on average."""

_PIECE = 3
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

_LARGE_EVERY = 80
"""Every so many answers is one too large to travel inside a reply frame."""


class Backend:
    """One backend. `failing` and `slow_s` are set from outside, also from another thread; what it does of itself is
    decided by the seed, the call's tag and how often that came."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.stub = StubBackend(self._answer)
        self.executions: list[Execution] = []
        self.failing = ""
        self.slow_s = 0.0
        self._seed = seed
        self._seen: Counter[str] = Counter()

    def _answer(self, request: SeenRequest) -> Script:
        if request.method != "POST":
            return self._answer_get()
        body = json.loads(request.body)
        tag = str(body["user"])
        self._seen[tag] += 1
        chance = random.Random(f"{self._seed} {tag} {self._seen[tag]}")
        affected = chance.random() < _AFFECTED
        how = self.failing if affected else ""
        delay = chance.choices(_DELAYS_S, _DELAY_WEIGHTS)[0] * chance.uniform(0.5, 1.5)
        if affected and self.slow_s:
            delay += self.slow_s * chance.uniform(0.5, 1.5)
        large = how == "" and chance.randrange(_LARGE_EVERY) == 0
        self.executions.append(Execution(tag=tag, at=time.time(), backend=self.name, how=how or "ok"))
        if body.get("stream") and how not in _STATUSES:
            return Script(_stream(tag, how, delay))
        return Script((Pause(delay), *_steps(tag, how, large=large)))

    def _answer_get(self) -> Script:
        """Answer a look at /models, or at a page that is not there."""
        if self.failing:
            return Script((Write(answer_bytes(b"{}", status=_STATUSES["500"][0], headers=_JSON)),))
        return Script((Write(answer_bytes(b'{"object":"list","data":[]}', headers=_JSON)),))


def expected_text(tag: str) -> str:
    """Return how the answer to the call `tag` begins; all of a streamed one."""
    return f"answer to {tag};"


def _steps(tag: str, how: str, *, large: bool) -> tuple[Step, ...]:
    if how in _STATUSES:
        status, headers = _STATUSES[how]
        body = json.dumps({"error": {"message": f"no answer to {tag}", "type": "chaos"}}).encode()
        return (Write(answer_bytes(body, status=status, headers=[*_JSON, *headers])),)
    whole = answer_bytes(_completion(tag, large=large), headers=_JSON)
    match how:
        case "reset":
            return (Reset(),)
        case "short":
            return (Write(whole[:-20]), Fin())
        case "garbage":
            return (Write(answer_bytes(b"<html>", headers=[("content-type", "text/html")])),)
        case "silent":
            return (Hold(),)
    return (Write(whole),)


def _stream(tag: str, how: str, delay_s: float) -> tuple[Step, ...]:
    """Return the answer in pieces, the first at half of the time; one that fails does so in the middle or before."""
    text = expected_text(tag)
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    middle = len(pieces) // 2 if how in ("short", "silent") else 0
    begin = (Pause(delay_s / 2), Write(_STREAM_HEAD))
    events = [_event(tag, {"content": piece}) for piece in pieces]
    if how:
        return (*begin, *(Write(event) for event in events[:middle]), *_BREAKS[how])
    pause = Pause(delay_s / 2 / len(events))
    steps = [step for event in events for step in (pause, Write(event))]
    return (*begin, *steps, Write(_event(tag, {}, "stop") + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"))


def _event(tag: str, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    document = {"id": tag, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return _framed(b"data: %b\n\n" % json.dumps(document).encode())


def _framed(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


_BREAKS: dict[str, tuple[Step, ...]] = {
    "reset": (Reset(),),
    "short": (Fin(),),
    "garbage": (Write(_framed(b"data: <html>\n\n")), Hold()),
    "silent": (Hold(),),
}
"""How a stream breaks off."""


def _completion(tag: str, *, large: bool) -> bytes:
    text = expected_text(tag) + ("x" * 70_000 if large else "")
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    document = {"id": tag, "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(document).encode()
