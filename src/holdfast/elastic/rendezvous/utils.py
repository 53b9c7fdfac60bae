"""Endpoints as text, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.net.endpoints import parse_rendezvous_endpoint

__all__ = ["parse_rendezvous_endpoint"]
