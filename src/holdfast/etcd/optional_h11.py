"""The package h11, which parses HTTP for the clients of etcd.

Only jobs on etcd need it. The commands that operate jobs import the clients of etcd for any job, so a missing
package is an error only when a client is created.
"""

from __future__ import annotations

from holdfast.errors import EnvironmentProblem

try:
    import h11
except ImportError:
    h11 = None  # type: ignore[assignment]

__all__ = ["h11", "require_h11"]


def require_h11() -> None:
    """Raise `EnvironmentProblem` if h11 is not installed."""
    if h11 is None:
        raise EnvironmentProblem("etcd needs the package h11", hint="pip install h11")
