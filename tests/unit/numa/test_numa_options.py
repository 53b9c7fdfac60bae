from __future__ import annotations

import os
import shutil
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from holdfast import console
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


def test_each_worker_gets_the_cpus_near_its_gpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "holdfast")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,0")
    SMALL.build(tmp_path)
    low, high = (SMALL.threads(SMALL.cores_of(node)) for node in (0, 1))
    assert cpus_of_workers(NODE, range(2), root=str(tmp_path)) == {0: high, 1: low}
    first, second = caplog.messages
    assert "4-7,12-15" in first
    assert "0000:07:00.0" in second


LACKING = ["no GPU", "no NUMA", "too few", "nonsense"]


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
def test_missing_gpus_are_an_error_or_leave_workers_unbound(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    build_lacking(tmp_path, what)
    with pytest.raises(EnvironmentProblem, match=r"^--numa-binding node: [^\n]*$"):
        cpus_of_workers(NODE, range(3), root=str(tmp_path))
    caplog.clear()
    for _ in range(2):  # Logged once, however often workers are started.
        assert cpus_of_workers(LENIENT, range(3), root=str(tmp_path)) == {}
    [line] = caplog.messages
    assert line.startswith("--numa-binding node: ")


def test_unknown_gpu_order_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(console.NOTICE, "holdfast")
    SMALL.build(tmp_path)
    add_nvidia(tmp_path, 0, 0, "NVIDIA T4")
    for _ in range(2):
        assert len(cpus_of_workers(NODE, range(8), root=str(tmp_path))) == 8
    [line] = caplog.messages
    assert "NVIDIA H100, NVIDIA T4" in line
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in line


@pytest.mark.parametrize(
    "options",
    ["bogus", 3, NumaOptions("nodes"), SimpleNamespace(affinity_mode=None)],  # type: ignore[arg-type]
)
def test_invalid_options_are_refused(options: object) -> None:
    with pytest.raises(UsageError, match=r"^numa_options: .* node, socket, exclusive"):
        cpus_of_workers(options, range(1))


def test_thread_is_bound_only_inside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    one = {min(before)}
    go = threading.Event()
    seen: list[set[int]] = []

    def read_affinity() -> None:
        go.wait()
        seen.append(os.sched_getaffinity(0))

    other = threading.Thread(target=read_affinity)
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
