"""What a person reads when a node waited in vain: for a place to meet, or for enough nodes.

One line each, the same wherever nodes meet. Nothing here decides that it was in vain.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.coordinator.client import GaveUp
    from holdfast.core.news import View


def unreachable(what: str, gave_up: GaveUp) -> str:
    """Return what could not be reached, since when and why."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - gave_up.away_s))
    why = f": {gave_up.why}" if gave_up.why else ""
    return f"{what} could not be reached since {since} ({gave_up.away_s:.0f} s){why}"


def too_few(view: View | None, problem: str, where: str, join_timeout_s: float) -> str:
    """Return who was waited for, or what was in the way if this node was told nothing at all."""
    limit = f"{join_timeout_s:g} s"
    if view is None:
        return f"{problem} (join_timeout: {limit})"
    return f"{view.present} of {view.needed} nodes came to {where} within {limit} (join_timeout)"
