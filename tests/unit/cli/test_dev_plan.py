"""What `dispatch dev` refuses before it starts anything, and what it plans otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from dispatch.cli.dev.plan import Options, make_plan
from dispatch.errors import ConfigurationError
from tests.support.valkey import free_port

pytestmark = pytest.mark.anyio

OPTIONS = Options(
    endpoint=None, api_key_env="", port=0, gateways=2, valkey_port=0, studio=False, load=False, history=True, logs=False
)


async def refusal(**changes: object) -> str:
    with pytest.raises(ConfigurationError) as refused:
        await make_plan(dataclasses.replace(OPTIONS, **changes))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@contextlib.contextmanager
def backend(status: int, document: object) -> Iterator[str]:
    """A backend that gives one answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


# ---- ports


async def test_free_ports_are_all_different() -> None:
    plan = await make_plan(dataclasses.replace(OPTIONS, gateways=8))
    assert len({*plan.gateway_ports, plan.backend_port}) == 9
    assert plan.simulated


async def test_given_ports_follow_each_other() -> None:
    port = free_port()
    with contextlib.suppress(ConfigurationError):  # the next one may be somebody's
        assert (await make_plan(dataclasses.replace(OPTIONS, port=port))).gateway_ports == (port, port + 1)


async def test_a_busy_port_of_any_kind_is_named_with_its_option() -> None:
    with taken_port() as port:
        assert await refusal(port=port) == f"port {port} is in use; free it, or choose another with --port"
        # The second gateway's, unless somebody took the first one's meanwhile.
        assert await refusal(port=port - 1) in [
            f"port {busy} is in use; free it, or choose another with --port" for busy in (port - 1, port)
        ]
        said = await refusal(valkey_port=port)
        assert said == f"port {port} is in use; free it, or choose another with --valkey-port"


async def test_a_port_that_does_not_exist_or_is_taken_twice_is_named() -> None:
    assert await refusal(port=65_535) == "there is no port 65536; choose others with --port"
    port = free_port()
    assert "--valkey-port" in await refusal(port=port, gateways=1, valkey_port=port)


# ---- the endpoint


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "nonsense", "http://127.0.0.1/v1?key=secret"])
async def test_a_wrong_url_is_told_without_what_may_be_secret(url: str) -> None:
    said = await refusal(endpoint=url)
    assert said.startswith("--endpoint: url ")
    assert "secret" not in said


async def test_an_endpoint_that_does_not_answer_is_told_without_its_password() -> None:
    said = await refusal(endpoint="http://user:password@127.0.0.1:9/v1")
    assert said == "the endpoint http://127.0.0.1:9/v1 cannot be reached: Connection refused"


async def test_a_server_that_speaks_no_http_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            wire, _ = server.accept()
            with wire:
                wire.sendall(b"+OK\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = await refusal(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        thread.join()
    assert "no HTTP answer" in said


async def test_a_key_that_is_missing_wanted_or_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--endpoint" in await refusal(api_key_env="PATH")
    with backend(401, {}) as url:
        monkeypatch.delenv("OTHER_KEY", raising=False)
        said = await refusal(endpoint=url, api_key_env="OTHER_KEY")
        assert said == "the environment variable OTHER_KEY (--api-key-env) is not set or empty"
        assert "wants a key; name its environment variable with --api-key-env" in await refusal(endpoint=url)
        monkeypatch.setenv("OTHER_KEY", "secret-key")
        said = await refusal(endpoint=url, api_key_env="OTHER_KEY")
        assert "refuses the key in OTHER_KEY (status 401)" in said
        assert "secret-key" not in said


@pytest.mark.parametrize(
    ("status", "document", "model"),
    [
        (200, {"data": [{"id": "first"}, {"id": "second"}]}, "first"),
        (200, {"data": []}, ""),
        (200, ["odd"], ""),
        (404, {"error": {}}, ""),  # a backend without a model list is one all the same
    ],
)
async def test_the_first_model_is_what_the_shown_call_uses(status: int, document: object, model: str) -> None:
    with backend(status, document) as url:
        plan = await make_plan(dataclasses.replace(OPTIONS, endpoint=url))
    assert plan.model == model
    assert not plan.simulated
    assert plan.endpoint_url == url


# ---- what the processes get


async def test_variables_of_other_installations_are_kept_from_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCH_VALKEY_URL", "valkey://elsewhere")
    monkeypatch.setenv("DISPATCH_MY_KEY", "secret-key")
    monkeypatch.setenv("LLM_KEY", "other")
    with backend(200, {}) as url:
        plan = await make_plan(dataclasses.replace(OPTIONS, endpoint=url, api_key_env="DISPATCH_MY_KEY"))
    environment = plan.environment()
    assert "DISPATCH_VALKEY_URL" not in environment
    assert environment["DISPATCH_MY_KEY"] == "secret-key"
    assert environment["LLM_KEY"] == "other"
