"""The global registry's handlers under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.rendezvous.handler_registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
