"""Health checks under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.observe.health.health_server import HealthCheckServer, create_healthcheck_server

__all__ = ["HealthCheckServer", "create_healthcheck_server"]
