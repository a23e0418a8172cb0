"""The control API: what an operator sees and does over HTTP, and calls that are fetched later."""

from dispatch.ingress.control.application import BASE, create_control

__all__ = ["BASE", "create_control"]
