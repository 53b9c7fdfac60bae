"""Metrics of a run: for handlers, for Prometheus and for OpenTelemetry."""
