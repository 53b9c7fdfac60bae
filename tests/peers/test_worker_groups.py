"""Groups of workers that a program creates itself, and their barriers: torch's and ours."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("signals_as_before")]

SIDES = ("torch.distributed", "holdfast")


def say() -> None:
    print("one")
    print("two", flush=True)
    print("three", file=sys.stderr, flush=True)


FILTERS = {"duplicate_stdout_filters": ["one"], "duplicate_stderr_filters": ["nothing"]}


@pytest.mark.filterwarnings("ignore")  # Torch does not close the files of commands.
@pytest.mark.parametrize("filters", [FILTERS, {}], ids=["filters", "none"])
@pytest.mark.parametrize("kind", ["function", "command"])
def test_filtered_lines_are_equal(kind: str, filters: dict[str, Any], tmp_path: Path) -> None:
    program, args = (say, ()) if kind == "function" else ("sh", ("-c", "echo one; echo two"))
    found: list[Any] = []
    for root in SIDES:
        module = importlib.import_module(f"{root}.elastic.multiprocessing")
        folder = tmp_path / root
        group = module.start_processes(
            name="it",
            entrypoint=program,
            args={0: args, 1: args},
            envs={0: {}, 1: {}},
            logs_specs=module.DefaultLogsSpecs(log_dir=str(folder), tee=module.Std.ALL),
            log_line_prefixes={0: "[r0]:", 1: "[r1]:"},
            start_method="fork",
            **filters,
        )
        group.wait()
        group.close()
        files = [group.filtered_stdout, group.filtered_stderr]
        in_folder = {
            str(one.relative_to(next(folder.iterdir()))): sorted(one.read_text().splitlines())
            for one in folder.rglob("filtered_*")
        }
        names = [one and (one.name.rpartition("/")[2], one.closed) for one in files]
        found.append((names, in_folder))
    theirs, ours = found
    assert ours == theirs
    assert bool(ours[1]) == bool(filters)
