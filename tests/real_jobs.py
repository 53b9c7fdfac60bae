"""Real jobs for the integration tests: started, watched and looked for afterwards.

Nothing here sleeps in the hope that something has happened: workers tell of themselves through a
named pipe, and the end of a process is awaited by its pidfd.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

HOLDFAST = (sys.executable, "-m", "holdfast")
PATIENCE_S = 60


class News:
    """A named pipe that workers write lines to with `tell`, see `SCRIPT_HEAD`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "news"
        os.mkfifo(self.path)
        # Opened for both, so that neither end waits for the other and it never ends.
        self._fd = os.open(self.path, os.O_RDWR)
        self._unread = b""

    def next(self) -> list[str]:
        """Wait for the next line and return its words."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
            assert ready, "no news from the workers"
            self._unread += os.read(self._fd, 65536)
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().split()

    def take(self, count: int) -> dict[str, int]:
        """Wait for lines of the form `name pid` and return them by name."""
        told = [self.next() for _ in range(count)]
        return {name: int(pid) for name, pid in told}

    def is_quiet(self) -> bool:
        """Whether nothing more has been said so far."""
        return not self._unread and not select.select([self._fd], [], [], 0)[0]

    def close(self) -> None:
        os.close(self._fd)


# Every worker script begins with this: `tell(name)` says a name and this process's id.
SCRIPT_HEAD = """
import os, signal, subprocess, sys, time
def tell(name, pid=None):
    with open(os.environ["NEWS"], "w") as news:
        news.write(f"{name} {pid or os.getpid()}\\n")
RANK, GENERATION = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
def forever():
    while True:  # Not for long: a signal just before Python goes to sleep does not wake it.
        time.sleep(0.1)
"""


class Job:
    """A `holdfast run` of one script, with its news; ends with the test, whatever happens."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *flags: str,
        name: str = "train.py",
        stderr: int = subprocess.PIPE,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.news = News(folder)
        path = folder / name
        head = SCRIPT_HEAD if name.endswith(".py") else ""
        path.write_text(head + textwrap.dedent(script))
        path.chmod(0o755)
        self.agent = subprocess.Popen(
            [*HOLDFAST, "run", *flags, str(path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "NEWS": str(self.news.path), **(env or {})},
            cwd=folder,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.agent.poll() is None:
            self.agent.kill()
        self.agent.communicate(timeout=PATIENCE_S)
        self.news.close()

    def signal(self, signum: signal.Signals) -> None:
        self.agent.send_signal(signum)

    def end(self) -> tuple[int, str, str]:
        """Wait for the command to end; return its exit code and what it said."""
        out, err = self.agent.communicate(timeout=PATIENCE_S)
        return self.agent.returncode, out, err

    def keeper(self) -> int:
        """Return the process id of the agent's keeper."""
        pids = children(self.agent.pid)
        assert len(pids) == 1, pids
        return pids[0]


def children(pid: int) -> list[int]:
    """Return the processes that any thread of this one has started."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as listing:
            found += [int(word) for word in listing.read().split()]
    return found


class Watched:
    """Processes whose end can be awaited, even where their numbers are used again."""

    def __init__(self, *pids: int) -> None:
        self._pidfds = {}
        for pid in pids:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # It is gone already.

    def all_gone(self) -> None:
        """Wait until every one has ended; fail if one does not."""
        for pid, pidfd in self._pidfds.items():
            ready, _, _ = select.select([pidfd], [], [], PATIENCE_S)
            assert ready, f"process {pid} is still there"
            os.close(pidfd)
        self._pidfds.clear()

    def gone_already(self) -> None:
        """Fail if any is there at this moment; for what must be gone before."""
        for pid, pidfd in self._pidfds.items():
            ready, _, _ = select.select([pidfd], [], [], 0)
            os.close(pidfd)
            assert ready, f"process {pid} was left behind"
        self._pidfds.clear()
