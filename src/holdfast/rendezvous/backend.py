"""A job over any compare-and-set backend: `RendezvousBackend`, and the handler that works on one.

Derive your own backend from `RendezvousBackend`. Its token is the fence: a write names the state it
was made from, and is refused if another node wrote since; so nodes that never talk to each other
agree on one history. All decisions are in `core.shared_state`; here are the threads around it.

A backend may be anybody's and may block for ever, in code that no signal interrupts. So one thread
does nothing but call it, and another wakes the machine when a deadline has come, also while the
first one hangs. Nothing that came from the backend is ever executed.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import console
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.job_settings import JobSettings
from holdfast.core.machine import TICK
from holdfast.core.protocol import Failure, NodeInfo, NodePhase, NodeRole, View
from holdfast.core.session import (
    DeliverView,
    GiveUp,
    PortsChanged,
    Rejoined,
    RequestMade,
    StatusChanged,
)
from holdfast.core.shared_state import (
    NO_ANSWER,
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
from holdfast.errors import UsageError
from holdfast.membership.interface import ControlAccess, JoinRefused, News, draw_incarnation
from holdfast.membership.loop_heartbeat import LoopMonitor
from holdfast.membership.mailbox import Mailbox
from holdfast.membership.session_driver import status_change
from holdfast.net.agent_port import (
    OFF,
    ON,
    ControlCredentials,
    explicit_token,
    open_control,
)
from holdfast.net.listening import address_of
from holdfast.rendezvous.config import RendezvousSettings, RendezvousTimeout
from holdfast.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.polled import PolledHandler
from holdfast.store.prefix_store import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.protocol import ControlPort, Request
    from holdfast.core.rounds import Job
    from holdfast.membership.interface import Membership
    from holdfast.rendezvous.config import RendezvousParameters
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary

AWAY_S = 60.0
"""How long a node goes on while the backend cannot be reached."""
ABSENT_S = 60.0
"""How long a round waits for a member that lives but does not come. Workers have 30 s to stop."""
THREAD_END_S = 0.5
"""How long `close` waits for the thread at the backend, which may hang."""

_local_ids = itertools.count()

Token = Any
"""Names one state that was stored; only the backend that gave it knows what it is."""


class RendezvousBackend(ABC):
    """Keeps the state of one job where all of its nodes can reach it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the backend, as it is asked for by `--rdzv-backend`."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without one, be the first to store any.

        Returns what is stored after the call, its token, and whether that is the new state: if
        another node was faster it is the other's. None if nothing is stored at all, or if that is
        not known: what is stored is then read.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """


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
        """Return how clients reach the agents, from the shared state."""
        return self._membership.contacts()


class BackendMembership:
    """One node's membership in a job over a backend, from `start` until `close`."""

    hosting = False  # No other node depends on this process.
    presence_fd = -1

    def __init__(
        self,
        backend: RendezvousBackend,
        *,
        where: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        store: Any,
        timeouts: Timeouts,
        access: ControlCredentials | None = None,
        control: str = OFF,
    ) -> None:
        self.run_id = run_id
        self._access = access or ControlCredentials(run_id=run_id)
        self.control = BackendControl(self)
        port = self.control.port = open_control(info.address, self._access, control)
        self.view: View | None = None
        self.error: RendezvousError | None = None
        """What the backend raised last."""
        self._where = where
        self._backend = backend
        self._store = store
        self._incarnation = info.incarnation
        self._session = SharedStateSession(
            time.monotonic(),
            run_id=run_id,
            info=info,
            settings=settings,
            timeouts=timeouts,
            draw=random.random,
            fence_floor=int(time.time() * 1000),  # Where the state is lost and nobody remembers.
            control=port.port if port is not None else None,
        )
        self._mailbox = Mailbox()
        self.heartbeat = self._mailbox.heartbeat
        self._monitor = LoopMonitor(time.monotonic(), self._mailbox, timeouts.lost_after_s)
        self._changed = threading.Condition()  # Guards the session and all below.
        self._request: tuple[ReadState | WriteState, str] | None = None
        self._renew: Callable[[float | None], None] | None = None
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{info.node}", daemon=True)
            for target, name in (
                (self._call_backend, "holdfast-backend"),
                (self._watch_time, "holdfast-rendezvous"),
            )
        ]

    # From start to end.

    def start(self) -> None:
        """Begin to read; the node is not in the job before it reports something."""
        self._mailbox.open()
        for thread in self._threads:
            thread.start()
        self._feed(RefreshRequested())

    def leave(self, limit_s: float) -> bool:
        """Report that this node leaves; return whether that is stored, or does not matter any more.

        Waits no longer than `limit_s`, and not at all if the backend was never reached, or is
        given up.
        """
        with self._changed:
            session = self._session
            if self._is_closed or self.is_unreached or session.given_up:
                return False
            self._feed(StatusChanged(NodePhase.LEAVING, session.status.generation))
            seq = session.status.seq
            return self._changed.wait_for(lambda: self._is_out(seq), limit_s)

    def close(self) -> None:
        """End the threads and release the descriptor; may be called more than once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(THREAD_END_S)
        self._mailbox.close()
        if self.control.port is not None:
            self.control.port.close()

    # For the agent.

    @property
    def where(self) -> str:
        """The endpoint, as a user writes it."""
        return self._where

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `take`."""
        return self._mailbox.fileno()

    def take(self) -> list[News]:
        """Return what arrived since the last call."""
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
        """Report what this node does now, to all nodes."""
        self._feed(status_change(phase, generation, failure, report, clear), cause)

    def guard(self, renew: Callable[[float | None], None]) -> None:
        """Have `renew` called with the time at which the workers must be gone."""
        with self._changed:
            self._renew = renew
            renew(self._session.stop_at)

    def rejoin(self, *, cause: str = "") -> int:
        """Begin anew as another incarnation, after this one was fenced; return its number."""
        incarnation = draw_incarnation()
        with self._changed:
            self._incarnation = incarnation
            self._mailbox.discard_view()  # It was for the one before.
            self.view = None
            self._feed(Rejoined(incarnation), cause)
        return incarnation

    def request(self, request: Request) -> None:
        """Ask for something; the answer is in a view."""
        self._feed(RequestMade(request))

    def summary(self) -> JobSummary | None:
        """Return the state of the job as it was last read."""
        from holdfast.wire.job_summary import summary_of

        with self._changed:
            rounds = self._session.rounds
            return summary_of(rounds) if rounds is not None else None

    def contacts(self) -> Contacts:
        """Return how people reach the agents, as these have stored it."""
        with self._changed:
            rounds = self._session.rounds
            return self._access.contacts(ports_of(rounds.job) if rounds is not None else ())

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        """Have the next status say that this node holds these ports for the workers' store."""
        self._feed(PortsChanged(ports))

    @property
    def is_unreached(self) -> bool:
        """Whether the backend failed and never answered before."""
        with self._changed:  # So that `error` is that of the problem.
            return bool(self._session.problem) and not self._session.ever_read

    def problem(self) -> str:
        """Return what is wrong with the backend and since when, or nothing."""
        with self._changed:
            session = self._session
            if session.ever_read and not session.problem:
                return ""
            away_s = session.away_s(time.monotonic())
            why = session.problem or NO_ANSWER
            return f"no contact with {self.where} for {away_s:.1f} s: {why}"

    def store(self, scope: str) -> PrefixStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        return PrefixStore(f"torch.rendezvous.{self.run_id}.{scope}", self._store)

    def refresh(self, limit_s: float) -> bool:
        """Read the state now; return whether the job is over.

        Raises what keeps the backend from answering, or `RendezvousTimeoutError`.
        """
        with self._changed:
            session = self._session
            wanted = session.reads_begun + 1  # One that is under way may show what was before.
            self._feed(RefreshRequested())
            self._changed.wait_for(
                lambda: session.reads >= wanted or self._is_closed or self.is_unreached, limit_s
            )
            if session.reads >= wanted:
                return session.closed
            if session.problem and self.error is not None:
                raise self.error
            raise RendezvousTimeoutError(
                f"the rendezvous backend {self._backend.name!r} did not answer in {limit_s:g} s"
            )

    # The machine, in any thread.

    def _feed(self, event: SessionEvent, cause: str = "") -> None:
        with self._changed:
            if self._is_closed:
                return
            had_problem = bool(self._session.problem)
            try:
                effects = self._session.handle(time.monotonic(), event, cause)
            except Exception as error:  # noqa: BLE001 (a thread must not end without a word)
                what = f"{type(error).__name__}: {error}"
                self._mailbox.put(CoordinatorLost(f"this side of the connection is broken: {what}"))
                self._is_closed = True
                effects = []
            problem = self._session.problem
            if problem and isinstance(event, StateRead):
                hint = "another program or version uses the same place; choose another --rdzv-id"
                if event.state is None:
                    hint = "get_state must return what set_state was given, from all nodes"
                self.error = RendezvousStateError(
                    f"{self._backend.name!r}, job {self.run_id!r}: {problem}", hint=hint
                )
            if problem and not had_problem and not any(type(e) is RefuseJoin for e in effects):
                console.warning(f"{problem}; trying again")
            for effect in effects:
                self._perform(effect)
            if self._renew is not None:
                self._renew(self._session.stop_at)
            self._changed.notify_all()

    def _perform(self, effect: SessionEffect) -> None:
        match effect:
            case ReadState() | WriteState():
                self._request = (effect, self._session.story.last)
            case DeliverView(view):
                if view.incarnation == self._incarnation:
                    self.view = view
                    self._mailbox.put(view)
            case GiveUp(away_s, why):
                self._mailbox.put(CoordinatorLost(why, away_s))
            case RefuseJoin(why):
                self._mailbox.put(JoinRefused(str(self.error or why)))

    def _is_out(self, seq: int) -> bool:
        session, view = self._session, self._session.view
        if view is not None and view.role in (NodeRole.FENCED, NodeRole.REFUSED, NodeRole.CLOSED):
            return True
        return session.stored_seq >= seq

    # The threads.

    def _watch_time(self) -> None:
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                changed = self._monitor.check(now)
                if changed is not None:
                    self._feed(changed)
                deadline = self._session.next_deadline(now)
                if deadline is not None and deadline <= now:
                    self._feed(TICK)
                else:
                    wait_s = self._monitor.step_s
                    self._changed.wait(wait_s if deadline is None else min(wait_s, deadline - now))

    def _call_backend(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._request is not None or self._is_closed)
                if self._is_closed:
                    return
                assert self._request is not None
                request, cause = self._request
                self._request = None
            answer = self._call(request)
            self._feed(answer, cause)

    def _call(self, request: ReadState | WriteState) -> SessionEvent:
        try:
            if isinstance(request, ReadState):
                found = self._checked(self._backend.get_state(), 2)
                return StateRead(*found) if found is not None else StateRead(None, None)
            answer = self._checked(self._backend.set_state(request.state, request.token), 3)
            return StateWritten() if answer is not None and answer[2] else WriteConflict()
        except RendezvousError as problem:
            self.error = problem
        except Exception as problem:  # noqa: BLE001 (a backend may be anybody's)
            what = " ".join(f"{type(problem).__name__}: {problem}".split())
            self.error = RendezvousConnectionError(
                f"the rendezvous backend {self._backend.name!r} failed: {what}"
            )
            self.error.__cause__ = problem
        is_invalid = isinstance(self.error, RendezvousStateError)
        return CallFailed(self.error.message, invalid=is_invalid)

    def _checked(self, answer: Any, length: int) -> Any:
        if answer is None:
            return None
        if isinstance(answer, tuple) and len(answer) == length and isinstance(answer[0], bytes):
            return answer
        raise RendezvousStateError(
            f"the rendezvous backend {self._backend.name!r} returned {type(answer).__name__} where "
            f"None or a tuple of {length} that begins with bytes was due"
        )


