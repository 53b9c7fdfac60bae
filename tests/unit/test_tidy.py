"""The house rules that a program can check. CONTRIBUTING.md says why they are what they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "holdfast"

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
# A program of its own, which may import nothing of ours and so cannot be divided.
FILE_LINES_MAX_OF = {"processes/keeper/main.py": 515}

# Words that say nothing about what a module or a class is for.
EMPTY_WORDS = {"api", "base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
# Paths that TorchElastic's users import; they only re-export.
TORCHELASTIC_PATHS = {"launcher/api.py"}

# A note for later needs a place where it is kept in mind: `TODO(#12)` or a link.
NOTE = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\)|.*https?://)")

SOURCES = sorted(SRC.rglob("*.py"))
PYTHON = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks")
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


def is_elastic(path: Path) -> bool:
    return path.is_relative_to(SRC / "elastic")


def test_the_rules_see_the_sources() -> None:
    assert len(SOURCES) > 30
    assert words_of("HTTPBaseManager_utils") == {"http", "base", "manager", "utils"}
    assert NOTE.search("x = 1  # TODO tidy up")
    assert not NOTE.search("x = 1  # TODO(#12) tidy up")


def test_source_files_are_short() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    long = {
        name: count
        for name, count in lines.items()
        if count > FILE_LINES_MAX_OF.get(name, FILE_LINES_MAX)
    }
    assert not long, f"longer than {FILE_LINES_MAX} lines: split along the ideas in them"


def test_source_files_say_what_they_are_for() -> None:
    silent = [name_of(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert not silent, "no module docstring"


def test_functions_fit_a_screen() -> None:
    lines = {
        f"{name_of(path)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, FUNCTION)
    }
    long = {name: count for name, count in lines.items() if count > FUNCTION_LINES_MAX}
    assert not long, f"functions longer than {FUNCTION_LINES_MAX} lines"


def test_names_say_something() -> None:
    found = []
    for path in SOURCES:
        if is_elastic(path) or name_of(path) in TORCHELASTIC_PATHS:
            continue
        names = [path.stem, path.parent.name]
        names += [node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
        found += [f"{name_of(path)}: {name}" for name in names if words_of(name) & EMPTY_WORDS]
    assert not found, "names with an empty word in them"


def test_torchelastic_paths_only_re_export() -> None:
    defining = [
        name_of(path)
        for path in SOURCES
        if is_elastic(path) or name_of(path) in TORCHELASTIC_PATHS
        if any(isinstance(node, (ast.ClassDef, *FUNCTION)) for node in parsed(path).body)
    ]
    assert not defining


def test_notes_for_later_are_kept_somewhere() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in PYTHON
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if NOTE.search(line)
    ]
    assert not found
