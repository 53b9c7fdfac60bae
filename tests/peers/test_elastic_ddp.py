"""The elastic example has the same result as a single process, whatever happens to its workers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from launchers import BIN, TIMEOUT_S, Launchers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "elastic_ddp.py")
POLL_S = 0.01
DEMO_TIMEOUT_S = 100  # It takes about 20 s on two idle cores.
PRELOADED = {"PET_PRELOAD": "torch,torch._dynamo"}  # Saves imports; torchrun ignores it.
# Two sums of the same numbers in different orders differ in the last of 16 digits.
TOLERANCE = 1e-12


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint_*.pt"))


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(newest(folder), weights_only=True)
    return state


def test_demo_survives_the_loss_of_a_worker_and_an_agent_and_a_joining_node(tmp_path: Path) -> None:
    """The parameters and Adam's state equal those of a single process."""
    folder, picture = tmp_path / "demo", tmp_path / "losses.svg"
    command = [sys.executable, str(EXAMPLES / "elastic_ddp_demo.py"), "--workers", "1"]
    code, output = run_demo([*command, "--folder", str(folder), "--picture", str(picture)])
    assert code == 0, output
    assert "exit codes: A 0, B -9, C 0" in output
    assert "the log has every step once" in output
    notes = log_of(folder / "job")
    by_start = groupby(notes, lambda note: (note["generation"], note["world_size"]))
    assert [world_size for (_, world_size), _ in by_start] == [2, 2, 1, 2], output
    ours, alone = load(folder / "job"), load(folder / "alone")
    assert ours["step"] == alone["step"] == len(notes)
    assert list(different(ours, alone)) == []
    shown = re.findall(r">(\w+ \w+)</text>", picture.read_text())
    assert shown == ["worker killed", "agent killed", "node joined", "1 worker", "2 workers"]


def run_demo(command: list[str]) -> tuple[int, str]:
    """Run the demo until it exits; a hanging demo receives a signal to clean up."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        try:
            output, _ = demo.communicate(timeout=DEMO_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            demo.terminate()
            output, _ = demo.communicate(timeout=TIMEOUT_S)
        return demo.returncode, output


def different(ours: object, alone: object, name: str = "") -> Iterator[str]:
    """Return every number in which two checkpoints differ by more than rounding."""
    if isinstance(ours, dict) and isinstance(alone, dict):
        assert ours.keys() == alone.keys(), name
        for key in ours:
            yield from different(ours[key], alone[key], f"{name}/{key}")
    elif isinstance(ours, torch.Tensor) and isinstance(alone, torch.Tensor):
        if not torch.allclose(ours.double(), alone.double(), rtol=0, atol=TOLERANCE):
            yield name
    elif ours != alone:
        yield name


def test_script_runs_under_torchrun_and_can_be_stopped_and_resumed(launchers: Launchers) -> None:
    line = ["--nproc-per-node=2", SCRIPT, "--folder", "ddp", "--step-seconds=0"]
    theirs, ours = launchers.both([*line, "--steps=20"], PRELOADED)
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    folder = ours.folder / "ddp"
    before = log_of(folder)
    assert [note["step"] for note in before] == list(range(1, 21))
    assert before == log_of(theirs.folder / "ddp")
    newest(folder).write_bytes(newest(folder).read_bytes()[:1000])  # As after a full disk.
    endless = ["--steps=1000000", "--checkpoint-every=1000000"]
    with subprocess.Popen(
        [str(BIN / "holdfast"), "run", *line, *endless],
        cwd=ours.folder,
        env=launchers.env | PRELOADED,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            await_step(folder, 30, agent)
            agent.send_signal(signal.SIGTERM)
            out, err = agent.communicate(timeout=TIMEOUT_S)
        finally:
            agent.kill()
    assert agent.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err, err
    assert "checkpoint_00000020.pt cannot be read" in out
    assert (
        len(re.findall(r"rank [01] of 2 \(pid \d+\): generation 0, continues after step 10\n", out))
        == 2
    )
    after = log_of(folder)
    assert after[:20] == before, "the steps that were done again had other losses"
    assert [note["step"] for note in after] == list(range(1, len(after) + 1))
    assert load(folder)["step"] == len(after), "it did not save before it left"


def await_step(folder: Path, step: int, agent: subprocess.Popen[str]) -> None:
    """Wait until the log has a step."""
    deadline = time.monotonic() + TIMEOUT_S
    while (folder / "losses.jsonl").read_text().count("\n") < step:
        assert agent.poll() is None, agent.communicate()
        assert time.monotonic() < deadline, f"step {step} was not done"
        time.sleep(POLL_S)
