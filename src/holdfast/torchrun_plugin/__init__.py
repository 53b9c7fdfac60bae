"""`torchrun --rdzv-backend holdfast`: the plug-in in the entry point group `torchrun.handlers`.

torchrun, and any other program that imports its rendezvous package, calls `creator` in the middle of
that import. So this module imports nothing. The first job that uses the handler imports its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def creator() -> Callable[[Any], Any]:
    """Return the creator of handlers."""
    return create_handler


def create_handler(params: Any) -> Any:
    """Return a handler for torchrun's agent."""
    from holdfast.torchrun_plugin.torchrun_handler import TorchrunHandler

    return TorchrunHandler(params)
