"""The rendezvous of nodes with fixed ranks, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.static_tcp_rendezvous import StaticTCPRendezvous
from holdfast.rendezvous.coordinator_handler import create_static_handler as create_rdzv_handler

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]
