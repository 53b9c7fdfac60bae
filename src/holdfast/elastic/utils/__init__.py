"""Helpers for scripts, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.scripts import get_env_variable_or_raise, get_socket_with_port, macros
from holdfast.elastic._impl.submodules import bind_submodules

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]

bind_submodules(__name__)
