from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from holdfast.agent import loop, side_services
from holdfast.agent.assembly import agent_of
from holdfast.agent.spec import WorkerState
from holdfast.agent.worker_processes import ProcessSettings
from holdfast.control.discovery import local_jobs, open_job
from holdfast.control.job_client import JobUnreachable
from holdfast.core.requests import Action
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.worker_store import SingleNodeHandler
from holdfast.store.memory_store import MemoryStore
from holdfast.store.tcp.store_server import ServingLoop
from rendezvous_fakes import FOREVER_S, QuietRendezvous, ScriptedRendezvous, shell_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.agent.loop import AgentLoop
    from holdfast.agent.spec import RunResult
    from holdfast.control.history import Generation
    from holdfast.rendezvous.handler import RendezvousInfo
    from holdfast.wire.messages import JobSummary


def local(
    script: str | None = None,
    *,
    how: dict[str, Any] | None = None,
    logs: DefaultLogsSpecs | None = None,
    **settings: Any,
) -> AgentLoop:
    """Return an agent whose workers run a shell script in the current folder."""
    spec = shell_spec(script, **settings)
    specs = logs or DefaultLogsSpecs("logs", redirects=Std.ALL)
    return agent_of(spec, ProcessSettings(specs, **(how or {})))


def run(agent: AgentLoop) -> RunResult:
    try:
        return agent.run()
    finally:
        agent.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of the test, and so of its workers."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_WORKER_IDENTICAL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def lines(name: str) -> list[str]:
    return sorted(Path(name).read_text().splitlines())


def place_and(*args: Any) -> tuple[str, str, tuple[Any, ...]]:
    return os.environ["LOCAL_RANK"], os.environ["RANK"], args


def second_of_two_nodes() -> ScriptedRendezvous:
    """Return a rendezvous whose other node has ranks 0 to 2, and has already finished."""
    store = MemoryStore()
    store.set("torchelastic/assigned_ranks/1", "[3, 5, 3, 5]")
    store.add("torchelastic/agent/terminal_state/num_members", 1)
    return QuietRendezvous(1, 2, lambda: store)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_functions_return_their_values_by_global_rank(start_method: str) -> None:
    agent = local(
        entrypoint=place_and,
        args=("to $local_rank", 7),
        local_world_size=2,
        handler=second_of_two_nodes(),
        how={"start_method": start_method},
    )
    result = run(agent)
    assert result.state is WorkerState.SUCCEEDED
    assert result.return_values == {3: ("0", "3", ("to 0", 7)), 4: ("1", "4", ("to 1", 7))}
    assert result.failures == {}


def test_one_failure_stops_the_others_and_is_first() -> None:
    os.mkfifo("ready")
    script = (
        'if [ $RANK = 1 ]; then read go < ready; echo "the reason" >&2; exit 7; fi;'
        "echo go > ready; sleep 1000"
    )
    agent = local(script, local_world_size=2)
    result = run(agent)
    assert result.is_failed()
    assert agent.group.state is WorkerState.FAILED
    first, other = result.failures[1], result.failures[0]
    assert (first.exitcode, first.consequence, first.order) == (7, False, 0)
    assert first.stderr_tail == "the reason\n"
    assert (other.exitcode, other.consequence) == (-signal.SIGTERM, True)
    assert result.return_values == {}


