"""What the standard `OTEL_*` variables ask of one signal: which exporters, and whether by a protocol that is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dispatch.errors import ConfigurationError

Signal = Literal["TRACES", "METRICS"]

OTLP, NONE = "otlp", "none"
_HTTP = "http/protobuf"


def asked_exporters(environ: Mapping[str, str], signal: Signal, said: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the exporters asked for, by their words.

    `said` is the variable `OTEL_{signal}_EXPORTER`; "" = OTLP wherever an endpoint of it is given.

    Raises:
        ConfigurationError: one of them is not in `known`, or OTLP is to be another protocol than HTTP with protobuf.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    if not said:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        said = OTLP if any(environ.get(name) for name in endpoints) else NONE
    words = tuple(dict.fromkeys(word.strip() for word in said.split(",") if word.strip()))
    for word in words:
        if word not in {*known, NONE}:
            message = f"OTEL_{signal}_EXPORTER: {word!r} is not allowed; {', '.join(known)} or {NONE} is"
            raise ConfigurationError(message)
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") if OTLP in words else ():
        if (protocol := environ.get(name) or _HTTP) != _HTTP:
            raise ConfigurationError(f"{name}: {protocol!r} is not allowed; {_HTTP} is (port 4318 of a collector)")
    return tuple(word for word in words if word != NONE)
