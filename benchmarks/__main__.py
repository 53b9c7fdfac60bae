"""The command `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import host_info, result_tables
from benchmarks.figures import LAUNCHERS
from benchmarks.launching import BenchmarkError, Lab
from benchmarks.measuring import measure
from benchmarks.rows import GROUPS, ROWS

if TYPE_CHECKING:
    from benchmarks.figures import RowResult
    from benchmarks.measuring import Row

RESULTS = Path(__file__).parent / "results"
FORMAT_VERSION = 1
NAMES = [row.name for row in ROWS]

EXAMPLES = f"""\
rows: {", ".join(NAMES)}
groups of rows: {", ".join(GROUPS)}

examples:
  python -m benchmarks                            everything, about 35 minutes
  python -m benchmarks --quick                    few rounds, without the slowest rows, about 8 minutes
  python -m benchmarks --rows one-node            without the rows of many nodes, about 4 minutes
  python -m benchmarks --rows torch               workers that import torch, about 12 minutes
  python -m benchmarks --rows etcd                jobs on etcd, about 3 minutes
  python -m benchmarks --rows no-op-command first-line
                                                  two rows
  python -m benchmarks --rows no-op-command --repeat 25
                                                  one row, with more rounds
  python -m benchmarks --rows no-op-command --launchers holdfast bare
                                                  without torchrun, which is slow
  python -m benchmarks --save docs/benchmark.json also write the figures there

Run nothing else on the machine. The figures are written to benchmarks/results/.
"""


def main() -> int:
    """Measure, print, write; return the exit code."""
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        with Lab() as lab:
            return _run(args, lab)
    except BenchmarkError as problem:
        sys.stderr.write(f"benchmarks: error: {problem}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nbenchmarks: interrupted; all processes have been stopped\n")
        return 130


def _run(args: argparse.Namespace, lab: Lab) -> int:
    began, host, before = time.monotonic(), host_info.describe(), host_info.CpuTimes()
    print(host_info.in_words(host), flush=True)
    wanted = {name for one in args.rows or NAMES for name in GROUPS.get(one, (one,))}
    rows = [row for row in ROWS if row.name in wanted and (args.rows or _rounds(args, row))]
    results: dict[str, list[RowResult]] = {}
    for index, row in enumerate(rows, 1):
        rounds = max(1, _rounds(args, row))  # Measure a row that the user named in any case.
        label = f"[{index}/{len(rows)}]"
        results[row.name] = measure(lab, row, rounds, args.launchers, label)
    flat = [result for row in rows for result in results[row.name]]
    host["stolen_share"] = round(host_info.CpuTimes().stolen_share_since(before), 4)
    report = {
        "format": FORMAT_VERSION,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - began, 1),
        "machine": host,
        "quick": args.quick,
        "left_behind": lab.left_behind,
        "rows": {name: [result.as_json() for result in ones] for name, ones in results.items()},
    }
    print(f"\n{result_tables.spread(flat)}\n\n{result_tables.medians(flat)}\n")
    for line in _remarks(flat, host, lab):
        print(line)
    print(f"took {report['took_s']:g} s; figures: {_write(report, args.save)}")
    return 1 if args.check and (result_tables.missed(flat) or "holdfast" in lab.left_behind) else 0


def _rounds(args: argparse.Namespace, row: Row) -> int:
    return args.repeat or (row.quick_rounds if args.quick else row.rounds)


def _remarks(results: list[RowResult], host: dict[str, Any], lab: Lab) -> list[str]:
    lines = [f"not reached: {line}" for line in result_tables.missed(results)]
    lines += [
        f"left behind by {launcher}: {count} processes"
        for launcher, count in lab.left_behind.items()
    ]
    return lines + [f"warning: {line}" for line in host_info.warnings(host)]


def _write(report: dict[str, Any], also: Path | None) -> str:
    RESULTS.mkdir(exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    paths = [RESULTS / f"bench-{stamp}.json", *([also] if also else [])]
    for path in paths:
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return " and ".join(map(str, paths))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare holdfast with torchrun and bare processes, interleaved.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, to check that it works")
    parser.add_argument(
        "--rows", nargs="+", choices=[*NAMES, *GROUPS], metavar="ROW", help="only these rows"
    )
    parser.add_argument(
        "--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS, metavar="NAME",
        help=f"only these of {', '.join(LAUNCHERS)}",
    )  # fmt: skip
    parser.add_argument("--repeat", type=_positive, metavar="N", help="measured rounds of each row")
    parser.add_argument("--save", type=Path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
