"""The command: `python -m chaos --seed 1 --minutes 10`, or `make chaos SEED=1 MINUTES=10`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from chaos import ha
from chaos.job import BACKENDS, ChaosJob, Plan, make_plan
from chaos.machine_network import missing
from chaos.rules import Record, violations
from holdfast.etcd.runner import find_etcd

FAULTS, FAULTS_MAX = 200, 10_000
EXAMPLES = """\
examples:
  python -m chaos --minutes 10               random jobs for ten minutes
  python -m chaos --seed 7 --jobs 1 --keep   one job, and keep its consoles
  python -m chaos --backend etcd --jobs 50
  python -m chaos --backend ha --faults 200  one long job with --ha on five machines
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m chaos",
        description="Run real jobs under random faults, and check that they satisfy the rules.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="the seed of the first job; the others follow"
    )
    parser.add_argument("--minutes", type=float, help="start no job after this time")
    parser.add_argument("--jobs", type=int, help="how many jobs; 10 without --minutes")
    parser.add_argument("--backend", choices=(*BACKENDS, "ha"), default="", help="only this one")
    parser.add_argument(
        "--faults", type=int, help="faults of the job with --ha; 200 without --minutes"
    )
    parser.add_argument("--parallel", type=int, default=2, help="jobs at the same time (2)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all jobs")
    args = parser.parse_args()
    reason = missing()
    if reason:
        print(f"chaos: error: {reason}", file=sys.stderr)
        return 78
    jobs = args.jobs or (10 if args.minutes is None else sys.maxsize)
    until = time.monotonic() + args.minutes * 60 if args.minutes is not None else float("inf")
    if args.backend == "ha":
        return run_long(args.seed, args.faults, until, keep=args.keep)
    tally = Tally()
    with ThreadPoolExecutor(args.parallel) as pool:
        running: set[Future[bool]] = set()
        seed = args.seed
        while (seed < args.seed + jobs and time.monotonic() < until) or running:
            while len(running) < args.parallel and seed < args.seed + jobs:
                if time.monotonic() >= until:
                    break
                plan = make_plan(seed, args.backend)
                running.add(pool.submit(run_one, plan, tally, keep=args.keep))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
    print(tally.table())
    return 1 if tally.violated else 0


class Tally:
    """The totals of all jobs."""

    def __init__(self) -> None:
        self.jobs: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.generations = 0
        self.violated: dict[int, list[str]] = {}

    def add(self, plan: Plan, record: Record, found: list[str]) -> None:
        self.jobs[plan.backend] += 1
        self.faults.update(fault.kind for fault in record.faults)
        self.generations += len({one.generation for one in record.entries})
        if found:
            self.violated[plan.seed] = found

    def table(self) -> str:
        total = sum(self.faults.values())
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        jobs = ", ".join(f"{backend} {count}" for backend, count in sorted(self.jobs.items()))
        return (
            f"{sum(self.jobs.values())} jobs ({jobs}), {self.generations} generations, {total} faults "
            f"({faults}): {len(self.violated)} jobs broke a rule {sorted(self.violated) or ''}"
        ).rstrip()


def run_one(plan: Plan, tally: Tally, *, keep: bool = False) -> bool:
    """Run a job, print how it went, and return whether all rules held."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{plan.seed}-"))
    begin = time.monotonic()
    record = ChaosJob(plan, folder).run()
    found = violations(record)
    tally.add(plan, record, found)
    took = time.monotonic() - begin
    print(f"seed {plan.seed:4} {'BROKEN' if found else 'ok':6} {took:5.1f} s  {plan}", flush=True)
    for one in found:
        print(f"    {one}\n    see {folder}", flush=True)
    if not keep and not found:
        shutil.rmtree(folder)
    return not found


def run_long(seed: int, faults: int | None, until: float, *, keep: bool) -> int:
    """Run one job with `--ha` until all faults are done or the time is over."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-ha-{seed}-"))
    count = faults or (FAULTS if until == float("inf") else FAULTS_MAX)
    plan = ha.make_plan(seed, count, keeps_data=find_etcd("--ha").is_safe)
    record = ha.LongJob(plan, folder, lambda line: print(line, flush=True), until).run()
    found = violations(record)
    print(ha.summary(record))
    for one in found:
        print(f"    {one}")
    if found or keep:
        print(f"seed {seed}{' broke a rule' if found else ''}: see {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
