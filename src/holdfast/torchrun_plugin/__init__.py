"""`torchrun --rdzv-backend holdfast`: the plug-in that torchrun finds by `torchrun.handlers`.

The one thing to know: torchrun, and whatever else imports its rendezvous package, calls `creator`
in the middle of that import. So this module loads nothing, and least of all torch; the handler
itself is imported by the first job that asks for it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def creator() -> Callable[[Any], Any]:
    """Return what makes handlers out of torchrun's parameters."""
    return create_handler


def create_handler(params: Any) -> Any:
    """Return the handler of one node, for torchrun's agent."""
    from holdfast.torchrun_plugin.handler import TorchrunHandler

    return TorchrunHandler(params)
