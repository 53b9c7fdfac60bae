from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.launcher import devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have imported torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str], list[str]], None]:
    """Give the machine these entries in the driver's folder and in /dev."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def build(in_proc: list[str], in_dev: list[str]) -> None:
        for folder, names in (("proc", in_proc), ("dev", in_dev)):
            for name in names:
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        monkeypatch.setattr(devices, "NVIDIA_PROC", str(tmp_path / "proc"))
        monkeypatch.setattr(devices, "DEV", str(tmp_path / "dev"))

    return build


def never_counted(kind: str) -> int:
    raise AssertionError(f"PyTorch counted {kind}")


@pytest.mark.parametrize(
    ("in_proc", "in_dev", "expected"),
    [
        ([], [], 0),
        (["0000:01", "0000:02"], ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 2),
        (["0000:01", "0000:02"], [], 2),
        ([], ["nvidia0", "nvidia11", "null"], 2),
        (["0000:01", "0000:02"], ["nvidia0"], 1),
    ],
)
def test_nvidia_gpus_are_counted_in_the_file_system(
    in_proc: list[str],
    in_dev: list[str],
    expected: int,
    machine: Callable[[list[str], list[str]], None],
) -> None:
    machine(in_proc, in_dev)
    assert devices.nvidia_count() == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", 0), (" 0 , 1 ", 2), ("-1", 0), ("0,-1,1", 1), ("0,7,1", 1), ("GPU-aa,GPU-bb", 2)],
)
def test_only_visible_gpus_count(
    visible: str,
    expected: int,
    machine: Callable[[list[str], list[str]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine([], ["nvidia0", "nvidia1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.nvidia_count() == expected


def test_torch_does_not_count_nvidia_gpus(
    machine: Callable[[list[str], list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_count", never_counted)
    monkeypatch.setattr(devices, "has_foreign_backend", lambda: False)
    for found, cards in ((["null", "kvm"], 0), (["nvidia0"], 1)):
        machine([], found)
        assert (devices.gpu_count(), devices.accelerator_count()) == (cards, cards)
    assert devices.named_backend_count("npu") == 0


@pytest.mark.parametrize("node", ["kfd", "dri/renderD128"])
def test_torch_counts_other_accelerators(
    node: str, machine: Callable[[list[str], list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_count", {"gpu": 4, "auto": 5, "npu": 6}.__getitem__)
    machine([], [node])
    assert devices.gpu_count() == 4
    assert devices.accelerator_count() == 5
    monkeypatch.setattr(devices, "has_foreign_backend", lambda: True)
    assert devices.named_backend_count("npu") == 6


def interpreter(tmp_path: Path, body: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "expected"), [("echo loading; echo 8", 8), ("echo 8; exit 1", 0), ("echo many", 0)]
)
def test_workers_interpreter_counts_devices(
    body: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", interpreter(tmp_path, body))
    assert devices.torch_count("gpu") == expected


def test_no_module_of_the_working_directory_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may be able to write to it, as to /tmp."""
    installed, here = tmp_path / "installed", tmp_path / "here"
    cuda = "class cuda:\n    is_available = staticmethod(lambda: True)\n    device_count = staticmethod(lambda: {})\n"
    for folder, count in ((installed, 2), (here, 7)):
        folder.mkdir()
        (folder / "torch.py").write_text(cuda.format(count))
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    assert devices.torch_count("gpu") == 2


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["gpu", "xpu", "auto", "npu"])
def test_torch_evaluates_every_device_expression(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    # The real interpreter runs the expression; the script stores its exit code.
    body = f'"{sys.executable}" "$@"; code=$?; echo $code >"{asked}"; exit $code'
    monkeypatch.setenv("PYTHON_EXEC", interpreter(tmp_path, body))
    devices.torch_count(kind)
    assert asked.read_text().strip() == "0"


def test_program_that_imported_torch_counts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(count: int) -> Any:
        return SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)

    torch = SimpleNamespace(cuda=has(3), xpu=has(2), accelerator=has(4))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    assert (devices.gpu_count(), devices.xpu_count(), devices.accelerator_count()) == (3, 2, 4)
    torch.cuda = torch.accelerator = has(0)
    assert (devices.gpu_count(), devices.accelerator_count()) == (0, 0)
