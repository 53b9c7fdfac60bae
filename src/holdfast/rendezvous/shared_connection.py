"""An agent's connection to a job that lies in a `RendezvousBackend`: `SharedConnection`.

It is to the agent what `coordinator.connection.NodeConnection` is: the agent says what its node
does, and hears what is new; `fileno()` is readable while there is something to `take`. Behind it is
no coordinator but the thread of `attendant`, which looks at the state and changes it, by the rules
of `teammate`.

A second thread does nothing but watch for how long the first one has come back from the backend
with an error, or not at all: one that hangs would else never be given up. Only time this process
was awake for counts.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.coordinator.client import GaveUp, Refused
from holdfast.coordinator.news_box import News, NewsBox
from holdfast.coordinator.node_line import draw_incarnation
from holdfast.core.liveness import AttendedClock
from holdfast.core.membership import CLOSED_AWAY_S
from holdfast.core.news import Failure, JobSettings, NodeInfo, Phase, Role, View
from holdfast.rendezvous.attendant import Attendant
from holdfast.rendezvous.errors import RendezvousError, RendezvousStateError
from holdfast.rendezvous.teammate import Outlook, Teammate
from holdfast.store.prefix import PrefixStore
from holdfast.wire.limits import NAME_CHARS_MAX, REPORT_BYTES_MAX, SUMMARY_CHARS_MAX, clip

if TYPE_CHECKING:
    from holdfast.rendezvous.shared_job import SharedJob

CHANCES_S = 0.5
"""How long `close` waits for the thread at the backend, which may hang."""
STEPS_PER_PATIENCE = 10
"""How often the time is looked at; a process that slept for longer was not awake."""
NO_ANSWER = "it does not answer"


class SharedConnection:
    """One node's connection, from `start` until `close`."""

    def __init__(
        self,
        shared: SharedJob,
        *,
        where: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        store: Any,
        interval_s: float,
        lost_after_s: float,
        attempt_s: float,
        patience_s: float,
    ) -> None:
        now = time.monotonic()
        self.run_id = run_id
        self.where = where
        self.hosting = False
        """No other node needs this process to meet, as they would one that coordinates."""
        self.view: View | None = None
        self._store = store
        self._patience_s = patience_s
        self._incarnation = info.incarnation
        self._mate = Teammate(
            now,
            run_id=run_id,
            info=info,
            settings=settings,
            interval_s=interval_s,
            lost_after_s=lost_after_s,
        )
        self._attendant = Attendant(
            shared,
            self._mate,
            name=f"holdfast-rendezvous-{info.node}",
            attempt_s=attempt_s,
            patience_s=patience_s,
            on_look=self._looked,
        )
        self._changed = threading.Condition()
        self._box = NewsBox()
        self._closed = False
        # How the place is. `_since` is when it was last in order, by the time this process attends.
        self._clock = AttendedClock(now, patience_s / STEPS_PER_PATIENCE)
        self._since = 0.0
        self._why = NO_ANSWER
        self._was_there = self._is_there = False
        self._given_up = False
        self._watch = threading.Thread(
            target=self._watch_time, name=f"holdfast-patience-{info.node}", daemon=True
        )

    # From start to end.

    def start(self) -> None:
        """Begin to take part. A place that cannot be reached (yet) raises nothing."""
        self._box.open()
        self._watch.start()
        self._attendant.ask()

    def leave(self, limit_s: float) -> bool:
        """Say that this node goes; return whether that is stored, or does not matter any more.

        Waits for that no longer than `limit_s`, and not at all if the place was never there or
        has been given up.
        """
        if self._closed or self._given_up or self._box.fileno() < 0:
            return False
        said: list[int] = []

        def say() -> None:
            self._mate.say(Phase.LEAVING, self._mate.status.generation)
            said.append(self._mate.status.seq)

        def is_out(outlook: Outlook) -> bool:
            view = outlook.view
            if view is not None and view.role in (Role.FENCED, Role.REFUSED, Role.CLOSED):
                return True
            return bool(said) and outlook.heard_seq >= said[0]

        try:
            return self._attendant.wait(self._attendant.ask(say), is_out, limit_s)[1]
        except RendezvousError:
            return False

    def close(self) -> None:
        """End the threads and release the descriptor; may be called more than once."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._attendant.stop(CHANCES_S)
        if self._watch.ident is not None and self._watch is not threading.current_thread():
            self._watch.join()
        self._box.close()

    # What the agent hears and says.

    @property
    def endpoint(self) -> str:
        """Where the nodes meet, as a person knows it."""
        return self.where

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
        """Tell all nodes what this one does now."""
        if failure is not None:
            failure = msgspec.structs.replace(
                failure,
                summary=clip(failure.summary, SUMMARY_CHARS_MAX),
                host=clip(failure.host, NAME_CHARS_MAX),
            )
        report = report[:REPORT_BYTES_MAX]
        self._attendant.ask(lambda: self._mate.say(phase, generation, failure, report))

    def rejoin(self) -> int:
        """Begin anew as another incarnation, after this one was fenced; return its number."""
        incarnation = draw_incarnation()
        with self._changed:
            self._incarnation = incarnation
            self._box.forget_view()  # It was for the one before.
            self.view = None
        self._attendant.ask(lambda: self._mate.rejoin(incarnation))
        return incarnation

    def problem(self) -> str:
        """Return what is wrong with the place and since when, or nothing."""
        with self._changed:
            if self._is_there:
                return ""
            away_s = self._clock.look(time.monotonic()) - self._since
            return f"no contact with {self.where} for {away_s:.1f} s: {self._why}"

    def store(self, scope: str) -> PrefixStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        return PrefixStore(f"torch.rendezvous.{self.run_id}.{scope}", self._store)

    # In the thread that goes to the backend.

    def _looked(self, outlook: Outlook, problem: RendezvousError | None) -> None:
        with self._changed:
            view = outlook.view
            if view is not None and view is not self.view and self._is_mine(view):
                self.view = view
                self._box.put_view(view)
            self._is_there = problem is None
            if problem is None:
                self._since = self._clock.look(time.monotonic())
                self._was_there = True
                self._why = NO_ANSWER
            else:
                self._why = problem.message
                if isinstance(problem, RendezvousStateError) and not self._was_there:
                    # Later it may be the mistake of another program, and be repaired.
                    self._give_up(Refused(str(problem)))

    def _is_mine(self, view: View) -> bool:
        return view.incarnation == self._incarnation

    # In the thread that watches the time.

    def _watch_time(self) -> None:
        with self._changed:
            while not self._closed and not self._given_up:
                at = self._clock.look(time.monotonic())
                if self._is_there and not self._attendant.is_looking:
                    self._since = at  # Nobody was asked since, so nobody was away.
                away_s = at - self._since
                limit_s = self._limit_s()
                if away_s >= limit_s:
                    self._give_up(GaveUp(self._why, away_s))
                else:
                    self._changed.wait(min(limit_s - away_s, self._clock.step_s))

    def _limit_s(self) -> float:
        closed = self.view is not None and self.view.role is Role.CLOSED
        return min(CLOSED_AWAY_S, self._patience_s) if closed else self._patience_s

    # With the lock.

    def _give_up(self, news: GaveUp | Refused) -> None:
        if not self._given_up:  # Once, and for good.
            self._given_up = True
            self._box.put_fault(news)
