"""Scripts for the stub backend from the corpus' rows: a row's `response` says byte for byte what a backend answers."""

from __future__ import annotations

import itertools
import re
import time
from email.utils import formatdate
from typing import Any

from tests.support.stub import Fin, Pause, Reset, Script, Step, Write

_BLANK = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DATE = re.compile(r"\{http_date:\+(\d+)\}")


def corpus_script(response: dict[str, Any], data: bytes, port: int) -> Script:
    """Return the script of a corpus row's `response` (see the corpus' README) for the body `data`.

    `port` is the stub's own, for addresses in headers. A row that says `refuse` has no script: use `free_port`.
    """
    if response.get("connect") == "reset":
        return Script((Reset(),))
    framing, end, plan = response["framing"], response["end"], response["writes"]
    wire = _framed(_cut(data, plan), framing, end)
    gap, gaps = plan.get("gap_ms", 0), plan.get("gaps", {})
    if "tcp" in response:
        wire, gap, gaps = _cut(b"".join(wire), response["tcp"]), response["tcp"].get("gap_ms", 0), {}
    steps: list[Step] = [Pause(response["head_delay_ms"] / 1000), Write(_head(response, len(data), port))]
    for number, piece in enumerate(wire):
        steps += [Pause(gaps.get(str(number), gap if number else 0) / 1000), Write(piece)]
    if end == "hold":
        steps.append(Pause(response["hold_ms"] / 1000))
    elif end == "rst":
        # Time for the bytes to be read: an RST throws away what the other side has not taken yet.
        steps += [Pause(0.2), Reset()]
    if end in {"fin", "fin_mid_chunk", "hold"} or framing == "until-close":
        steps.append(Fin())
    return Script(tuple(step for step in steps if step != Pause(0)))


def _head(response: dict[str, Any], length: int, port: int) -> bytes:
    lines = [f"HTTP/1.1 {response['status']} {response['reason']}"]
    for name, value in response["headers"]:
        dated = _DATE.sub(lambda found: formatdate(time.time() + int(found[1]), usegmt=True), value)
        lines.append(f"{name}: {dated.replace('{port}', str(port))}")
    if response["framing"] == "content-length":
        lines.append(f"content-length: {length + response.get('length_plus', 0)}")
    elif response["framing"] == "chunked":
        lines.append("transfer-encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _framed(pieces: list[bytes], framing: str, end: str) -> list[bytes]:
    if framing != "chunked":
        return pieces
    framed = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    if end == "fin_mid_chunk":
        framed[-1] = b"%x\r\n%b" % (len(pieces[-1]) + 40, pieces[-1])
    return [*framed, b"0\r\n\r\n"] if end == "clean" else framed


def _cut(data: bytes, plan: dict[str, Any]) -> list[bytes]:
    match plan["plan"]:
        case "whole":
            marks = []
        case "every":
            marks = list(range(plan["n"], len(data), plan["n"]))
        case "at":
            marks = plan["offsets"]
        case "events":
            marks = [found.end() for found in _BLANK.finditer(data)]
        case other:
            raise ValueError(other)
    edges = [0, *marks, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if b > a]
