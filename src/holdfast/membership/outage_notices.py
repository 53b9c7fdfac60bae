"""Console messages about an outage: the lost connection, the running workers, the time left, and advice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.protocol import NodePhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.session import Session, SessionTimeouts


class OutageNotices:
    """Reports the outages of one membership; `peer` returns the name of the other side for messages."""

    def __init__(self, peer: Callable[[], str], timeouts: SessionTimeouts, advice: str) -> None:
        self._peer, self._timeouts, self._advice = peer, timeouts, advice
        self._lost = ""
        """The name of the side that the current outage cut off; empty without an outage."""

    def lost(self, session: Session, why: str) -> None:
        """Report an outage; the caller repeats this while the outage lasts."""
        silent_s, left_s = session.silence(time.monotonic())
        if self._lost:
            console.notice(
                f"still no connection to {self._peer()} ({why}): this node exits in {left_s:.0f} s"
            )
            return
        self._lost = self._peer()
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        console.notice(
            f"lost the connection to {self._lost}, last message at {since} ({why}); "
            f"{self._workers_of(session)}"
        )
        advice = f"; {self._advice}" if self._advice else ""
        runs = session.status.phase is NodePhase.RUNNING
        console.notice(
            f"this node retries for {left_s:.0f} s more (coordinator_timeout="
            f"{self._timeouts.away_s:g}), then {'stops its workers and ' * runs}exits{advice}"
        )

    def over(self) -> None:
        """Report that the outage is over."""
        lost, self._lost = self._lost, ""
        if lost:
            peer = self._peer()
            console.notice(
                f"reconnected to {peer}" if peer == lost else f"connected to {peer} instead"
            )

    def _workers_of(self, session: Session) -> str:
        status, stop_at = session.status, session.stop_at
        if status.phase is NodePhase.SUCCEEDED:
            return "this node's workers have finished"
        if status.phase is not NodePhase.RUNNING:
            return "no workers run here"
        workers = f"the workers of generation {status.generation}"
        if not self._timeouts.needs_answers or stop_at is None:
            return f"{workers} keep running"
        left_s = max(0.0, stop_at - time.monotonic())
        return f"{workers} are stopped unless it reconnects within {left_s:.1f} s (on_lost=stop)"
