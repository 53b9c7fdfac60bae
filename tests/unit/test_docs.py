"""The documentation is correct as far as a program can check: links, flags, variables, commands.

docs/internals/testing.md says how a block of a page is run.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.cli.completion_command import flags_of_commands
from holdfast.cli.run_command import build_parser
from holdfast.control.step_rates import RankSeries, RankSummary, StepProgress
from holdfast.launcher.config import FLAGS, LaunchConfig
from holdfast.numa.visible_devices import CUDA, HIP, IF_SET
from holdfast.observe.timeline import KINDS, UNRECORDED
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.rdzv_conf import KEYS, Key
from holdfast.views.report import model
from real_teams import free_port

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SRC = ROOT / "src" / "holdfast"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PAGES += sorted(DOCS.rglob("*.md"))

HOLDFAST = (sys.executable, "-m", "holdfast", "run")
README_LINES_MAX = 120
# Lines of workers that write to one pipe may be joined. So an expected line of at least this length
# may be anywhere in a printed line.
MIXED_CHARS_MIN = 10
RUN = "<!-- run -->"
PORT = "29400"  # In a block that a test runs, it stands for any free port.
ANYTHING = "..."
KNOWN_FLAGS = {"-h", "--help", "--print-completion"} | {
    name for flag in FLAGS for name in (flag.name, flag.short) if name
}

FENCE = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]*[a-z]|(?<![\w-])-[a-z]\b")

# What differs between runs and machines, and its placeholder.
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


def flags_in(text: str) -> set[str]:
    return {word.replace("_", "-") for word in FLAG.findall(text)}


def table_keys(page: Path, after: str = "", until: str = "\0") -> set[str]:
    """Return the names in backquotes in the first column of tables, in a part of a page."""
    text = prose_of(page)
    text = (text.partition(after)[2] if after else text).partition(until)[0]
    cells = re.findall(r"^\| ((?:[^|\\]|\\.)*) \|", text, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


# Links and structure.


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_has_a_target(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    assert not broken


def test_navigation_has_every_page_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_page_named_in_the_code_exists() -> None:
    sources = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_file_named_in_the_architecture_exists() -> None:
    named = re.findall(
        r"`([\w/]+(?:\.py|/))`", (DOCS / "internals" / "architecture.md").read_text()
    )
    assert len(named) > 50
    assert not [
        path
        for path in named
        if "/" in path and not (SRC / path).exists() and not (ROOT / path).exists()
    ]


def test_pages_load_nothing_from_other_hosts() -> None:
    """Without `font: false` the theme loads its fonts from Google; for a mermaid block it loads a script."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  font: false\b", settings, re.MULTILINE)
    assert "://" not in settings
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"!\[[^]]*\]\(\w+:", text), page
        assert "mermaid" not in {block.language for block in blocks_of(page)}, page
        assert not re.search(r"<(img|script|link|iframe)\b", prose_of(page)), page
    for picture in (DOCS / "assets").glob("*.svg"):
        assert set(re.findall(r"https?://[\w./]+", picture.read_text())) <= {
            "http://www.w3.org/2000/svg"
        }, picture


def test_start_pages_give_the_default_of_max_restarts() -> None:
    (flag,) = (flag for flag in FLAGS if flag.name == "--max-restarts")
    for page in (ROOT / "README.md", DOCS / "index.md"):
        shown = re.search(r"`--max-restarts[^.]*\. The\s+default\s+is\s+(\d+)", page.read_text())
        assert shown is not None, page
        assert int(shown[1]) == flag.default


def test_readme_is_short_and_has_a_place_for_figures() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES_MAX
    assert "<!-- bench -->" in text
    assert "<!-- /bench -->" in text


# Tables against the code.


def test_flag_table_is_complete() -> None:
    page = DOCS / "reference" / "cli.md"
    assert flags_in(" ".join(table_keys(page, until="## Running jobs"))) == KNOWN_FLAGS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_named_in_the_text_exist(page: Path) -> None:
    known = KNOWN_FLAGS | {"--version", "--flag", "--use-env"}  # The last is the old launcher's.
    known |= {flag for flags in flags_of_commands().values() for flag in flags}
    named = flags_in(" ".join(re.findall(r"`(-[^`]+)`", prose_of(page))))
    # A short form such as `--nproc` may be named as well.
    unknown = [word for word in named if not any(flag.startswith(word) for flag in known)]
    assert not unknown


