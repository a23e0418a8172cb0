"""What a call to an endpoint leaves in the log: one line where the network or the backend failed, never content."""

from __future__ import annotations

import structlog

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.execution import ErrorType
from dispatch.contract import ReplyError

_log = structlog.get_logger(__name__)

_WORTH_A_LINE = frozenset({ErrorType.UNREACHABLE, ErrorType.TIMEOUT, ErrorType.DISCONNECTED, ErrorType.UNREADABLE})


def note_failure(endpoint: Endpoint, error: ReplyError | None) -> None:
    """Write a line about a call's end, where it deserves one."""
    if error is not None and error.type in _WORTH_A_LINE:
        _log.warning(
            "endpoint_call_failed", endpoint=endpoint.endpoint_id, address=endpoint.address, reason=error.message
        )
