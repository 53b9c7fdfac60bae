"""Every example does what its header says when it is run with the command in its header."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from real_teams import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# The two commands that a header may use, with this environment's paths.
PROGRAMS = {"holdfast": [sys.executable, "-m", "holdfast"], "python": [sys.executable]}

_tested: set[str] = set()


def example(name: str) -> str:
    """Record that a test covers this example."""
    _tested.add(name)
    return name


PLAIN, SHELL, FUNCTION = map(example, ("train_plain.py", "shell_worker.sh", "launch_function.py"))
DEMO, TORCH, ELASTIC = map(example, ("demo.py", "ddp_gloo.py", "elastic_plain.py"))
STORE, PLOT = map(example, ("store_plain.py", "plot_losses.py"))
FIXED, SAMPLER = map(example, ("sampler_fixed.py", "sampler_elastic.py"))
PROGRESS = example("worker_progress.py")
FENCED = example("fenced_checkpoints.py")
# tests/peers/test_elastic_ddp.py tests these two, which take longer.
DDP, DDP_DEMO = map(example, ("elastic_ddp.py", "elastic_ddp_demo.py"))
example("grafana-dashboard.json")  # tests/unit/observe/test_grafana_dashboard.py reads it.
LAUNCHER, RENDEZVOUS = map(
    example, ("customizing/launcher.py", "customizing/rendezvous_handler.py")
)
METRICS, EVENTS = map(example, ("customizing/metric_handler.py", "customizing/event_handler.py"))


def command_of(name: str) -> list[str]:
    """Return the command that the header of an example gives, with this environment's Python."""
    header = (EXAMPLES / name).read_text().replace("\\\n", " ")
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
    files = (path for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert {str(path.relative_to(EXAMPLES)) for path in files} == _tested


def test_demo_survives_every_change_and_leaves_nothing(tmp_path: Path) -> None:
    found = re.search(r"python (examples/demo\.py)", (EXAMPLES / DEMO).read_text())
    assert found is not None
    report = tmp_path / "report.html"
    done = run([sys.executable, found[1], "--report", str(report)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"file://{report}\n")
    ends = re.findall(r'<span class="pill (\w+)">\1</span> ', report.read_text())
    assert ends[:4] == ["failed", "lost", "regrouped", "succeeded"]
    for change, workers, nodes in (
        ("the start", 6, "A, B, C"),
        ("the kill of a worker", 6, "A, B, C"),
        ("the death of a node", 4, "A, B"),
        ("the start of a new node", 6, "A, B, D"),
    ):
        received = rf"workers +{workers} run on {nodes}, \d+\.\d\d s after {change}$"
        assert re.search(received, done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"kill -9 \d+: rank 5 on node [ABC]", done.stdout)
    assert "C was lost: its connection closed" in done.stdout
    assert "exit codes: A 0, B 0, C -9, D 0" in done.stdout
    assert "exactly the result of a single process" in done.stdout
    assert re.search(r"left over +no processes$", done.stdout, re.MULTILINE)
    assert " | " not in done.stdout, "the demo did not expect this line"
    assert "\033" not in done.stdout, "colours are for terminals"
    assert done.stderr == ""
    assert words_without_figures(picture_text()) <= words_without_figures(done.stdout)


def picture_text() -> str:
    """Return the recorded output in the README's picture, without the typed command and the link."""
    picture = ET.parse(ROOT / "docs" / "assets" / "demo.svg")
    lines = ["".join(line.itertext()) for line in picture.iterfind(".//{*}text")]
    return "\n".join(line for line in lines[1:] if not line.strip().startswith("file:"))


def words_without_figures(text: str) -> set[str]:
    """Return the words of a text, with every number as 0, without progress bars."""
    return {re.sub(r"\d+", "0", word) for word in text.split() if not re.match(r"\[[#.]+\]$", word)}


def test_elastic_plain_runs_on_two_terminals(tmp_path: Path) -> None:
    command = command_of(ELASTIC)
    command[command.index("localhost:29400")] = f"localhost:{free_port()}"
    command[command.index("--folder") + 1] = str(tmp_path / "pi")
    command += ["--blocks", "6", "--block-seconds", "0"]
    pipe = subprocess.PIPE
    agents = [
        subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) for _ in range(2)
    ]
    output = [agent.communicate(timeout=100) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    out = "".join(out for out, _ in output)
    assert sorted(re.findall(r"rank (\d) of 2 .* generation 0", out)) == ["0", "1"]
    assert sorted(re.findall(r"block (\d) of 6", out)) == list("012345")
    assert pi_in(out) == pytest.approx(math.pi, abs=1e-3)


def test_elastic_plain_continues_with_another_number_of_workers(tmp_path: Path) -> None:
    def worker(rank: int, world_size: int) -> str:
        command = [sys.executable, str(EXAMPLES / ELASTIC), "--folder", str(tmp_path)]
        done = run(
            [*command, "--blocks", "7", "--block-seconds", "0"],
            RANK=str(rank), WORLD_SIZE=str(world_size), HOLDFAST_GENERATION="0",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert re.findall(r"block (\d) of 7", worker(1, 3)) == ["1", "4"]
    alone = worker(0, 1)
    assert "generation 0, 2 blocks exist" in alone
    assert re.findall(r"block (\d) of 7", alone) == ["0", "2", "3", "5", "6"]
    again = worker(0, 1)
    assert re.findall(r"block (\d) of 7", again) == []
    assert pi_in(again) == pi_in(alone) == pytest.approx(math.pi, abs=1e-3)


def test_fenced_checkpoints_reject_a_replaced_writer(tmp_path: Path) -> None:
    def worker(fence: int, steps: int) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            str(EXAMPLES / FENCED),
            "--folder",
            str(tmp_path),
        ]
        more = ["--steps", str(steps), "--step-seconds", "0"]
        return run([*command, *more], RANK="0", HOLDFAST_FENCE=str(fence))

    assert "from step 0\ndone: 3 steps" in worker(7, 3).stdout
    assert "from step 3\ndone: 5 steps" in worker(9, 5).stdout
    old = worker(8, 9)
    assert old.returncode != 0
    assert "the folder has fence 9" in old.stderr
    assert "from step 5\ndone: 5 steps" in worker(9, 5).stdout


def pi_in(output: str) -> float:
    (found,) = re.findall(r"pi = (\S+)", output)
    return float(found)


def test_train_plain_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    command = command_of(PLAIN)
    command[command.index("--folder") + 1] = str(tmp_path)
    command += ["--steps", "4", "--step-seconds", "0.01", "--fail-at-step", "2"]
    done = run(with_whole_lines(command, tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    assert "restarting all workers (restart 1 of 3)" in done.stderr
    assert re.search(r"rank 1 \(pid \d+\): start 1, begins at step 2 of 4", done.stdout)
    shares = [float(text) for text in re.findall(r"its share of pi is (\S+)", done.stdout)]
    # A rank that finished before another one failed prints its value twice.
    assert sum(set(shares)) == pytest.approx(3.14159, abs=1e-3)


def test_worker_progress_restarts_when_it_hangs(tmp_path: Path) -> None:
    command = [*command_of(PROGRESS), "--timeout", "1"]
    done = run(with_whole_lines(command, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "timer expired: 'section a step'" in done.stderr
    assert "restarting all workers (restart 1 of 1)" in done.stderr
    assert "rank 1: generation 1; the previous one had 2 workers and ended: " in done.stdout
    assert "rank 1 of 2: 5 steps done" in done.stdout


def test_worker_progress_needs_no_agent() -> None:
    done = run([sys.executable, str(EXAMPLES / PROGRESS)])
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1: 5 steps done\n"), done.stderr


def test_shell_worker_knows_its_rank() -> None:
    done = run(command_of(SHELL))
    assert done.returncode == 0, done.stderr
    expected = ["worker 0 of 2 says: hello", "worker 1 of 2 says: hello"]
    assert sorted(done.stdout.splitlines()) == expected


def test_launch_function_returns_the_values_by_rank() -> None:
    done = run(command_of(FUNCTION))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rank [012] found \d+$", done.stdout, re.MULTILINE)) == 3
    assert done.stdout.endswith("primes below 10000: 1229\n")


@pytest.mark.parametrize("flags", [[], ["--worker-store"]], ids=["the agent's", "rank 0's"])
def test_store_plain_shares_every_block_once(flags: list[str]) -> None:
    command = command_of(STORE)
    at = command.index("run") + 1
    done = run([*command[:at], *flags, *command[at:]])
    assert done.returncode == 0, done.stderr
    taken = re.findall(r"rank ([012]) of 3 took (\d+) blocks", done.stdout)
    assert sorted(rank for rank, _ in taken) == ["0", "1", "2"]
    assert sum(int(blocks) for _, blocks in taken) == 40
    assert "primes below 20000: 2262" in done.stdout


def test_plot_losses_draws_the_log_of_a_job(tmp_path: Path) -> None:
    # Two workers, and then three; the loss halves with each step.
    sizes = [2, 2, 2, 3, 3, 3]
    notes = [
        {"step": step, "loss": 0.5**step, "generation": size - 2, "world_size": size}
        for step, size in enumerate(sizes, start=1)
    ]
    log, picture = tmp_path / "losses.jsonl", tmp_path / "losses.svg"
    log.write_text("".join(json.dumps(note) + "\n" for note in notes))
    command = " ".join(command_of(PLOT)).replace("/tmp/ddp/losses.jsonl", str(log))
    words = shlex.split(command.replace(" losses.svg", f" {picture}"))
    done = run(words)
    assert done.returncode == 0, done.stderr
    drawn = ET.fromstring(picture.read_text())
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in ("worker killed", "2 workers", "3 workers")] == [
        "worker killed", "2 workers", "3 workers",
    ]  # fmt: skip
    paths = [element.get("d", "") for element in drawn.iter("{http://www.w3.org/2000/svg}path")]
    points = [re.findall(r"([\d.]+) ([\d.]+)", path) for path in paths if "L" in path]
    first, second = points
    assert first[-1] == second[0], "the curve has a gap"
    heights = [float(y) for _, y in first + second[1:]]
    assert len(heights) == len(notes)
    assert heights == sorted(heights), "the loss falls, so the line goes down"


# The four customizations.


def test_guide_shows_the_customizations_unchanged() -> None:
    guide = (ROOT / "docs" / "guides" / "customizing.md").read_text()
    for name in (LAUNCHER, RENDEZVOUS, METRICS, EVENTS):
        path = EXAMPLES / name
        assert f'```python title="{path.name}"\n{path.read_text()}```\n' in guide, name


def test_custom_launcher_records_events_and_metrics(tmp_path: Path) -> None:
    done = run(command_of(LAUNCHER), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    *states, metric = done.stdout.splitlines()
    assert states == [
        "AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", *["WORKER START"] * 3,
        *["WORKER SUCCEEDED"] * 3, "AGENT SUCCEEDED",
    ]  # fmt: skip
    assert metric.endswith("[mine]: sum=30")
    assert [*tmp_path.iterdir()] == []


def test_custom_rendezvous_handler_connects_two_nodes(tmp_path: Path) -> None:
    done = run(command_of(RENDEZVOUS), TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"worker {rank} of 2 runs on node {rank}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected
    assert [*tmp_path.iterdir()] == []


def test_custom_metric_handler_gets_the_agents_metrics() -> None:
    done = run(command_of(METRICS))
    assert done.returncode == 0, done.stderr
    assert "restarting all workers (restart 1 of 4)" in done.stderr
    received = dict(line.split(": ") for line in done.stdout.splitlines())
    spent = [int(received[step].removesuffix(" ms")) for step in ("_restart_workers", "run")]
    assert 0 < spent[0] <= spent[1]
    assert (received["flakiness"], received["succeeded with retries"]) == ("20 %", "1")


def test_custom_event_handler_sees_the_failed_worker(tmp_path: Path) -> None:
    done = run(command_of(EVENTS), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first == "the job failed: exit code 7"
    assert [row.split(maxsplit=2) for row in rows[-4:]] == [
        ["WORKER", "TERMINATED", "rank 0, exit code -15"],
        ["WORKER", "TERMINATED", "rank 1, exit code -15"],
        ["WORKER", "FAILED", "rank 2, exit code 7"],
        ["AGENT", "SUCCEEDED", "rank None, exit code None"],
    ]


def test_longer_examples_say_how_to_run_them() -> None:
    assert "elastic_ddp.py" in " ".join(command_of(DDP))
    assert "elastic_ddp_demo.py" in " ".join(command_of(DDP_DEMO))


# The threads of a process group that DistributedDataParallel has used do not end with the group (PyTorch 2.13). If
# such a thread releases its last all-reduce while Python exits, the process aborts. This happens on busy machines.
WITH_GLOO_AT_REST = """
import os, pathlib, runpy, sys, time

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
is_at_rest = False
while not is_at_rest:
    time.sleep(0.01)  # Meanwhile the threads can take the GIL, if they wait for it.
    stats = [(task / "stat").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    is_at_rest = all(") S " in stat for stat in stats if "(pt_gloo_runloop)" in stat)
"""


@pytest.mark.torch
def test_ddp_gloo_trains_the_same_weight_on_every_rank(tmp_path: Path) -> None:
    around = tmp_path / "with_gloo_at_rest.py"
    around.write_text(WITH_GLOO_AT_REST)
    *command, script = command_of(TORCH)
    done = run(with_whole_lines([*command, str(around), script], tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    expected = [f"[default{rank}]:rank {rank} of 2: the weight is 3.000" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected


def code_of(name: str) -> str:
    """Return an example without its header."""
    return (EXAMPLES / name).read_text().partition('"""\n\n')[2]


def test_guide_shows_the_fixed_script_and_its_difference_from_the_elastic_one() -> None:
    guide = (ROOT / "docs" / "guides" / "distributed-sampler.md").read_text()
    before, after = (code_of(name).splitlines(keepends=True) for name in (FIXED, SAMPLER))
    assert f'```python title="{FIXED}"\n{"".join(before)}```\n' in guide
    assert f"```diff\n{''.join(unified_diff(before, after, FIXED, SAMPLER))}```\n" in guide
    assert [command_of(name)[-2:] for name in (FIXED, SAMPLER)] == [
        ["--folder", "/tmp/sampler"]
    ] * 2


# Rank 0 exits after its second checkpoint.
DIES_AFTER_TWO_SAVES = """
import os, runpy, sys
from pathlib import Path

count, replace = 0, Path.replace

def replace_and_count(*arguments):
    global count
    replace(*arguments)
    count += 1
    if count == 2:
        os._exit(9)

Path.replace = replace_and_count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.torch
def test_sampler_elastic_continues_within_an_epoch_with_fewer_workers_as_if_uninterrupted(
    tmp_path: Path,
) -> None:
    """Its model equals that of the script without checkpoints, which nothing interrupts."""
    torch = pytest.importorskip("torch")
    around, dying = tmp_path / "with_gloo_at_rest.py", tmp_path / "dying.py"
    around.write_text(WITH_GLOO_AT_REST)
    dying.write_text(DIES_AFTER_TWO_SAVES)

    def train(name: str, workers: int, wrapper: Path, *more: str) -> tuple[int, str, str]:
        folder = tmp_path / name
        launch = [*PROGRAMS["holdfast"], "run", "--preload", "torch,torch._dynamo"]
        script = [str(wrapper), str(EXAMPLES / name), "--folder", str(folder), "--epochs", "2"]
        done = run([*launch, f"--nproc-per-node={workers}", *script, *more])
        return done.returncode, done.stdout, done.stderr

    code, out, err = train(FIXED, 2, around)
    assert (code, len(re.findall(r"^epoch [01]: loss ", out, re.MULTILINE))) == (0, 2), out + err
    # 3 and 2 workers round this batch down to the 24 of the first script, and the rate to its 0.05.
    rounded = ("--batch=25", f"--rate={0.05 * 25 / 24}")
    code, out, err = train(SAMPLER, 3, dying, *rounded)
    assert (code, re.findall(r"sample (\d+)", out)) == (9, ["120"]), out + err
    code, out, err = train(SAMPLER, 2, around, *rounded)
    seen = re.findall(r"epoch (\d), sample (\d+)", out)
    assert (code, seen[:3]) == (0, [("0", "360"), ("0", "480"), ("1", "120")]), out + err
    models = [torch.load(tmp_path / name / "model.pt") for name in (FIXED, SAMPLER)]
    for key, expected in models[0].items():
        assert torch.allclose(models[1][key], expected, atol=1e-5), key
