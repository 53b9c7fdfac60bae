"""How an agent handles requests and queries in a job without a coordinator."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from holdfast.control import node_server
from holdfast.control.control_point import ControlPoint
from holdfast.control.history import NodeHistory, NodeState
from holdfast.control.node_server import own_summary, record_of
from holdfast.core.phases import NodeRole
from holdfast.core.protocol import Request, RequestAnswer
from holdfast.core.requests import Action, RequestRefusal
from holdfast.core.supervision import Begun, RoundJoined, Supervision, WorkersStarted
from holdfast.observe import lifecycle
from holdfast.wire.messages import HERE, HISTORY, REPORT, STACKS, NodeReport, Query, Watch, unpack
from recorded_runs import began

if TYPE_CHECKING:
    from collections.abc import Callable


class Handler:
    """A user's own rendezvous handler."""

    def get_run_id(self) -> str:
        return "job"

    def get_backend(self) -> str:
        return "own"


class Membership:
    """A membership that collects requests and reports."""

    def __init__(self) -> None:
        self.reports: queue.Queue[NodeReport] = queue.Queue()
        self.requests: list[Request] = []
        self.view = SimpleNamespace(answered=None, incarnation=1, role=NodeRole.MEMBER)
        self.control = SimpleNamespace(
            port=None,
            has_coordinator=True,
            request=self.requests.append,
            send_report=self.reports.put,
        )


def agent_of(nodes: int | None, rank: int = 0) -> Any:
    """Return the agent of one node of a job on a user's own rendezvous handler."""
    machine = Supervision(local_world_size=2, max_restarts=3)
    for event in (Begun(), RoundJoined(0, rank, nodes or 1), WorkersStarted(0)):
        machine.handle(0.0, event)
    spec = SimpleNamespace(role="default", local_world_size=2, rdzv_handler=Handler())
    group = SimpleNamespace(
        spec=spec,
        group_rank=rank,
        group_world_size=nodes,
        workers=[SimpleNamespace(global_rank=2 * rank + one) for one in range(2)],
    )
    return SimpleNamespace(
        machine=machine,
        membership=None,
        group=group,
        requested=lambda request, what: None,
    )


@pytest.mark.parametrize("action", [Action.STOP, Action.RESTART])
def test_node_without_coordinator_refuses_job_wide_requests(action: Action) -> None:
    point = ControlPoint(agent_of(2), began)
    answer = point.request(Request(id="r", action=action.value))
    assert [*point.take_requests()] == []
    assert answer.result(0).refusal == RequestRefusal.NO_COORDINATOR.value


def test_the_only_node_of_a_job_decides_alone() -> None:
    for nodes in (None, 1):
        agent = agent_of(nodes)
        point = ControlPoint(agent, began)
        answer = point.request(Request(id="r", action=Action.STOP.value))
        for event in point.take_requests():
            agent.machine.handle(1.0, event)
        assert answer.result(0).refusal == ""


def test_node_without_coordinator_reports_the_number_of_nodes() -> None:
    report = NodeReport(run_id="job", node="b", state="running", generation=0)
    job = own_summary(agent_of(3, rank=1), report)
    assert (job.members, job.present, job.min_nodes) == (3, 3, 3)
    assert [(one.node, one.rank, one.first_rank) for one in job.nodes] == [("b", 1, 2)]


def test_clients_that_repeat_a_request_all_get_its_answer() -> None:
    agent = agent_of(2)
    agent.membership = Membership()
    point = ControlPoint(agent, began)
    request = Request(id="r", action=Action.STOP.value)
    gave_up, first, second = (point.request(request) for _ in range(3))
    assert [*point.take_requests()] == []
    gave_up.cancel()
    point.answered(RequestAnswer(id="r", refusal="", why="stopped"))
    assert [one.result(0).why for one in (first, second)] == ["stopped", "stopped"]
    point.request(Request(id="s", action=Action.STOP.value))
    assert [*point.take_requests()] == []
    assert [name for name, _ in point._pending] == ["s"]