class DynamicRendezvousHandler(PolledHandler):
    """A node's rendezvous over a backend; see `from_backend` and `create_handler`.

    What differs from TorchElastic's class of this name: a round that lost a member, or that a
    member asks to be started again, makes `num_nodes_waiting` positive on all the others, and so
    does being put out while cut off; the store and the workers' meeting point are new with every
    generation; and `shutdown` leaves without ending the job for the others, which `set_closed`
    alone does.
    """

    def __init__(
        self,
        node: NodeInfo,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: RendezvousBackend,
        *,
        job_settings: JobSettings | None = None,
        away_s: float = AWAY_S,
        stops_alone: bool = False,
        endpoint: str = "",
        worker_store: bool = False,
        store_address: str = "",
        control: str = ON,
    ) -> None:
        check_settings(settings)
        timeout = settings.timeout
        super().__init__(
            backend=backend_name,
            run_id=settings.run_id,
            node_id=node.node,
            join_timeout_s=timeout.join.total_seconds(),
            worker_store=worker_store,
            store_address="" if worker_store else store_address,
            store_access=(job_settings or job_settings_of(settings)).store.value,
        )
        self.close_timeout_s = self.leave_timeout_s = timeout.close.total_seconds()
        self._node = node
        self._settings = settings
        self._backend = state_holder
        self._store = store
        self._job_settings = job_settings or job_settings_of(settings)
        self._away_s = away_s
        self._stops_alone = stops_alone
        self._control = control
        self._endpoint = endpoint or f"the rendezvous backend {backend_name!r}"
        self._has_joined = self._is_shut = False
        self._release: weakref.finalize[..., DynamicRendezvousHandler] | None = None

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """Return a handler on a backend and a store of the caller's.

        The store is what agents exchange their ranks through; the backend may use the same.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        node, address = this_node(local_addr), address_of(local_addr or "")
        return cls(node, settings, backend.name, store, backend, store_address=address)

    @property
    def settings(self) -> RendezvousSettings:
        """What the handler was made with."""
        return self._settings

    @property
    def endpoint(self) -> str:
        """The endpoint, as a user writes it."""
        return self._endpoint

    def scope_of(self, view: View) -> str:
        """Return a scope that no round of another job of this id had, in a store that outlives it."""
        return f"{view.generation}.{view.round}.{view.round_key:x}"

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> Membership:
        """Join the job as a node of this shape; called again, return the same connection."""
        connection = super().enter(
            role=role, local_world_size=local_world_size, max_restarts=max_restarts
        )
        if not self._has_joined:
            self._has_joined = True
            connection.report(NodePhase.READY, -1)
        return connection

    def is_closed(self) -> bool:
        """Return whether the job is over for all nodes, by reading the state now."""
        limit_s = self._settings.timeout.heartbeat.total_seconds()
        connection = self._connection
        if isinstance(connection, BackendMembership):
            return connection.refresh(limit_s)
        # To look is not to join: what kind of node this is, only `enter` will say.
        connection = self._connect(self._node, self._job_settings)
        try:
            return connection.refresh(limit_s)
        finally:
            connection.close()

    def set_closed(self) -> None:
        """End the job for all nodes, and for all that would come later; nothing after `shutdown`."""
        if not self._is_shut:
            super().set_closed()

    def shutdown(self) -> bool:
        """Leave the job and release what the handler holds; False if that could not be stored."""
        self._is_shut = True
        super().shutdown()
        if self._release is not None:
            self._release.detach()
        return self._has_left

    def _make_connection(
        self,
        *,
        role: str,
        local_world_size: int,
        max_restarts: int,
        ports: tuple[int, ...],
        store_key: bytes,
    ) -> Membership:
        replace = msgspec.structs.replace
        connection = self._connect(
            replace(
                self._node,
                role=role,
                local_world_size=local_world_size,
                ports=ports,
                store_key=store_key,
            ),
            self._job_settings._replace(max_restarts=max_restarts),
            control=OFF if self._is_polled else self._control,
        )
        # A handler that is dropped without a `shutdown` must not keep its node alive for ever.
        self._release = weakref.finalize(self, _close_all, connection, self._worker_store)
        return connection

    def _connect(
        self, info: NodeInfo, settings: JobSettings, *, control: str = OFF
    ) -> BackendMembership:
        """Return a connection that is started."""
        if self._is_shut:
            raise RendezvousClosedError("the rendezvous handler was shut down")
        interval_s = self._settings.keep_alive_interval.total_seconds()
        connection = BackendMembership(
            self._backend,
            where=self.endpoint,
            run_id=self.get_run_id(),
            info=msgspec.structs.replace(info, incarnation=draw_incarnation()),
            settings=settings,
            store=self._store,
            timeouts=Timeouts(
                interval_s=interval_s,
                lost_after_s=interval_s * self._settings.keep_alive_max_attempt,
                away_s=self._away_s,
                needs_answers=self._stops_alone and not self._is_polled,
                absent_s=min(ABSENT_S, self.join_timeout_s / 2) if self._is_polled else None,
            ),
            access=None
            if control == OFF
            else ControlCredentials(run_id=self.get_run_id(), token=explicit_token(os.environ)),
            control=control,
        )
        connection.start()
        return connection

    def _enter_polled(self) -> Membership:
        self._is_polled = self._has_joined = True  # The caller reports what it wants.
        return self.enter()

    def _take(self, connection: Membership) -> None:
        super()._take(connection)
        # A backend that was never reached is not waited for: it is not there, or not that kind.
        if isinstance(connection, BackendMembership) and connection.is_unreached:
            assert connection.error is not None
            raise connection.error

    def _refusal(self, why: str) -> RendezvousError:
        connection = self._connection
        if isinstance(connection, BackendMembership) and connection.error is not None:
            return connection.error
        return super()._refusal(why)

    @property
    def _authority_at(self) -> str:
        return self.endpoint


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Return a handler on a backend, with the settings of `--rdzv-conf`."""
    from holdfast.rendezvous import config

    conf = config.parse(params, shares_state=True)
    settings = RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        conf.timeouts(),
        timedelta(seconds=conf.keep_alive_interval),
        conf.keep_alive_max_attempt,
    )
    check_settings(settings)
    return DynamicRendezvousHandler(
        this_node(
            params.local_addr, node_id=conf.node_id, label=conf.label, yields=bool(conf.replace)
        ),
        settings,
        backend.name,
        store,
        backend,
        job_settings=conf.job,
        away_s=conf.coordinator_timeout,
        stops_alone=conf.on_lost == "stop",
        endpoint=params.endpoint,
        worker_store=conf.worker_store,
        store_address=address_of(params.local_addr or ""),
        control=conf.control,
    )


