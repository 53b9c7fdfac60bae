"""`python -m benchmarks.first_failure`: how often the report names the worker that failed first.

In each job one worker fails and the others fail because of it within milliseconds. A job counts as
named if the reports of all nodes name the first worker, as narrowed down if they list it among
several, and otherwise as wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.launching import WORKERS, BenchmarkError, Lab
from holdfast.etcd.local_etcd import LocalEtcd

if TYPE_CHECKING:
    from typing import Any

KINDS = {"one-node": (1, 4), "coordinator": (3, 2), "etcd": (3, 2)}  # Nodes, and workers of each.
NOTICES = ("connection", "words", "quiet")
HOW = ("raise", "unwind", "exit", "kill")
JOB_S_MAX = 60.0
NAMED, NARROWED, WRONG = "named", "one of", "wrong"


class Case(NamedTuple):
    """One job: which worker fails, how it fails, and how the others react."""

    kind: str
    link: str
    notice: str
    record: bool
    how: str
    first: int


def main() -> int:
    """Run the jobs and print the table."""
    args = _parser().parse_args()
    tables: dict[tuple[str, ...], Counter[str]] = {}
    wrong: list[str] = []
    began = time.monotonic()
    with Lab() as lab, ExitStack() as stack:
        server = stack.enter_context(LocalEtcd()) if "etcd" in args.kinds else None
        endpoint = server.get_endpoint() if server is not None else ""
        for record in args.record:
            for kind in args.kinds:
                for notice in args.notices:
                    row = (kind, args.link, notice, "@record" if record == "yes" else "")
                    counts = tables[row] = Counter()
                    for seed in range(args.seed, args.seed + args.jobs):
                        case = _case(kind, args.link, notice, record == "yes", seed)
                        verdict, output = _run(lab, case, endpoint, f"{os.getpid()}-{seed}-{row}")
                        counts[verdict] += 1
                        counts[f"{verdict} {case.how}"] += 1
                        if verdict == WRONG:
                            wrong.append(f"{case} seed {seed}: {output}")
                    print(row, dict(counts), flush=True)
    print(_table(tables))
    for line in wrong:
        print(line)
    print(f"took {time.monotonic() - began:.0f} s")
    return 0


def _case(kind: str, link: str, notice: str, record: bool, seed: int) -> Case:
    draw = random.Random(seed)
    nodes, workers = KINDS[kind]
    return Case(kind, link, notice, record, draw.choice(HOW), draw.randrange(nodes * workers))


def _run(lab: Lab, case: Case, endpoint: str, name: str) -> tuple[str, str]:
    nodes, workers = KINDS[case.kind]
    with tempfile.TemporaryDirectory(dir=lab.folder) as place:
        folder = Path(place)
        env = lab.env | {
            "BENCH_FOLDER": place,
            "BENCH_FIRST": str(case.first),
            "BENCH_HOW": case.how,
            "BENCH_NOTICE": case.notice,
            "BENCH_LINK": case.link,
            "BENCH_RECORD": "1" if case.record else "0",
            "OMP_NUM_THREADS": "1",
        }
        flags = ["--nproc-per-node", str(workers), "--nnodes", str(nodes)]
        if case.link == "gloo":
            flags += ["--preload", "torch"]
        if case.kind == "etcd":
            flags += ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", name]
        elif case.kind == "coordinator":
            place_to_meet = f"127.0.0.1:{_free_port()}"
            flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place_to_meet, "--rdzv-id", name]
        agents = [
            subprocess.Popen(
                [
                    *(lab.program("holdfast"), "run", *flags),
                    *("--log-dir", str(folder / f"node-{node}"), str(WORKERS / "fail_first.py")),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"output-{node}").open("wb"),
                start_new_session=True,
            )
            for node in range(nodes)
        ]
        try:
            deadline = time.monotonic() + JOB_S_MAX
            for agent in agents:
                agent.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
                    agent.wait()
            raise BenchmarkError(f"{case} did not end{_output(folder)}") from None
        reports = [
            json.loads(path.read_text())
            for node in range(nodes)
            for path in (folder / f"node-{node}").rglob("failure.json")
        ]
        if len(reports) != nodes:
            raise BenchmarkError(f"{case}: {len(reports)} reports of {nodes}{_output(folder)}")
        verdicts = [_verdict(report, case.first) for report in reports]
        worst = max(verdicts, key=[NAMED, NARROWED, WRONG].index)
        return worst, "; ".join(_short(report) for report in reports)


def _verdict(report: dict[str, Any], first: int) -> str:
    candidates = report.get("first_is_one_of") or [report["first"]["rank"]]
    if first not in candidates:
        return WRONG
    return NAMED if len(candidates) == 1 else NARROWED


def _short(report: dict[str, Any]) -> str:
    def line(one: dict[str, Any]) -> str:
        mark = " consequence" if one["consequence"] else ""
        text = (one["message"] or one["traceback"]).strip().rpartition("\n")[2]
        return f"{one['rank']} [{one['exitcode']}{mark}] {text[:60]}"

    candidates = report.get("first_is_one_of") or [report["first"]["rank"]]
    return f"{candidates}: " + " | ".join(line(one) for one in [report["first"], *report["others"]])


def _output(folder: Path) -> str:
    return "".join(f"\n{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("output-*"))


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _table(tables: dict[tuple[str, ...], Counter[str]]) -> str:
    head = f"| job | linked by | the others fail with | | jobs | {NAMED} | {NARROWED} | {WRONG} |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row, counts in tables.items():
        jobs = sum(counts[one] for one in (NAMED, NARROWED, WRONG))
        share = [f"{100 * counts[one] / jobs:.1f} %" for one in (NAMED, NARROWED, WRONG)]
        lines.append("| " + " | ".join([*row, str(jobs), *share]) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_failure", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="jobs of each kind (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job (0)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--notices", nargs="+", choices=NOTICES, default=["connection"])
    parser.add_argument("--record", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--link", choices=("sockets", "gloo"), default="sockets")
    return parser


if __name__ == "__main__":
    sys.exit(main())
