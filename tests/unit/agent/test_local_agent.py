from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rendezvous_fakes import ScriptedRendezvous

from holdfast.agent.local_agent import LocalElasticAgent
from holdfast.agent.spec import RunResult, WorkerGroup, WorkerSpec, WorkerState
from holdfast.processes.logs.specs import DefaultLogsSpecs, Std
from holdfast.processes.signals import SignalException
from holdfast.store.memory import MemoryStore

if TYPE_CHECKING:
    from holdfast.rendezvous.handler import RendezvousHandler

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FOREVER_S = 3600.0
# How many windows an agent may take to become quiet after it started the workers.
WINDOWS_MAX = 20


class Quiet(ScriptedRendezvous):
    """A rendezvous that need not be asked for waiting nodes."""

    polls_membership = False


def local(
    script: str | None = None,
    *,
    kind: type[LocalElasticAgent] = LocalElasticAgent,
    handler: RendezvousHandler | None = None,
    how: dict[str, Any] | None = None,
    logs: DefaultLogsSpecs | None = None,
    **settings: Any,
) -> Any:
    """Return an agent whose workers run a shell script in the current folder."""
    spec = WorkerSpec(
        **{
            "role": "trainer",
            "local_world_size": 1,
            "rdzv_handler": handler or Quiet(),
            "entrypoint": "/bin/sh",
            "args": ("-c", script),
            "max_restarts": 0,
            # Far too long to be of any use: nothing here may depend on it.
            "monitor_interval": FOREVER_S,
            **settings,
        }
    )
    return kind(spec, logs or DefaultLogsSpecs("logs", redirects=Std.ALL), **(how or {}))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of the test, and so of its workers."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_WORKER_IDENTICAL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def kill_and_wait(pid: int) -> None:
    """Kill a process and wait until it is dead; its parent is left to reap it."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.close(pidfd)


def lines(name: str) -> list[str]:
    return sorted(Path(name).read_text().splitlines())


# What workers are given, and what they give back.


def place_and(*args: Any) -> tuple[str, str, tuple[Any, ...]]:
    return os.environ["LOCAL_RANK"], os.environ["RANK"], args


def second_of_two_nodes() -> ScriptedRendezvous:
    """Return a rendezvous whose other node has ranks 0 to 2, and is done already."""
    store = MemoryStore()
    store.set("torchelastic/assigned_ranks/1", "[3, 5, 3, 5]")
    store.add("torchelastic/agent/terminal_state/num_members", 1)
    return Quiet(1, 2, lambda: store)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_functions_return_their_values_by_global_rank(start_method: str) -> None:
    agent = local(
        entrypoint=place_and,
        args=("to $local_rank", 7),
        local_world_size=2,
        handler=second_of_two_nodes(),
        how={"start_method": start_method},
    )
    result = agent.run()
    assert result.state is WorkerState.SUCCEEDED
    assert result.return_values == {3: ("0", "3", ("to 0", 7)), 4: ("1", "4", ("to 1", 7))}
    assert result.failures == {}


# Failures and restarts.


def test_workers_are_restarted_until_they_succeed(folder: Path) -> None:
    script = (
        'echo "$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS at $MASTER_PORT" >> seen;'
        'echo "try $TORCHELASTIC_RESTART_COUNT"; [ $TORCHELASTIC_RESTART_COUNT = 2 ]'
    )
    agent = local(script, max_restarts=3)
    result = agent.run()
    assert result == RunResult(WorkerState.SUCCEEDED, {0: None})
    assert agent.restart_count == 2
    assert lines("seen") == ["0 of 3 at 29001", "1 of 3 at 29002", "2 of 3 at 29003"]
    (run_dir,) = (folder / "logs").iterdir()
    assert {path.name: (path / "0/stdout.log").read_text() for path in run_dir.iterdir()} == {
        "attempt_0": "try 0\n",
        "attempt_1": "try 1\n",
        "attempt_2": "try 2\n",
    }


def test_one_failure_stops_the_others_and_comes_first() -> None:
    os.mkfifo("ready")
    script = (
        'if [ $RANK = 1 ]; then read go < ready; echo "the reason" >&2; exit 7; fi;'
        "echo go > ready; sleep 1000"
    )
    agent = local(script, local_world_size=2)
    result = agent.run()
    assert result.is_failed()
    assert agent.get_worker_group().state is WorkerState.FAILED
    first, other = result.failures[1], result.failures[0]
    assert (first.exitcode, first.consequence, first.order) == (7, False, 0)
    assert first.stderr_tail == "the reason\n"
    assert (other.exitcode, other.consequence) == (-signal.SIGTERM, True)
    assert result.return_values == {}


@pytest.mark.timeout(20)
def test_a_worker_that_does_not_stop_is_killed_after_the_shutdown_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the default of 30 s this test would run into its own timeout."""
    os.mkfifo("ready")
    script = (
        "if [ $RANK = 1 ]; then read go < ready; exit 7; fi;"
        "trap '' TERM; echo go > ready; while :; do sleep 1; done"
    )
    result = local(script, local_world_size=2, how={"shutdown_timeout": 0.1}).run()
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert "worker 0 " in caplog.text


