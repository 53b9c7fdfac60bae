"""The out-of-memory killer is named only where the kernel counted a kill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.processes.failures.exits import OomKills

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = {
    "v2": (
        "0::/job",
        "sys/fs/cgroup/job/memory.events",
        "low 0\nhigh 0\nmax 7\noom 1\noom_kill {}\n",
    ),
    "hybrid": (
        "1:cpu:/\n0::/job",
        "sys/fs/cgroup/unified/job/memory.events",
        "oom 1\noom_kill {}\n",
    ),
    "v1": (
        "5:devices:/\n4:memory:/job\n0::/",
        "sys/fs/cgroup/memory/job/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
    "none": ("0::/", "proc/vmstat", "pgfault 12\noom_kill {}\nnr_x 3\n"),
}


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize("kind", GROUPS)
def test_a_kill_that_was_counted_since_is_told(tmp_path: Path, kind: str) -> None:
    groups, path, text = GROUPS[kind]
    write(tmp_path, "proc/self/cgroup", groups + "\n")
    write(tmp_path, path, text.format(3))
    kills = OomKills(str(tmp_path))
    assert kills.explain() == ""
    write(tmp_path, path, text.format(4))
    where = "on this machine" if kind == "none" else "in this job's memory group"
    told = f"SIGKILL: the kernel's out-of-memory killer was at work {where}"
    assert kills.explain() == told
    assert kills.explain() == ""  # It killed one; another's death has another reason.
    write(tmp_path, path, text.format(6))
    assert [kills.explain() for _ in range(3)] == [told, told, ""]


def test_the_groups_own_count_is_preferred_to_the_machines(tmp_path: Path) -> None:
    groups, path, text = GROUPS["v2"]
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, path, text.format(0))
    write(tmp_path, "proc/vmstat", "oom_kill 1\n")
    kills = OomKills(str(tmp_path))
    write(tmp_path, "proc/vmstat", "oom_kill 2\n")
    assert kills.explain() == ""


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "\x00\xff"])
def test_files_that_make_no_sense_are_no_kill(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", text)
    write(tmp_path, "proc/vmstat", text)
    assert OomKills(str(tmp_path)).explain() == ""
