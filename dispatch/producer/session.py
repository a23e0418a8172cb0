"""Who a client is to its group: producer id, session, keys; and which process may use it."""

from __future__ import annotations

import os
import re
import socket
import uuid
from dataclasses import dataclass

from dispatch.errors import StateConflict
from dispatch.fabric.schema import key
from dispatch.producer.options import ClientOptions

_HOST_LENGTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client's identity. The group takes the producer's newest session for its owner; older ones are told so."""

    group: str
    producer_id: str
    session_id: str
    pid: int
    liveness_ms: int
    replies_ttl_ms: int

    @classmethod
    def begin(cls, options: ClientOptions) -> Session:
        """Make a new session in this process."""
        return cls(
            group=options.fabric_group,
            producer_id=options.producer_id or made_up_producer_id(),
            session_id=uuid.uuid4().hex,
            pid=os.getpid(),
            liveness_ms=options.liveness_ms,
            replies_ttl_ms=options.replies_ttl_ms,
        )

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that opened the client."""
        return os.getpid() != self.pid

    @property
    def alive_key(self) -> str:
        """Key of the liveness marker."""
        return key(self.group, "alive", producer=self.producer_id)

    @property
    def replies_key(self) -> str:
        """Key of the reply list."""
        return key(self.group, "replies", producer=self.producer_id)

    @property
    def wake_key(self) -> str:
        """Key of the pump's wake tokens."""
        return key(self.group, "wake_producer", producer=self.producer_id)

    def closed(self) -> StateConflict:
        """Make the error for a client that was closed."""
        return StateConflict("the client was closed; requests still outstanding were told to stop")

    def interrupted(self) -> StateConflict:
        """Make the error for who waits for a request with an idempotency key when the client is closed."""
        return StateConflict("the client was closed; the request goes on: repeat it with its idempotency key")

    def taken_over(self) -> StateConflict:
        """Make the error for a session that another one has replaced."""
        return StateConflict(
            f"another session owns producer {self.producer_id!r}: a second client was opened under this producer_id; "
            "replies go to that one. Give each client its own producer_id, or none"
        )


def made_up_producer_id() -> str:
    """Return a new producer id in which an operator can recognise host and process."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_HOST_LENGTH] or "host"
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
