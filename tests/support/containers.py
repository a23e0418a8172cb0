"""A Valkey server in a container, with the surface of `ValkeyProcess` that integration tests use."""

from __future__ import annotations

import time
from typing import Any, Self

import docker
from docker.errors import DockerException
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from tests.support.valkey import START_TIMEOUT_S, answers

_PORT = 6379


def docker_problem() -> str:
    """Say why no container can be started; "" when one can."""
    try:
        docker.from_env(timeout=5).ping()
    except DockerException:
        return "Docker does not answer"
    return ""


class ValkeyContainer:
    """One container of `image`. Its port stays the same until `close`."""

    def __init__(self, image: str) -> None:
        # The clean-up container of testcontainers needs an image of its own; `close` cleans up here.
        testcontainers_config.ryuk_disabled = True
        self._container = DockerContainer(image).with_exposed_ports(_PORT)
        self._container.with_command(["--protected-mode", "no", "--save", "", "--appendonly", "yes"])
        self.process = None

    @property
    def port(self) -> int:
        return int(self._container.get_exposed_port(_PORT))

    @property
    def url(self) -> str:
        return f"valkey://{self._container.get_container_host_ip()}:{self.port}"

    def start(self) -> Self:
        """Start and wait until commands are answered."""
        self._container.start()
        self._wait_ready()
        return self

    def restart(self) -> None:
        """Stop, then start with the same data."""
        self._wrapped().restart()
        self._wait_ready()

    def pause(self) -> None:
        """Freeze: connections stay open, nothing is answered."""
        self._wrapped().pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._wrapped().unpause()

    def close(self) -> None:
        """End the container and remove it."""
        self._container.stop()

    def _wrapped(self) -> Any:
        return self._container.get_wrapped_container()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(self._container.get_container_host_ip(), self.port):
            assert time.monotonic() < deadline, "the Valkey container did not become ready"
            time.sleep(0.05)
