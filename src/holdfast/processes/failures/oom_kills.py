"""Finds out whether the kernel's out-of-memory killer may have killed a worker.

The kernel counts the kills of its out-of-memory killer, for each memory control group and for the
whole machine, but does not name the victims. So if a worker died of SIGKILL and the count has
increased, the report states that the killer was active, in this job's group or on this machine. Each
kill explains at most one such death. The agent reads two small files when workers start, and one when
a worker was killed.
"""

from __future__ import annotations

import os


class OomKills:
    """Counts the out-of-memory kills since its creation."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._group = self._group_file()
        self._explained = self._count()

    def explain(self) -> str:
        """Return a reason for a worker's SIGKILL; empty if every kill so far explains another death."""
        if self._count() <= self._explained:
            return ""
        self._explained += 1
        where = "in this job's memory group" if self._group else "on this machine"
        return f"SIGKILL: the kernel's out-of-memory killer was active {where}"

    def _count(self) -> int:
        path = self._group or os.path.join(self._root, "proc/vmstat")
        for line in self._read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
        return 0

    def _group_file(self) -> str:
        """Return the file in which this process's memory control group counts, if there is one."""
        for line in self._read(os.path.join(self._root, "proc/self/cgroup")).splitlines():
            _number, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if controllers == "":
                mounts, name = ["unified", ""], "memory.events"
            elif "memory" in controllers.split(","):
                mounts, name = ["memory"], "memory.oom_control"
            else:
                continue
            for mount in mounts:
                folder = os.path.join(self._root, "sys/fs/cgroup", mount, group.strip("/"))
                path = os.path.join(folder, name)
                if "oom_kill " in self._read(path):
                    return path
        return ""

    @staticmethod
    def _read(path: str) -> str:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return ""
