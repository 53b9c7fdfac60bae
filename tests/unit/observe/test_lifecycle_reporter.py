"""What observers of a real agent are told, from beginning to end."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.agent.local_agent import LocalElasticAgent
from holdfast.agent.spec import WorkerSpec
from holdfast.observe.lifecycle import (
    GenerationStarted,
    GenerationStopped,
    GenerationStopping,
    LifecycleEvent,
    RanksAssigned,
    RendezvousEnded,
    RunEnded,
    RunStarted,
    WorkerEnded,
    WorkersObserved,
)
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.signals import SignalException
from holdfast.rendezvous.config import RendezvousParameters
from holdfast.rendezvous.errors import RendezvousTimeoutError
from holdfast.rendezvous.registry import get_rendezvous_handler
from holdfast.rendezvous.single_node import SingleNodeHandler
from holdfast.run import run_script_path

if TYPE_CHECKING:
    from pathlib import Path

FAILS_ONCE = "import os, sys; sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0') * 3)"


def run(
    folder: Path, script: str, *, max_restarts: int = 0, workers: int = 1
) -> list[LifecycleEvent]:
    told: list[LifecycleEvent] = []
    handler = SingleNodeHandler("job-1")
    spec = WorkerSpec(
        "trainer", workers, handler, entrypoint=sys.executable, args=("-c", script),
        max_restarts=max_restarts,
    )  # fmt: skip
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(folder)))
    agent.observers.add(told.append)
    try:
        agent.run()
    finally:
        handler.shutdown()
    return told


def kinds(told: list[LifecycleEvent]) -> list[type]:
    return [type(one) for one in told]


def test_a_run_that_succeeds(tmp_path: Path) -> None:
    told = run(tmp_path, "pass", workers=2)
    began, met, ranked, started, looked, *exits, stopping, stopped, ended = told
    assert [type(one) for one in exits] == [WorkerEnded, WorkerEnded]
    assert kinds(told[:5]) == [
        RunStarted,
        RendezvousEnded,
        RanksAssigned,
        GenerationStarted,
        WorkersObserved,
    ]
    assert kinds(told[-3:]) == [GenerationStopping, GenerationStopped, RunEnded]
    assert isinstance(began, RunStarted)
    assert (began.run_id, began.role, began.local_world_size) == ("job-1", "trainer", 2)
    assert isinstance(met, RendezvousEnded)
    assert (met.group_rank, met.group_world_size, met.error) == (0, 1, "")
    assert isinstance(ranked, RanksAssigned)
    assert isinstance(started, GenerationStarted)
    assert [one.global_rank for one in started.workers] == [0, 1]
    assert {one.pid for one in started.workers} == {
        one.worker.pid for one in exits if isinstance(one, WorkerEnded)
    }
    assert isinstance(looked, WorkersObserved)
    assert looked.state == "healthy"
    assert isinstance(stopping, GenerationStopping)
    assert isinstance(stopped, GenerationStopped)
    assert isinstance(ended, RunEnded)
    assert (ended.state, ended.error) == ("succeeded", "")
    assert [(one.state, one.exit_code) for one in ended.outcomes] == [("succeeded", 0)] * 2
    times = [one.at for one in told if hasattr(one, "at")]
    assert times == sorted(times)


def test_a_restart_is_told_from_the_failure_to_the_next_start(tmp_path: Path) -> None:
    told = run(tmp_path, FAILS_ONCE, max_restarts=1)
    first_exit = next(at for at, one in enumerate(told) if isinstance(one, WorkerEnded))
    assert kinds(told[first_exit : first_exit + 6]) == [
        WorkerEnded, GenerationStopping, GenerationStopped, RendezvousEnded, RanksAssigned, GenerationStarted,
    ]  # fmt: skip
    exited, started = told[first_exit], told[first_exit + 5]
    assert isinstance(exited, WorkerEnded)
    assert exited.failed
    assert isinstance(started, GenerationStarted)
    assert (started.generation, started.restart_count) == (1, 1)


def test_a_run_that_fails_says_how_each_worker_ended(tmp_path: Path) -> None:
    script = "import os, signal, sys; os.environ['RANK'] == '1' and sys.exit(5); signal.pause()"
    ended = run(tmp_path, script, workers=2)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.state == "failed"
    first, second = ended.outcomes
    assert (first.state, second.state, second.exit_code) == ("terminated", "failed", 5)


def test_a_run_that_a_signal_ends_is_told_with_the_error(tmp_path: Path) -> None:
    told: list[LifecycleEvent] = []
    spec = WorkerSpec(
        "trainer", 1, SingleNodeHandler("job-1"), entrypoint=sys.executable,
        args=("-c", "import os, signal; os.kill(os.getppid(), 0); signal.pause()"),
    )  # fmt: skip
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)))
    agent.observers.add(told.append)
    agent.observers.add(
        lambda moment: (
            signal.raise_signal(signal.SIGTERM) if isinstance(moment, GenerationStarted) else None
        )
    )
    with pytest.raises(SignalException):
        agent.run()
    spec.rdzv_handler.shutdown()
    ended = told[-1]
    assert isinstance(ended, RunEnded)
    assert ended.state == ""
    assert "SignalException" in ended.error


def test_a_rendezvous_that_fails_is_told_once_before_the_end(tmp_path: Path) -> None:
    told: list[LifecycleEvent] = []
    params = RendezvousParameters("c10d", "127.0.0.1:0", "job", 2, 2, join_timeout=0.2)
    spec = WorkerSpec("trainer", 1, get_rendezvous_handler(params), entrypoint="/bin/true")
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)))
    agent.observers.add(told.append)
    with pytest.raises(RendezvousTimeoutError):
        agent.run()
    spec.rdzv_handler.shutdown()
    assert kinds(told) == [RunStarted, RendezvousEnded, RunEnded]
    met = told[1]
    assert isinstance(met, RendezvousEnded)
    assert "RendezvousTimeoutError" in met.error


@pytest.mark.parametrize(
    ("entrypoint", "args", "program"),
    [
        (sys.executable, ("-u", "jobs/train.py", "--steps", "3"), "train.py"),
        (sys.executable, ("-u", "-m", "jobs.train", "x"), "jobs.train"),
        (sys.executable, ("-u", "-c", "print(1)"), sys.executable.rpartition("/")[2]),
        ("/opt/train.sh", ("fast",), "train.sh"),
        (run_script_path, ("jobs/train.py", "x"), "train.py"),
        (len, ("jobs/train.py",), "len"),
    ],
)
def test_a_program_has_the_name_a_person_knows_it_by(
    tmp_path: Path, entrypoint: Any, args: tuple[str, ...], program: str
) -> None:
    handler = SingleNodeHandler("job-1")
    spec = WorkerSpec("trainer", 1, handler, entrypoint=entrypoint, args=args)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)))
    began = agent._reporter.describe_run()
    assert began.program == program
    assert began.entry_point == spec.get_entrypoint_name()
    handler.shutdown()
