"""The kernel's counters of out-of-memory kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.processes.failures.oom_kills import OomKills

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
def test_new_oom_kill_is_reported(tmp_path: Path, kind: str) -> None:
    groups, path, text = GROUPS[kind]
    write(tmp_path, "proc/self/cgroup", groups + "\n")
    write(tmp_path, path, text.format(3))
    kills = OomKills(str(tmp_path))
    assert kills.explain() == ""
    write(tmp_path, path, text.format(4))
    explanation = kills.explain()
    assert "out-of-memory" in explanation
    assert kills.explain() == ""  # There was one kill; another death has another reason.
    write(tmp_path, path, text.format(6))
    assert [kills.explain() for _ in range(3)] == [explanation, explanation, ""]


def test_cgroup_oom_count_is_preferred(tmp_path: Path) -> None:
    groups, path, text = GROUPS["v2"]
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, path, text.format(0))
    write(tmp_path, "proc/vmstat", "oom_kill 1\n")
    kills = OomKills(str(tmp_path))
    write(tmp_path, "proc/vmstat", "oom_kill 2\n")
    assert kills.explain() == ""
