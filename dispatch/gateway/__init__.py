"""Claiming and running requests."""

from dispatch.gateway.executors import EndpointExecutor, Executor, NoopExecutor
from dispatch.gateway.gateway import Gateway
from dispatch.gateway.status import GatewayStatus

__all__ = ["EndpointExecutor", "Executor", "Gateway", "GatewayStatus", "NoopExecutor"]
