from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from dispatch.ingress import IngressState, create_app
from tests.support.front import FakeClient, FakeGateway


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
async def http(client: FakeClient, gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client wired straight to the application."""
    app = create_app(IngressState(client=client, gateway=gateway))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as opened:
        yield opened
