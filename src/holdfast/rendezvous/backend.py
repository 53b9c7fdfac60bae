"""A job over any compare-and-set backend: `RendezvousBackend`, and the handler that works on one.

Derive your own backend from `RendezvousBackend`. Its token is the fence: a write names the state
it was made from, and is refused if another node wrote since; so nodes that never talk to each
other agree on one history. The decisions are `core.rounds`'s, the same as a coordinator's,
applied to the stored state by each node (`core.shared_state`).

A backend may be anybody's and may block for ever, in code that no signal interrupts. So only one
thread ever calls it; the agent's thread asks, and waits for answers no longer than it wants to. A
second thread measures how long the backend has failed or hung, counting only time this process
was awake for. A backend cannot push changes, so it is polled: often while a round is forming,
else about ten times a second, and more rarely the more nodes there are.

The stored state is msgpack with a mark before it. Nothing that came from the backend is ever
executed.
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
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from holdfast import console
from holdfast.coordinator.agent_connection import (
    JoinRefused,
    Mailbox,
    News,
    clip_failure,
    draw_incarnation,
)
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.liveness import AttendedClock
from holdfast.core.protocol import (
    REPORT_BYTES_MAX,
    Failure,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    View,
)
from holdfast.core.ranks import RankOrder
from holdfast.core.rounds import Job
from holdfast.core.session import CLOSED_AWAY_S
from holdfast.core.shared_state import Outlook, SharedStateNode
from holdfast.errors import UsageError
from holdfast.rendezvous import errors
from holdfast.rendezvous.config import RendezvousSettings, RendezvousTimeout
from holdfast.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.handler import (
    CoordinatedRendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.participant import ATTEND_S, Participant, PolledStanding
from holdfast.rendezvous.worker_store import PORTS, WorkerStore
from holdfast.store.prefix import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordinator.agent_connection import JobConnection
    from holdfast.rendezvous.config import RendezvousParameters


Token = Any
"""Names one state that was stored; only the backend that gave it knows what it is."""

STATE_BYTES_MAX = 4 * 1024 * 1024
"""A state larger than this is not read: about ten thousand nodes, and what TCPStore can hold."""


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
        another node was faster it is the other's. None if nothing is stored at all.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """


_local_ids = itertools.count()


def this_node(local_addr: str | None, *, node_id: str = "", label: str = "") -> NodeInfo:
    """Describe this node. Without an address it is known by the name its host gives itself."""
    host = os.uname().nodename
    address = local_addr or host
    if not local_addr:
        console.info(f"other nodes know this one as {host}; --local-addr gives it an address")
    name = node_id or f"{address}_{os.getpid()}_{next(_local_ids)}"
    return NodeInfo(node=name, incarnation=0, host=host, label=label, address=address)


def job_settings_of(
    settings: RendezvousSettings, *, spares: int = 0, order: RankOrder = RankOrder.STABLE
) -> JobSettings:
    """Return what all nodes of the job must agree on. How many restarts there are, `enter` adds."""
    return JobSettings(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        spares=spares,
        settle_s=settings.timeout.last_call.total_seconds(),
        order=order,
    )


def check_settings(settings: RendezvousSettings) -> None:
    """Refuse what no job can be run with."""
    if not settings.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    if settings.min_nodes < 1 or settings.max_nodes < settings.min_nodes:
        raise UsageError(
            f"--nnodes: {settings.min_nodes}:{settings.max_nodes} is no range of nodes; accepted: "
            "MIN:MAX with MIN from 1 and MAX not below it"
        )
    if settings.keep_alive_interval <= timedelta(0) or settings.keep_alive_max_attempt < 1:
        raise UsageError(
            "--rdzv-conf: keep_alive_interval must be above 0 and keep_alive_max_attempt from 1"
        )


MARK = b"holdfast job 1\n"
BACKOFF_S_MIN = 0.002
BACKOFF_S_MAX = 1.0

_decoder = msgspec.msgpack.Decoder(Job)
_encoder = msgspec.msgpack.Encoder()


class LostEveryRace(RendezvousTimeoutError):
    """Other nodes were faster at each attempt; the backend answered every time."""


