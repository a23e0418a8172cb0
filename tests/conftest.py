"""Fixtures every test may use, and which Valkey the integration tests run on."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest

from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.fabric.deploy import Action, load
from dispatch.fabric.library import current_library
from dispatch.fabric.sync import BlockingConnection
from tests.support.groups import configure, unique_group
from tests.support.valkey import ValkeyProcess

IMAGE = os.environ.get("DISPATCH_TEST_VALKEY_IMAGE", "")


@functools.cache
def container_problem() -> str:
    """Say why tests marked `container` cannot run on a container; "" when they can."""
    if not IMAGE:
        return "DISPATCH_TEST_VALKEY_IMAGE is not set"
    from tests.support.containers import docker_problem  # noqa: PLC0415 - needs Docker's packages only where it is used

    return docker_problem()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dispatch")
    group.addoption("--long", action="store_true", help="also run tests that need minutes")
    group.addoption("--require-docker", action="store_true", help="fail instead of using the embedded server")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-docker") and (problem := container_problem()):
        raise pytest.UsageError(f"--require-docker: {problem}")


def pytest_report_header() -> str:
    problem = container_problem()
    server = f"the embedded server ({problem})" if problem else f"a container of {IMAGE}"
    return f"valkey of the integration tests: {server}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="needs --long"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wants_container = any(mark.name == "container" for mark in metafunc.definition.iter_markers())
    if "valkey" in metafunc.fixturenames and wants_container and not container_problem():
        metafunc.parametrize("valkey", ["container"], indirect=True, scope="session")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def _servers() -> Iterator[Callable[[str], ValkeyProcess]]:
    """Start each kind of session server once, the library loaded."""
    with ExitStack() as stack:

        @functools.cache
        def start(kind: str) -> ValkeyProcess:
            if kind == "container":
                from tests.support.containers import ValkeyContainer  # noqa: PLC0415 - as above

                server = ValkeyContainer(IMAGE)
            else:
                server = ValkeyProcess()
            stack.callback(server.close)
            server.start()
            load_library(server.url)
            return server

        yield start


@pytest.fixture(scope="session")
def valkey(request: pytest.FixtureRequest, _servers: Callable[[str], ValkeyProcess]) -> ValkeyProcess:
    """The session's server with the library loaded; shared by all tests, so never stop or flush it."""
    return _servers(getattr(request, "param", "embedded"))


@pytest.fixture
def start_valkey() -> Iterator[Callable[..., ValkeyProcess]]:
    """Start servers of the test's own (`start_valkey(aof=True, library=False, options=[...])`), to stop and kill."""
    with ExitStack() as stack:

        def start(*, library: bool = True, aof: bool = False, options: tuple[str, ...] = ()) -> ValkeyProcess:
            server = stack.enter_context(ValkeyProcess(aof=aof, options=options))
            if library:
                load_library(server.url)
            return server

        yield start


@pytest.fixture
def group(valkey: ValkeyProcess) -> str:
    """A group of the test's own, configured with the default pools."""
    name = unique_group()
    configure(valkey.url, name)
    return name


@pytest.fixture
def client_name() -> str:
    """Which Valkey client `connection` uses; parametrise to run a test on both."""
    return "glide"


@pytest.fixture
async def connection(valkey: ValkeyProcess, client_name: str) -> AsyncIterator[Connection]:
    """A connection to the session's server."""
    opened = await connect(valkey.url, client=client_name)
    yield opened
    await opened.aclose()


def load_library(url: str) -> None:
    """Write this version's library to the server at `url`."""
    with BlockingConnection(url) as connection:
        for report in load(connection, current_library()):
            assert report.action is not Action.FAILED, report.problem
