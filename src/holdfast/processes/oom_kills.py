"""Whether the kernel's out-of-memory killer was at work: the one who kills and leaves no note.

The kernel counts its kills, for each memory control group and for the whole machine. A worker
that died of SIGKILL while the count of this job's own group rose was killed for its memory; if
only the machine's count is to be had, that is likely, not certain.

It reads two small files when workers start and one when a worker was killed; nothing watches.
"""

from __future__ import annotations

import os


class OomKills:
    """The count of out-of-memory kills, as it was when this was made."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._group = self._group_file()
        self._at_first = self._count()

    def explain(self) -> str:
        """Say that the out-of-memory killer was at work since, empty if it was not."""
        if self._count() <= self._at_first:
            return ""
        if self._group:
            return "killed by the kernel's out-of-memory killer (SIGKILL)"
        return "likely killed by the kernel's out-of-memory killer, which was at work (SIGKILL)"

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
            with open(path, encoding="ascii", errors="replace") as stream:
                return stream.read()
        except OSError:
            return ""