def test_request_that_the_view_already_answers_is_answered_at_once() -> None:
    agent = agent_of(2)
    agent.membership = membership = Membership()
    membership.view.answered = RequestAnswer(id="r", refusal="", why="stopped")
    point = ControlPoint(agent, began)
    answer = point.request(Request(id="r", action=Action.STOP.value))
    assert [*point.take_requests()] == []
    assert answer.result(0).why == "stopped"


def test_one_server_is_started_even_if_two_threads_need_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    served: queue.Queue[object] = queue.Queue()
    two_starts = threading.Barrier(2)

    class Server:
        watch, close = served.put, Mock()

        def __init__(self, *_: object) -> None:
            started.append(threading.current_thread())
            with suppress(threading.BrokenBarrierError):
                two_starts.wait(0.2)

    monkeypatch.setattr(node_server, "NodeServer", Server)
    agent = agent_of(2)
    agent.membership = Membership()
    point = ControlPoint(agent, began)
    point.open()
    watches = Watch(for_s=1.0), Watch(for_s=2.0)
    threads = [threading.Thread(target=point.watched, args=(one,)) for one in watches]
    for one in threads:
        one.start()
    assert {served.get(timeout=10) for _ in watches} == {*watches}
    assert len(started) == 1
    assert started[0] not in threads  # They do not wait for the imports.
    for one in threads:
        one.join()
    point.close()


def test_client_is_refused_while_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(node_server, "NodeServer", Mock())
    point = ControlPoint(agent_of(1), began)
    used, refused = queue.Queue[object](), Mock()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        point._serve(used.put, refused)
    assert refused.call_count == 1
    point._serve(used.put, refused)
    assert used.get(timeout=10)
    assert refused.call_count == 1
    point.close()


def test_agent_whose_loop_does_not_respond_is_reported_as_stuck() -> None:
    agent = agent_of(2)
    agent.membership = membership = Membership()
    point = ControlPoint(agent, began)
    point.close()  # It refuses calls into the loop at once.
    server = node_server.NodeServer(point, agent)
    try:
        server.watch(Watch(for_s=60.0, every_s=60.0))
        assert membership.reports.get(timeout=10).state == NodeState.STUCK
    finally:
        server.close()


def test_workers_are_paused_for_one_dump_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of(1)
    agent.live_workers = {0: 4711}
    point = ControlPoint(agent, began)
    server = node_server.NodeServer(point, agent)
    dumped: list[int] = []
    dumping, may_end, first, second = asyncio.Event(), threading.Event(), Mock(), Mock()

    def dump(pid: int) -> str:
        dumped.append(pid)
        server._loop.call_soon_threadsafe(dumping.set)
        may_end.wait(10)
        return "in train.py"

    async def call(function: Callable[[], object]) -> object:
        return function()

    async def ask() -> None:
        asked = [
            asyncio.create_task(server._stacks(client, Query(id=number, what=STACKS)))
            for number, client in enumerate((first, second))
        ]
        await dumping.wait()
        may_end.set()
        await asyncio.gather(*asked)

    monkeypatch.setattr(node_server, "dump_stacks", dump)
    monkeypatch.setattr(server, "_in_agent", call)
    try:
        server._thread.run(ask(), 10)
        assert dumped == [4711]
        replies = [client.send.call_args[0][0] for client in (first, second)]
        assert [one.id for one in replies] == [0, 1]
        assert b"in train.py" in replies[0].body == replies[1].body
    finally:
        server.close()
        point.close()