class SharedJob:
    """The job of one run id, in a backend that others use at the same time."""

    def __init__(self, backend: RendezvousBackend, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id

    def update(
        self,
        change: Callable[[Job], bool],
        *,
        may_go_on: Callable[[], bool],
        pause: Callable[[float], object],
    ) -> Job:
        """Let `change` change the job until that is what is stored; return the job as it is then.

        `change` returns whether there is anything to store. It is called again after each lost
        race, on another copy. Raises `LostEveryRace` if each attempt was lost until
        `may_go_on` said no.
        """
        backoff = BACKOFF_S_MIN
        while True:
            stored = self._get()
            if stored is None:
                job, token = Job(run_id=self._run_id), None
            else:
                job, token = self._decode(stored[0]), stored[1]
            if not change(job):
                return job
            state = encode(job)
            if len(state) > STATE_BYTES_MAX and job.report:  # What happened is in the failure too.
                job.report = b""
                state = encode(job)
            answer = self._set(state, token)
            if answer is not None and answer[2]:
                return job
            if not may_go_on():
                raise LostEveryRace(
                    f"the state of the job {self._run_id!r} could not be written in time: other "
                    f"nodes were faster at each attempt ({self._backend.name})"
                )
            # What the loser was shown will be old after the pause, so it is read again.
            pause(random.uniform(0, backoff))  # noqa: S311 (it only spreads the attempts)
            backoff = min(BACKOFF_S_MAX, backoff * 2)

    def _get(self) -> tuple[bytes, Token] | None:
        answer = self._ask(self._backend.get_state)
        return None if answer is None else self._checked(answer, 2)

    def _set(self, state: bytes, token: Token | None) -> tuple[bytes, Token, bool] | None:
        if len(state) > STATE_BYTES_MAX:
            raise RendezvousStateError(
                f"the state of the job {self._run_id!r} has {len(state)} bytes; the limit is "
                f"{STATE_BYTES_MAX}"
            )
        answer = self._ask(lambda: self._backend.set_state(state, token))
        return None if answer is None else self._checked(answer, 3)

    def _checked(self, answer: Any, length: int) -> Any:
        if not isinstance(answer, tuple) or len(answer) != length:
            raise RendezvousStateError(
                f"the rendezvous backend {self._backend.name!r} returned {type(answer).__name__} "
                f"where a tuple of {length} or None was due"
            )
        return answer

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RendezvousError:
            raise
        except Exception as problem:
            # A backend may be anybody's; whatever it raises must not end the thread that asks.
            what = " ".join(f"{type(problem).__name__}: {problem}".split())
            raise RendezvousConnectionError(
                f"the rendezvous backend {self._backend.name!r} failed: {what}"
            ) from problem

    def _decode(self, state: bytes) -> Job:
        try:
            job = decode(state)
        except ValueError as problem:
            raise RendezvousStateError(
                f"what {self._backend.name!r} has stored for the job {self._run_id!r} cannot be "
                f"read: {problem}",
                hint="another program or version uses the same place; choose another --rdzv-id",
            ) from None
        if job.run_id != self._run_id:
            raise RendezvousStateError(
                f"{self._backend.name!r} has the job {job.run_id!r} stored where {self._run_id!r} "
                "should be"
            )
        return job


def encode(job: Job) -> bytes:
    """Return the job as bytes to store."""
    return MARK + _encoder.encode(job)


def decode(state: bytes) -> Job:
    """Return the job that was stored; raise `ValueError` in words if it is none of ours."""
    if len(state) > STATE_BYTES_MAX:
        raise ValueError(f"it has {len(state)} bytes, above the limit of {STATE_BYTES_MAX}")
    if not state.startswith(MARK):
        raise ValueError("it does not begin as a job of this version of Holdfast's does")
    try:
        return _decoder.decode(memoryview(state)[len(MARK) :])
    except msgspec.MsgspecError as problem:
        raise ValueError(str(problem)) from None


LOOK_S_MIN = 0.005
LOOK_S_MAX = 0.1
LOOK_S_PER_NODE = 0.004
"""Each look reads the whole state, which grows with the nodes; and so do those who look."""


class Seen(Protocol):
    """What a look brought, as far as it bears on when to look again."""

    @property
    def present(self) -> int:
        """How many nodes there are."""

    @property
    def rests(self) -> bool:
        """Whether nothing more is to be looked for until something is asked for."""

    @property
    def hurries(self) -> bool:
        """Whether something is likely to happen soon."""

    @property
    def mark(self) -> object:
        """What differs after a change that others are likely to follow."""


SeenT = TypeVar("SeenT", bound=Seen)


class Looking(Protocol[SeenT]):
    """A node that looks at the state."""

    standing: SeenT

    def step(self, now: float, job: Job) -> tuple[Any, bool]:
        """Change the job; return what `keep` wants to know, and whether to store the job."""

    def keep(self, now: float, job: Job, said: Any, /) -> SeenT:
        """Take in the job as it is stored."""

    def next_deadline(self, now: float) -> float | None:
        """Return when to look again at the latest, if it matters."""


class Attendant(Generic[SeenT]):
    """Does in its own thread what is asked for; starts it when something first is."""

    def __init__(
        self,
        shared: SharedJob,
        node: Looking[SeenT],
        *,
        name: str,
        attempt_s: float,
        patience_s: float,
        on_look: Callable[[SeenT, RendezvousError | None], None] | None = None,
    ) -> None:
        self._shared = shared
        self._node = node
        self._on_look = on_look
        self._name = name
        self._attempt_s = attempt_s
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._requests: list[Callable[[], None]] = []
        self._asked = 0
        self._answered = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._standing = node.standing
        self._problem: RendezvousError | None = None
        self._contact_at: float | None = None
        self._look_s = LOOK_S_MIN
        self.is_looking = False
        """Whether the thread is at the backend just now; it may hang there."""

    # For the thread of the agent.

    @property
    def is_running(self) -> bool:
        """Whether anything was asked for yet, and the end was not."""
        return self._thread is not None and not self._stopping.is_set()

    def ask(self, request: Callable[[], None] | None = None) -> int:
        """Have a request made to the node, and a look taken; return its number."""
        with self._changed:
            self._asked += 1
            if request is not None:
                self._requests.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._asked

    def wait(
        self, number: int, enough: Callable[[SeenT], object], timeout_s: float
    ) -> tuple[SeenT, bool]:
        """Wait until a look after request `number` shows what is enough, or the time is over.

        Raises what keeps the backend from answering, once that has lasted too long to wait for.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._answered >= number and enough(self._standing):
                    return self._standing, True
                self.raise_problem()
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping.is_set():
                    return self._standing, False
                # Problems become worse by time alone, so there is something to see now and then.
                self._changed.wait(min(left, self._patience_s))

    def last_seen(self) -> SeenT:
        """Return how the node stood at the last look, and raise a problem that lasts."""
        with self._changed:
            self.raise_problem()
            return self._standing

    def raise_problem(self) -> None:
        """Raise what is wrong with the backend, unless it may still pass."""
        problem = self._problem
        now = time.monotonic()
        if problem is None or self._contact_at is None:
            if problem is not None:
                raise problem
            return
        away_s = now - self._contact_at
        if not isinstance(problem, RendezvousConnectionError):
            raise problem
        if away_s >= self._patience_s:
            raise RendezvousConnectionError(
                f"no contact to the other nodes for {away_s:.0f} s: {problem}"
            )

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it is gone."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    # The thread itself.

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                requests, self._requests = self._requests, []
                number = self._asked
            for request in requests:
                request()
                self._look_s = LOOK_S_MIN
            before = self._standing
            self.is_looking = True
            standing, problem = self._look()
            self.is_looking = False
            if self._on_look is not None:
                self._on_look(standing, problem)
            with self._changed:
                self._standing, self._answered = standing, number
                self._take_problem(problem)
                self._changed.notify_all()
                if standing.mark != before.mark:
                    self._look_s = LOOK_S_MIN
                pause_s = self._pause_s(standing)
                if not self._requests and not self._stopping.is_set():
                    self._changed.wait(pause_s)

    def _look(self) -> tuple[SeenT, RendezvousError | None]:
        said: list[Any] = []
        give_up_at = time.monotonic() + self._attempt_s

        def change(job: Job) -> bool:
            what, is_new = self._node.step(time.monotonic(), job)
            said[:] = [what]
            return is_new

        try:
            job = self._shared.update(
                change,
                may_go_on=lambda: time.monotonic() < give_up_at and not self._stopping.is_set(),
                pause=self._stopping.wait,
            )
            now = time.monotonic()
            return self._node.keep(now, job, said[0]), None
        except LostEveryRace as problem:
            console.debug(problem.message)  # Nothing is broken; the next look tries again.
            return self._node.standing, None
        except RendezvousError as problem:
            return self._node.standing, problem
        except Exception as problem:  # noqa: BLE001 (it must not end the thread without a word)
            unexpected = RendezvousError(f"{type(problem).__name__}: {problem}")
            unexpected.__cause__ = problem
            return self._node.standing, unexpected

    def _take_problem(self, problem: RendezvousError | None) -> None:
        if problem is None:
            self._contact_at = time.monotonic()
        elif self._problem is None and self._may_pass(problem):
            console.warning(f"{problem.message}; trying again")
        self._problem = problem

    def _may_pass(self, problem: RendezvousError) -> bool:
        return self._contact_at is not None or isinstance(problem, RendezvousConnectionError)

    def _pause_s(self, standing: SeenT) -> float | None:
        """Return how long to wait before the next look; None until something is asked for."""
        if self._problem is None and standing.rests:
            return None
        longest = LOOK_S_MAX + LOOK_S_PER_NODE * standing.present
        pause_s = min(self._look_s, longest) if standing.hurries else longest
        if self._problem is not None:
            pause_s = longest
        self._look_s = min(longest, self._look_s * 1.5)
        now = time.monotonic()
        due = self._node.next_deadline(now)
        if due is not None and self._problem is None:
            pause_s = min(pause_s, max(LOOK_S_MIN, due - now))
        return pause_s


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
        self._mate = SharedStateNode(
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
        self._box = Mailbox()
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
            self._mate.say(NodePhase.LEAVING, self._mate.status.generation)
            said.append(self._mate.status.seq)

        def is_out(outlook: Outlook) -> bool:
            view = outlook.view
            if view is not None and view.role in (
                NodeRole.FENCED,
                NodeRole.REFUSED,
                NodeRole.CLOSED,
            ):
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

    def report(
        self,
        phase: NodePhase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
        *,
        cause: str = "",  # noqa: ARG002 (the state has no room for it)
    ) -> None:
        if failure is not None:
            failure = clip_failure(failure)
        report = report[:REPORT_BYTES_MAX]
        self._attendant.ask(lambda: self._mate.say(phase, generation, failure, report))

    def rejoin(self, *, cause: str = "") -> int:  # noqa: ARG002 (as above)
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
                self._box.put(view)
            self._is_there = problem is None
            if problem is None:
                self._since = self._clock.look(time.monotonic())
                self._was_there = True
                self._why = NO_ANSWER
            else:
                self._why = problem.message
                if isinstance(problem, RendezvousStateError) and not self._was_there:
                    # Later it may be the mistake of another program, and be repaired.
                    self._give_up(JoinRefused(str(problem)))

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
                    self._give_up(CoordinatorLost(self._why, away_s))
                else:
                    self._changed.wait(min(limit_s - away_s, self._clock.step_s))

    def _limit_s(self) -> float:
        closed = self.view is not None and self.view.role is NodeRole.CLOSED
        return min(CLOSED_AWAY_S, self._patience_s) if closed else self._patience_s

    # With the lock.

    def _give_up(self, news: CoordinatorLost | JoinRefused) -> None:
        if not self._given_up:  # Once, and for good.
            self._given_up = True
            self._box.put(news)


PATIENCE_S = 60.0
"""How long a node goes on while the backend cannot be reached; then its agent is told."""


class DynamicRendezvousHandler(CoordinatedRendezvousHandler):
    """A node's way into the rounds of a job that is kept in a backend.

    Use `from_backend` or `create_handler`. The constructor takes the parts they are made of.
    """

    def __init__(
        self,
        node: NodeInfo,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: SharedJob,
        *,
        job_settings: JobSettings | None = None,
        patience_s: float = PATIENCE_S,
        endpoint: str = "",
        worker_store: bool = False,
    ) -> None:
        check_settings(settings)
        self.node_id = node.node
        self._settings = settings
        self._backend_name = backend_name
        self._endpoint = endpoint
        self._store = store
        self._shared = state_holder
        self._job_settings = job_settings or job_settings_of(settings)
        self._patience_s = patience_s
        self._worker_store = WorkerStore(ports=PORTS, served=not worker_store)
        self._use_agent_store = not worker_store
        self._node = msgspec.structs.replace(node, ports=self._worker_store.numbers)
        self._interval_s = settings.keep_alive_interval.total_seconds()
        self._lost_after_s = self._interval_s * settings.keep_alive_max_attempt
        participant = Participant(
            time.monotonic(),
            run_id=settings.run_id,
            info=self._node,
            settings=self._job_settings,
            interval_s=self._interval_s,
            lost_after_s=self._lost_after_s,
            new_incarnation=draw_incarnation,
            attend_s=min(ATTEND_S, self.join_timeout_s / 2),
        )
        self._participant = participant
        self._attendant = Attendant(
            state_holder,
            participant,
            name=f"holdfast-rendezvous-{node.node}",
            attempt_s=settings.timeout.heartbeat.total_seconds(),
            patience_s=patience_s,
        )
        self._has_asked = False
        self._connections: list[SharedConnection] = []  # One at most.
        # A handler that is dropped without a `shutdown` must not keep its node alive for ever.
        self._end = weakref.finalize(
            self, _release, self._attendant, self._connections, self._worker_store
        )

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
        shared = SharedJob(backend, run_id)
        node = this_node(local_addr)
        return cls(node, settings, backend.name, store, shared)

    @property
    def settings(self) -> RendezvousSettings:
        """What the handler was made with."""
        return self._settings

    @property
    def use_agent_store(self) -> bool:
        """The agent of the first node serves the workers' store, unless rank 0 is to do so."""
        return self._use_agent_store

    @property
    def serves_workers(self) -> bool:
        """Whether the workers of the job depend on this process."""
        return self._worker_store.is_serving

    # For agents that are told.

    @property
    def join_timeout_s(self) -> float:
        """How long a node waits for a round with enough nodes."""
        return self._settings.timeout.join.total_seconds()

    @property
    def endpoint(self) -> str:
        """Where the nodes meet, as a person knows it."""
        return self._endpoint or f"the rendezvous backend {self._backend_name!r}"

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> SharedConnection:
        """Begin to take part in the job, as a node of this shape; once."""
        self._check_open()
        if self._connections:
            return self._connections[0]
        if self._has_asked:
            raise RendezvousError("this handler is in the job by next_rendezvous already")
        replace = msgspec.structs.replace
        connection = SharedConnection(
            self._shared,
            where=self.endpoint,
            run_id=self.get_run_id(),
            info=replace(
                self._node,
                incarnation=draw_incarnation(),
                role=role,
                local_world_size=local_world_size,
            ),
            settings=replace(self._job_settings, max_restarts=max_restarts),
            store=self._store,
            interval_s=self._interval_s,
            lost_after_s=self._lost_after_s,
            attempt_s=self._settings.timeout.heartbeat.total_seconds(),
            patience_s=self._patience_s,
        )
        self._connections.append(connection)
        connection.start()
        return connection

    def serve_workers(self, view: View) -> None:
        """Serve the store of the workers that a view is about, if this node is the first."""
        self._worker_store.begin(view.generation, is_first=view.rank == 0)

    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view as TorchElastic's agents know rounds."""
        (connection,) = self._connections
        self.serve_workers(view)
        # The key is another one in another job of this id, which may have used the same store.
        store = connection.store(f"{view.generation}.{view.round}.{view.round_key:x}")
        meeting_point = RendezvousStoreInfo(view.master_addr, view.master_port)
        return RendezvousInfo(store, view.rank, view.size, meeting_point)

    def describe_timeout(self, connection: JobConnection) -> str:
        """Return what was waited for in vain, in one line."""
        problem = connection.problem() or f"no round is to be seen at {self.endpoint}"
        return errors.too_few(connection.view, problem, self.endpoint, self.join_timeout_s)

    def describe_loss(self, gave_up: CoordinatorLost) -> str:
        """Return what could not be reached, since when and why, in one line."""
        return errors.unreachable(self.endpoint, gave_up)

    def describe_refusal(self, why: str) -> str:
        """Return that this node cannot be in the job, and why, in one line."""
        return f"{self.endpoint}: {why}"

    # TorchElastic's interface.

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend_name

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node and all others of a new round are in it, and return it.

        Called again, it asks for another round, unless there is one already. A standby waits for
        as long as the job runs.
        """
        self._check_open()
        if self._connections:
            raise RendezvousError("this handler has entered the job, and is told of its rounds")
        self._has_asked = True
        number = self._attendant.ask(self._participant.ask_round)
        join_s = self.join_timeout_s
        while True:
            standing, is_done = self._attendant.wait(number, _is_settled, join_s)
            if is_done:
                break
            if standing.role is not NodeRole.STANDBY:
                self._attendant.ask(self._participant.ask_leave)
                raise self._too_late(standing, join_s)
        if standing.refusal:
            raise RendezvousError(standing.refusal)
        if standing.seat is None:
            raise self._is_over(standing)
        return self._info(standing.seat, standing.seat_key)

    def is_closed(self) -> bool:
        """Return whether the job is over for all nodes."""
        return self._look().closed

    def set_closed(self) -> None:
        """End the job for all nodes, and for all that would come later."""
        if self._end.alive:
            number = self._attendant.ask(self._close)
            close_s = self._settings.timeout.close.total_seconds()
            _, is_done = self._attendant.wait(number, lambda standing: standing.closed, close_s)
            if not is_done:
                raise RendezvousTimeoutError(
                    f"the job {self.get_run_id()!r} could not be closed in {close_s:g} s"
                )

    def num_nodes_waiting(self) -> int:
        """Return above 0 if the workers must be started again in another round.

        So it is when a node joined and the others have settled, when one was lost or asked for a
        new start, and when the others went on without this node. It does not wait: the answer is
        that of the last look, a tenth of a second ago, or more in jobs of many nodes.
        """
        if not self._attendant.is_running:
            return self._look().regroup
        return self._attendant.last_seen().regroup

    def shutdown(self) -> bool:
        """Leave the job, and release what the handler holds; False if nobody could be told."""
        if not self._end.alive:
            return True
        is_done = True
        close_s = self._settings.timeout.close.total_seconds()
        for connection in self._connections:
            is_done = connection.leave(close_s)
        if self._attendant.is_running:
            number = self._attendant.ask(self._participant.ask_leave)
            try:
                _, is_done = self._attendant.wait(
                    number, lambda standing: not standing.in_job, close_s
                )
            except RendezvousError as problem:
                console.warning(f"the other nodes were not told that this one leaves: {problem}")
                is_done = False
        is_gone = self._attendant.stop(CHANCES_S)
        self._end()
        return is_done and is_gone

    def _close(self) -> None:
        self._participant.ask_close("an agent asked for the end of the job")

    def _look(self) -> PolledStanding:
        self._check_open()
        number = self._attendant.ask()
        heartbeat_s = self._settings.timeout.heartbeat.total_seconds()
        standing, is_done = self._attendant.wait(number, lambda _: True, heartbeat_s)
        if not is_done:
            raise RendezvousTimeoutError(
                f"the rendezvous backend {self._backend_name!r} did not answer in {heartbeat_s:g} s"
            )
        return standing

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RendezvousClosedError("the rendezvous handler was shut down")

    def _info(self, seat: View, key: str) -> RendezvousInfo:
        console.info(
            f"round {seat.round}, generation {seat.generation} of the job {self.get_run_id()!r}: "
            f"node {seat.rank} of {seat.size} ({seat.why})"
        )
        self.serve_workers(seat)
        store = PrefixStore(f"torch.rendezvous.{self.get_run_id()}.{key}", self._store)
        meeting_point = RendezvousStoreInfo(seat.master_addr, seat.master_port)
        return RendezvousInfo(store, seat.rank, seat.size, meeting_point)

    def _too_late(self, standing: PolledStanding, join_s: float) -> RendezvousTimeoutError:
        there = f"{standing.present} of at least {standing.needed} nodes are there"
        return RendezvousTimeoutError(
            f"there was no round of the job {self.get_run_id()!r} within {join_s:g} s: {there}",
            hint="join_timeout in --rdzv-conf sets the time",
        )

    def _is_over(self, standing: PolledStanding) -> RendezvousError:
        text = f"the job {self.get_run_id()!r} is over"
        if standing.was_standby:
            return RendezvousGracefulExitError(f"{text}; this node was a standby")
        return RendezvousClosedError(
            f"{text} ({standing.why})", hint="start another one under another --rdzv-id"
        )


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
        this_node(params.local_addr, node_id=conf.node_id, label=conf.label),
        settings,
        backend.name,
        store,
        SharedJob(backend, params.run_id),
        job_settings=job_settings_of(
            settings, spares=conf.spares, order=RankOrder(conf.rank_order)
        ),
        patience_s=conf.coordinator_timeout,
        endpoint=params.endpoint,
        worker_store=conf.worker_store,
    )


def _is_settled(standing: PolledStanding) -> bool:
    return standing.seat is not None or standing.closed or bool(standing.refusal)


def _release(
    attendant: Attendant[PolledStanding],
    connections: list[SharedConnection],
    worker_store: WorkerStore,
) -> None:
    attendant.stop(0.0)
    for connection in connections:
        connection.close()
    worker_store.close()
