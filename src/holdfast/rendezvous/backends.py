"""The backends of `--rdzv-backend`, and how they differ."""

from __future__ import annotations

from enum import Enum


class Backend(Enum):
    """How the nodes of a job find each other."""

    C10D = "c10d"
    STATIC = "static"
    FILE = "file"
    ETCD = "etcd"
    HA = "ha"

    @classmethod
    def named(cls, name: str) -> Backend | None:
        """Return the backend with this name; None for a plug-in."""
        return _NAMED.get(name)

    @property
    def names(self) -> list[str]:
        """The names that `--rdzv-backend` accepts for it."""
        return [name for name, backend in _NAMED.items() if backend is self]

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator serves the job; otherwise the agents have control ports."""
        return self in (Backend.C10D, Backend.STATIC)

    @property
    def is_polled(self) -> bool:
        """Whether agents poll a stored state."""
        return self is Backend.FILE

    @property
    def is_on_etcd(self) -> bool:
        """Whether agents store the job in etcd, where one of them leads."""
        return self in (Backend.ETCD, Backend.HA)

    @property
    def takes_token(self) -> bool:
        """Whether nodes authenticate each other with the token."""
        return self.has_coordinator or self is Backend.HA

    @property
    def needs_endpoint(self) -> bool:
        """Whether a job of one node needs an endpoint too."""
        return self in (Backend.FILE, Backend.HA)


ETCD_V2 = "etcd-v2"
"""torchrun's name of the backend that uses the API of etcd 3."""
_NAMED = {backend.value: backend for backend in Backend}
_NAMED |= {"holdfast": Backend.C10D, ETCD_V2: Backend.ETCD}
