"""The control socket of an agent, in the user's runtime folder. It costs nothing until a client connects.

The agent's loop opens the socket before the first worker starts and includes it in its poll. The first
client starts a thread that serves all clients (`control.node_server`). The thread calls into the loop
for data that belongs to the loop. The same thread answers queries that the coordinator forwards. In a
job without a coordinator, it also serves clients that connect to the agent port.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core import supervision
from holdfast.core.requests import RequestRefusal
from holdfast.net.runtime_dir import socket_of
from holdfast.observe import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from typing import Any, Protocol, TypeVar

    from holdfast.control.history import History
    from holdfast.control.node_server import NodeServer
    from holdfast.core.machine import Event
    from holdfast.core.protocol import Request, RequestAnswer
    from holdfast.core.supervision import Supervision
    from holdfast.membership.interface import Membership
    from holdfast.observe.lifecycle import LifecycleEvent, RunStarted
    from holdfast.processes.workers.pages import Progress
    from holdfast.wire.messages import Watch

    T = TypeVar("T")

    class ControlledAgent(Protocol):
        """The parts of an agent that control uses. Call them only from the agent's loop."""

        @property
        def machine(self) -> Supervision: ...

        @property
        def membership(self) -> Membership | None:
            """The membership in a job of several nodes; None if this agent decides alone."""

        @property
        def live_workers(self) -> dict[int, int]:
            """The process ids of workers that have not exited, by local rank."""

        @property
        def activity(self) -> str:
            """What delays the start of the workers; empty if nothing does."""

        @property
        def log_files(self) -> list[tuple[int, str, str]]:
            """Rank, stream and path of each file that the workers write."""

        @property
        def group(self) -> Any:
            """The `agent.spec.WorkerGroup`."""

        def pages(self) -> dict[int, Progress]:
            """Return the progress that workers report, by local rank."""

        @property
        def past_memory(self) -> list[tuple[float, int]]:
            """The memory of all workers, in bytes, at past times, as far as the agent noted it."""

        def curves(self) -> list[list[bytes]]:
            """Return the past progress of some workers, by generation."""

        def describe_program(self) -> str: ...

        def requested(self, request_id: str, what: str) -> None:
            """Announce an accepted request."""


BACKLOG = 16
EVENTS_KEPT_MAX = 256
EARLY_EVENTS_MAX = 512
"""Events to buffer until the history module is imported. A start causes about three per worker."""
CALLS_MAX = 256
"""Pending calls from the thread into the loop."""
START_S = 1.0
"""How long `close` waits for a server that is starting."""


