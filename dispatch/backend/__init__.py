"""Calling OpenAI-compatible endpoints, and a simulated one."""

from dispatch.backend.client import EndpointClient
from dispatch.backend.endpoint import Endpoint
from dispatch.backend.execution import ErrorType, Execution, Outcome, Verdict

__all__ = ["Endpoint", "EndpointClient", "ErrorType", "Execution", "Outcome", "Verdict"]
