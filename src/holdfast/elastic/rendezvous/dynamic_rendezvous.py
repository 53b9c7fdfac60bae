"""Rendezvous over any backend, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.rendezvous.backend_handler import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
    create_handler,
)
from holdfast.rendezvous.rdzv_conf import RendezvousSettings, RendezvousTimeout

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]
