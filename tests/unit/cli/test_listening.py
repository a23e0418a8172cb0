"""Listening: who can connect, and that clients which are gone are noticed."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest

from dispatch.cli.listening import is_loopback, listen, raise_file_limit


@pytest.mark.parametrize(
    ("host", "only_us"),
    [("127.0.0.1", True), ("127.0.0.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_who_can_connect_is_read_off_the_socket(host: str, only_us: bool) -> None:
    with listen(host, 0) as listener:
        assert is_loopback(listener) is only_us


def test_a_client_that_is_gone_without_a_word_is_asked_for() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


def test_as_many_files_are_allowed_as_may_be() -> None:
    code = (
        "import resource; from dispatch.cli.listening import raise_file_limit; "
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)); "
        "print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, raised = done.stdout.split()
    assert raised == "True"
    assert int(number) > 64
    assert raise_file_limit() == int(number)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
