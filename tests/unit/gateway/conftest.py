from __future__ import annotations

from typing import Any

import pytest

from dispatch.config import GatewaySettings
from dispatch.gateway import Gateway
from tests.support.executors import HeldExecutor
from tests.support.fake_fabric import FakeFabric


def make_settings(**more: Any) -> GatewaySettings:
    values = {
        "valkey_url": "valkey://127.0.0.1:1",
        "fabric_group": "g",
        "gateway_id": "gw",
        "slots": 4,
        "drain_timeout_ms": 500,
    }
    return GatewaySettings(**(values | more))


def make_gateway(fabric: FakeFabric, executor: HeldExecutor, **more: Any) -> Gateway:
    return Gateway(make_settings(**more), connection=fabric, executor=executor)


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def executor() -> HeldExecutor:
    return HeldExecutor()