def test_gpus_are_read_only_for_those_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Mock(shares=(0.5, 1.0))
    monkeypatch.setattr(node_server, "GpuUtilization", lambda: gpus)
    agent = agent_of(1)
    agent.live_workers, agent.pages, agent.curves, agent.past_memory = {}, dict, list, []
    agent.activity, agent.describe_program = "", lambda: "train.py"
    for at, worker in enumerate(agent.group.workers):
        worker.local_rank = at
    point = ControlPoint(agent, began)
    server = node_server.NodeServer(point, agent)

    async def call(function: Callable[[], object]) -> object:
        return function()

    def ask(method: Any, what: str) -> bytes:
        client = Mock()
        server._thread.run(method(client, Query(id=1, what=what)), 10)
        body: bytes = client.send.call_args[0][0].body
        return body

    monkeypatch.setattr(server, "_in_agent", call)
    try:
        ask(server._describe_agent, HERE)
        gpus.refresh.assert_not_called()
        report = unpack(NodeReport, ask(server._send_report, REPORT))
        gpus.refresh.assert_called_once()
        assert (report.gpus, report.gpu) == (2, 0.75)
        series = unpack(NodeHistory, ask(server._history, HISTORY)).series
        assert series is not None
        assert 0.75 in series.gpu
    finally:
        server.close()
        point.close()
    gpus.close.assert_called()


def test_many_queries_at_once_compute_the_history_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of(1)
    agent.curves, agent.past_memory = list, []
    point = ControlPoint(agent, began)
    server = node_server.NodeServer(point, agent)
    client, called = Mock(), []

    async def call(function: Callable[[], object]) -> object:
        called.append(function)
        await asyncio.sleep(0)
        return function()

    async def ask() -> None:
        queries = [Query(id=number, what=HISTORY) for number in range(100)]
        await asyncio.gather(*(server._history(client, one) for one in queries))
        await server._history(client, Query(id=100, what=HISTORY))

    monkeypatch.setattr(server, "_in_agent", call)
    try:
        server._thread.run(ask(), 10)
    finally:
        server.close()
        point.close()
    assert len(called) == 2
    last = [reply.id for (reply,), _ in client.send.call_args_list if reply.last]
    assert last == [*range(101)]


@pytest.mark.parametrize("used", ["streams", "following"])
def test_connection_of_the_coordinator_stays_open_while_it_has_streams(used: str) -> None:
    agent = agent_of(2)
    point = ControlPoint(agent, began)
    server = node_server.NodeServer(point, agent)
    passed = server._attached = Mock(**{"streams": {}, "following": {}, used: {7: Mock()}})

    async def detach_if_idle() -> None:
        server._detach_if_idle()

    try:
        server._thread.run(detach_if_idle(), 10)
        passed.drop.assert_not_called()
        getattr(passed, used).clear()
        server._thread.run(detach_if_idle(), 10)
        passed.drop.assert_called_once()
    finally:
        server.close()
        point.close()


@pytest.mark.parametrize(("failed", "stopped"), [(True, False), (True, True), (False, False)])
def test_only_original_failures_are_reported_as_problems(*, failed: bool, stopped: bool) -> None:
    worker = lifecycle.WorkerInfo(0, 4, 4, 8, 100)
    ended = lifecycle.WorkerEnded(1.0, 2.0, 0, worker, failed, stopped)
    assert record_of("node", (2.0, ended)).is_problem is (failed and not stopped)


@pytest.mark.parametrize(
    ("state", "cut_short", "is_problem"),
    [
        ("succeeded", "", False),
        ("failed", "", True),
        ("", "left", False),
        ("", "stopped", False),
        ("", "standby", False),
        ("", "error", True),
    ],
)
def test_only_a_failed_run_is_a_problem(*, state: str, cut_short: str, is_problem: bool) -> None:
    error = "SignalException: SIGTERM" if cut_short else ""
    ended = lifecycle.RunEnded(
        1.0, 2.0, 1.0, state, 0, 0, 0, 0, 1, error=error, cut_short=cut_short
    )
    found = record_of("node", (2.0, ended))
    assert (found.is_problem, found.outcome) == (is_problem, state or cut_short)
