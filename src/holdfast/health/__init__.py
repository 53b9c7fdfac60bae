"""Health checks: whether the agent lives and its workers run, for those who ask by HTTP.

`HealthCheckServer` answers the probes, `Pulse` is how it knows that the agent's loop turns.

Importing this package loads nothing but this file; each name is fetched when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.health.pulse import Pulse
    from holdfast.health.server import (
        HealthCheckServer,
        create_healthcheck_server,
        server_from_environment,
    )

__all__ = [
    "HealthCheckServer",
    "Pulse",
    "create_healthcheck_server",
    "server_from_environment",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.health' has no attribute {name!r}")
    from importlib import import_module

    home = "holdfast.health.pulse" if name == "Pulse" else "holdfast.health.server"
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
