"""What a gateway process records, and where it goes."""

from __future__ import annotations

from collections.abc import Callable

from dispatch.config import GatewaySettings
from dispatch.errors import HistoryUnavailable
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.recorder import RecorderOptions, unnoticed
from dispatch.telemetry.recording import Recording
from dispatch.telemetry.sinks import Sink, ThreadSink
from dispatch.telemetry.tracing import Tracing


def recording_of(
    settings: GatewaySettings, tracing: Tracing, on_delivery: Callable[[str, float], None] = unnoticed
) -> Recording:
    """Return the recording of a gateway; nothing is recorded where neither history nor a collector is configured.

    `on_delivery`: see `RecorderOptions`.

    Raises:
        ConfigurationError: a sink cannot be made of what is configured.
    """
    options = RecorderOptions(
        group=settings.fabric_group,
        consumer=settings.gateway_id,
        resource=tracing.resource,
        samples_root=tracing.samples_root,
        on_delivery=on_delivery,
    )
    sinks = (*_history(settings), *tracing.sinks)
    return Recording(settings.require_valkey_url(), options, sinks)


def history_of(settings: GatewaySettings) -> HistoryStore | None:
    """Return the history that a gateway is told, None = it is told none. Opens nothing; the caller closes it.

    Raises:
        ConfigurationError: the URL is none, or the password is not there.
    """
    if not settings.history_url:
        return None
    return HistoryStore(
        settings.history_url, password_env=settings.history_password_env, batch_rows=settings.history_batch_rows
    )


def _history(settings: GatewaySettings) -> tuple[Sink, ...]:
    store = history_of(settings)
    if store is None:
        return ()
    return (ThreadSink("history", store.write, away=HistoryUnavailable, close=store.close),)
