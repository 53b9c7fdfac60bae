"""The number of accelerators of this machine, found without importing PyTorch in this process.

This module reads the number of NVIDIA GPUs from the driver's files and `CUDA_VISIBLE_DEVICES`. If there are
signs of another kind of accelerator, it starts a child process, in which PyTorch counts the devices. If this
process has already imported PyTorch, PyTorch counts all devices. Nothing checks whether a device works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

NVIDIA_PROC = "/proc/driver/nvidia/gpus"
DEV = "/dev"

TORCH_ANSWER_S = 120
"""Limit for importing PyTorch and counting with it, on a cold file system."""

OTHER_ACCELERATORS = ("accel", "davinci0", "dri/renderD128", "hl0", "kfd")
"""Names in /dev that hint at accelerators other than NVIDIA's."""

_TORCH_QUESTIONS = {
    "gpu": "torch.cuda.device_count() if torch.cuda.is_available() else 0",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else 0",
}
_TORCH_QUESTION_BY_NAME = (
    "(lambda n: getattr(torch, n).device_count()"
    " if n == torch._C._get_privateuse1_backend_name() and getattr(torch, n).is_available()"
    " else 0)({name!r})"
)


def cpu_count() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def gpu_count() -> int:
    """Return how many GPUs workers will see: NVIDIA's, or if there are none, PyTorch's count."""
    if _is_torch_here():
        return torch_count("gpu")
    return nvidia_count() or (torch_count("gpu") if _has_other_accelerators() else 0)


def xpu_count() -> int:
    """Return how many Intel GPUs workers will see; only PyTorch knows."""
    return torch_count("xpu")


def accelerator_count() -> int:
    """Return the number of devices of any accelerator, 0 if there is none.

    NVIDIA GPUs count even if the installed PyTorch could not use them; `torchrun` would then count
    CPUs.
    """
    if _is_torch_here():
        return torch_count("auto")
    found = nvidia_count()
    if found == 0 and (_has_other_accelerators() or has_foreign_backend()):
        found = torch_count("auto")
    return found


def named_backend_count(name: str) -> int:
    """Return the number of devices of an out-of-tree PyTorch backend such as `npu`, 0 if it is unknown."""
    return torch_count(name) if has_foreign_backend() else 0


def nvidia_count() -> int:
    """Return the number of NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` shows to workers."""
    in_proc = len(_names_in(NVIDIA_PROC))
    in_dev = sum(name.removeprefix("nvidia").isdecimal() for name in _names_in(DEV))
    # A container may hide GPUs in only one of the two places.
    present = min(in_proc, in_dev) or max(in_proc, in_dev)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present == 0 or visible is None:
        return present
    count = 0
    for item in visible.split(","):
        # CUDA ignores everything from the first invalid entry on.
        name = item.strip()
        if not name or name.startswith("-"):
            break
        if name.isdecimal() and int(name) >= present:
            break
        count += 1
    return count


def has_foreign_backend() -> bool:
    """Return whether an installed package adds a backend to PyTorch."""
    return bool(metadata.entry_points(group="torch.backends"))


def torch_count(kind: str) -> int:
    """Return PyTorch's count of `kind` in the workers' interpreter; 0 without PyTorch."""
    question = _TORCH_QUESTIONS.get(kind) or _TORCH_QUESTION_BY_NAME.format(name=kind)
    if _is_torch_here():
        return int(eval(question, {"torch": sys.modules["torch"]}))  # noqa: S307 (our own text)
    interpreter = os.environ.get("PYTHON_EXEC") or sys.executable
    # Not from the working directory: other users may be able to write to it.
    program = (
        f"import sys; sys.path = [one for one in sys.path if one]; import torch; print({question})"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TORCH_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # Libraries may print while they are imported, so the count is the last line.
    answer = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    return int(answer) if done.returncode == 0 and answer.isdecimal() else 0


def _is_torch_here() -> bool:
    """Whether this program has imported PyTorch itself, and its workers use the same installation."""
    return "torch" in sys.modules and not os.environ.get("PYTHON_EXEC")


def _has_other_accelerators() -> bool:
    return any(os.path.exists(os.path.join(DEV, name)) for name in OTHER_ACCELERATORS)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
