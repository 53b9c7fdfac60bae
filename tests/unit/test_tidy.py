"""The rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "holdfast"

# Words that say nothing about what a module or a class is for.
EMPTY_WORDS = {"api", "base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
# Paths that TorchElastic's users import; they only re-export.
TORCHELASTIC_PATHS = {"launcher/api.py"}

# A note for later names an issue, `TODO(#12)`, or has a link.
NOTE = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\)|.*https?://)")

SOURCES = sorted(SRC.rglob("*.py"))
PYTHON = sorted(
    path
    for folder in ("src", "simulator", "tests", "examples", "benchmarks", "chaos")
    for path in (ROOT / folder).rglob("*.py")
)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC if path.is_relative_to(SRC) else ROOT))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def words_of(name: str) -> set[str]:
    """Split `WorkerSpec` and `worker_spec` into their words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def is_elastic_path(path: Path) -> bool:
    return path.is_relative_to(SRC / "elastic") and not path.is_relative_to(SRC / "elastic/_impl")


def names_in(path: Path) -> list[str]:
    """Return the names of a module, its package and its classes."""
    classes = [node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    return [path.stem, path.parent.name, *classes]


def test_rules_apply_to_the_sources() -> None:
    assert len(SOURCES) > 30
    assert words_of("HTTPBaseManager_utils") == {"http", "base", "manager", "utils"}
    assert NOTE.search("x = 1  # TODO tidy up")
    assert not NOTE.search("x = 1  # TODO(#12) tidy up")


def test_every_module_has_a_docstring() -> None:
    silent = [name_of(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert not silent, "no module docstring"


def test_no_name_has_a_meaningless_word() -> None:
    found = [
        f"{name_of(path)}: {name}"
        for path in SOURCES
        if not is_elastic_path(path) and name_of(path) not in TORCHELASTIC_PATHS
        for name in names_in(path)
        if words_of(name) & EMPTY_WORDS
    ]
    assert not found, "names with a meaningless word"


def test_a_file_name_occurs_once() -> None:
    names = Counter(
        path.name
        for path in SOURCES
        if not path.name.startswith("__")
        and not path.is_relative_to(SRC / "elastic")
        and name_of(path) not in TORCHELASTIC_PATHS
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_torchelastic_paths_only_re_export() -> None:
    defining = [
        name_of(path)
        for path in SOURCES
        if is_elastic_path(path) or name_of(path) in TORCHELASTIC_PATHS
        if any(isinstance(node, (ast.ClassDef, *FUNCTION)) for node in parsed(path).body)
    ]
    assert not defining


def test_notes_for_later_name_an_issue() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in PYTHON
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if NOTE.search(line)
    ]
    assert not found