def test_the_stop_signal_can_be_chosen() -> None:
    os.mkfifo("ready")
    script = (
        "if [ $RANK = 1 ]; then read go < ready; exit 7; fi;"
        "trap 'echo USR1 > seen; exit 0' USR1; echo go > ready; while :; do sleep 0.01; done"
    )
    agent = local(script, local_world_size=2, how={"stop_signal": signal.SIGUSR1})
    assert list(agent.run().failures) == [1]
    assert lines("seen") == ["USR1"]


def test_a_program_that_cannot_be_started_is_not_tried_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = local(entrypoint="/no/such/program", args=(), max_restarts=3)
    result = agent.run()
    assert result.failures[0].exitcode == 127
    assert "No such file or directory" in result.failures[0].detail
    assert agent.restart_count == 0
    assert "restart" not in caplog.text


# The keeper below the agent.


def test_one_keeper_serves_all_restarts() -> None:
    agent = local("echo $PPID >> keepers; exit 1", max_restarts=2)
    assert agent.run().is_failed()
    keepers = lines("keepers")
    assert len(keepers) == 3
    assert len(set(keepers)) == 1


def test_a_killed_keeper_is_a_failure_that_a_restart_mends() -> None:
    script = (
        "echo $PPID >> keepers; if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then"
        " kill -9 $PPID; exec sleep 1000; fi"
    )
    agent = local(script, max_restarts=1)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert len(set(lines("keepers"))) == 2


