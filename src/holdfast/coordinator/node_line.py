"""What an agent holds of its node's connection, wherever the job is decided about: `NodeLine`.

One daemon thread runs the client that keeps the node in touch (`coordinator.client`), whatever the
agent does. The agent says what its node does (`say`) and hears what is new: `fileno()` is readable
while there is something to `take`. Several views that came meanwhile are one, the newest; a view
says all there is to know.

Whatever goes wrong in the thread and was not expected comes out of `take` as a `GaveUp`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from holdfast import messages
from holdfast.coordinator.client import GaveUp, NodeClient
from holdfast.coordinator.loop_thread import LoopThread
from holdfast.coordinator.news_box import News, NewsBox
from holdfast.core.membership import Membership, Times
from holdfast.core.news import Failure, JobSettings, NodeInfo, Phase, Status, View
from holdfast.errors import UsageError
from holdfast.wire.errors import BadMessage
from holdfast.wire.messages import check

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.coordinator.client import Dials
    from holdfast.store.interface import RoundStore

INCARNATION_BITS = 63
START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator whose job is over waits for nodes to hear of it."""
SLACK_S = 5.0
REMIND_S = 60.0
"""How often an agent that was never told anything says why. Whoever looks at a job that does not
begin finds the reason near the end of its output; oftener would only fill logs."""


def draw_incarnation() -> int:
    """Return a number that no other agent has drawn."""
    return secrets.randbits(INCARNATION_BITS)


class NodeLine:
    """One node's connection, from `start` until `close`; subclasses say to what."""

    decider = "the coordinator"
    """What decides about the job, as a person calls it."""

    def __init__(self, *, run_id: str, info: NodeInfo, settings: JobSettings, times: Times) -> None:
        self.run_id = run_id
        self.hosting = False
        """Whether all other nodes depend on this process."""
        self.view: View | None = None
        self._info, self._settings, self._times = info, settings, times
        self._incarnation = info.incarnation
        self._lock = threading.Lock()  # For the incarnation and its view.
        self._box = NewsBox()
        self._thread: LoopThread | None = None
        self._client: NodeClient | None = None
        self._closed = False
        self._ending = False

    @property
    def where(self) -> str:
        """The endpoint as a person writes it."""
        raise NotImplementedError

    def store(self, scope: str) -> RoundStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        raise NotImplementedError

    # From start to end.

    def _launch(self, begin: Coroutine[Any, Any, None]) -> None:
        """Start the thread and let it begin."""
        self._box.open()
        self._thread = LoopThread("holdfast-coordinator", self._broken)
        try:
            self._thread.start()
            self._thread.ask(begin, START_S)
        except BaseException:
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        """Say that this node goes; return whether that is known to have been heard.

        Waits for that no longer than `limit_s`, and not at all while there is no link.
        """
        self._ending = True
        if self._client is None or self._thread is None or not self._thread.runs:
            return False
        try:
            return self._thread.ask(self._client.leave(limit_s), limit_s + SLACK_S)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Close the connection and end the thread; may be called more than once.

        A process that others depend on lets them hear of the job's end first, for `drain_s` at
        most.
        """
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._thread.ask(self._end(drain_s), drain_s + SLACK_S)
        except Exception as error:  # noqa: BLE001 (an end must come to an end)
            messages.debug(
                f"{self.decider} at {self.where}: the connection did not end well: {error!r}"
            )
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._box.close()

    # What the agent hears and says.

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `take`."""
        return self._box.fileno()

    def take(self) -> list[News]:
        """Return what is new since the last call."""
        return self._box.take()

    def say(
        self,
        phase: Phase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
    ) -> None:
        """Tell what this node does now."""
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.say, phase, generation, failure, report)

    def rejoin(self) -> int:
        """Begin anew as another incarnation, after this one was fenced; return its number."""
        with self._lock:
            self._incarnation = draw_incarnation()
            self._box.forget_view()  # It was for the one before.
            self.view = None
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.rejoin, self._incarnation)
        return self._incarnation

    def problem(self) -> str:
        """Return why there is no link and since when, or nothing."""
        client = self._client
        if client is None:
            return f"not connected to {self.decider} at {self.where}"
        if client.refused:
            return f"{self.decider.removeprefix('the ')} at {self.where}: {client.refused}"
        since = client.down_since
        if since is None:
            return ""
        why = client.last_problem or "connecting"
        away_s = time.monotonic() - since
        return f"no {self.decider.removeprefix('the ')} at {self.where} for {away_s:.1f} s: {why}"

    # In the thread.

    def _connect(self, now: float, dialer: Dials, doubt: Callable[[], str] = str) -> NodeClient:
        """Begin to keep the node in touch."""
        membership = Membership(
            now,
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            times=self._times,
            draw=random.random,
        )
        self._client = NodeClient(
            membership,
            dialer,
            on_view=self._told,
            on_gave_up=self._box.put_fault,
            on_refused=self._box.put_fault,
            on_away=self._tell_away,
            on_back=lambda: messages.notice(f"{self.decider} at {self.where} is back"),
            doubt=doubt,
        )
        self._client.start()
        asyncio.get_running_loop().call_later(REMIND_S, self._remind)
        return self._client

    def _remind(self) -> None:
        client = self._client
        if client is None or self._ending or client.refused or client.membership.ever_told:
            return
        problem = self.problem()
        if problem:
            messages.notice(f"still waiting: {problem}")
        asyncio.get_running_loop().call_later(REMIND_S, self._remind)

    async def _end(self, drain_s: float) -> None:
        """Close what the thread holds."""
        raise NotImplementedError

    def _tell_away(self, why: str) -> None:
        if not self._ending:
            messages.notice(
                f"lost {self.decider} at {self.where} ({why}); workers go on without it for up "
                f"to {self._times.away_s:g} s"
            )

    def _told(self, view: View) -> None:
        with self._lock:
            if view.incarnation == self._incarnation:
                self.view = view
                self._box.put_view(view)

    def _broken(self, what: str) -> None:
        self._box.put_fault(GaveUp(f"this side of the connection is broken: {what}"))

    def _check(self) -> None:
        """Raise for values that nobody would take, before anybody is asked."""
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self._settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None
