"""Calling OpenAI-compatible endpoints, and a simulated one."""

from dispatch.backend.chunks import Payload
from dispatch.backend.client import EndpointClient
from dispatch.backend.endpoint import Endpoint
from dispatch.backend.execution import ErrorType, Execution, Outcome, Verdict
from dispatch.backend.streaming import BackendStream

__all__ = ["BackendStream", "Endpoint", "EndpointClient", "ErrorType", "Execution", "Outcome", "Payload", "Verdict"]
