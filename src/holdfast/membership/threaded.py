"""A membership with a thread: the agent calls it, and the thread's loop drives the node's session."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from holdfast import console
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.job_settings import JobSettings
from holdfast.core.protocol import Failure, NodeInfo, NodePhase, Status, View
from holdfast.core.session import PortsChanged, Rejoined, RequestMade, Session, StatusChanged
from holdfast.errors import UsageError
from holdfast.membership.interface import News, draw_incarnation
from holdfast.membership.loop_heartbeat import LoopMonitor
from holdfast.membership.mailbox import Mailbox
from holdfast.membership.outage_notices import OutageNotices
from holdfast.membership.session_driver import SessionDriver, status_change
from holdfast.net.loop_thread import LoopThread
from holdfast.wire.messages import check
from holdfast.wire.wire_errors import BadMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.core.protocol import Request
    from holdfast.core.session import SessionTimeouts
    from holdfast.membership.interface import ControlAccess
    from holdfast.membership.session_driver import Connector
    from holdfast.store.store_interface import RoundStore

START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator whose job has ended waits until its nodes have received that."""
SLACK_S = 5.0
REMIND_S = 60.0
"""How often an agent repeats why it has received nothing so far. In the output of a job that does not start, the
reason is then near the end."""

T = TypeVar("T")

NodeEvent = StatusChanged | Rejoined | PortsChanged | RequestMade
"""What the agent reports to its session."""


class Driver(Protocol):
    """Performs the session of one node in the thread's loop."""

    @property
    def view(self) -> View | None:
        """The newest view of any incarnation; any thread may read it."""

    @property
    def is_refused(self) -> bool:
        """Whether it delivered `JoinRefused` and stopped."""

    @property
    def is_stuck(self) -> bool:
        """Whether the agent's loop is stuck."""

    def start(self) -> None: ...

    def handle(self, event: NodeEvent, cause: str = "") -> None: ...

    def guard(self, renew: Callable[[float | None], None]) -> None:
        """Call `renew` with the deadline for the workers' exit, now and when it changes."""

    def problem(self, peer: str) -> str:
        """Return the problem with the connection to `peer`, or an empty text; any thread may call."""

    async def leave(self, limit_s: float) -> bool:
        """Report that the node leaves; return whether the report is known to have arrived."""

    async def close(self) -> None: ...


class ThreadedMembership:
    """A `Membership` with a thread. A subclass opens and closes the resources of its driver.

    If the thread fails unexpectedly, `take` returns a `CoordinatorLost`.
    """

    authority = "the coordinator"
    """The name in messages for the side that runs the job's rounds."""
    hosting = False
    control: ControlAccess

    def __init__(self, *, run_id: str, info: NodeInfo, settings: JobSettings) -> None:
        self.run_id = run_id
        self._info, self._settings = info, settings
        self._mailbox = Mailbox(info.incarnation)
        self.heartbeat = self._mailbox.heartbeat
        self._thread: LoopThread | None = None
        self._driver: Driver | None = None
        self._closed = False
        self._ending = False

    # Subclasses provide these.

    @property
    def presence_fd(self) -> int:
        return -1

    @property
    def where(self) -> str:
        raise NotImplementedError

    def store(self, scope: str) -> RoundStore:
        raise NotImplementedError

    async def _open(self) -> Driver:
        """Open the driver's resources, in the thread; return the driver."""
        raise NotImplementedError

    async def _shut(self, drain_s: float) -> None:
        """Close the driver and its resources, in the thread."""
        raise NotImplementedError

    # From start to end.

    def start(self) -> None:
        """Connect; raise `UsageError` or `EnvironmentProblem` for invalid settings.

        It is no error if the coordinator does not run yet.
        """
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self._settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None
        self._mailbox.open()
        self._thread = LoopThread("holdfast-membership", self._report_fault)
        try:
            self._thread.start()
            self._thread.run(self._start(), START_S)
        except BaseException:
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        self._ending = True
        if self._driver is None:
            return False
        try:
            return self._ask(self._driver.leave(limit_s), limit_s)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._ask(self._shut(drain_s), drain_s)
        except Exception as error:  # noqa: BLE001 (closing must not fail)
            console.debug(f"closing the connection to {self.peer} failed: {error!r}")
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._mailbox.close()

    # For the agent.

    @property
    def peer(self) -> str:
        """The name of the other side, for messages."""
        return f"{self.authority} at {self.where}"

    @property
    def view(self) -> View | None:
        return self._mailbox.view

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

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        self._handle(PortsChanged(ports))

    def request(self, request: Request) -> None:
        """Submit an operator's request to the job."""
        self._handle(RequestMade(request))

    def guard(self, renew: Callable[[float | None], None]) -> None:
        driver = self._driver
        if driver is None:
            return

        def renew_unless_hosting(at: float | None) -> None:
            # If this process hosts the coordinator and is stopped, no node can be replaced meanwhile.
            is_safe = self.hosting and not driver.is_stuck
            renew(None if is_safe else at)

        driver.guard(renew_unless_hosting)

    def rejoin(self, *, cause: str = "") -> int:
        incarnation = draw_incarnation()
        self._mailbox.begin_incarnation(incarnation)
        self._handle(Rejoined(incarnation), cause)
        return incarnation

    def problem(self) -> str:
        if self._driver is None:
            return f"not connected to {self.peer}"
        return self._driver.problem(self.peer)

    def _handle(self, event: NodeEvent, cause: str = "") -> None:
        if self._driver is not None:
            self._post(self._driver.handle, event, cause)

    def _post(self, call: Callable[..., object], *args: Any) -> bool:
        """Schedule a call in the thread; return False if the thread has ended."""
        return self._thread is not None and self._thread.post(call, *args)

    def _ask(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Return the result of a coroutine in the thread; the coroutine ends by the limit itself."""
        assert self._thread is not None
        return self._thread.run(work, limit_s + SLACK_S)

    # In the thread.

    async def _start(self) -> None:
        self._driver = await self._open()
        self._driver.start()
        asyncio.get_running_loop().call_later(REMIND_S, self._remind)

    def _drive(
        self, connector: Connector, timeouts: SessionTimeouts, advice: str = ""
    ) -> SessionDriver:
        """Return the driver of a session over a connector; `advice` is for messages about an outage."""
        now = asyncio.get_running_loop().time()
        session = Session(
            now,
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            timeouts=timeouts,
            draw=random.random,
        )
        notices = OutageNotices(lambda: self.peer, timeouts, advice)

        def note_outage(why: str) -> None:
            if not why:
                notices.over()
            elif not self._ending:
                notices.lost(session, why)

        monitor = LoopMonitor(now, self._mailbox, timeouts.silence_s)
        return SessionDriver(session, connector, self._mailbox.put, note_outage, monitor)

    def _report_fault(self, what: str) -> None:
        self._mailbox.put(CoordinatorLost(f"this side of the connection failed: {what}"))

    def _remind(self) -> None:
        driver = self._driver
        if driver is None or self._ending or driver.is_refused or driver.view is not None:
            return
        problem = self.problem()
        if problem:
            console.notice(f"still waiting: {problem}")
        asyncio.get_running_loop().call_later(REMIND_S, self._remind)
