"""The OpenAI-compatible HTTP front."""

from dispatch.ingress.app import create_app
from dispatch.ingress.protocol import HttpProtocol
from dispatch.ingress.state import IngressSettings, IngressState

__all__ = ["HttpProtocol", "IngressSettings", "IngressState", "create_app"]
