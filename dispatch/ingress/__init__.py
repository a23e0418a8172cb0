"""The OpenAI-compatible HTTP front."""

from dispatch.ingress.app import create_app
from dispatch.ingress.state import IngressSettings, IngressState

__all__ = ["IngressSettings", "IngressState", "create_app"]
