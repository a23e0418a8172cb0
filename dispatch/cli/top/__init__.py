"""`dispatch top`: a group, live, in a terminal."""

from dispatch.cli.top.command import app

__all__ = ["app"]
