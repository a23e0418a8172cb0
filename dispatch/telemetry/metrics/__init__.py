"""Metrics of a gateway process: what is counted here, what is read of the group, and how both go out."""

from __future__ import annotations

from dispatch.telemetry.metrics.catalogue import CATALOGUE, Family
from dispatch.telemetry.metrics.exporting import Metrics
from dispatch.telemetry.metrics.reading import GroupReader

__all__ = ["CATALOGUE", "Family", "GroupReader", "Metrics"]
