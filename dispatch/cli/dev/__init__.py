"""`dispatch dev`: everything on this machine, from one command, and nothing left behind."""

from dispatch.cli.dev.command import app

__all__ = ["app"]
