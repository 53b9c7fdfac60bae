"""The documentation is true as far as a program can tell: links, flags, variables, commands.

How a block of a page is run is told in docs/internals/testing.md.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.cli.flags import FLAGS, build_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))]
PAGES += sorted(DOCS.rglob("*.md"))

README_LINES_MAX = 120
RUN = "<!-- run -->"
ANYTHING = "..."
HELP = {"-h", "--help"}

FENCE = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*[a-z]|(?<![\w-])-[a-z]\b")

# What differs from run to run and from machine to machine, and what stands for it.
VARYING = (
    (r"\(pid:? \d+\)|, pid: \d+\)", "(pid)"),
    (r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "<time>"),
    (r"^( +host +: ).*", r"\1<host>"),
    (r"/home/me/job", "<folder>"),
)


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    runs: bool


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for found in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', found[2])
        runs = text[: found.start()].rstrip("\n").endswith(RUN)
        blocks.append(Block(found[1], title[1] if title else "", found[3], runs))
    return blocks


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def table_keys(page: Path, heading: str = "") -> set[str]:
    """Return what stands in backquotes in the first column of a page's tables."""
    text = prose_of(page).partition(heading)[2] if heading else prose_of(page)
    cells = re.findall(r"^\| ([^|]*(?:\\\|[^|]*)*) \|", text, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


# Links and structure.


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    assert not broken


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_page_that_the_code_names_is_there() -> None:
    sources = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_readme_is_short_and_has_the_place_for_figures() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES_MAX
    assert "<!-- bench -->" in text
    assert "<!-- /bench -->" in text


# Tables against the code.


def test_the_flag_table_is_complete_and_true() -> None:
    page = DOCS / "reference" / "cli.md"
    words = {word for key in table_keys(page) for word in FLAG.findall(key)}
    known = HELP | {flag.name for flag in FLAGS} | {flag.short for flag in FLAGS if flag.short}
    assert words == known
    # And nowhere else on the page is there a flag that does not exist.
    elsewhere = {word for word in FLAG.findall(prose_of(page)) if word.startswith("--")}
    assert elsewhere - known - {"--flag", "--version"} == set()


def test_flags_named_on_other_pages_exist() -> None:
    known = HELP | {"--version"} | {flag.name for flag in FLAGS}
    for page in PAGES:
        inline = " ".join(re.findall(r"`((?:holdfast run )?-[^`]+)`", prose_of(page)))
        named = {word for word in FLAG.findall(inline) if word.startswith("--")}
        # A flag of torchrun may be shortened, and a family of flags be written with a star.
        unknown = {word for word in named if not any(flag.startswith(word) for flag in known)}
        assert unknown - {"--force", "--flag"} == set(), name_of(page)


def test_every_variable_of_a_worker_is_documented() -> None:
    bare = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=2", "--virtual-local-rank",
         "--local-ranks-filter=0", "--no-python", "env"],
        env=bare, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    given = {line.partition("=")[0] for line in done.stdout.splitlines()} - {"PATH"}
    page = DOCS / "reference" / "environment-variables.md"
    told = prose_of(page).partition("## What a worker is given")[2].partition("\n## ")[0]
    assert given == set(
        re.findall(r"`([A-Z][A-Z_]+)`", re.sub(r"(?m)^\| [^|]* \| (.*)$", _first, told))
    )


def _first(row: re.Match[str]) -> str:
    return row[0].partition(" | ")[0]


def test_every_key_of_the_report_is_documented(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--log-dir", str(tmp_path), "--no-python", "false"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (written,) = tmp_path.glob("*/failure.json")
    report = json.loads(written.read_text())
    page = DOCS / "reference" / "failure-report-json.md"
    of_failure = table_keys(page, "Of each failure:")
    assert set(report["first"]) == of_failure
    assert set(report) == table_keys(page) - (of_failure - {"host"})


# Blocks.


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_and_json_blocks_parse(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_command_lines_of_holdfast(page: Path) -> None:
    for block in blocks_of(page):
        if block.language != "console":
            continue
        for line in re.findall(r"^\$ .*\bholdfast +run +(.*)$", block.text, re.MULTILINE):
            words = shlex.split(line.partition(";")[0], comments=True)
            wrong = "cannot be used" in block.text  # It shows what is said of a wrong one.
            try:
                build_parser().parse_args(words)
            except SystemExit:
                assert wrong, line


def matches(expected: str, line: str) -> bool:
    parts = [re.escape(part) for part in expected.split(ANYTHING)]
    return re.fullmatch(".*".join(parts), line) is not None


def steady(text: str, folder: Path) -> list[str]:
    """Return the lines of a text with what varies taken out of it."""
    text = text.replace(str(folder), "/home/me/job")
    for pattern, instead in VARYING:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.splitlines()


def differences(shown: list[str], printed: list[str]) -> list[str]:
    """Return the lines that only one of the two has, in any order."""
    left, missing = list(printed), []
    exact_first = sorted((line for line in shown if line != ANYTHING), key=lambda x: ANYTHING in x)
    for expected in exact_first:
        found = next((line for line in left if matches(expected, line)), None)
        if found is None:
            missing.append(f"not printed: {expected}")
        else:
            left.remove(found)
    return missing if ANYTHING in shown else missing + [f"not shown: {line}" for line in left]


def test_differences_are_found() -> None:
    assert differences(["a ... c", "b"], ["b", "a b c"]) == []
    assert differences(["a", "b"], ["a"]) == ["not printed: b"]
    assert differences(["a"], ["a", "b"]) == ["not shown: b"]
    assert differences(["a", ANYTHING], ["b", "a"]) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks_of(page))], ids=name_of
)
def test_blocks_that_are_marked_print_what_they_show(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks_of(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        if not block.runs:
            continue
        lines = block.text.splitlines()
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        done = subprocess.run(
            ["sh", "-c", "\n".join(commands)],
            cwd=tmp_path, env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100,
        )  # fmt: skip
        shown = "\n".join(line for line in lines if not line.startswith("$ "))
        unlike = differences(steady(shown, tmp_path), steady(done.stdout, tmp_path))
        assert not unlike, f"{block.text}\nprinted:\n{done.stdout}"
