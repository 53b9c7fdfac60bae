"""Nodes with given ranks, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.rendezvous.coordinated import create_static_handler as create_rdzv_handler
from holdfast.rendezvous.static_tcp import StaticTCPRendezvous

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]
