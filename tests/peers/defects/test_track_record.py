"""The page about the peer's defects names every script that shows one, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from defects.show import names, title_of

PAGE = Path(__file__).parents[3] / "docs" / "track-record.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "under torchrun"]


def test_every_script_is_on_the_page_once() -> None:
    named = [re.fullmatch(r"`(\w+)`", row[1]) for row in rows()]
    assert sorted(one[1] for one in named if one) == names()
    assert len(rows()) == len(names())


def test_every_row_says_what_holdfast_does_and_what_proves_it() -> None:
    assert [row for row in rows() if len(row) != 4 or not all(row)] == []


def test_every_script_says_what_it_shows() -> None:
    titles = [title_of(name) for name in names()]
    assert all(title.endswith(".") for title in titles)