@pytest.mark.parametrize("command", sorted(flags_of_commands().keys() - {"run"}))
def test_flags_of_every_other_command_are_documented(command: str) -> None:
    page = DOCS / "reference" / "cli.md"
    row = re.search(rf"^\| `{command}\b[^|]*\|([^|]*)\|", page.read_text(), re.MULTILINE)
    if row is None:
        documented = flags_in(" ".join(table_keys(page, f"\n## {command}\n", "\n## ")))
    else:
        of_the_job = table_keys(page, "\n### Which job\n", "\n### ")
        documented = flags_in(" ".join([row[1], *of_the_job]))
    assert documented == set(flags_of_commands()[command]) - {"-h", "--help"}


def test_every_keyword_of_a_launch_config_without_a_flag_is_documented() -> None:
    page = DOCS / "reference" / "python-api.md"
    parameters = inspect.signature(LaunchConfig).parameters.values()
    keywords = {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    rows = re.findall(
        r"^\| `(\w+)`",
        page.read_text().partition("by keyword only")[2].partition("\n\nC")[0],
        re.MULTILINE,
    )
    of_flags = {flag.name.removeprefix("--").replace("-", "_") for flag in FLAGS if flag.field}
    assert keywords - of_flags - set(rows) == set()
    assert set(rows) <= keywords


# `os.environ.get("NAME"`, `env["NAME"]`, `"NAME" in os.environ`, `PORT_ENV = "NAME"`.
READS = re.compile(
    r"""(?:environ|env)(?:\.get\(|\.pop\(|\[)\s*"([A-Z]\w+)"|"([A-Z]\w+)" (?:not )?in (?:os\.)?environ"""
    r'''|^(?:\w+_)?(?:ENV|VARIABLE)\b[^=\n]*= "([A-Z]\w+)"|_visible\(\w+, "(\w+)"''',
    re.MULTILINE,
)


def test_every_variable_that_is_read_is_documented() -> None:
    found = [match for path in SRC.rglob("*.py") for match in READS.findall(path.read_text())]
    names = {name for match in found for name in match if name}
    assert {"TORCHELASTIC_TIMER_FILE", "HOLDFAST_RUNTIME_DIR", "ROCR_VISIBLE_DEVICES"} <= names
    names |= {CUDA, HIP, *IF_SET}
    documented = table_keys(DOCS / "reference" / "environment-variables.md")
    assert names - documented == {"PATH"}


def test_every_variable_of_a_worker_is_documented() -> None:
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [*HOLDFAST, "--nproc-per-node=2", "--virtual-local-rank", "--local-ranks-filter=0",
         "--no-python", "env"],
        env=bare, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    given = {line.partition("=")[0] for line in done.stdout.splitlines()} - set(bare)
    page = DOCS / "reference" / "environment-variables.md"
    assert given == table_keys(page, "## What a worker gets", "\n## ")


def test_every_key_of_a_failure_report_is_documented(tmp_path: Path) -> None:
    done = subprocess.run(
        [*HOLDFAST, "--log-dir", str(tmp_path), "--no-python", "false"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (written,) = tmp_path.glob("*/failure.json")
    report = json.loads(written.read_text())
    page = DOCS / "reference" / "failure-report-json.md"
    assert set(report["first"]) == table_keys(page, after="Keys of a failure")
    assert set(report) == table_keys(page, until="Keys of a failure")


def test_every_key_of_a_report_is_documented() -> None:
    page = DOCS / "reference" / "report-json.md"
    parts = {
        "": (model.Report, "Keys of a generation"),
        "Keys of a generation": (model.GenerationEntry, "Keys of a node"),
        "Keys of a node": (model.NodeEntry, "Keys of a failure"),
        "Keys of a failure": (model.FailureEntry, "Keys of `progress`"),
        "Keys of `progress`": (StepProgress, "\0"),
    }
    for after, (kind, until) in parts.items():
        assert table_keys(page, after, until) == set(kind.__struct_fields__)
    inner = {
        model.OutcomeEntry,
        model.StageCost,
        model.SpanEntry,
        model.NodeSpan,
        model.OutputTail,
        RankSeries,
    }
    text = page.read_text()
    named = {name for kind in inner | {RankSummary} for name in kind.__struct_fields__}
    assert {name for name in named if f"`{name}`" not in text} == set()


def test_every_line_of_a_timeline_is_documented() -> None:
    text = (DOCS / "reference" / "log-directory.md").read_text().partition("## Timeline")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \|(.*)\|$", text, re.MULTILINE))
    assert set(KINDS.values()) == set(rows) - {"kind"}
    for event, kind in KINDS.items():
        keys = {*event.__match_args__, *(["host"] if kind == "run" else [])}
        assert keys - {"at", "wall", "took_s", *UNRECORDED} == set(
            re.findall(r"`(\w+)`", rows[kind])
        )


def row_of(key: Key) -> str:
    """Return the table row of a rendezvous setting."""
    here = [one.value for one in Backend if one in key.backends]
    words = " or ".join(f"`{word}`" for word in key.kind.split("|"))
    takes = words if "|" in key.kind else key.kind
    known = key.default not in (None, "")
    number = isinstance(key.default, float)
    default = (f"`{key.default:g}`" if number else f"`{key.default}`") if known else ""
    where = "all" if len(here) == len(Backend) else ", ".join(here)
    return f"| `{key.name}` | {takes} | {default} | {where} | {key.meaning} |"


def test_every_setting_of_the_rendezvous_is_documented() -> None:
    page = DOCS / "reference" / "rendezvous-settings.md"
    lines = page.read_text().splitlines()
    assert [row for row in map(row_of, KEYS) if row not in lines] == []
    assert table_keys(page) == {key.name for key in KEYS}


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
            wrong = "accepted:" in block.text  # It shows a usage error.
            try:
                build_parser().parse_args(words)
            except SystemExit:
                assert wrong, line


def steady(text: str, folder: Path) -> str:
    """Replace the varying parts of a text with placeholders."""
    text = text.replace(str(folder), "/home/me/job")
    for pattern, instead in VARYING:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def differences(shown: str, printed: str) -> list[str]:
    """Return the lines that only one of the two has, in any order."""
    lines = [line for line in shown.splitlines() if line.strip()]
    missing = []
    for line in sorted(set(lines) - {ANYTHING}, key=lambda line: (ANYTHING in line, -len(line))):
        pattern = "[^\n]*".join(re.escape(part) for part in line.split(ANYTHING))
        for _ in range(lines.count(line)):
            found = re.search(rf"^{pattern}$", printed, re.MULTILINE)
            if found is None and len(line) >= MIXED_CHARS_MIN:
                found = re.search(pattern, printed)
            if found is None:
                missing.append(f"not printed: {line}")
            else:
                printed = f"{printed[: found.start()]}\n{printed[found.end() :]}"
    if ANYTHING in lines:
        return missing
    return missing + [f"not shown: {line}" for line in printed.splitlines() if line.strip()]


def test_differences_are_found() -> None:
    assert differences("a ... c\nb", "b\na b c") == []
    assert differences("a\nb", "a") == ["not printed: b"]
    assert differences("a", "a\nb") == ["not shown: b"]
    assert differences("a\n...", "b\na") == []
    assert differences("worker 0 of 2\nworker 1 of 2", "worker 1 of 2worker 0 of 2\n\n") == []
    assert differences("7\n...", "137") == ["not printed: 7"]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks_of(page))], ids=name_of
)
def test_marked_blocks_print_what_they_show(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks_of(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        if not block.runs:
            continue
        lines = block.text.splitlines()
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        done = subprocess.run(
            ["sh", "-c", "\n".join(commands).replace(PORT, str(free_port()))],
            cwd=tmp_path, env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100,
        )  # fmt: skip
        shown = "\n".join(line for line in lines if not line.startswith("$ "))
        unlike = differences(steady(shown, tmp_path), steady(done.stdout, tmp_path))
        assert not unlike, f"{block.text}\nprinted:\n{done.stdout}"
