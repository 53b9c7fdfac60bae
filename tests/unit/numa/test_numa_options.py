from __future__ import annotations

import os
import pickle
import shutil
import threading
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from holdfast import console, numa
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.numa import binding
from holdfast.numa.binding import AffinityMode, NumaOptions, OnCpus, cpus_of_workers
from synthetic_machines import SMALL, add_nvidia

if TYPE_CHECKING:
    from pathlib import Path

NODE = NumaOptions(AffinityMode.NODE)
LENIENT = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)


@pytest.fixture(autouse=True)
def all_cpus_and_gpus_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(binding, "_logged", set())
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def test_options_are_a_value() -> None:
    assert numa.NumaOptions is NumaOptions
    assert AffinityMode("core-complex") is AffinityMode.CORE_COMPLEX
    assert NumaOptions(AffinityMode.NODE) == NODE
    assert hash(NumaOptions(AffinityMode.NODE)) == hash(NODE)
    assert pickle.loads(pickle.dumps(LENIENT)) == LENIENT
    with pytest.raises(FrozenInstanceError):
        NODE.affinity_mode = AffinityMode.SOCKET  # type: ignore[misc]


def test_without_options_nothing_is_looked_at() -> None:
    assert cpus_of_workers(None, range(8), root="/nowhere") == {}


def test_each_worker_gets_the_cpus_near_its_gpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "holdfast")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,0")
    SMALL.build(tmp_path)
    low, high = (SMALL.threads(SMALL.cores_of(node)) for node in (0, 1))
    assert cpus_of_workers(NODE, range(2), root=str(tmp_path)) == {0: high, 1: low}
    assert [line.partition(" is ")[2] for line in caplog.messages] == [
        "bound to CPUs 4-7,12-15, near GPU 0000:c3:00.0 on NUMA node 1",
        "bound to CPUs 0-3,8-11, near GPU 0000:07:00.0 on NUMA node 0",
    ]


def test_cpus_that_the_agent_may_not_use_are_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 3, 14})
    SMALL.build(tmp_path)
    assert cpus_of_workers(NODE, [0, 4], root=str(tmp_path)) == {0: [1, 3], 4: [14]}


# What a machine can lack, and what is said of it.
LACKING = {
    "no GPU": "no GPU can be seen here, and workers are bound near to theirs",
    "no NUMA": "the kernel shows no NUMA nodes here, in /sys/devices/system/node",
    "too few": "worker 1 has no GPU to be bound near to: 1 GPU can be seen here",
    "nonsense": "what the kernel says is not clear: invalid literal for int()",
}


def build_lacking(root: Path, what: str) -> None:
    if what == "no GPU":
        SMALL.build(root)
        shutil.rmtree(root / "proc")
        shutil.rmtree(root / "sys/bus")
    elif what == "no NUMA":
        add_nvidia(root, 0, -1)
    else:
        SMALL.build(root)
        for gpu in list((root / "proc/driver/nvidia/gpus").iterdir())[1:]:
            shutil.rmtree(gpu)
    if what == "nonsense":
        (root / "sys/devices/system/node/node0/cpulist").write_text("many")


@pytest.mark.parametrize("what", LACKING)
def test_a_machine_that_lacks_something_is_told_of_in_one_line(tmp_path: Path, what: str) -> None:
    build_lacking(tmp_path, what)
    with pytest.raises(EnvironmentProblem) as caught:
        cpus_of_workers(NODE, range(3), root=str(tmp_path))
    said = str(caught.value)
    assert said.startswith(f"--numa-binding node: {LACKING[what]}")
    assert said.endswith("(leave --numa-binding out, or NumaOptions, to start workers unbound)")
    assert "\n" not in said


@pytest.mark.parametrize("what", LACKING)
def test_workers_are_not_bound_there_if_that_is_allowed(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    build_lacking(tmp_path, what)
    for _ in range(2):  # Said once, however often workers are started.
        assert cpus_of_workers(LENIENT, range(3), root=str(tmp_path)) == {}
    [line] = caplog.messages
    assert line.startswith(f"--numa-binding node: {LACKING[what]}")
    assert line.endswith("; workers are not bound")


def test_an_order_that_only_cuda_knows_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(console.NOTICE, "holdfast")
    SMALL.build(tmp_path)
    add_nvidia(tmp_path, 0, 0, "NVIDIA T4")
    for _ in range(2):
        assert len(cpus_of_workers(NODE, range(8), root=str(tmp_path))) == 8
    [line] = caplog.messages
    assert "GPUs of several models are here (NVIDIA H100, NVIDIA T4)" in line
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in line


@pytest.mark.parametrize(
    "options",
    ["bogus", 3, NumaOptions("nodes"), SimpleNamespace(affinity_mode=None)],  # type: ignore[arg-type]
)
def test_options_that_say_nothing_are_refused(options: object) -> None:
    with pytest.raises(UsageError, match=r"^numa_options: .* accepted: .* node, socket, exclusive"):
        cpus_of_workers(options, range(1))


@pytest.mark.parametrize("options", ["node", NumaOptions("node")])  # type: ignore[arg-type]
def test_a_mode_may_be_its_text(tmp_path: Path, options: object) -> None:
    SMALL.build(tmp_path)
    assert list(cpus_of_workers(options, range(2), root=str(tmp_path))) == [0, 1]


def test_a_thread_is_bound_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    one = {min(before)}
    go = threading.Event()
    seen: list[set[int]] = []

    def look() -> None:
        go.wait()
        seen.append(os.sched_getaffinity(0))

    other = threading.Thread(target=look)
    other.start()
    try:
        with OnCpus(one):
            seen.append(os.sched_getaffinity(0))
            go.set()
            other.join()
    finally:
        go.set()
        other.join()
    assert seen == [one, before]
    assert os.sched_getaffinity(0) == before
    with OnCpus(()):
        assert os.sched_getaffinity(0) == before
