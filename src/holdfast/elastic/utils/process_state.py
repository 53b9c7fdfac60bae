"""The states of processes under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.scripts import is_uninterruptible_state, read_proc_state

__all__ = ["is_uninterruptible_state", "read_proc_state"]
