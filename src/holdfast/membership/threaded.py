"""A membership with a thread: the agent calls it, and the thread drives `core.session`."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.job_settings import JobSettings
from holdfast.core.protocol import Failure, NodeInfo, NodePhase, Status, View
from holdfast.core.session import (
    PortsChanged,
    Rejoined,
    RequestMade,
    Session,
    SessionEvent,
    SessionTimeouts,
)
from holdfast.errors import UsageError
from holdfast.membership.interface import News, draw_incarnation
from holdfast.membership.loop_heartbeat import LoopMonitor
from holdfast.membership.mailbox import Mailbox
from holdfast.membership.session_driver import SessionDriver, status_change
from holdfast.net.loop_thread import LoopThread
from holdfast.wire.errors import BadMessage
from holdfast.wire.messages import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.protocol import Request
    from holdfast.membership.interface import ControlAccess
    from holdfast.membership.session_driver import Connector
    from holdfast.store.interface import RoundStore

START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator whose job has ended waits for nodes to receive that."""
SLACK_S = 5.0
REMIND_S = 60.0
"""How often an agent that never received anything repeats the reason, so that it is near the end of
the output of a job that does not start."""


class ThreadedMembership:
    """A `Membership` with a thread that drives `core.session`; subclasses provide what it connects to.

    `take` returns an unexpected error of the thread as a loss.
    """

    authority = "the coordinator"
    """What runs the job's rounds, in messages."""
    advice = ""
    """What the user can do about its loss."""
    control: ControlAccess

    def __init__(
        self, *, run_id: str, info: NodeInfo, settings: JobSettings, timeouts: SessionTimeouts
    ) -> None:
        self.run_id = run_id
        self.hosting = False
        self.view: View | None = None
        self._info, self._settings, self._timeouts = info, settings, timeouts
        self._incarnation = info.incarnation
        self._lock = threading.Lock()  # For the incarnation and its view.
        self._mailbox = Mailbox()
        self.heartbeat = self._mailbox.heartbeat
        self._thread: LoopThread | None = None
        self._driver: SessionDriver | None = None
        self._closed = False
        self._ending = False
        self._lost_from = ""

    # Subclasses provide these.

    @property
    def presence_fd(self) -> int:
        return -1

    @property
    def where(self) -> str:
        raise NotImplementedError

    def store(self, scope: str) -> RoundStore:
        raise NotImplementedError

    async def _open(self) -> Connector:
        """Prepare, in the thread; return the connector."""
        raise NotImplementedError

    async def _shut(self, drain_s: float) -> None:
        """Close the driver and whatever else the thread holds."""
        raise NotImplementedError

    # From start to end.

    def start(self) -> None:
        """Connect; raise `UsageError` or `EnvironmentProblem` for what cannot work.

        A coordinator that does not run yet is not an error.
        """
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self._settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None
        self._mailbox.open()
        self._thread = LoopThread("holdfast-coordinator", self._broke)
        try:
            self._thread.start()
            self._thread.ask(self._start(), START_S)
        except BaseException:
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        self._ending = True
        if self._driver is None or self._thread is None or not self._thread.runs:
            return False
        try:
            return self._thread.ask(self._driver.leave(limit_s), limit_s + SLACK_S)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._thread.ask(self._shut(drain_s), drain_s + SLACK_S)
        except Exception as error:  # noqa: BLE001 (closing must not fail)
            console.debug(
                f"{self.authority} at {self.where}: the connection closed badly: {error!r}"
            )
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._mailbox.close()

    # In between.

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def take(self) -> list[News]:
        return self._mailbox.take()

    def report(
        self,
        phase: NodePhase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
        *,
        clear: int = -1,
        cause: str = "",
    ) -> None:
        self._handle(status_change(phase, generation, failure, report, clear), cause)

    def guard(self, renew: Callable[[float | None], None]) -> None:
        driver = self._driver
        if driver is None:
            return

        def renew_unless_hosting(at: float | None) -> None:
            # No node can be replaced while the coordinator in this process is stopped, too.
            is_safe = self.hosting and not driver.session.status.stuck
            renew(None if is_safe else at)

        driver.guard(renew_unless_hosting)

    def rejoin(self, *, cause: str = "") -> int:
        with self._lock:
            self._incarnation = draw_incarnation()
            self._mailbox.discard_view()  # It belongs to the previous incarnation.
            self.view = None
        self._handle(Rejoined(self._incarnation), cause)
        return self._incarnation

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        self._handle(PortsChanged(ports))

    def request(self, request: Request) -> None:
        """Submit an operator's request to the job."""
        self._handle(RequestMade(request))

    def _handle(self, event: SessionEvent, cause: str = "") -> None:
        if self._driver is not None and self._thread is not None:
            self._thread.post(self._driver.handle, event, cause)

    def problem(self) -> str:
        driver = self._driver
        authority = self.authority.removeprefix("the ")
        if driver is None:
            return f"not connected to {self.authority} at {self.where}"
        if driver.refused:
            return f"{authority} at {self.where}: {driver.refused}"
        since = driver.down_since
        if since is None:
            silent_s = driver.session.silence(time.monotonic())[0]
            is_late = silent_s >= self._timeouts.silence_s / 2  # Two answers are missing, at least.
            return f"no answer of {self.authority} at {self.where} for {silent_s:.1f} s" * is_late
        why = driver.last_problem or "connecting"
        return f"no {authority} at {self.where} for {time.monotonic() - since:.1f} s: {why}"

    # In the thread.

    async def _start(self) -> None:
        connector = await self._open()
        loop = asyncio.get_running_loop()
        session = Session(
            loop.time(),
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            timeouts=self._timeouts,
            draw=random.random,
        )
        monitor = LoopMonitor(loop.time(), self._mailbox, self._timeouts.silence_s)
        self._driver = SessionDriver(session, connector, self._deliver, self._note_outage, monitor)
        self._driver.start()
        loop.call_later(REMIND_S, self._remind, loop)

    def _deliver(self, news: News) -> None:
        with self._lock:
            if isinstance(news, View):
                if news.incarnation != self._incarnation:
                    return
                self.view = news
            self._mailbox.put(news)

    def _broke(self, what: str) -> None:
        self._mailbox.put(CoordinatorLost(f"this side of the connection is broken: {what}"))

    def _remind(self, loop: asyncio.AbstractEventLoop) -> None:
        driver = self._driver
        if driver is None or self._ending or driver.refused or driver.session.had_view:
            return
        problem = self.problem()
        if problem:
            console.notice(f"still waiting: {problem}")
        loop.call_later(REMIND_S, self._remind, loop)

    def _note_outage(self, why: str) -> None:
        """Say what is lost, what still runs, how long it is waited for and what helps; or its return."""
        who = f"{self.authority} at {self.where}"
        driver = self._driver
        if not why:
            moved = self.where != self._lost_from
            console.notice(
                f"{self.authority} is at {self.where} now" if moved else f"{who} is back"
            )
        elif not self._ending and driver is not None:
            silent_s, left_s = driver.session.silence(time.monotonic())
            if driver.outage_noted:
                console.notice(f"still without {who} ({why}): this node ends in {left_s:.0f} s")
                return
            self._lost_from = self.where
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
            console.notice(
                f"lost {who}, last heard of at {since} ({why}); {self._what_runs(driver)}"
            )
            advice = f"; {self.advice}" if self.advice else ""
            runs = driver.session.status.phase is NodePhase.RUNNING
            console.notice(
                f"this node waits for it for {left_s:.0f} s more (coordinator_timeout="
                f"{self._timeouts.away_s:g}), then {'stops its workers and ' * runs}ends{advice}"
            )

    def _what_runs(self, driver: SessionDriver) -> str:
        status, stop_at = driver.session.status, driver.session.stop_at
        if status.phase is NodePhase.SUCCEEDED:
            return "this node's workers are done"
        if status.phase is not NodePhase.RUNNING:
            return "no workers run here"
        workers = f"the workers of generation {status.generation}"
        if not self._timeouts.needs_answers or stop_at is None:
            return f"{workers} run on"
        left_s = max(0.0, stop_at - time.monotonic())
        return f"{workers} are stopped unless it is back within {left_s:.1f} s (on_lost=stop)"
