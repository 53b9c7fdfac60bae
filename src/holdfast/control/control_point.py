"""Where people reach an agent: a socket in their runtime folder, which costs nothing until they come.

The agent's own loop waits for the first of them, among all else that it waits for. Then a thread
serves them (`control.node_server`), and asks the loop for what only that knows; the same thread
answers what a coordinator passes on, and at the agent's control port where there is none. The socket
is opened when a run has lasted for a second: a shorter one is over before anybody could look at it.
"""

from __future__ import annotations

import _socket
import os
import time
from _thread import allocate_lock
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.control.runtime_dir import socket_of
from holdfast.core import supervision
from holdfast.core.supervision import State
from holdfast.observe import lifecycle

if TYPE_CHECKING:
    import socket
    from collections import deque
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
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
        """What control needs of an agent; all of it belongs to the agent's loop."""

        @property
        def machine(self) -> Supervision: ...

        @property
        def connection(self) -> Membership | None:
            """The connection to the coordinator, or None if this agent decides alone."""

        @property
        def live_workers(self) -> dict[int, int]:
            """Process ids by local rank, of workers that have not exited."""

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
            """Announce a request that was granted."""

else:
    from _collections import deque  # Without the rest of `collections`.

BACKLOG = 16
EVENTS_KEPT_MAX = 256
EARLY_EVENTS_MAX = 512
"""Events that are buffered until the history is imported: of a start, some three of each worker."""
CALLS_MAX = 256
"""What the thread may ask of the loop and has no answer to yet."""


class ControlPoint:
    """One agent's, for one run. `look` belongs to the agent's loop, as does all without a note."""

    name = "the events for people who watch"

    def __init__(self, agent: ControlledAgent, run_started_at: float) -> None:
        self.agent = agent
        self.path = ""
        self._events: deque[tuple[float, LifecycleEvent]] = deque(maxlen=EVENTS_KEPT_MAX)
        self._early: list[LifecycleEvent] = []
        """Events that are not in the history yet."""
        self._history: History | None = None
        self._listener: _socket.socket | None = None
        self._server: NodeServer | None = None
        self._lock = allocate_lock()  # For the server, which several threads may need first.
        self._wakeup = -1
        self._calls: deque[Callable[[], None]] = deque()
        self._requests: deque[tuple[Request, Future[RequestAnswer]]] = deque()
        self._asking: dict[str, Future[RequestAnswer]] = {}
        self._begun_at = run_started_at
        self._is_closed = False
        is_running = agent.machine.state is State.RUNNING
        self._running = agent.machine.generation if is_running else None

    def open(self) -> None:
        """Listen; where that is impossible the job goes on, and cannot be found by `holdfast ps`."""
        connection = self.agent.connection
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        port = connection.control.port if connection is not None else None
        if port is not None:
            port.serve(self._adopt_client)
        try:
            self.path = socket_of(os.getpid())
            self._listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            self._listener.settimeout(0)
            self._listener.bind(self.path)
            self._listener.listen(BACKLOG)
        except OSError as problem:
            console.debug(f"holdfast ps will not find this job: {problem}")
            self._close_listener()

    def close(self) -> None:
        """End it all; may be called more than once."""
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
                pass  # Somebody has cleaned up.
            self.path = ""

    # For the loop.

    def descriptors(self) -> list[int]:
        listening = [self._listener.fileno()] if self._listener is not None else []
        return [*listening, self._wakeup] if self._wakeup >= 0 else listening

    def look(self) -> None:
        """Take in whoever has come, and do what the thread asks for."""
        if self._listener is not None:
            try:
                descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]
            except OSError:
                pass  # Nobody has come.
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
        """Give what was asked for to the machine of a job that has nobody else to decide."""
        while self._requests:
            request, answer = self._requests.popleft()
            agent = self.agent
            if agent.connection is not None:
                self._asking[request.id] = answer
                agent.connection.control.request(request)
                view = agent.connection.view
                if view is not None and view.answered is not None:
                    self.answered(view.answered)  # The same may have been asked before.
                continue
            nodes = agent.group.group_world_size or 1
            if nodes > 1:
                from holdfast.core.protocol import RequestRefusal  # Imports msgspec.

                why = f"the job has {nodes} nodes and no coordinator to pass this on to the others"
                refusal = RequestRefusal.NO_COORDINATOR.value
                self._answer(answer, request.id, refusal, why)
                continue
            known = request.id in agent.machine.answers
            yield supervision.Requested(request.id, request.action, str(request), request.grace_s)
            self._answer(answer, request.id, *agent.machine.answers[request.id])
            if not known and not agent.machine.answers[request.id][0]:
                agent.requested(request.id, str(request))

    def answered(self, answer: RequestAnswer) -> None:
        """Hand on what whoever decides made of a request that came through this node."""
        asked = self._asking.pop(answer.id, None)
        if asked is not None:
            self._answer(asked, answer.id, answer.refusal, answer.why)

    def _answer(
        self, asked: Future[RequestAnswer], request_id: str, refusal: str, why: str
    ) -> None:
        from holdfast.core.protocol import RequestAnswer

        if not asked.done():
            asked.set_result(RequestAnswer(id=request_id, refusal=refusal, why=why))

    def _fail_all(self) -> None:
        asked = [*self._asking.values(), *(answer for _, answer in self._requests)]
        self._asking.clear()
        self._requests.clear()
        for one in asked:
            self._answer(one, "", "over", "the agent has ended")
        while self._calls:
            self._calls.popleft()()

    def __call__(self, event: LifecycleEvent) -> None:
        """Keep an event, and tell those who watch."""
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
                    return  # They were stopped, as was said before.
        one = (time.time(), event)
        self._events.append(one)
        if self._server is not None:
            self._server.happened(one)

    @property
    def history(self) -> History:
        """The history of this run. Most runs end before anybody wants it."""
        if self._history is None:
            from holdfast.control.history import History

            self._history = History(self._begun_at, running=self._running)
            for event in self._early:
                self._history.add(event)
            self._early.clear()
        return self._history

    # For any thread.

    @property
    def kept(self) -> list[tuple[float, LifecycleEvent]]:
        """The newest events, each with the time of day."""
        return [*self._events]

    def watched(self, watch: Watch) -> None:
        """Do what the coordinator asks for on behalf of those who watch."""
        server = self._obtain_server()
        if server is not None:
            server.watch(watch)

    def _adopt_client(self, connection: socket.socket, address: str) -> None:
        """Serve a client that connected to the agent's port; from any thread."""
        server = self._obtain_server()
        if server is None:
            connection.close()
        else:
            server.adopt_client(connection, address)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have something called in the agent's loop, in its next turn."""
        from concurrent.futures import Future

        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except BaseException as problem:  # noqa: BLE001 (it is the caller's)
                answer.set_exception(problem)

        if self._is_closed or len(self._calls) >= CALLS_MAX:
            answer.set_exception(RuntimeError("the agent does not answer"))
            return answer
        self._calls.append(run)
        self._wake()
        return answer

    def request(self, request: Request) -> Future[RequestAnswer]:
        """Give a request to whoever decides."""
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
                except Exception as problem:  # noqa: BLE001 (the job goes on)
                    console.warning(f"this job cannot be watched: {console.describe(problem)}")
                    self._is_closed = True
            return self._server
