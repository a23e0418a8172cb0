"""What a gateway process records, and where it goes."""

from __future__ import annotations

from dispatch.config import GatewaySettings
from dispatch.telemetry.recorder import RecorderOptions
from dispatch.telemetry.recording import Recording
from dispatch.telemetry.tracing import Tracing


def recording_of(settings: GatewaySettings, tracing: Tracing) -> Recording:
    """Return the recording of a gateway; nothing is recorded where neither history nor a collector is configured.

    Raises:
        ConfigurationError: a sink cannot be made of what is configured.
    """
    options = RecorderOptions(
        group=settings.fabric_group,
        consumer=settings.gateway_id,
        resource=tracing.resource,
        samples_root=tracing.samples_root,
    )
    return Recording(settings.require_valkey_url(), settings.valkey_client, options, tracing.sinks)
