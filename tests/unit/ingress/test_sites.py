"""Pages of other sites are kept out of a front that asks for no keys."""

from __future__ import annotations

import pytest

from dispatch.errors import NotAllowed
from dispatch.ingress.sites import require_own_site

LOOPBACK, ELSEWHERE = ("127.0.0.1", 8080), ("10.1.2.3", 8080)


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": (b"127.0.0.1:8080",)},
        {b"host": (b"localhost:8080",), b"origin": (b"http://localhost:8080",)},
        {b"host": (b"[::1]:8080",), b"sec-fetch-site": (b"same-origin",)},
        {b"host": (b"studio.localhost",), b"sec-fetch-site": (b"none",)},
        {},
    ],
)
def test_programs_and_its_own_pages_come_in(headers) -> None:
    require_own_site(headers, LOOPBACK)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({b"host": (b"127.0.0.1:8080",), b"origin": (b"http://evil.example",)}, "cross_site"),
        ({b"host": (b"127.0.0.1:8080",), b"origin": (b"null",)}, "cross_site"),
        ({b"host": (b"127.0.0.1:8080",), b"origin": (b"http://127.0.0.1:9999",)}, "cross_site"),
        ({b"host": (b"127.0.0.1:8080",), b"sec-fetch-site": (b"cross-site",)}, "cross_site"),
        ({b"host": (b"127.0.0.1:8080",), b"sec-fetch-site": (b"same-site",)}, "cross_site"),
        ({b"host": (b"evil.example:8080",)}, "unknown_host"),
        ({b"host": (b"evil.example:8080",), b"origin": (b"http://evil.example:8080",)}, "unknown_host"),
    ],
)
def test_other_sites_do_not(headers, code: str) -> None:
    with pytest.raises(NotAllowed) as refused:
        require_own_site(headers, LOOPBACK)
    assert refused.value.code == code


def test_a_front_that_others_reach_by_name_is_known_by_any() -> None:
    require_own_site({b"host": (b"gateway.internal:8080",)}, ELSEWHERE)
    with pytest.raises(NotAllowed):
        require_own_site({b"host": (b"gateway.internal",), b"origin": (b"http://evil.example",)}, ELSEWHERE)
