"""Runs one command line under the real torchrun and under `holdfast run`, and records the results."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TIMEOUT_S = 60

RUN_FOLDER = re.compile(r"(?P<run_id>.+)_[0-9a-z_]{8}")
"""The folder of a run: its id and eight random characters."""
OWN_FILE = re.compile(r"failure\.json|(events|timeline)-.+\.jsonl")
"""The files that only Holdfast writes there: the report and the events."""


def free_port() -> int:
    """Return an unused port outside of the range from which the kernel assigns ports."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


class Outcome(NamedTuple):
    """The results of one launcher for a command line."""

    folder: Path
    code: int
    out: str
    err: str

    def probes(self) -> dict[str, Any]:
        """Return the files that the workers wrote, by name."""
        return {
            file.name: json.loads(file.read_text()) for file in self.folder.glob("probe-*.json")
        }

    def logs(self) -> dict[str, str]:
        """Return every file and folder of the log directory, without the name of the run."""
        root = self.folder / "logs"
        tree = {}
        for path in sorted(root.rglob("*")):
            run, *inner = path.relative_to(root).parts
            assert RUN_FOLDER.fullmatch(run)
            if not inner or OWN_FILE.fullmatch("/".join(inner)):
                continue
            text = path.read_text() if path.is_file() else "a folder"
            if inner[-1].startswith("filtered_"):  # Workers write in any order.
                text = "".join(sorted(text.splitlines(keepends=True)))
            tree["/".join(inner)] = text
        return tree

    def shown(self) -> tuple[list[str], list[str]]:
        """Return the workers' lines on the two streams; workers write in any order."""
        err = [line for line in self.err.splitlines() if re.search(r"\berr \S+ \d", line)]
        return sorted(self.out.splitlines()), sorted(err)


class Torchrun:
    """The process that runs torchrun's jobs; see `torchrun_many.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "torchrun_many.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def begin(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> int:
        """Wait until the job exits; return its exit code."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
        assert ready, f"torchrun is not done after {TIMEOUT_S} s"
        return int(self._process.stdout.readline())

    def close(self) -> None:
        # The whole group, since an abandoned job must stop its workers.
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()


class Launchers:
    """Runs command lines, each launcher in its own folder next to the scripts."""

    def __init__(self, base: Path, torchrun: Torchrun) -> None:
        self.base = base
        self._torchrun = torchrun
        kept = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
        (base / "tmp").mkdir()
        self.env = {
            "PATH": f"{BIN}:/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": str(base / "tmp"),
            **kept,
        }

    def script(self, name: str, text: str) -> None:
        path = self.base / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def both(self, line: list[str], env: dict[str, str] | None = None) -> tuple[Outcome, Outcome]:
        """Return the results of torchrun and Holdfast for the line, in this order."""
        # If the line names the port of the workers' store, the launchers cannot run at the same time.
        in_turn = self.holdfast(line, env) if "--master-port" in line else None
        folder = self._folder("torchrun")
        out, err = folder / "stdout", folder / "stderr"
        self._torchrun.begin(
            {
                "argv": line,
                "env": self.env | (env or {}),
                "cwd": str(folder),
                "stdout": str(out),
                "stderr": str(err),
            }
        )
        ours = in_turn or self.holdfast(line, env)
        code = self._torchrun.end()
        return Outcome(folder, code, out.read_text(), err.read_text()), ours

    def holdfast(self, line: list[str], env: dict[str, str] | None = None) -> Outcome:
        return self.command([str(BIN / "holdfast"), "run", *line], "holdfast", env)

    def command(
        self, command: list[str], folder_name: str, env: dict[str, str] | None = None
    ) -> Outcome:
        folder = self._folder(folder_name)
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.env | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        return Outcome(folder, done.returncode, done.stdout, done.stderr)

    def _folder(self, name: str) -> Path:
        folder = self.base / name
        folder.mkdir()
        return folder
