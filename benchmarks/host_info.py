"""The machine of a run, and how busy other programs kept it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

BUSY_SAMPLE_S = 0.5
# Above this share of CPU used by other programs, medians of short rows begin to move.
BUSY_SHARE_MAX = 0.10


def describe() -> dict[str, Any]:
    """Return the machine and the compared versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": _version("torch"),
        "holdfast": _version("holdfast-run"),
        "commit": _commit(),
        "load_before": [round(one, 2) for one in os.getloadavg()],
        "busy_before": round(_busy_share(), 3),
    }


def in_words(machine: dict[str, Any]) -> str:
    """Return the machine as two lines."""
    load = " ".join(f"{one:g}" for one in machine["load_before"])
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    return (
        f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['kernel']}; load before: {load}, CPU used by other programs: "
        f"{machine['busy_before']:.0%}\n"
        f"versions: {machine['python']}, torch {machine['torch']}, "
        f"holdfast {machine['holdfast']}{commit}"
    )


def warnings(machine: dict[str, Any]) -> list[str]:
    """Return warnings about the figures."""
    if machine["busy_before"] <= BUSY_SHARE_MAX:
        return []
    used = f"{machine['busy_before']:.0%}"
    return [f"other programs used {used} of the CPU before the start: do not trust the times"]


class CpuTimes:
    """The machine's CPU time, including the time stolen by the host of a virtual machine."""

    def __init__(self) -> None:
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(field) for field in stat.readline().split()[1:9]]
        self.total = sum(fields)
        self.idle = fields[3] + fields[4]
        self.stolen = fields[7]

    def stolen_share_since(self, before: CpuTimes) -> float:
        """Return the share of CPU time that other virtual machines got."""
        return (self.stolen - before.stolen) / max(1, self.total - before.total)


def _busy_share() -> float:
    before = CpuTimes()
    time.sleep(BUSY_SAMPLE_S)
    after = CpuTimes()
    return 1 - (after.idle - before.idle) / max(1, after.total - before.total)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the measured commit, empty outside a checkout."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() if found.returncode == 0 else ""
