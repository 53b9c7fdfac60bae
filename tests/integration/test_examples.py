"""Every example does what its header says, run in the way its header says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# The two commands that a header may use, as this environment has them.
PROGRAMS = {"holdfast": [sys.executable, "-m", "holdfast"], "python": [sys.executable]}

_tested: set[str] = set()


def example(name: str) -> str:
    """Note that a test covers this example."""
    _tested.add(name)
    return name


PLAIN, SHELL, FUNCTION = map(example, ("train_plain.py", "shell_worker.sh", "launch_function.py"))
DEMO, TORCH = map(example, ("demo.py", "ddp_gloo.py"))


def command_of(name: str) -> list[str]:
    """Return the command that the header of an example gives, with this environment's Python."""
    header = (EXAMPLES / name).read_text()
    found = re.search(
        rf"^[# ]+((?:holdfast|python) .*examples/{re.escape(name)}.*)$", header, re.MULTILINE
    )
    assert found is not None, f"the header of {name} does not say how to run it"
    program, *words = found[1].split()
    return [*PROGRAMS[program], *words]


def with_whole_lines(command: list[str], logs: Path) -> list[str]:
    """Return the command with --tee: workers that share a pipe may break each other's lines."""
    at = command.index("run") + 1
    return [*command[:at], "--tee", "1", "--log-dir", str(logs), *command[at:]]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return subprocess.run(
        command, cwd=ROOT, env=inherited | variables, capture_output=True, text=True, timeout=100
    )


def test_every_example_is_covered() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == _tested


def test_demo_recovers_twice_and_leaves_nothing() -> None:
    found = re.search(r"python (examples/demo\.py)", (EXAMPLES / DEMO).read_text())
    assert found is not None
    done = run([sys.executable, found[1]])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"kill -9 \d+: rank 1 is gone", done.stdout)
    assert "ValueError: a bad batch" in done.stdout
    assert len(re.findall(r"all 3 run again \(pids [\d, ]+\), \d\.\d\d s later", done.stdout)) == 2
    assert "exactly what an undisturbed run computes" in done.stdout
    assert "no processes, the helpers included" in done.stdout
    assert "\033" not in done.stdout, "colours are for terminals"
    assert done.stderr == ""


def test_train_plain_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    command = command_of(PLAIN)
    command[command.index("--folder") + 1] = str(tmp_path)
    command += ["--steps", "4", "--step-seconds", "0.01", "--fail-at-step", "2"]
    done = run(with_whole_lines(command, tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    assert "restarting all workers (restart 1 of 3)" in done.stderr
    assert re.search(r"rank 1 \(pid \d+\): start 1, begins at step 2 of 4", done.stdout)
    shares = [float(text) for text in re.findall(r"its share of pi is (\S+)", done.stdout)]
    # A rank that was done before another failed says so twice, with the same value.
    assert sum(set(shares)) == pytest.approx(3.14159, abs=1e-3)


def test_shell_worker_is_told_its_rank() -> None:
    done = run(command_of(SHELL))
    assert done.returncode == 0, done.stderr
    said = ["worker 0 of 2 says: hello", "worker 1 of 2 says: hello"]
    assert sorted(done.stdout.splitlines()) == said


def test_launch_function_returns_the_values_by_rank() -> None:
    done = run(command_of(FUNCTION))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rank [012] found \d+$", done.stdout, re.MULTILINE)) == 3
    assert done.stdout.endswith("primes below 10000: 1229\n")


@pytest.mark.torch
def test_ddp_gloo_trains_the_same_weight_on_every_rank(tmp_path: Path) -> None:
    done = run(with_whole_lines(command_of(TORCH), tmp_path))
    assert done.returncode == 0, done.stderr
    said = [f"[default{rank}]:rank {rank} of 2: the weight is 3.000" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == said
