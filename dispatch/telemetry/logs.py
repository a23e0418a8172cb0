"""How a process logs: one line an event on stderr, for people on a terminal, as JSON elsewhere.

Which events there are stands in `dispatch.telemetry.events`. No line holds a prompt, a completion or a secret: events
carry names, sizes and times, and what looks like a secret in them all the same is taken out here.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import msgspec
import structlog
from structlog.typing import Processor, WrappedLogger

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

HIDDEN = "[redacted]"
_SECRET_NAMES = re.compile(
    r"(?i)authorization|cookie|passw(or)?d|secret|credential|(^|_)token$|api[-_]?key$|private[-_]?key"
)
_NESTED_MAX = 4
# Warns of each try while a server is away. Who asked it (the history, an exporter) says so, once.
_REPEATING = ("urllib3.connectionpool",)
# Each: what comes before a secret, and the secret.
_SECRETS = re.compile(
    r"""(?ix)
      ( [a-z][a-z0-9+.-]{1,30} :// ) [^\s/'"]*@            # what stands before @ in a URL
    | ( \b (?: bearer | basic ) [ ]+ ) [a-z0-9._~+/=-]{8,}
    | ( \b (?: api[-_]?key | access[-_]?token | token | password | secret ) ["']? [ ]? [=:] [ ]? ["']? )
      [^\s"',;&)}]{4,}
    | ( \b ) (?: fd_ | sk- | pk- | hf_ | gsk_ | xai- | AIza ) [a-z0-9_-]{8,}   # keys of ours and of providers
    """
)


def set_up_logging(log_format: LogFormat = "auto", level: LogLevel = "info", **always: str) -> None:
    """Configure structlog and the standard library's logging for this process. For commands; a library never does it.

    `auto` is `console` when stderr is a terminal, else `json`. `always` are facts of the process (its gateway), which
    stand in every line that does not say otherwise. `level` is for this project; other libraries are heard from
    warnings on, because what they tell of each connection or request may hold what must not be told.
    """
    terminal = sys.stderr.isatty()
    console = log_format == "console" or (log_format == "auto" and terminal)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Always(always),
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
    ]
    # Exceptions become text first, so that secrets are found in them, too. Plain text: the rich form shows local
    # variables, and those hold bodies and keys.
    ending: list[Processor] = [structlog.processors.format_exc_info, hide_secrets]
    if console:
        plain = structlog.dev.plain_traceback
        ending.append(structlog.dev.ConsoleRenderer(colors=terminal, pad_event_to=28, exception_formatter=plain))
    else:
        ending.append(structlog.processors.JSONRenderer(_to_json))
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
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(__name__.partition(".")[0]).setLevel(threshold)
    for library in _REPEATING:
        logging.getLogger(library).setLevel(logging.ERROR)


def hide_secrets(_logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Take out of an event what looks like a secret: members that are named so, user info of URLs, bearer tokens, keys.

    The last line of defence: nobody logs one knowingly. It looks at text four levels deep.
    """
    for name, value in event.items():
        event[name] = _hidden(name, value, _NESTED_MAX)
    return event


def _hidden(name: str, value: Any, depth: int) -> Any:
    if isinstance(value, bool | int | float | None):
        return value
    if depth == 0 or _SECRET_NAMES.search(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: _hidden(str(key), one, depth - 1) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_hidden("", one, depth - 1) for one in value]
    return _SECRETS.sub(_mask, str(value))


def _mask(found: re.Match[str]) -> str:
    before = next((group for group in found.groups() if group), "")
    return f"{before}{HIDDEN}{'@' if '://' in before else ''}"


class _Always:
    """Adds facts to every event that does not say otherwise."""

    def __init__(self, facts: dict[str, str]) -> None:
        self._facts = facts

    def __call__(
        self, _logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        for name, value in self._facts.items():
            event.setdefault(name, value)
        return event


def _to_json(event: dict[str, Any], **_options: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
