"""The kernel's letters for what a process does, as TorchElastic's programs ask for them."""

from __future__ import annotations

from holdfast.processes.endings import process_state


def read_proc_state(pid: int) -> str | None:
    """Return the letter of a process's state, None if it is gone or cannot be read."""
    return process_state(pid) or None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether a state is uninterruptible sleep, out of which no signal gets a process."""
    return state is not None and state.startswith("D")
