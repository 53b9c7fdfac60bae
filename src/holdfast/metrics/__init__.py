"""Figures about a run: for handlers of one's own, for Prometheus, and for OpenTelemetry."""
