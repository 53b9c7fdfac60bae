"""Limits of open files and of processes: a job runs, or one line names the limit to raise.

Root has no limit of processes, so if the tests run as root, these jobs run as an otherwise unused user. Testing the
whole range of limits for each kind of job takes minutes, and was done by hand; each value here causes a different
failure.
"""

from __future__ import annotations

import glob
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.errors import EnvironmentProblem
from holdfast.processes.workers.pages import FOLDER_PREFIX, SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from real_etcd import Etcd

PATIENCE_S = 60
USER = 61_234  # No other process has this user.
IS_ROOT = os.getuid() == 0

PROGRAM = """
import sys
from holdfast.errors import HoldfastError
from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import elastic_launch
from holdfast.processes.failures.failure import ChildFailedError, exit_status

def value():
    return 7

if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, start_method=sys.argv[1], max_restarts=0
    )
    try:
        print(elastic_launch(config, value)())
    except HoldfastError as error:
        sys.exit(error.exit_code)
    except ChildFailedError as error:
        sys.exit(exit_status(error))
"""


class Limited:
    """Runs programs with a limit, and checks what they left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.script = folder / "train.py"
        self.script.write_text("print('trained')\n")
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)
        packages = [path for path in sys.path if path.endswith("site-packages")]
        source = os.path.dirname(os.path.dirname(holdfast.__file__))
        self.env = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join([source, *packages]),
        }
        if IS_ROOT:
            for path in (folder, self.temporary):
                path.chmod(0o777)
        self.python = self.find_python()

    def find_python(self) -> str:
        """Return an interpreter that this user can run."""
        for path in (sys.executable, "/usr/bin/python3"):
            try:
                with self.start(path, "-c", "import holdfast.wire.messages") as job:
                    job.communicate(timeout=PATIENCE_S)
            except OSError:
                continue
            if job.returncode == 0:
                return path
        pytest.skip("no interpreter that users other than root can run")

    def start(self, *words: str, kind: int = 0, limit: int = 0) -> subprocess.Popen[str]:
        def begin() -> None:
            if limit:
                resource.setrlimit(kind, (limit, limit))
            if IS_ROOT:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)

        return subprocess.Popen(
            words,
            env=self.env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=begin,  # noqa: PLW1509 (the tests have one thread here)
        )

    def check(self, kind: int, limit: int, *words: str) -> int:
        """Run a program until it exits; check its exit code, output and files; return the exit code."""
        with self.start(self.python, *words, kind=kind, limit=limit) as job:
            _, err = job.communicate(timeout=PATIENCE_S)
        assert job.returncode in (0, EnvironmentProblem.exit_code), (limit, job.returncode, err)
        assert "Traceback" not in err, (limit, err)
        if "FAILED" not in err:  # The logs of a failed job are kept.
            assert not [*self.temporary.iterdir()], (limit, err)
        if IS_ROOT:
            assert not glob.glob(f"{SHARED_MEMORY}/{FOLDER_PREFIX}{USER}-*"), (limit, err)
        return job.returncode


@pytest.fixture
def limited() -> Iterator[Limited]:
    # Not `tmp_path`, because other users cannot enter its parent folders.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Limited(Path(folder))


def run(*flags: str) -> tuple[str, ...]:
    return ("-m", "holdfast", "run", "--nproc-per-node=2", *flags, "train.py")


MANY = (
    "--nnodes=1:2",
    "--rdzv-conf=settle=0.01",
    "--rdzv-endpoint=127.0.0.1:0",
    "--rdzv-backend=c10d",
)
BY_FILE = (*MANY[:2], "--rdzv-endpoint=meeting", "--rdzv-backend=file")


@pytest.mark.parametrize(
    ("words", "too_few", "enough"),
    [
        (run(), (5, 6, 7, 8, 10, 11, 12, 15, 17), 200),
        (run("--preload=json"), (8, 14), 68),
        (run(*MANY), (9, 20), 200),
        (run(*BY_FILE), (12, 20), 200),
        (("program.py", "fork"), (8, 20), 200),
        (("program.py", "forkserver"), (14,), 200),
        (("program.py", "spawn"), (14,), 200),
    ],
)
def test_job_runs_or_names_the_limit_of_open_files(
    limited: Limited, words: tuple[str, ...], too_few: tuple[int, ...], enough: int
) -> None:
    for limit in too_few:
        assert limited.check(resource.RLIMIT_NOFILE, limit, *words) != 0, limit
    assert limited.check(resource.RLIMIT_NOFILE, enough, *words) == 0


def test_job_on_etcd_runs_or_names_the_limit_of_open_files(limited: Limited, etcd: Etcd) -> None:
    """A node that fails because of its limit leaves nothing in etcd that blocks other nodes of its job."""
    words = run(*MANY[:2], f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-backend=etcd")
    for limit in (8, 20, 30):
        assert limited.check(resource.RLIMIT_NOFILE, limit, *words) != 0, limit
    for limit in range(2, 5) if IS_ROOT else ():
        assert limited.check(resource.RLIMIT_NPROC, limit, *words) != 0, limit
    assert limited.check(resource.RLIMIT_NOFILE, 200, *words) == 0


@pytest.mark.skipif(not IS_ROOT, reason="other processes of the user would count")
@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (run(), 4),  # The agent, its keeper and the workers; threads count as well.
        (run(*MANY), 5),
        (("program.py", "fork"), 3),  # A worker also has a thread, and fails without it.
    ],
)
def test_job_runs_or_names_the_limit_of_processes(
    limited: Limited, words: tuple[str, ...], needed: int
) -> None:
    for limit in range(1, needed):
        assert limited.check(resource.RLIMIT_NPROC, limit, *words) != 0, limit
    assert limited.check(resource.RLIMIT_NPROC, 200, *words) == 0
