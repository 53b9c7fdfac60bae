"""The page about torchrun's defects lists exactly the scripts that show one."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.launching import WORKERS
from defects.show import names, title_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "track-record.md"


def rows() -> list[list[str]]:
    defects, _, _ = PAGE.read_text().partition("\n## Chaos runs")
    lines = [line for line in defects.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "under torchrun"]


def test_every_script_is_on_the_page_once() -> None:
    named = [re.fullmatch(r"`(\w+)`", row[1]) for row in rows()]
    assert sorted(one[1] for one in named if one) == names()
    assert len(rows()) == len(names())


def test_every_row_states_what_holdfast_does_and_what_proves_it() -> None:
    assert [row for row in rows() if len(row) != 4 or not all(row)] == []


def test_every_script_states_what_it_shows() -> None:
    titles = [title_of(name) for name in names()]
    assert all(title.endswith(".") for title in titles)


def test_every_test_that_is_named_exists() -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    named = [one for row in rows() for one in re.findall(r"`(test_\w+\.py)::(test_\w+)`", row[3])]
    assert named
    missing = [
        f"{file}::{test}"
        for file, test in named
        if file not in files or f"def {test}(" not in files[file].read_text()
    ]
    assert missing == []


def test_every_program_that_a_script_starts_exists() -> None:
    scripts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    started = {one for text in scripts for one in re.findall(r"WORKERS / \"([^\"]+)\"", text)}
    assert started
    assert [one for one in sorted(started) if not (WORKERS / one).exists()] == []
