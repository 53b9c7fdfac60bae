"""The dashboard of `--dashboard`: a child process of the first node's agent.

It starts with the first generation in which this node has rank 0 and continues through restarts. If it has
exited by the next generation, it starts again. A pipe connects it to the agent, so it exits when the agent
exits, even if the agent is killed. The agent imports none of its code and does not wait until it has
started. The dashboard reports its own errors, on standard error.
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
"""How long the dashboard may take to exit when the agent ends; then the agent kills it."""


class DashboardProcess:
    """Runs the dashboard, in at most one process at a time."""

    name = "the dashboard"

    def __init__(self, port: int, run_id: str, logs: LogsSpecs) -> None:
        self._port, self._run_id, self._logs = port, run_id, logs
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, event: LifecycleEvent) -> None:
        if isinstance(event, GenerationStarted):
            if event.group_rank in (0, None):
                self._begin()
            else:
                self._close_pipe()
        elif isinstance(event, RunEnded):
            self._close_pipe()

    def _begin(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            if self._process.poll() is None and not self._process.stdin.closed:
                return
            self._close_pipe()
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
            console.warning(
                f"--dashboard: cannot start the dashboard: {problem.strerror or problem}"
            )

    def _close_pipe(self) -> None:
        """Make it exit, without waiting."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def end(self) -> None:
        """Make it exit, and wait."""
        if self._process is None:
            return

        self._close_pipe()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
