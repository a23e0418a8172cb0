"""`dispatch history`: what has ended."""

from dispatch.cli.history.command import app

__all__ = ["app"]
