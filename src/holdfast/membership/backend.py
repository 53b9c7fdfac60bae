"""The membership in a job on a compare-and-set backend: `--rdzv-backend file`, and any `RendezvousBackend`.

Each write names the state that it replaces. If another node has written since, the backend rejects the write, so
nodes that never communicate agree on one history. No other node depends on this process.

`BackendDriver` performs `core.shared_state`. A user may supply the backend, and its calls may block forever, in
code that no signal interrupts. So a separate thread calls it, and the loop handles deadlines while a call hangs.
Nothing that a backend returns is ever executed.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from holdfast import console
from holdfast.core.machine import TICK
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.session import DeliverView, GiveUp, StatusChanged
from holdfast.core.shared_state import (
    CallFailed,
    ReadState,
    RefreshRequested,
    RefuseJoin,
    SessionEffect,
    SessionEvent,
    SharedStateSession,
    StateRead,
    StateWritten,
    Timeouts,
    WriteConflict,
    WriteState,
)
from holdfast.core.supervision import CoordinatorLost, ViewReceived
from holdfast.membership.interface import ControlAccess, JoinRefused, MembershipEvent
from holdfast.membership.loop_heartbeat import LoopMonitor
from holdfast.membership.threaded import ThreadedMembership
from holdfast.net.agent_port import OFF, ControlCredentials, open_agent_port
from holdfast.net.deadline_timer import DeadlineTimer
from holdfast.store.prefix_store import PrefixStore
from holdfast.wire.messages import summary_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import ControlPort, NodeInfo, Request, View
    from holdfast.core.rounds import Job
    from holdfast.membership.interface import RenewDeadline
    from holdfast.wire.messages import Contacts, JobSummary

END_S = 0.5
"""How long `join` waits for the thread that calls the backend, which may hang."""
OTHER_STATE = "choose another --rdzv-id, or remove the state"
LOST_STATE = "get_state must return the state that set_state stored, on all nodes"

Token = Any
"""Identifies one stored state; only the backend that returned it can interpret it."""


class BackendControl(ControlAccess):
    """Control of a job through the state that its agents share."""

    def __init__(self, membership: BackendMembership) -> None:
        self._membership = membership

    def request(self, request: Request) -> None:
        """Submit an operator's request in this node's status."""
        self._membership.request(request)

    def summary(self) -> JobSummary | None:
        """Return the state of the job as this node last read it."""
        return self._membership.summary()

    def contacts(self) -> Contacts:
        """Return the contacts of the agents, from the shared state."""
        return self._membership.contacts()


class BackendMembership(ThreadedMembership):
    """One node's membership in a job on a backend; it joins with its first report."""

    authority = "the backend"
    _driver: BackendDriver | None

    def __init__(
        self,
        backend: StateStore,
        *,
        where: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: Timeouts,
        store: Any,
        credentials: ControlCredentials | None = None,
        control: str = OFF,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings)
        self.backend, self.credentials = backend, credentials or ControlCredentials(run_id=run_id)
        self.control = BackendControl(self)
        self._control_setting = control
        self._where, self._timeouts, self._store = where, timeouts, store

    @property
    def where(self) -> str:
        return self._where

    @property
    def peer(self) -> str:
        return self._where

    def store(self, scope: str) -> PrefixStore:
        return PrefixStore(f"torch.rendezvous.{self.run_id}.{scope}", self._store)

    def close(self, drain_s: float = 0.0) -> None:
        super().close(drain_s)
        if self._driver is not None:
            self._driver.join()

    # For the handler.

    @property
    def failure(self) -> BackendFailed | None:
        """The last failure of the backend."""
        return self._driver.failure if self._driver is not None else None

    @property
    def is_unreached(self) -> bool:
        """Whether the backend failed and has never responded."""
        return self._driver is not None and self._driver.is_unreached

    def refresh(self, limit_s: float) -> bool:
        """Read the state now; return whether the job has ended.

        Raises `BackendFailed`, or `TimeoutError` past the limit.
        """
        assert self._driver is not None
        return self._run_in_loop(self._driver.refresh(limit_s), limit_s)

    # For `BackendControl`.

    def summary(self) -> JobSummary | None:
        """Return the state of the job as this node last read it."""

        async def read() -> JobSummary | None:
            rounds = self._driver.session.rounds if self._driver is not None else None
            return summary_of(rounds) if rounds is not None else None

        return self._run_in_loop(read(), 0.0)

    def contacts(self) -> Contacts:
        """Return the contacts of the agents, from the shared state."""

        async def read() -> Contacts:
            rounds = self._driver.session.rounds if self._driver is not None else None
            return self.credentials.contacts(ports_of(rounds.job) if rounds is not None else ())

        return self._run_in_loop(read(), 0.0)

    # In the thread.

    async def _open_driver(self) -> BackendDriver:
        now = asyncio.get_running_loop().time()
        port = self.control.port = open_agent_port(
            self._info.address,
            self.credentials,
            control=self._control_setting,
            shows_presence=False,
        )
        session = SharedStateSession(
            now,
            run_id=self.run_id,
            info=self._info,
            settings=self.settings,
            timeouts=self._timeouts,
            draw=random.random,
            # From the clock, so that fences still grow if the state is lost on all nodes.
            fence_floor=int(time.time() * 1000),
            control=port.control if port is not None else None,
        )
        monitor = LoopMonitor(now, self._mailbox, self._timeouts.lost_after_s)
        return BackendDriver(session, self.backend, self._mailbox.put, monitor)

    async def _close_driver(self, drain_s: float) -> None:
        del drain_s
        if self._driver is not None:
            await self._driver.close()
        if self.control.port is not None:
            self.control.port.close()


