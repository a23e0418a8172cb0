"""A Valkey server in a container, with the surface of `ValkeyProcess`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import docker
from docker.errors import DockerException
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from tests.support.valkey import START_TIMEOUT_S, answers, free_port

_PORT = 6379


def docker_problem() -> str:
    """Say why no container can be started; "" when one can."""
    try:
        docker.from_env(timeout=5).ping()
    except DockerException:
        return "Docker does not answer"
    return ""


class ValkeyContainer:
    """One container of `image`. `start` after `stop` or `kill` uses the same port and, with `aof`, the same data."""

    def __init__(self, image: str, *, aof: bool = False, options: Sequence[str] = ()) -> None:
        # The clean-up container of testcontainers needs an image of its own; `close` cleans up here.
        testcontainers_config.ryuk_disabled = True
        # A port that Docker chooses would be another one after every start.
        self.port = free_port()
        self.process = None
        self._started = False
        keep = ["--appendonly", "yes", "--appendfsync", "always"] if aof else ["--appendonly", "no"]
        command = ["--protected-mode", "no", "--save", "", *keep, *options]
        self._container = DockerContainer(image).with_bind_ports(_PORT, self.port).with_command(command)

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, for the first time or again, and wait until commands are answered."""
        if self._started:
            self._wrapped().start()
        else:
            self._container.start()
            self._started = True
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers("127.0.0.1", self.port):
            assert time.monotonic() < deadline, "the Valkey container did not become ready"
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """Stop in good order (saves what it is configured to save)."""
        self._wrapped().stop()

    def kill(self) -> None:
        """End at once, without any chance to save."""
        self._wrapped().kill()

    def restart(self) -> None:
        """Stop, then start on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze: connections stay open, nothing is answered."""
        self._wrapped().pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._wrapped().unpause()

    def close(self) -> None:
        """End the container and remove it."""
        self._container.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _wrapped(self) -> Any:
        return self._container.get_wrapped_container()
