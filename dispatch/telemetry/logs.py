"""How a process logs: one line an event on stderr, for people on a terminal, as JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import msgspec
import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def set_up_logging(log_format: LogFormat = "auto", level: LogLevel = "info") -> None:
    """Configure structlog and the standard library's logging for this process. For commands; a library never does it.

    `auto` is `console` when stderr is a terminal, else `json`.
    """
    terminal = sys.stderr.isatty()
    console = log_format == "console" or (log_format == "auto" and terminal)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
    ]
    ending: list[Processor]
    if console:
        # Plain: the rich form shows local variables, and those hold bodies and keys.
        plain = structlog.dev.plain_traceback
        ending = [structlog.dev.ConsoleRenderer(colors=terminal, pad_event_to=28, exception_formatter=plain)]
    else:
        ending = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        )
    )
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    # These tell of each connection or request; the product's own events say what matters of them.
    for name in ("uvicorn.error", "uvicorn.access", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def _to_json(event: dict[str, Any], **_options: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
