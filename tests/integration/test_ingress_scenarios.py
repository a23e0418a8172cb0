"""Faults that people who run such systems have reported, played through the front door."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from tests.support.calls import COMPLETION
from tests.support.front import exchange, head
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import said, say
from tests.support.stack import stack
from tests.support.stub import Fin, Script, SeenRequest, StubBackend, Write, answer_bytes, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
OK = json_answer(COMPLETION)
LIMIT = 16 * 1024 * 1024

# Numbers no float holds, keys in an odd order, unknown members, a number beyond every range.
PRECISE = (
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"seed":123456789012345678901234567890,'
    b'"top_p":0.10000000000000001,"chat_template_kwargs":{"enable_thinking":false},"stream_options":'
    b'{"include_usage":false,"step_usage_chunks":true},"x_vendor":{"k":[1e400,null]},"temperature":1.0}'
)
LINES = '{"model":"m","messages":[{"role":"user","content":"a\u2028b\u2029c\u0085d é漢🙂"}]}'.encode()


@pytest.mark.parametrize("body", [PRECISE, LINES, b" \r\n\t" + BODY + b"\n"])
async def test_a_body_is_not_changed_on_the_way(valkey: ValkeyProcess, body: bytes) -> None:
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with httpx.AsyncClient(base_url=path.url) as client:
            assert (await client.post(CHAT, content=body)).status_code == 200
        [seen] = stub.requests
        assert seen.body == body
        assert seen.header("content-length") == str(len(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","messages":[],"model":"b"}',
        b'{"model":"a","messages":[],"stream":false,"stream":true}',
        b'{"model":"a","messages":[],"str\\u0065am":true,"stream":false}',
    ],
)
async def test_two_readers_of_one_body_cannot_see_two_calls(valkey: ValkeyProcess, body: bytes) -> None:
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with httpx.AsyncClient(base_url=path.url) as client:
            answer = await client.post(CHAT, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_member")
        assert stub.requests == []
        assert path.submitted() == 0


def lying(body: bytes, *headers: tuple[str, str], length: bool = True) -> Script:
    """Return an answer with these headers, closed afterwards."""
    data = answer_bytes(body, headers=headers)
    return Script((Write(data if length else data.replace(b"content-length: %d\r\n" % len(body), b"")), Fin()))


ODD_ANSWERS: list[tuple[str, Script, int]] = [
    ("sse", lying(b"data: {}\n\ndata: [DONE]\n\n", ("content-type", "text/event-stream"), length=False), 502),
    ("gzip", lying(gzip.compress(COMPLETION), ("content-type", "application/json"), ("content-encoding", "gzip")), 200),
    ("gzip that is none", lying(COMPLETION, ("content-encoding", "gzip")), 502),
    ("html", lying(b"<html><body>welcome</body></html>", ("content-type", "text/html")), 502),
    ("html labelled json", lying(b"<html>", ("content-type", "application/json")), 502),
    ("json labelled text", lying(COMPLETION, ("content-type", "text/plain")), 200),
    (
        "fields of the hop",
        lying(
            COMPLETION,
            ("content-type", "application/json"),
            ("set-cookie", "a=1"),
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authenticate", "Basic"),
            ("alt-svc", "h3"),
        ),
        200,
    ),
    ("error in a 200", lying(b'{"object":"error","message":"too long","code":400}'), 502),
]


@pytest.mark.parametrize(("name", "script", "status"), ODD_ANSWERS, ids=[name for name, _, _ in ODD_ANSWERS])
async def test_an_answer_that_lies_about_itself(valkey: ValkeyProcess, name: str, script: Script, status: int) -> None:
    async with StubBackend(script) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        heard = await exchange(
            path.port,
            head([b"POST " + CHAT.encode() + b" HTTP/1.1", b"host: x", b"content-length: %d" % len(BODY)]) + BODY,
        )
    assert heard.status == status, name
    assert heard.header(b"content-type") == b"application/json"
    assert heard.header(b"content-length") == b"%d" % len(heard.body)
    if status == 200:
        assert heard.body == COMPLETION
    else:
        assert set(json.loads(heard.body)["error"]) == {"message", "type", "param", "code"}
    for field in (b"content-encoding", b"set-cookie", b"x-hop", b"keep-alive", b"proxy-authenticate", b"alt-svc"):
        assert heard.header(field) is None


async def test_equal_request_ids_never_cross_replies(valkey: ValkeyProcess) -> None:
    def echo(request: SeenRequest) -> Script:
        return json_answer(json.dumps({"choices": [], "id": said(request.body)}).encode())

    answers: dict[str, httpx.Response] = {}
    async with StubBackend(echo) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        client = httpx.AsyncClient(base_url=path.url, headers={"x-request-id": "same"})

        async def one(text: str) -> None:
            answers[text] = await client.post(CHAT, json={"model": "m", "messages": say(text)})

        async with client, anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, str(number))
    assert {text: answer.json()["id"] for text, answer in answers.items()} == {text: text for text in answers}
    assert {answer.headers["x-request-id"] for answer in answers.values()} == {"same"}
    assert len({answer.headers["x-dispatch-request-id"] for answer in answers.values()}) == 50


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("more", [(), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect:")])
async def test_curl_reads_a_413_of_a_body_far_too_large(
    valkey: ValkeyProcess, tmp_path: Path, more: tuple[str, ...]
) -> None:
    file = tmp_path / "body"
    file.write_bytes(b" " * 60_000_000)
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        command = ["curl", "-sS", "-m", "20", "-w", "\n%{http_code}", "-H", "content-type: application/json", *more]
        command += ["--data-binary", f"@{file}", f"{path.url}{CHAT}"]
        done = await anyio.to_thread.run_sync(partial(subprocess.run, command, capture_output=True, check=False))
        body, _, status = done.stdout.decode().rpartition("\n")
        assert (status, json.loads(body)["error"]["code"]) == ("413", "body_too_large")
        assert stub.requests == []
        assert path.keys("body:") == []


PROBER = """
import json, select, socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30)
took = []
while not select.select([sys.stdin], [], [], 0.01)[0]:
    started = time.perf_counter()
    connection.sendall(b"GET /healthz HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
    connection.recv(4096)
    took.append(time.perf_counter() - started)
print(json.dumps(sorted(took)))
"""


def start_prober(port: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROBER, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def memory_mb(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


@pytest.mark.long
async def test_thirty_of_the_largest_bodies_at_once(valkey: ValkeyProcess) -> None:
    """Memory below three times what is in flight, and a process that goes on answering others meanwhile."""
    part: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    empty = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    body = empty.replace(b"base64,", b"base64," + b"A" * (LIMIT - len(empty)))
    group = unique_group()
    async with StubBackend(lambda _: OK) as stub:
        pools = [{"pool_id": "default", "quantum": 1, "max_queue_bytes": 2**30}]
        configure(valkey.url, group, default_document(f"{stub.url}/v1") | {"pools": pools})
        async with GatewayProcess(valkey.url, group) as gateway:
            before = memory_mb(gateway.process.pid, "VmRSS")
            port = gateway.url.rpartition(":")[2]
            statuses: list[int] = []
            prober = start_prober(port)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:

                async def one() -> None:
                    statuses.append((await client.post(CHAT, content=body)).status_code)

                async with anyio.create_task_group() as tasks:
                    for _ in range(30):
                        tasks.start_soon(one)
            took = json.loads(prober.communicate(b"x\n")[0])
            grown = memory_mb(gateway.process.pid, "VmHWM") - before
        assert statuses == [200] * 30
        assert all(seen.body == body for seen in stub.requests)
        assert grown < 3 * 30 * 16
        # 0.1 s on a machine of its own; here four busy processes share it.
        assert took[int(len(took) * 0.99)] < 0.5
