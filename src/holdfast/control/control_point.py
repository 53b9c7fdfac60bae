"""The control socket of an agent, in the user's runtime folder. It costs nothing until a client connects.

The agent's loop opens the socket before the first worker starts and includes it in its poll. When the
first client connects, the loop starts a thread that serves all clients (`control.node_server`). The
thread calls into the loop for data that belongs to the loop. The same thread answers queries that the
coordinator forwards. In a job without a coordinator, it also serves clients that connect to the agent
port.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.control.runtime_dir import socket_of
from holdfast.core import supervision
from holdfast.core.requests import RequestRefusal
from holdfast.observe import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from typing import Any, Protocol, TypeVar

    from holdfast.control.history import History
    from holdfast.control.node_server import NodeServer
    from holdfast.core.machine import Event
    from holdfast.core.protocol import Request, RequestAnswer
    from holdfast.core.supervision import Supervision
    from holdfast.membership.interface import Membership
    from holdfast.observe.lifecycle import LifecycleEvent
    from holdfast.processes.workers.pages import Progress
    from holdfast.wire.messages import Watch

    T = TypeVar("T")

    class ControlledAgent(Protocol):
        """The parts of an agent that control uses. Call them only from the agent's loop."""

        @property
        def machine(self) -> Supervision: ...

        @property
        def connection(self) -> Membership | None:
            """The membership in a job of several nodes; None if the job has only this agent."""

        @property
        def live_workers(self) -> dict[int, int]:
            """The process ids of workers that have not exited, by local rank."""

        @property
        def log_files(self) -> list[tuple[int, str, str]]:
            """Rank, stream and path of each file that the workers write."""

        @property
        def group(self) -> Any:
            """The `agent.spec.WorkerGroup`."""

        def pages(self) -> dict[int, Progress]:
            """Return the progress that workers report, by local rank."""

        def describe_program(self) -> str: ...

        def requested(self, request_id: str, what: str) -> None:
            """Announce an accepted request."""


BACKLOG = 16
EVENTS_KEPT_MAX = 256
EARLY_EVENTS_MAX = 512
"""Events to buffer until the history module is imported. A start causes about three per worker."""
CALLS_MAX = 256
"""Pending calls from the thread into the loop."""


class ControlPoint:
    """The control socket of one agent, for one run. Call methods from the agent's loop unless noted."""

    name = "the events for control clients"

    def __init__(self, agent: ControlledAgent, run_started_at: float) -> None:
        self.agent = agent
        self.path = ""
        self._events: deque[tuple[float, LifecycleEvent]] = deque(maxlen=EVENTS_KEPT_MAX)
        self._early: list[LifecycleEvent] = []
        """Events that are not yet in the history."""
        self._history: History | None = None
        self._listener: socket.socket | None = None
        self._server: NodeServer | None = None
        self._lock: AbstractContextManager[object] = nullcontext()
        self._wakeup = -1
        self._calls: deque[Callable[[], None]] = deque()
        self._requests: deque[tuple[Request, Future[RequestAnswer]]] = deque()
        self._pending: dict[str, Future[RequestAnswer]] = {}
        self._begun_at = run_started_at
        self._is_closed = False

    def open(self) -> None:
        """Listen for clients. If that fails, the job continues, but `holdfast ps` does not list it."""
        connection = self.agent.connection
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        port = connection.control.port if connection is not None else None
        if port is not None:
            self._lock = threading.Lock()  # Several threads may try to start the server.
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

    def close(self) -> None:
        """Close the socket and the server; may be called more than once."""
        with self._lock:
            self._is_closed = True
            server, self._server = self._server, None
        self._close_listener()
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

    def look(self) -> None:
        """Accept a client, then run the calls that the server's thread submitted."""
        if self._listener is not None:
            try:
                descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]
            except OSError:
                pass  # No client.
            else:
                server = self._obtain_server()
                if server is None:
                    os.close(descriptor)
                else:
                    server.adopt(descriptor)
        if self._wakeup >= 0:
            try:
                os.eventfd_read(self._wakeup)
            except BlockingIOError:
                pass
        while self._calls:
            self._calls.popleft()()

    def take_requests(self) -> Iterator[Event]:
        """Pass requests to the membership. Without a membership, yield them as events for the machine."""
        while self._requests:
            request, answer = self._requests.popleft()
            agent = self.agent
            if agent.connection is not None:
                self._pending[request.id] = answer
                agent.connection.control.request(request)
                view = agent.connection.view
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
        pending = self._pending.pop(answer.id, None)
        if pending is not None:
            self._answer(pending, answer.id, answer.refusal, answer.why)

    def _answer(
        self, pending: Future[RequestAnswer], request_id: str, refusal: str, why: str
    ) -> None:
        from holdfast.core.protocol import RequestAnswer

        if not pending.done():
            pending.set_result(RequestAnswer(id=request_id, refusal=refusal, why=why))

    def _fail_all(self) -> None:
        pending = [*self._pending.values(), *(answer for _, answer in self._requests)]
        self._pending.clear()
        self._requests.clear()
        for one in pending:
            self._answer(one, "", "over", "the agent has exited")
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

            self._history = History(self._begun_at)
            for event in self._early:
                self._history.add(event)
            self._early.clear()
        return self._history

    # Called by any thread.

    @property
    def kept(self) -> list[tuple[float, LifecycleEvent]]:
        """The newest events, each with its wall-clock time."""
        return [*self._events]

    def watched(self, watch: Watch) -> None:
        """Start to report to the coordinator, which requested this for its clients."""
        server = self._obtain_server()
        if server is not None:
            server.watch(watch)

    def _adopt_client(self, connection: socket.socket, address: str) -> None:
        """Serve a client that connected to the agent port."""
        server = self._obtain_server()
        if server is None:
            connection.close()
        else:
            server.adopt_client(connection, address)

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

    def _obtain_server(self) -> NodeServer | None:
        with self._lock:
            if self._server is None and not self._is_closed:
                try:
                    from holdfast.control.node_server import NodeServer

                    self._server = NodeServer(self, self.agent)
                except Exception as problem:  # noqa: BLE001 (the job continues)
                    console.warning(f"cannot serve control clients: {console.describe(problem)}")
                    self._is_closed = True
            return self._server
