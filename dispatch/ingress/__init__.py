"""The OpenAI-compatible HTTP front."""

from dispatch.ingress.app import create_app
from dispatch.ingress.authority import Authority
from dispatch.ingress.connections import ConnectionLimits
from dispatch.ingress.protocol import HttpProtocol
from dispatch.ingress.state import IngressSettings, IngressState

__all__ = ["Authority", "ConnectionLimits", "HttpProtocol", "IngressSettings", "IngressState", "create_app"]
