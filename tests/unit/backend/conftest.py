"""What the adapter's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatch.backend import EndpointClient


@pytest.fixture
async def client() -> AsyncIterator[EndpointClient]:
    async with EndpointClient() as opened:
        yield opened
