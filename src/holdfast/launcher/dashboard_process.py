"""The dashboard of `--dashboard`: a process of its own below the agent of the first node.

It is an observer: it begins with the first generation in which this node has rank 0, goes on through
restarts, and is begun again if it has ended by then. It holds one end of a pipe whose other end is
the agent's, so it ends with the agent however that ends. The agent imports nothing of it, waits for
nothing of it, and does not care if it fails: what there is to say it says itself, on standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.observe.lifecycle import GenerationStarted, RunEnded

if TYPE_CHECKING:
    from holdfast.observe.lifecycle import LifecycleEvent
    from holdfast.processes.logs.specs import LogsSpecs

END_S = 2.0
"""For it to end by itself when the agent does; then it is killed."""


class DashboardProcess:
    """At most one process at a time."""

    name = "the dashboard"

    def __init__(self, port: int, run_id: str, logs: LogsSpecs) -> None:
        self._port, self._run_id, self._logs = port, run_id, logs
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, event: LifecycleEvent) -> None:
        if isinstance(event, GenerationStarted):
            if event.group_rank in (0, None):
                self._begin()
            else:
                self._let_go()
        elif isinstance(event, RunEnded):
            self._let_go()

    def _begin(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            if self._process.poll() is None and not self._process.stdin.closed:
                return
            self._let_go()
        folder = getattr(self._logs, "run_dir", None) or ""
        command = [
            sys.executable, "-P", "-m", "holdfast", "dashboard",
            "--port", str(self._port),
            "--rdzv-id", self._run_id,
            "--agent-pid", str(os.getpid()),
            *(["--log-dir", folder] if os.path.isdir(folder) else []),
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=2, start_new_session=True
            )
        except OSError as problem:
            console.warning(f"--dashboard: cannot start it: {problem.strerror or problem}")

    def _let_go(self) -> None:
        """Have it end soon; a loop that must go on does not wait for that."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def end(self) -> None:
        """End it, and wait for that."""
        if self._process is None:
            return

        self._let_go()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