def ports_of(job: Job) -> list[tuple[str, str, ControlPort | None]]:
    """Return node, address and control port of each agent of a job."""
    return [(name, one.info.address, one.control) for name, one in job.nodes.items()]


class BackendFailed(Exception):
    """A call of the backend failed; the cause is the exception that the backend raised, if any."""

    def __init__(self, message: str, *, invalid: bool = False, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        self.invalid = invalid
        """Whether the backend responded, with a state that this node cannot use."""


class StateStore(Protocol):
    """Stores the state of one job for all of its nodes; a call may block forever.

    A call raises only `BackendFailed`.
    """

    name: str

    def read(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none."""

    def write(self, state: bytes, token: Token | None) -> bool:
        """Replace the state that `token` names; return whether that succeeded."""


class BackendDriver:
    """Performs the session of one node, from `start` until `close`; belongs to one loop.

    `deliver` receives each newer view, `CoordinatorLost` when the backend fails past the limit, and
    `JoinRefused` when retrying cannot help.
    """

    def __init__(
        self,
        session: SharedStateSession,
        store: StateStore,
        deliver: Callable[[MembershipEvent], None],
        monitor: LoopMonitor,
    ) -> None:
        self.session = session
        self.failure: BackendFailed | None = None
        """The last failure of the backend."""
        self.is_refused = False
        self._store = store
        self._deliver = deliver
        self._monitor = monitor
        self._renew: RenewDeadline | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._loop, self._tick)
        self._changed = asyncio.Event()
        self._closed = False
        self._requests: SimpleQueue[tuple[ReadState | WriteState, str] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve_requests, name="holdfast-backend", daemon=True
        )

    @property
    def view(self) -> View | None:
        """The newest view; any thread may read it."""
        return self.session.view

    @property
    def is_stuck(self) -> bool:
        """Whether the agent's loop is stuck."""
        return bool(self.session.status.stuck)

    @property
    def is_unreached(self) -> bool:
        """Whether the backend failed and has never responded; any thread may read it."""
        return bool(self.session.problem) and not self.session.ever_read

    def problem(self, peer: str) -> str:
        """Return the problem with the backend and its duration, or an empty string; any thread may call."""
        session = self.session
        if session.ever_read and not session.problem:
            return ""
        unreachable_s = session.unreachable_s(self._loop.time())
        why = f": {session.problem}" if session.problem else ""
        return f"no response from {peer} for {unreachable_s:.1f} s{why}"

    def start(self) -> None:
        self._thread.start()
        self.handle(RefreshRequested())
        self._tick()

    async def leave(self, limit_s: float) -> bool:
        """Report that the node leaves; return whether that is stored or no longer needed.

        Returns immediately if the backend was never reached, or the session has given up.
        """
        session = self.session
        if self._closed or self.is_unreached or session.given_up:
            return False
        self.handle(StatusChanged(NodePhase.LEAVING, session.status.generation))
        seq = session.status.seq
        return await self._wait_until(lambda: self._has_left(seq), limit_s)

    async def refresh(self, limit_s: float) -> bool:
        """Read the state now; return whether the job has ended.

        Raises `BackendFailed`, or `TimeoutError` past the limit.
        """
        session = self.session
        wanted = session.reads_begun + 1  # A read in progress may return an earlier state.
        self.handle(RefreshRequested())
        await self._wait_until(lambda: session.reads >= wanted or self.is_unreached, limit_s)
        if session.reads >= wanted:
            return session.closed
        if session.problem and self.failure is not None:
            raise self.failure
        raise TimeoutError

    async def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        self._requests.put(None)
        self._changed.set()

    def join(self) -> None:
        """Wait up to `END_S` for the thread that calls the backend. Call this after `close`."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def watch_stop_deadline(self, renew: RenewDeadline) -> None:
        """Call `renew` with the deadline for the workers' exit, now and when it changes."""
        self._renew = renew
        renew(self.session.stop_at, 0.0)

    # The machine.

    def handle(self, event: SessionEvent, cause: str = "") -> None:
        """Give the session one event and perform its effects; does nothing after `close`."""
        if self._closed:
            return
        session = self.session
        had_problem = bool(session.problem)
        effects = session.handle(self._loop.time(), event, cause)
        problem = session.problem
        if problem and isinstance(event, StateRead):
            hint = LOST_STATE if event.state is None else OTHER_STATE
            self.failure = BackendFailed(problem, invalid=True, hint=hint)
        if problem and not had_problem and not any(type(one) is RefuseJoin for one in effects):
            console.warning(f"{problem}; retrying")
        for effect in effects:
            self._perform(effect)
        if self._renew is not None:
            self._renew(session.stop_at, 0.0)
        self._changed.set()
        self._schedule()

    def _perform(self, effect: SessionEffect) -> None:
        match effect:
            case ReadState() | WriteState():
                self._requests.put((effect, self.session.story.last))
            case DeliverView(view):
                self._deliver(ViewReceived(view))
            case GiveUp(unreachable_s, why):
                self._deliver(CoordinatorLost(why, unreachable_s))
            case RefuseJoin(why):
                self.is_refused = True
                self._deliver(JoinRefused(self.failure.message if self.failure else why))

    def _schedule(self) -> None:
        now = self._loop.time()
        deadline = self.session.next_deadline(now)
        step_at = now + self._monitor.step_s
        self._timer.set(step_at if deadline is None else min(step_at, deadline))

    def _tick(self) -> None:
        if self._closed:
            return
        now = self._loop.time()
        changed = self._monitor.check(now)
        if changed is not None:
            self.handle(changed)
        deadline = self.session.next_deadline(now)
        if deadline is not None and deadline <= now:
            self.handle(TICK)
        self._schedule()

    def _has_left(self, seq: int) -> bool:
        session, view = self.session, self.session.view
        if view is not None and view.role in (NodeRole.FENCED, NodeRole.REFUSED, NodeRole.CLOSED):
            return True
        return session.stored_seq >= seq

    async def _wait_until(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                while not is_true() and not self._closed:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return is_true()

    # The thread that calls the backend.

    def _serve_requests(self) -> None:
        while (item := self._requests.get()) is not None:
            request, cause = item
            event: SessionEvent
            try:
                if isinstance(request, ReadState):
                    found = self._store.read()
                    event = StateRead(*found) if found is not None else StateRead(None, None)
                else:
                    is_stored = self._store.write(request.state, request.token)
                    event = StateWritten() if is_stored else WriteConflict()
            except BackendFailed as failure:
                self.failure = failure
                event = CallFailed(failure.message, invalid=failure.invalid)
            try:
                self._loop.call_soon_threadsafe(self.handle, event, cause)
            except RuntimeError:
                return  # The loop has ended.
