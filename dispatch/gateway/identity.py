"""Who this gateway is towards its fabric group."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one gateway in one group.

    `session` is new with every start. It is part of every nonce, so leases that another life (or another process
    under the same name) claimed can be told from our own.
    """

    gateway_id: str
    group: str
    slots: int
    session: str = field(default_factory=lambda: secrets.token_hex(6))
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    @property
    def dispatcher_id(self) -> str:
        """The one claim loop of this gateway for this group."""
        return f"{self.gateway_id}/{self.group}"

    def nonce(self, number: int) -> str:
        """Return the nonce of this life's call `number` (calls are numbered in the order they are sent)."""
        return f"{self.session}-{number}"