def test_unstartable_program_is_not_retried(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = local(entrypoint="/no/such/program", args=(), max_restarts=3)
    result = run(agent)
    assert result.failures[0].exitcode == 127
    assert "No such file or directory" in result.failures[0].detail
    assert agent.machine.restart_count == 0
    assert "restart" not in caplog.text


def test_one_keeper_serves_all_restarts() -> None:
    agent = local("echo $PPID >> keepers; exit 1", max_restarts=2)
    assert run(agent).is_failed()
    keepers = lines("keepers")
    assert len(keepers) == 3
    assert len(set(keepers)) == 1


# Events rather than polling.


def test_failed_workers_store_starts_a_new_generation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve = ServingLoop.run

    def fail(_loop: ServingLoop) -> None:
        monkeypatch.setattr(ServingLoop, "run", serve)  # The next store works.
        raise RuntimeError("the tape is torn")

    monkeypatch.setattr(ServingLoop, "run", fail)
    connect = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT; sleep 3600"
    script = f"if [ $HOLDFAST_GENERATION = 0 ]; then {connect}; fi"
    handler = SingleNodeHandler("job")
    agent = local(script, handler=handler, entrypoint="/bin/bash", max_restarts=1)
    try:
        assert run(agent).state is WorkerState.SUCCEEDED
    finally:
        handler.shutdown()
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert any("the tape is torn" in one for one in warnings), warnings


# Services that a short job does not need start on demand, or after a second.


@pytest.fixture
def alone() -> Iterator[SingleNodeHandler]:
    handler = SingleNodeHandler("job")
    yield handler
    handler.shutdown()


def test_long_job_starts_log_following_and_its_services_on_its_own(
    monkeypatch: pytest.MonkeyPatch, alone: SingleNodeHandler
) -> None:
    monkeypatch.setattr(side_services, "DEFERRED_S", 0.01)
    agent = local("exec sleep 1000", handler=alone, logs=DefaultLogsSpecs())
    start_services, seen = agent._start_deferred_services, []

    def running() -> tuple[bool, bool]:
        assert alone._store is not None
        follows = any(thread.name == "holdfast-logs" for thread in threading.enumerate())
        return bool(alone._store._servers), follows

    def start_and_note() -> None:
        seen.append(running())
        start_services()
        seen.append(running())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(agent, "_start_deferred_services", start_and_note)
    with pytest.raises(SignalException):
        run(agent)
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_store_serves_a_late_first_client(
    when: str, monkeypatch: pytest.MonkeyPatch, alone: SingleNodeHandler
) -> None:
    monkeypatch.setattr(side_services, "DEFERRED_S", FOREVER_S if when == "at once" else 0)
    script = (
        "import os; from holdfast.store.tcp.store_client import TCPStore\n"
        "with TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])) as store:\n"
        "    store.set('key', 'value'); assert store.get('key') == b'value'"
    )
    agent = local(entrypoint=sys.executable, args=("-c", script), handler=alone)
    assert run(agent).state is WorkerState.SUCCEEDED


@pytest.fixture
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # A socket's path must be short.
        monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", folder)
        yield folder


def test_job_is_visible_when_its_first_worker_starts(runtime_folder: str) -> None:
    command = f"{sys.executable} -m holdfast"
    run(local(f"{command} ps > ps; {command} status > status"))
    [_, row] = Path("ps").read_text().splitlines()
    assert row.split()[:2] == ["job", "running"]
    assert "job 'job': " in Path("status").read_text()
    assert os.listdir(f"{runtime_folder}/holdfast-{os.geteuid()}") == []


def test_control_socket_exists_before_the_first_worker_starts(runtime_folder: str) -> None:
    agent = local("exit 0")
    start = agent.workers.start
    sockets: list[int] = []

    def look_and_start(*args: Any) -> Any:
        sockets.append(len(os.listdir(f"{runtime_folder}/holdfast-{os.geteuid()}")))
        return start(*args)

    agent.workers.start = look_and_start  # type: ignore[assignment]
    run(agent)
    assert sockets == [1]


def test_running_job_knows_when_its_first_round_was_formed(runtime_folder: str) -> None:
    """The history of a running job is that of its timeline, from the start of the run on."""
    assert runtime_folder
    agent = local("exit 0")
    seen: list[Generation | None] = []
    end = agent.services.end

    def look_and_end() -> None:
        control = agent.services.control
        seen.append(control.history.newest if control is not None else None)
        end()

    agent.services.end = look_and_end  # type: ignore[method-assign]
    run(agent)
    [one] = seen
    assert one is not None
    assert one.left_at is not None
    assert one.met_at is not None
    assert 0 < one.left_at <= one.met_at <= (one.started_at or 0)


@pytest.mark.parametrize("nodes", [1, 2])
def test_agent_answers_for_all_nodes_only_if_it_is_the_only_one(
    nodes: int, runtime_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runtime_folder
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")  # The nodes exchange nothing.
    script = (
        "import asyncio; from holdfast.control.discovery import local_jobs; "
        "[job] = asyncio.run(local_jobs()); print(job.here.coordinated)"
    )
    logs = f"echo first; {sys.executable} -m holdfast logs > own-logs"
    handler = QuietRendezvous(world_size=nodes)
    run(local(f"{logs}; {sys.executable} -c '{script}' > seen; exit 1", handler=handler))
    assert Path("seen").read_text() == f"{nodes == 1}\n"
    assert Path("own-logs").read_text() == "[0] first\n"


def test_earliest_watch_reaches_the_control_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delivered: list[object] = []
    watch = object()

    class Control:
        def __init__(self, *_: object) -> None:
            pass

        def __call__(self, event: object) -> None:
            pass

        def open(self) -> None:
            pass

        answered, watched = None, delivered.append

    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    monkeypatch.setattr(loop, "ControlPoint", Control)
    agent = local("true")
    control = SimpleNamespace(on_watch=lambda watched: watched(watch))
    heartbeat = Mock(start=stop)
    agent.job = Mock(membership=SimpleNamespace(control=control, heartbeat=heartbeat))
    agent.workers = Mock()
    with pytest.raises(Stopped):
        agent.supervise()
    assert delivered == [watch]


def test_job_is_visible_while_a_users_handler_forms_a_round() -> None:
    class Watched(ScriptedRendezvous):
        async def watch(self) -> JobSummary:
            [job] = await local_jobs()
            assert job.here.state == "joining"
            async with await open_job(job) as client:
                with pytest.raises(JobUnreachable, match="SIGTERM"):
                    await client.request(Action.STOP)
                return await client.status(watch=True)

        def next_rendezvous(self) -> RendezvousInfo:
            self.seen = asyncio.run(self.watch())  # The agent's loop waits here.
            return super().next_rendezvous()

    handler = Watched()
    assert run(local("exit 0", handler=handler)).state is WorkerState.SUCCEEDED
    [node] = handler.seen.nodes
    assert node.report is not None
    assert node.report.activity == "waiting for the rendezvous"
