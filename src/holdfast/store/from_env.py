"""The store of a job, for a worker without torch. The environment defines its address and who serves it.

Under `holdfast run` and `torchrun`, usually an agent serves it; otherwise the worker with rank 0 does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.core.limits import PORT_MAX
from holdfast.errors import UsageError
from holdfast.store.tcp.store_client import DEFAULT_TIMEOUT, TCPStore

if TYPE_CHECKING:
    from datetime import timedelta


def from_environment(timeout: timedelta = DEFAULT_TIMEOUT) -> TCPStore:
    """Connect to the store that all workers of this job share, and return it.

    It is at `MASTER_ADDR` and `MASTER_PORT`. If `TORCHELASTIC_USE_AGENT_STORE` is not `True`, the
    worker with `RANK` 0 serves it and waits until all `WORLD_SIZE` have connected, as torch does
    with `env://`; workers with and without torch may be mixed. Raises `UsageError` if a variable is
    missing, and the errors of `TCPStore`.
    """
    host, port = _variable("MASTER_ADDR"), _number("MASTER_PORT", most=PORT_MAX)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, port, timeout=timeout)
    world_size = _number("WORLD_SIZE", least=1)
    rank = _number("RANK", most=world_size - 1)
    return TCPStore(host, port, world_size, rank == 0, timeout, multi_tenant=True)


def _variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise UsageError(f"{name}: not set; was this process started by holdfast run or torchrun?")
    return value


def _number(name: str, *, least: int = 0, most: int | None = None) -> int:
    text = _variable(name)
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        accepted = f"from {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name}: {text!r} in the environment is invalid; accepted: {accepted}")
    return number