class ControlPoint:
    """The control socket of one agent, for one run. Call methods from the agent's loop unless noted.

    It observes the run, but is created after the run's first event, which `describe_run` returns.
    """

    name = "the events for control clients"

    def __init__(self, agent: ControlledAgent, describe_run: Callable[[], RunStarted]) -> None:
        self.agent = agent
        self.path = ""
        self._events: deque[tuple[float, LifecycleEvent]] = deque(maxlen=EVENTS_KEPT_MAX)
        self._describe_run = describe_run
        self._early: list[LifecycleEvent] = []
        """Events that are not yet in the history."""
        self._history: History | None = None
        self._listener: socket.socket | None = None
        self._server: NodeServer | None = None
        self._starting: threading.Thread | None = None
        self._waiting: list[tuple[Callable[[NodeServer], object], Callable[[], object]]] = []
        """Calls of `_serve` while the server is starting."""
        self._lock: threading.Lock | None = None
        """Guards the server. None until it is needed, because `threading` is slow to import."""
        self._wakeup = -1
        self._calls: deque[Callable[[], None]] = deque()
        self._requests: deque[tuple[Request, Future[RequestAnswer]]] = deque()
        self._pending: list[tuple[str, Future[RequestAnswer]]] = []
        """The requests that the membership has not answered, by id. Several clients may repeat one id."""
        self._is_closed = False
        self.awaited = ""
        """What the loop waits for in a user's code; meanwhile it makes no calls."""

    def open(self) -> None:
        """Listen for clients. If that fails, the job continues, but `holdfast ps` does not list it.

        Calls after the first have no effect.
        """
        if self._wakeup >= 0:
            return
        membership = self.agent.membership
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        port = membership.control.port if membership is not None else None
        if membership is not None:
            # Make it now: the membership's thread may be the first to call `_serve`.
            self._lock = threading.Lock()
        if port is not None:
            port.serve(self._adopt_client)
        try:
            self.path = socket_of(os.getpid())
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.settimeout(0)
            self._listener.bind(self.path)
            self._listener.listen(BACKLOG)
        except OSError as problem:
            console.debug(f"holdfast ps cannot find this job: {problem}")
            self._close_listener()

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Return a context in which a thread accepts clients, because the loop waits in a user's code."""
        if self._listener is None or self.awaited:
            yield
            return
        end = os.eventfd(0, os.EFD_CLOEXEC)
        acceptor = threading.Thread(
            target=self._accept_until, args=(end,), name="holdfast-control-accept", daemon=True
        )
        self.awaited = what
        acceptor.start()
        try:
            yield
        finally:
            os.eventfd_write(end, 1)
            acceptor.join()
            os.close(end)
            self.awaited = ""

    def _accept_until(self, end: int) -> None:
        assert self._listener is not None
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while end not in dict(poll.poll()):
            self._accept()

    def close(self) -> None:
        """Close the socket and the server; may be called more than once."""
        with self._lock or nullcontext():
            self._is_closed = True
            server, self._server = self._server, None
        self._close_listener()
        if self._starting is not None:
            self._starting.join(START_S)
        if server is not None:
            server.close()
        self._fail_all()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self.path:
            try:
                os.unlink(self.path)
            except OSError:
                pass  # Another process has removed it.
            self.path = ""

    # Called by the agent's loop.

    def descriptors(self) -> list[int]:
        listening = [self._listener.fileno()] if self._listener is not None else []
        return [*listening, self._wakeup] if self._wakeup >= 0 else listening

    def poll(self) -> None:
        """Accept a client, then run the calls that the server's thread submitted."""
        self._accept()
        if self._wakeup >= 0:
            try:
                os.eventfd_read(self._wakeup)
            except BlockingIOError:
                pass
        while self._calls:
            self._calls.popleft()()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return  # No client.
        self._serve(lambda server: server.adopt(descriptor), lambda: os.close(descriptor))

    def take_requests(self) -> Iterator[Event]:
        """Pass requests to the membership. Without a membership, yield them as events for the machine."""
        while self._requests:
            request, answer = self._requests.popleft()
            agent = self.agent
            if agent.membership is not None:
                self._pending = [one for one in self._pending if not one[1].done()]
                self._pending.append((request.id, answer))
                agent.membership.control.request(request)
                view = agent.membership.view
                if view is not None and view.answered is not None:
                    self.answered(view.answered)  # The request may be a repetition.
                continue
            nodes = agent.group.group_world_size or 1
            if nodes > 1:
                why = f"the job has {nodes} nodes and no coordinator, so this node cannot reach the others"
                refusal = RequestRefusal.NO_COORDINATOR.value
                self._answer(answer, request.id, refusal, why)
                continue
            known = request.id in agent.machine.answers
            yield supervision.Requested(request.id, request.action, str(request), request.grace_s)
            refused, why = agent.machine.answers[request.id]
            self._answer(answer, request.id, refused.value if refused else "", why)
            if not known and refused is None:
                agent.requested(request.id, str(request))

    def answered(self, answer: RequestAnswer) -> None:
        """Deliver the answer to a request that a client submitted at this node."""
        for request_id, pending in self._pending:
            if request_id == answer.id:
                self._answer(pending, answer.id, answer.refusal, answer.why)

    def _answer(
        self, pending: Future[RequestAnswer], request_id: str, refusal: str, why: str
    ) -> None:
        from holdfast.core.protocol import RequestAnswer

        if not pending.done() and pending.set_running_or_notify_cancel():
            pending.set_result(RequestAnswer(id=request_id, refusal=refusal, why=why))

    def _fail_all(self) -> None:
        pending = [one for _, one in (*self._pending, *self._requests)]
        self._pending.clear()
        self._requests.clear()
        for one in pending:
            self._answer(one, "", RequestRefusal.OVER.value, "the agent has exited")
        while self._calls:
            self._calls.popleft()()

    def __call__(self, event: LifecycleEvent) -> None:
        """Store an event and send it to the clients that follow events."""
        if self._history is None and len(self._early) < EARLY_EVENTS_MAX:
            self._early.append(event)
        else:
            self.history.add(event)
        match event:
            case lifecycle.WorkersObserved() | lifecycle.ProgressSampled():
                return
            case lifecycle.StandbyChanged():
                return
            case lifecycle.WorkersFailed(failures=failures):
                if all(one.consequence for one in failures):
                    return  # An earlier event has reported that they were stopped.
        one = (time.time(), event)
        self._events.append(one)
        if self._server is not None:
            self._server.publish(one)

    @property
    def history(self) -> History:
        """The history of this run, created on first use: most runs end before a client needs it."""
        if self._history is None:
            from holdfast.control.history import History

            self._history = History()
            for event in (self._describe_run(), *self._early):
                self._history.add(event)
            self._early.clear()
        return self._history

    # Called by any thread.

    @property
    def recent_events(self) -> list[tuple[float, LifecycleEvent]]:
        """The newest events, each with its wall-clock time."""
        return [*self._events]

    def watched(self, watch: Watch) -> None:
        """Start reporting to the coordinator, which requested this for its clients."""
        self._serve(lambda server: server.watch(watch), lambda: None)

    def _adopt_client(self, connection: socket.socket, address: str) -> None:
        """Serve a client that connected to the agent port."""
        self._serve(lambda server: server.adopt_client(connection, address), connection.close)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the next iteration of the agent's loop."""
        from concurrent.futures import Future

        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except BaseException as problem:  # noqa: BLE001 (the future passes it on)
                answer.set_exception(problem)

        if self._is_closed or len(self._calls) >= CALLS_MAX:
            answer.set_exception(RuntimeError("the agent does not respond"))
            return answer
        self._calls.append(run)
        self._wake()
        return answer

    def request(self, request: Request) -> Future[RequestAnswer]:
        """Submit a client's request."""
        from concurrent.futures import Future

        answer: Future[RequestAnswer] = Future()
        self._requests.append((request, answer))
        self._wake()
        return answer

    def _wake(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    def _serve(self, use: Callable[[NodeServer], object], refuse: Callable[[], object]) -> None:
        """Call `use` with the server, or `refuse` if there is none. The first call starts the server."""
        if self._lock is None:
            self._lock = threading.Lock()
        with self._lock:
            server = self._server
            if server is None and not self._is_closed and self._begin_start():
                self._waiting.append((use, refuse))
                return
        if server is None:
            refuse()
        else:
            use(server)

    def _begin_start(self) -> bool:
        """Start the server in a thread, if none is starting or runs; return False if no thread can start."""
        if self._starting is None:
            starting = threading.Thread(
                target=self._start_server, name="holdfast-control-start", daemon=True
            )
            try:
                starting.start()
            except RuntimeError as problem:  # No more threads. The next client tries again.
                console.warning(f"cannot serve a control client: {console.describe(problem)}")
                return False
            self._starting = starting
        return True

    def _start_server(self) -> None:
        """Start the server. The imports take longer than the agent's loop should wait."""
        server = None
        try:
            from holdfast.control.node_server import NodeServer

            server = NodeServer(self, self.agent)
        except Exception as problem:  # noqa: BLE001 (the job continues)
            console.warning(f"cannot serve control clients: {console.describe(problem)}")
        assert self._lock is not None
        with self._lock:
            if server is not None and self._is_closed:
                server.close()
                server = None
            self._server = server
            self._is_closed = server is None
            waiting, self._waiting = self._waiting, []
            for use, refuse in waiting:
                if server is None:
                    refuse()
                else:
                    use(server)
