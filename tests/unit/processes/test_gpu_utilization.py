"""The utilization of GPUs, with a fake nvidia-smi and fake files of a driver."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.gpus import GpuUtilization, parse_nvidia
from real_jobs import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

OUTPUT = "GPU-aa11, 90\nGPU-bb22, 40\nGPU-cc33, [N/A]\n"


def fake_program(folder: Path, body: str) -> dict[str, str]:
    """Return an environment whose PATH has an nvidia-smi that counts its starts."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho started >> {folder}/starts\n{body}\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def read(gpus: GpuUtilization) -> tuple[float, ...]:
    """Read once; return the utilization."""
    gpus.refresh()
    assert gpus._reading is not None
    gpus._reading.join(PATIENCE_S)
    return gpus.shares


def test_nvidia_smi_is_read_once_per_interval(tmp_path: Path) -> None:
    gpus = GpuUtilization(fake_program(tmp_path, f"printf '{OUTPUT}'"))
    assert gpus.shares == ()
    assert read(gpus) == (0.9, 0.4)
    assert read(gpus) == (0.9, 0.4)
    assert starts(tmp_path) == 1
    gpus.close()


def test_nvidia_smi_that_hangs_is_killed_and_tried_later(tmp_path: Path) -> None:
    environ = fake_program(tmp_path, "/bin/sleep 3600 & echo $! > ${0%/*}/pid; wait")
    gpus = GpuUtilization(environ, every_s=0.0, limit_s=0.5)
    assert read(gpus) == ()
    gpus.refresh()
    assert starts(tmp_path) == 1
    await_end(int((tmp_path / "pid").read_text()))


def test_only_one_read_is_in_progress_and_close_ends_it(tmp_path: Path) -> None:
    environ = fake_program(tmp_path, "/bin/sleep 3600 & echo $! > ${0%/*}/pid; wait")
    gpus = GpuUtilization(environ, every_s=0.0, limit_s=3600.0)
    gpus.refresh()
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gpus.refresh()
    gpus.close()
    assert gpus._reading is not None
    gpus._reading.join(PATIENCE_S)
    assert not gpus._reading.is_alive()
    assert starts(tmp_path) == 1
    await_end(int((tmp_path / "pid").read_text()))


def await_end(pid: int) -> None:
    """Wait until a process that was killed has exited."""
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run(["/bin/kill", "-0", str(pid)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_driver_of_amd_has_a_file_for_each_gpu(tmp_path: Path) -> None:
    for card, percent in (("card0", "75\n"), ("card1", "0\n")):
        (tmp_path / card / "device").mkdir(parents=True)
        (tmp_path / card / "device" / "gpu_busy_percent").write_text(percent)
    gpus = GpuUtilization({"PATH": ""}, str(tmp_path))
    assert read(gpus) == (0.75, 0.0)


def test_host_without_gpus_starts_no_thread(tmp_path: Path) -> None:
    gpus = GpuUtilization({"PATH": str(tmp_path)}, str(tmp_path))
    gpus.refresh()
    assert gpus._reading is None
    gpus.close()


@pytest.mark.parametrize(
    ("visible", "shares"),
    [(None, (0.9, 0.4)), ("1", (0.4,)), ("GPU-aa", (0.9,)), ("", ()), ("1,7", (0.4,)), ("2", ())],
)
def test_only_visible_gpus_count(visible: str | None, shares: tuple[float, ...]) -> None:
    assert parse_nvidia(OUTPUT, visible) == shares


@pytest.mark.parametrize("text", ["No devices were found", "GPU-aa, many", "\x1b[31m, 1 2"])
def test_other_output_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the message is Python's)
        parse_nvidia(text, None)
