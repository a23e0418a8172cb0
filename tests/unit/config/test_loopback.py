"""Only names that nobody else can let point somewhere count as this machine's."""

from __future__ import annotations

import pytest

from dispatch.config.loopback import is_loopback_name


@pytest.mark.parametrize("name", ["localhost", "studio.localhost", "127.0.0.1", "127.8.9.10", "::1", "[::1]"])
def test_names_of_this_machine(name: str) -> None:
    assert is_loopback_name(name)


@pytest.mark.parametrize(
    "name", ["", "127.0.0.1.evil.example", "127.evil.example", "localhost.evil.example", "10.0.0.1", "127.1.1"]
)
def test_names_that_anybody_can_have(name: str) -> None:
    assert not is_loopback_name(name)
