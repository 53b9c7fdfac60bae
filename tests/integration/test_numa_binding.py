"""Every kind of worker runs only on the CPUs that were selected for it; the agent is not bound.

The machine is synthetic, but has two CPUs of this machine, each with a NUMA node and a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.launcher import launch_job
from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import elastic_launch
from holdfast.numa import binding
from holdfast.numa.binding import AffinityMode, NumaOptions
from holdfast.processes.failures.failure import ChildFailedError
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.processes.workers.group import (
    GroupSpec,
    SubprocessHandler,
    replace_subprocess_handler,
    start_group,
)
from synthetic_machines import add_nvidia, put

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED = sorted(os.sched_getaffinity(0))
FIRST, SECOND = ALLOWED[0], ALLOWED[-1]
NODE = NumaOptions(AffinityMode.NODE)
SCRIPT = """
import os, sys, threading
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
assert seen == [os.sched_getaffinity(0)]
print("warm" if "slow" in sys.modules else "cold", *sorted(seen[0]))
"""


def where_it_runs() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Simulate a machine with two NUMA nodes; at the end the agent's affinity must be unchanged."""
    root = tmp_path / "root"
    for gpu, cpu in enumerate((SECOND, FIRST)):
        put(root, f"sys/devices/system/node/node{gpu}/cpulist", str(cpu))
        add_nvidia(root, gpu, gpu)
    monkeypatch.setattr(binding, "ROOT", str(root))
    monkeypatch.setattr(binding, "_logged", set())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    yield root
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


def launch(what: Any, *args: Any, **settings: Any) -> dict[int, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir="logs", redirects=Std.OUT),
        **{"numa_options": NODE, **settings},
    )
    return elastic_launch(config, what)(*args)


def written() -> dict[str, str]:
    """Return the output of each worker, by local rank."""
    return {file.parent.name: file.read_text() for file in Path("logs").rglob("stdout.log")}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_function_workers_are_bound_to_cpus(method: str) -> None:
    assert launch(where_it_runs, start_method=method) == {0: [SECOND], 1: [FIRST]}


def test_command_workers_are_bound_to_cpus() -> None:
    launch(sys.executable, "-c", SCRIPT)
    assert written() == {"0": f"cold {SECOND}\n", "1": f"cold {FIRST}\n"}


def test_workers_forked_from_a_zygote_are_bound(tmp_path: Path) -> None:
    (tmp_path / "slow.py").touch()
    (tmp_path / "train.py").write_text(SCRIPT)
    launch(sys.executable, "-u", "train.py", preload=["slow"])
    assert written() == {"0": f"warm {SECOND}\n", "1": f"warm {FIRST}\n"}


def test_without_options_workers_are_not_bound() -> None:
    everywhere = " ".join(map(str, ALLOWED))
    launch(sys.executable, "-c", SCRIPT, numa_options=None)
    assert written() == {"0": f"cold {everywhere}\n", "1": f"cold {everywhere}\n"}


def test_visible_devices_select_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    for virtual in (False, True):
        values = launch(where_it_runs, start_method="fork", virtual_local_rank=virtual)
        assert values == {0: [FIRST], 1: [SECOND]}


def test_workers_of_a_custom_handler_are_bound(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.OUT)
    replace_subprocess_handler(SubprocessHandler)
    try:
        args: dict[int, tuple[Any, ...]] = dict.fromkeys(range(2), ("-c", SCRIPT))
        envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
        context = start_group(GroupSpec("x", sys.executable, args, envs, logs, numa_options=NODE))
        try:
            result = context.wait(60)
        finally:
            context.close()
    finally:
        replace_subprocess_handler(None)
    assert result is not None
    assert result.failures == {}
    assert written() == {"0": f"cold {SECOND}\n", "1": f"cold {FIRST}\n"}


@pytest.mark.parametrize("what", ["a function", "a program", "a warm program"])
def test_refused_binding_is_reported(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel refuses if the CPUs were removed after the selection."""
    nowhere = os.cpu_count() or 1
    monkeypatch.setattr(binding, "_decide", lambda *_: {0: [nowhere], 1: [nowhere]})
    monkeypatch.setattr(binding, "_try_binding", lambda _chosen: None)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    (tmp_path / "slow.py").touch()
    preload = ["slow"] if what == "a warm program" else []
    command = [where_it_runs] if what == "a function" else [sys.executable, "train.py"]
    message = rf"bind to CPUs \[{nowhere}\]: Invalid argument"
    with pytest.raises(ChildFailedError, match=message):
        launch(*command, start_method="fork", preload=preload)
    assert not Path("started").exists()


def test_refused_binding_is_reported_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = os.cpu_count() or 1
    monkeypatch.setattr(binding, "_decide", lambda *_: {0: [FIRST], 1: [nowhere]})
    message = (
        f"^--numa-binding node: the kernel refuses to bind to CPUs {nowhere}: Invalid argument"
    )
    with pytest.raises(EnvironmentProblem, match=message):
        launch("touch", "started")
    assert not Path("started").exists()


def test_machine_without_gpus_starts_no_workers(machine: Path) -> None:
    (machine / "sys/devices/system").rename(machine / "nothing")
    with pytest.raises(EnvironmentProblem, match=r"^--numa-binding node: "):
        launch("touch", "started")
    assert not Path("started").exists()
    lenient = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert launch(where_it_runs, start_method="fork", numa_options=lenient) == {
        0: ALLOWED, 1: ALLOWED,
    }  # fmt: skip


def test_machine_without_gpus_joins_no_job(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others would wait for it, and regroup when it leaves."""
    (machine / "proc").rename(machine / "nothing")
    (machine / "sys/bus").rename(machine / "no_bus")
    calls: list[Any] = []
    monkeypatch.setattr(launch_job, "rendezvous_of", lambda *how: calls.append(how))
    with pytest.raises(EnvironmentProblem, match=r"^--numa-binding node: "):
        launch("touch", "started")
    assert calls == []
