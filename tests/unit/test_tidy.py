"""The house rules that a program can check. CONTRIBUTING.md says why they are what they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "holdfast"

# Words that say nothing about what a module or a class is for.
EMPTY_WORDS = {"api", "base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
# Words that the glossary (docs/internals/glossary.md) has replaced.
REPLACED_WORDS = {
    "attendant", "companion", "companions", "mendable", "moment", "newborn", "newsbox", "onlooker",
    "onlookers", "seats", "teammate", "teamwork", "told",
}  # fmt: skip
# Paths that TorchElastic's users import; they only re-export.
TORCHELASTIC_PATHS = {"launcher/api.py"}

# A note for later needs a place where it is kept in mind: `TODO(#12)` or a link.
NOTE = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\)|.*https?://)")

SOURCES = sorted(SRC.rglob("*.py"))
PYTHON = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks", "chaos")
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


def messages_in(path: Path) -> Iterator[str]:
    """Yield the strings of a module that may be shown, without docstrings."""
    tree = parsed(path)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value
            if isinstance(text, str) and " " in text:
                yield text


def test_the_rules_see_the_sources() -> None:
    assert len(SOURCES) > 30
    assert words_of("HTTPBaseManager_utils") == {"http", "base", "manager", "utils"}
    assert NOTE.search("x = 1  # TODO tidy up")
    assert not NOTE.search("x = 1  # TODO(#12) tidy up")


def test_source_files_say_what_they_are_for() -> None:
    silent = [name_of(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert not silent, "no module docstring"


def test_names_say_something() -> None:
    found = [
        f"{name_of(path)}: {name}"
        for path in SOURCES
        if not is_elastic_path(path) and name_of(path) not in TORCHELASTIC_PATHS
        for name in names_in(path)
        if words_of(name) & EMPTY_WORDS
    ]
    assert not found, "names with an empty word in them"


def test_names_and_messages_keep_to_the_glossary() -> None:
    found = [
        f"{name_of(path)}: {text}"
        for path in SOURCES
        for text in [*names_in(path), *messages_in(path)]
        if words_of(text) & REPLACED_WORDS
    ]
    assert not found, "words that the glossary has replaced"


def test_torchelastic_paths_only_re_export() -> None:
    defining = [
        name_of(path)
        for path in SOURCES
        if is_elastic_path(path) or name_of(path) in TORCHELASTIC_PATHS
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