def this_node(
    local_addr: str | None, *, node_id: str = "", label: str = "", yields: bool = False
) -> NodeInfo:
    """Describe this node. Without an address it is known by the name its host gives itself."""
    host = os.uname().nodename
    address = local_addr or host
    if not local_addr:
        console.info(f"other nodes know this one as {host}; --local-addr gives it an address")
    name = node_id or f"{address}_{os.getpid()}_{next(_local_ids)}"
    return NodeInfo(
        node=name, incarnation=0, host=host, label=label, address=address, yields=yields
    )


def job_settings_of(settings: RendezvousSettings) -> JobSettings:
    """Return what all nodes of the job must agree on. `enter` adds the number of restarts."""
    return JobSettings(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        settle_s=settings.timeout.last_call.total_seconds(),
    )


def check_settings(settings: RendezvousSettings) -> None:
    """Refuse what no job can be run with."""
    if not settings.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    if settings.min_nodes < 1 or settings.max_nodes < settings.min_nodes:
        raise UsageError(
            f"--nnodes: {settings.min_nodes}:{settings.max_nodes} is not a range of nodes; "
            "accepted: MIN:MAX with MIN from 1 and MAX not below it"
        )
    if settings.keep_alive_interval <= timedelta(0) or settings.keep_alive_max_attempt < 1:
        raise UsageError(
            "--rdzv-conf: keep_alive_interval must be above 0 and keep_alive_max_attempt from 1"
        )


def ports_of(job: Job) -> list[tuple[str, str, ControlPort | None]]:
    """Return node, address and control port of each agent of a job."""
    return [(name, one.info.address, one.control) for name, one in job.nodes.items()]


def _close_all(connection: BackendMembership, worker_store: Any) -> None:
    connection.close()
    if worker_store is not None:
        worker_store.close()
