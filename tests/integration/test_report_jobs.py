"""Reports of real jobs: `holdfast report` of their log directories, for every outcome."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from observed_jobs import until
from real_jobs import Job, holdfast
from real_teams import OBEY, TOGETHER, Cluster

if TYPE_CHECKING:
    from pathlib import Path

# Rank 1 fails at step 12 of the first generation; the second generation continues at step 5. `sampled` waits until a
# step is in the timeline.
TRAIN = """
import glob
from holdfast import worker
def sampled(step):
    what = f'[{RANK}, {step}, '
    while not any(what in open(path).read() for path in glob.glob("logs/*/timeline-*.jsonl")):
        time.sleep(0.01)
for step in range(0 if GENERATION == "0" else 5, 20):
    worker.progress(step)
    if os.path.exists("logs") and step in ((0, 12) if GENERATION == "0" else (5,)):
        sampled(step)
    if GENERATION == "0" and step == 12 and RANK == "1":
        raise ValueError("no data for <this> rank")
    elif GENERATION == "0" and step == 12:
        forever()
"""


def report_of(*words: Path | str) -> dict[str, Any]:
    done = holdfast("report", "--json", *map(str, words))
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lines_of(folder: Path, kind: str) -> list[str]:
    """Return all lines of one kind from the timelines below a folder."""
    lines = [line for path in folder.rglob("timeline-*") for line in path.read_text().splitlines()]
    return [line for line in lines if f'"kind": "{kind}"' in line]


def test_report_shows_both_generations_of_a_restarted_job(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(logs))
    with Job(tmp_path, TRAIN, *flags) as job:
        code, _, errors = job.end()
    assert code == 0, errors
    report = report_of(logs)
    assert report["outcome"]["state"] == "succeeded"
    first, second = report["generations"]
    assert (first["end"], second["end"]) == ("failed", "succeeded")
    assert "no data for <this> rank" in first["end_reason"]
    assert (second["first_step"], second["last_step"]) == (5, 19)
    assert first["repeated_s"] > 0
    assert all(second[stage] > 0 for stage in ("regroup_s", "start_s", "warmup_s"))
    assert first["stop_s"] > 0
    assert sum(cost["seconds"] for cost in report["costs"]) == pytest.approx(
        report["duration_s"], abs=0.01
    )
    cause, *others = report["failures"]
    assert (cause["rank"], cause["exitcode"], cause["consequence"]) == (1, 1, False)
    assert "ValueError: no data for <this> rank" in cause["traceback"]
    assert all(other["consequence"] for other in others)
    assert [one["rank"] for one in report["progress"]["ranks"]] == [0, 1]

    done = holdfast("report", str(logs))
    page = logs / "report.html"
    assert done.stdout == f"file://{page}\n"
    assert "no data for &lt;this&gt; rank" in page.read_text()
    assert holdfast("report", str(logs), "--output", "-").stdout == page.read_text()


def test_failed_job_has_a_report_without_log_dir(tmp_path: Path) -> None:
    with Job(tmp_path, TRAIN, "--nproc-per-node", "2", env={"TMPDIR": str(tmp_path)}) as job:
        code, _, _ = job.end()
    assert code == 1
    [folder] = tmp_path.glob("holdfast_*")
    report = report_of(folder)
    assert report["outcome"]["state"] == "failed"
    assert "no data for <this> rank" in report["outcome"]["reason"]
    # Without --log-dir, the agent takes only one sample, after the workers have stopped.
    assert report["generations"][0]["last_step"] >= 12


def test_running_and_killed_jobs_have_reports(tmp_path: Path) -> None:
    script = """
    from holdfast import worker
    print("loading", flush=True)
    worker.progress(7)
    send(RANK)
    forever()
    """
    with Job(tmp_path, script, "--log-dir", str(tmp_path / "logs"), "--redirects", "3") as job:
        job.messages.take(1)
        until(lambda: lines_of(tmp_path, "progress") or None)
        assert report_of(tmp_path / "logs")["outcome"]["state"] == "running"
        job.signal(signal.SIGKILL)
        job.end()
    report = report_of(tmp_path / "logs")
    assert report["outcome"]["state"] == "lost"
    assert report["generations"][0]["last_step"] == 7
    assert [(one["rank"], one["text"]) for one in report["tails"]] == [(0, "loading\n")]


def test_report_shows_a_lost_node_and_one_that_left(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with Cluster(tmp_path, OBEY, "--log-dir", str(logs), nnodes="1:3", conf=TOGETHER) as cluster:
        cluster.start_host("A", conf="node_id=A")
        cluster.start("B", conf="node_id=B")
        cluster.start("C", conf="node_id=C")
        cluster.generation(3)
        until(lambda: len(lines_of(logs, "generation")) == 3 or None)
        cluster.agents["B"].kill()
        cluster.generation(2)
        until(lambda: len(lines_of(logs, "generation")) == 5 or None)
        cluster.agents["C"].signal(signal.SIGTERM)
        assert cluster.agents["C"].end()[0] == 128 + signal.SIGTERM
        alone = cluster.generation(1)["A"]
        assert report_of(logs)["outcome"]["state"] == "running"
        alone.finish()
        code, output = cluster.agents["A"].end()
        assert code == 0, output
    report = report_of(logs)
    assert report["outcome"] == {
        "state": "succeeded", "reason": "all workers succeeded; 1 node left the job; lost 1 node",
    }  # fmt: skip
    states = {node["name"]: node["state"] for node in report["nodes"]}
    assert states == {"A": "succeeded", "B": "lost", "C": "left"}
    ends = [(one["end"], sorted(one["nodes"]), one["world_size"]) for one in report["generations"]]
    assert ends == [
        ("lost", ["A", "B", "C"], 3), ("regrouped", ["A", "C"], 2), ("succeeded", ["A"], 1),
    ]  # fmt: skip
    assert report["generations"][1]["end_reason"] == "C left"
    # A's own folder shows why each generation ended, but not how the runs of the others ended.
    [folder] = [node["folder"] for node in report["nodes"] if node["name"] == "A"]
    seen_by_a = report_of(folder)["generations"]
    assert [one["end"] for one in seen_by_a] == ["regrouped", "regrouped", "succeeded"]
    assert seen_by_a[0]["end_reason"].startswith("B was lost")
