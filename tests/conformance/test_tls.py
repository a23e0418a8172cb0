"""TLS with an authority of one's own."""

from __future__ import annotations

import pytest

from dispatch.errors import FabricUnavailable
from dispatch.fabric.verifying import verify_library
from tests.support.tls import tls_in_front_of

pytestmark = pytest.mark.anyio


async def test_an_authority_of_ones_own_is_named_in_the_url(valkey, open_connection, client_name, tmp_path) -> None:
    async with tls_in_front_of(valkey.port, tmp_path) as (port, pem):
        connection = await open_connection(f"valkeys://localhost:{port}?ca_file={pem}")
        await connection.put("{g}:tls", b"1", ttl_ms=1000)
        assert await connection.get("{g}:tls") == b"1"
        if client_name != "blocking":
            await verify_library(connection, "g")
        waiter = connection.waiter()
        assert await waiter.wait("{g}:none", 0.05) is False
        await waiter.aclose()
        await connection.aclose()


async def test_an_unknown_authority_is_refused(valkey, open_connection, tmp_path) -> None:
    async with tls_in_front_of(valkey.port, tmp_path) as (port, _):
        with pytest.raises(FabricUnavailable, match="does not answer: TLS failed"):
            await open_connection(f"valkeys://localhost:{port}")
