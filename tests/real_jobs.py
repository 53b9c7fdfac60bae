"""Real jobs for the integration tests: they are started and observed, and must leave nothing behind.

Nothing here sleeps in the hope that something has happened: workers report through a named pipe, and a pidfd shows
the exit of a process.
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
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Self

HOLDFAST = (sys.executable, "-m", "holdfast")
PATIENCE_S = 60


def holdfast(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of Holdfast to its end."""
    return subprocess.run(
        [*HOLDFAST, *words],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


class WorkerMessages:
    """A named pipe to which workers write lines with `send` (see `SCRIPT_HEAD`)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "messages"
        os.mkfifo(self.path)
        # Opened for both directions, so that neither end waits for the other and the pipe never ends.
        self._fd = os.open(self.path, os.O_RDWR)
        self._unread = b""

    def next(self, explain: Callable[[], object] = lambda: "") -> list[str]:
        """Wait for the next line and return its words; `explain` describes a failure."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
            assert ready, f"no messages from the workers {explain()}"
            self._unread += os.read(self._fd, 65536)
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().split()

    def take(self, count: int) -> dict[str, int]:
        """Wait for this many lines of the form `name pid`; return the pids by name."""
        received = [self.next() for _ in range(count)]
        return {name: int(pid) for name, pid in received}

    def is_quiet(self) -> bool:
        """Whether there are no further lines so far."""
        return not self._unread and not select.select([self._fd], [], [], 0)[0]

    def close(self) -> None:
        os.close(self._fd)


# Every worker script begins with this: `send(name)` writes a name and the id of the process.
SCRIPT_HEAD = """
import os, signal, subprocess, sys, time
def send(name, pid=None):
    with open(os.environ["MESSAGES"], "w") as messages:
        messages.write(f"{name} {pid or os.getpid()}\\n")
RANK, GENERATION = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
def forever():
    while True:  # Not for long: a signal just before Python goes to sleep does not wake it.
        time.sleep(0.1)
"""


class Job:
    """A `holdfast run` of one script, with its messages. It always exits with the test."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *flags: str,
        name: str = "train.py",
        stderr: int = subprocess.PIPE,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.messages = WorkerMessages(folder)
        path = folder / name
        head = SCRIPT_HEAD if name.endswith(".py") else ""
        path.write_text(head + textwrap.dedent(script))
        path.chmod(0o755)
        self.agent = subprocess.Popen(
            [*HOLDFAST, "run", *flags, str(path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "MESSAGES": str(self.messages.path), **(env or {})},
            cwd=folder,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.agent.poll() is None:
            self.agent.kill()
        self.agent.communicate(timeout=PATIENCE_S)
        self.messages.close()

    def signal(self, signum: signal.Signals) -> None:
        self.agent.send_signal(signum)

    def end(self) -> tuple[int, str, str]:
        """Wait until the command exits; return its exit code and its output."""
        out, err = self.agent.communicate(timeout=PATIENCE_S)
        return self.agent.returncode, out, err

    def keeper(self) -> int:
        """Return the process id of the agent's keeper."""
        pids = children(self.agent.pid)
        assert len(pids) == 1, pids
        return pids[0]


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as listing:
            found += [int(word) for word in listing.read().split()]
    return found


class Watched:
    """Processes whose exit can be awaited, even if their pids are reused."""

    def __init__(self, *pids: int) -> None:
        self._pidfds = {}
        for pid in pids:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # It has exited already.

    def wait_until_exited(self) -> None:
        """Wait until all have exited; fail if one does not."""
        for pid, pidfd in self._pidfds.items():
            ready, _, _ = select.select([pidfd], [], [], PATIENCE_S)
            assert ready, f"process {pid} still runs"
            os.close(pidfd)
        self._pidfds.clear()

    def assert_exited(self) -> None:
        """Fail if any of them still runs at this moment."""
        for pid, pidfd in self._pidfds.items():
            ready, _, _ = select.select([pidfd], [], [], 0)
            os.close(pidfd)
            assert ready, f"process {pid} was left behind"
        self._pidfds.clear()
