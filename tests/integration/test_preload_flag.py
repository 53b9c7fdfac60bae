"""`--preload` on real command lines: which modules are preloaded for workers, and the messages."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from dashboards import await_agents
from observed_jobs import until
from real_jobs import Job, holdfast
from real_teams import free_port

if TYPE_CHECKING:
    from pathlib import Path

# Two modules of the standard library that nothing else here imports, and one of the user.
WORKER = """
import sys
imported = [name for name in ("wave", "chunk_of_mine", "filecmp") if name in sys.modules]
import wave
import chunk_of_mine
def main():
    import filecmp
sys.stdout.write(" ".join(["there already:", *imported]) + "\\n")  # One write, since two workers share it.
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "PYTHON_EXEC", "LOGLEVEL", "PET_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "chunk_of_mine.py").touch()


def run(*words: str, **variables: str) -> tuple[int, list[str], list[str]]:
    """Run a job; return its exit code, and the lines of its output and its messages."""
    done = holdfast("run", *words, env=variables)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("program", [("worker.py",), ("-m", "worker"), ("--run-path", "worker.py")])
def test_auto_preloads_installed_modules_but_not_the_users(program: tuple[str, ...]) -> None:
    code, out, err = run("--nproc-per-node", "2", "--preload", "auto", *program)
    assert (code, out) == (0, ["there already: wave"] * 2), err
    assert err == []


def test_named_modules_are_preloaded_including_the_users() -> None:
    code, out, err = run("--preload", "auto,filecmp,chunk_of_mine", "worker.py")
    assert (code, out) == (0, ["there already: wave chunk_of_mine filecmp"]), err


def test_variable_equals_the_flag_and_auto_reports_its_modules() -> None:
    code, out, err = run("worker.py", PET_PRELOAD="auto", LOGLEVEL="INFO")
    assert (code, out) == (0, ["there already: wave"])
    assert "[holdfast] --preload auto finds in worker.py: wave" in err


# A module that reads variables when it is imported, and a script that sets them before the import.
READS = """
import os
HOME, MODE = os.environ.get("READS_HOME"), os.getenv("READS_MODE", "none")
everything = dict(os.environ)
"""
SETS = """
import os
os.environ["READS_HOME"] = "/here"
os.environ["READS_HOME"] = "/there"
os.environ.setdefault("READS_MODE", "late")
os.environ["PATH"], os.environ["OTHER"] = "/nowhere", "1"
import reads_early
"""


def late_variables(err: list[str]) -> list[str]:
    """Return the variables that the lines about the module name."""
    return [re.findall(r"READS_\w+", line)[0] for line in err if "reads_early" in line]


def test_variable_set_after_the_preload_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "reads_early.py").write_text(READS)
    (tmp_path / "sets.py").write_text(SETS)
    command = ("--nproc-per-node", "2", "--preload", "reads_early", "sets.py")
    code, _, err = run(*command)
    assert code == 0
    assert late_variables(err) == ["READS_HOME", "READS_MODE"]
    code, _, err = run(*command, READS_HOME="/there", READS_MODE="early")
    assert code == 0
    assert late_variables(err) == ["READS_HOME"]


def test_auto_skips_modules_that_the_script_configures_first(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "installed_here.py").touch()
    script = (
        "import os, sys; was = 'installed_here' in sys.modules\n"
        "os.environ['HF_HOME'] = '/here'\nimport installed_here, wave\nprint(was)\n"
    )
    (tmp_path / "prepares.py").write_text(script)
    places = {"PYTHONPATH": str(site)}
    code, out, err = run("--preload", "auto", "prepares.py", **places)
    assert (code, out) == (0, ["False"])
    assert "installed_here" in err[0]
    assert "HF_HOME" in err[0]
    assert run("--preload", "auto", "prepares.py", HF_HOME="/here", **places) == (0, ["True"], [])


WAITS = """
import os
with open(os.environ["GATE"]) as gate:
    gate.read()
"""
NETWORK = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", "settle=0.1")


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], "job 'early': preloading, generation -"),
        (["--nnodes", "2", *NETWORK], "waiting for nodes: 1 of 2"),
        (["--nnodes", "1:2", *NETWORK], "job 'early': active, generation 0"),
    ],
    ids=["alone", "waiting for a node", "in a round"],
)
def test_job_is_seen_and_stopped_while_it_preloads(
    tmp_path: Path, flags: list[str], shown: str
) -> None:
    (tmp_path / "waits_here.py").write_text(WAITS)
    os.mkfifo(tmp_path / "gate")
    port = free_port()
    flags = [one.replace(":0", f":{port}") if one.startswith("127") else one for one in flags]
    env = {"GATE": str(tmp_path / "gate")}
    command = ("--rdzv-id", "early", "--preload", "waits_here", *flags)
    with Job(tmp_path, "send('started')", *command, env=env) as job:
        assert await_agents(job.agent.pid) == "early"
        about = ("--rdzv-id", "early")
        status = until(lambda: one if shown in (one := holdfast("status", *about).stdout) else None)
        assert re.search(r"preloading waits_here, \d+ s", status)
        assert "  preloading  " in status
        assert holdfast("stop", *about, "--reason", "too slow").returncode == 0
        code, _, err = job.end()
        assert code == 143
        assert "too slow" in err
        assert job.messages.is_quiet(), "a worker was started"
