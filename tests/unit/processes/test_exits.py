"""How workers exited, and what can be known of why."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.failures import exits
from holdfast.processes.failures.exits import OomKills

if TYPE_CHECKING:
    from pathlib import Path


def test_only_a_shortage_is_retryable() -> None:
    assert exits.is_retryable(None)
    assert all(exits.is_retryable((number, "x")) for number in (errno.EAGAIN, errno.ETXTBSY))
    assert not any(exits.is_retryable((number, "x")) for number in (0, errno.ENOENT, errno.EACCES))


@pytest.mark.parametrize(
    ("after_stop", "stray_signal", "consequence"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_only_the_stops_signal_makes_a_consequence(
    after_stop: bool, stray_signal: bool, consequence: bool
) -> None:
    ended = exits.WorkerExit(0, 42, -11, "", 0, 2, after_stop, True, stray_signal)  # noqa: FBT003
    failure = exits.failure_of(ended, stop_began_ns=1, error_file="")
    assert (failure.consequence, failure.stopped) == (consequence, consequence)


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
    told = kills.explain()
    assert "out-of-memory" in told
    assert kills.explain() == ""  # It killed one; another's death has another reason.
    write(tmp_path, path, text.format(6))
    assert [kills.explain() for _ in range(3)] == [told, told, ""]


def test_cgroup_oom_count_is_preferred(tmp_path: Path) -> None:
    groups, path, text = GROUPS["v2"]
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, path, text.format(0))
    write(tmp_path, "proc/vmstat", "oom_kill 1\n")
    kills = OomKills(str(tmp_path))
    write(tmp_path, "proc/vmstat", "oom_kill 2\n")
    assert kills.explain() == ""