def test_a_keeper_killed_between_two_starts_is_replaced() -> None:
    class Unlucky(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            if self._keeper is not None and self.restart_count == 1:
                kill_and_wait(self._keeper.pid)
            return super()._start_workers(worker_group)

    agent = local("[ $TORCHELASTIC_RESTART_COUNT -ge 1 ]", kind=Unlucky, max_restarts=2)
    assert agent.run().state is WorkerState.SUCCEEDED


# Signals.


class Hooked(LocalElasticAgent):
    """Has hooks around starting and stopping, as agents of others may."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self.calls.append("start")
        return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")
        super()._stop_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("shutdown")
        super()._shutdown(*args, **kwargs)


@pytest.mark.parametrize("kind", [LocalElasticAgent, Hooked])
def test_a_signal_is_passed_on_and_ends_the_run(kind: type[LocalElasticAgent]) -> None:
    os.mkfifo("ready")
    script = "trap 'echo HUP >> seen; exit 0' HUP; echo go > ready; while :; do sleep 0.01; done"
    agent = local(script, kind=kind, max_restarts=3)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (Path("ready").read_text(), os.kill(os.getpid(), signal.SIGHUP)))
        with pytest.raises(SignalException) as ended:
            agent.run()
    assert ended.value.sigval is signal.SIGHUP
    assert lines("seen") == ["HUP"]
    assert getattr(agent, "calls", ["start", "shutdown"]) == ["start", "shutdown"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [LocalElasticAgent, Hooked])
def test_a_second_interrupt_kills_also_while_a_hook_waits(kind: type[LocalElasticAgent]) -> None:
    """With the grace of 30 s this test would run into its own timeout."""
    for name in ("ready", "stopping"):
        os.mkfifo(name)
    script = (
        "if [ $RANK = 1 ]; then read go < ready; exit 7; fi;"
        "trap 'echo > stopping' TERM; trap '' INT; echo go > ready; while :; do sleep 0.1; done"
    )

    def interrupt() -> None:
        Path("stopping").read_text()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    agent = local(script, local_world_size=2, kind=kind)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        result = agent.run()  # The failure came first, and stays the reason.
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert result.failures[1].exitcode == 7


def test_a_signal_at_the_end_of_a_stop_by_a_hook_comes_before_the_next_round() -> None:
    class Signalled(Hooked):
        def _group_events(self, group: Any) -> list[Any]:
            events = super()._group_events(group)
            if group.stop_ended:
                os.kill(os.getpid(), signal.SIGTERM)
            return events

    agent = local("exit 1", kind=Signalled, max_restarts=1)
    with pytest.raises(SignalException):
        agent.run()
    assert agent._worker_group.spec.rdzv_handler.rounds == 1


# Several nodes.


@pytest.mark.parametrize("polled", [True, False])
def test_nodes_with_roles_share_out_ranks_and_wait_for_each_other(polled: bool) -> None:
    os.mkfifo("go1")
    os.mkfifo("go2")
    script = (
        'echo "$ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE $RANK/$WORLD_SIZE '
        '$GROUP_RANK/$GROUP_WORLD_SIZE" >> seen; [ $GROUP_RANK = 0 ] || read go < go$GROUP_RANK'
    )
    store = MemoryStore()
    handler = ScriptedRendezvous if polled else Quiet
    agents = [
        local(
            script,
            role=role,
            local_world_size=size,
            handler=handler(rank, 3, lambda: store),
            monitor_interval=0.01 if polled else FOREVER_S,
            logs=DefaultLogsSpecs(f"logs{rank}", redirects=Std.ALL),
        )
        for rank, (role, size) in enumerate([("trainer", 2), ("reader", 1), ("trainer", 1)])
    ]
    with ThreadPoolExecutor(3) as pool:
        first, *others = [pool.submit(agent.run) for agent in agents]
        # The first node's workers are done, and it has come to the barrier.
        store.wait(["torchelastic/agent/terminal_state/num_members"])
        assert not first.done()
        Path("go1").write_text("on\n")
        Path("go2").write_text("on\n")
        results = [one.result() for one in (first, *others)]
    assert [result.return_values for result in results] == [
        {0: None, 1: None},
        {2: None},
        {3: None},
    ]
    assert lines("seen") == [
        "reader 0/1 2/4 1/3",
        "trainer 0/3 0/4 0/3",
        "trainer 1/3 1/4 0/3",
        "trainer 2/3 3/4 2/3",
    ]


# An agent that is derived from.


class Watching(LocalElasticAgent):
    """Finds workers unhealthy that say they are sick, and notes all it finds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: list[WorkerState] = []

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if Path("sick").exists():
            Path("sick").unlink()
            result = RunResult(WorkerState.UNHEALTHY)
        self.found.append(result.state)
        return result


def test_a_hook_may_find_running_workers_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    script = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then touch sick; sleep 1000; fi"
    agent = local(script, kind=Watching, monitor_interval=0.01, max_restarts=1)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.restart_count == 1
    assert WorkerState.UNHEALTHY in agent.found
    assert agent.found[-1] is WorkerState.SUCCEEDED
    assert len(caplog.messages) == 1  # Of the restart; a worker that was stopped did not fail.


def test_a_hook_has_the_last_word_on_a_failure() -> None:
    class Forgiving(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            return RunResult(WorkerState.SUCCEEDED) if result.is_failed() else result

    assert local("exit 3", kind=Forgiving, max_restarts=3).run().state is WorkerState.SUCCEEDED
    assert len(list(Path("logs").glob("*/attempt_*"))) == 1


def test_a_hook_does_not_have_a_hopeless_start_tried_again() -> None:
    agent = local(entrypoint="/no/such/program", args=(), kind=Watching, max_restarts=3)
    assert agent.run().is_failed()
    assert agent.restart_count == 0


def test_hooks_around_starting_and_stopping_are_used() -> None:
    agent = local("exit 1", kind=Hooked, max_restarts=1)
    assert agent.run().is_failed()
    assert agent.calls == ["start", "stop", "start", "stop", "shutdown"]


@pytest.mark.parametrize("stops_before", [False, True])
def test_a_hook_may_close_the_context_itself(stops_before: bool) -> None:
    class Closing(LocalElasticAgent):
        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            if stops_before:
                super()._stop_workers(worker_group)
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGKILL)

    agent = local(
        "[ $RANK = 0 ] && exit 3; sleep 1000", kind=Closing, local_world_size=2, max_restarts=1
    )
    result = agent.run()
    assert (agent.restart_count, result.failures[0].exitcode) == (1, 3)
    assert len(list(Path("logs").glob("*/attempt_*"))) == 2


# Events rather than polling.


def switches(folder: str) -> int:
    """Return how often the threads of a process have gone to sleep or were sent there."""
    count = 0
    for task in Path(folder).iterdir():
        if task.name != str(os.getpid()):
            for line in (task / "status").read_text().splitlines():
                count += int(line.split()[1]) if "ctxt_switches" in line else 0
    return count


def becomes_quiet(agent: LocalElasticAgent, windows: int, in_a_row: int = 1) -> bool:
    """Whether neither a thread of the agent nor the keeper moves between two ticks of a worker.

    A tick takes longer than any of them would let pass between two looks, if it looked. On a busy
    machine even one that looks may get no turn between two ticks, so there may have to be several.
    """
    quiet = 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(agent.run)
        with open("ticks") as ticks:
            before = -1
            for _ in range(windows):
                keeper = int(ticks.readline())
                now = switches("/proc/self/task") + switches(f"/proc/{keeper}/task")
                quiet, before = quiet + 1 if now == before else 0, now
                if quiet == in_a_row:
                    break
            Path("enough").touch()
        running.result()
    return quiet == in_a_row


TICKING = "exec 3> ticks; while [ ! -e enough ]; do echo $PPID >&3; sleep 0.2; done"


def test_nothing_wakes_while_nothing_happens() -> None:
    os.mkfifo("ticks")
    agent = local(TICKING, logs=DefaultLogsSpecs("logs"), monitor_interval=0.05)
    assert becomes_quiet(agent, WINDOWS_MAX)
