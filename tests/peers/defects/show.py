"""Runs the scripts of this folder and prints one line for each: whether it showed its defect, and the evidence.

They run one after the other, each in its own process and with a time limit.
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT_S_MAX = 300.0
EXAMPLES = """\
scripts:
{scripts}

examples:
  python tests/peers/defects/show.py                  all of them, about 6 minutes
  python tests/peers/defects/show.py clock_skew       one
  python tests/peers/defects/show.py --list           only their names

A line begins with "shown" where torchrun has the defect, as in PyTorch 2.13.0 and 2.15.0; the exit
code is 0 if all were shown. Two scripts need root, for a network of their own. docs/track-record.md describes
each defect, and what Holdfast does instead.
"""


def names() -> list[str]:
    """Return the names of the scripts: the modules here that define `show`."""
    return [path.stem for path in sorted(HERE.glob("*.py")) if _has_show(path)]


def _has_show(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "show" for node in body)


def title_of(name: str) -> str:
    """Return the first line of a script's docstring."""
    docstring = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    return docstring.splitlines()[0]


def run(name: str) -> tuple[bool, str]:
    """Run one script and return whether it showed the defect, and its line."""
    command = [sys.executable, "-m", f"tests.peers.defects.{name}"]
    began = time.monotonic()
    # Output and errors have separate pipes, because torch prints many errors.
    script = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = script.communicate(timeout=SCRIPT_S_MAX)
    except subprocess.TimeoutExpired:
        script.send_signal(signal.SIGTERM)
        out, err = script.communicate()
    took_s = time.monotonic() - began
    line = out.strip().splitlines()[-1] if out.strip() else f"not shown: {err.strip()[-500:]}"
    verdict, _, text = line.partition(": ")
    return script.returncode == 0, f"{verdict:9} {name:26} {text} ({took_s:.0f} s)"


def main() -> int:
    scripts = names()
    listed = "\n".join(f"  {name:26} {title_of(name)}" for name in scripts)
    parser = argparse.ArgumentParser(
        prog="python tests/peers/defects/show.py",
        description="Show the defects of torchrun with many nodes.",
        epilog=EXAMPLES.format(scripts=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (all)")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in scripts]
    if unknown:
        parser.error(f"unknown scripts: {', '.join(unknown)}; --list prints all names")
    if args.list:
        print("\n".join(scripts))
        return 0
    if not os.access(Path(sys.executable).parent / "torchrun", os.X_OK):
        parser.error(f"no torchrun next to {sys.executable}; install torch 2.13.0 or newer there")
    every_one = True
    for name in args.names or scripts:
        shown, line = run(name)
        print(line, flush=True)
        every_one &= shown
    return 0 if every_one else 1


if __name__ == "__main__":
    sys.exit(main())
