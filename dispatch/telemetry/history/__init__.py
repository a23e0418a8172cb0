"""History: what has ended, in ClickHouse, in the layout in which an OpenTelemetry collector writes spans there."""
