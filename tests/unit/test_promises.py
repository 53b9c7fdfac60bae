"""The security promises of the documentation have tests: docs/internals/promises.md lists them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from holdfast.wire.messages import EventsQuery, LogsQuery, StatusQuery

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "holdfast"
NO_PROMISE, END = "*no promise*", "\0"

# These exchange code and pickles with processes that they started themselves, or that started them.
PARENTS_AND_CHILDREN = {
    "processes/keeper/keeper_client.py",
    "processes/keeper/keeper_program.py",
    "processes/workers/function_child.py",
    "processes/workers/function_workers.py",
    "processes/zygote/child.py",
    "processes/zygote/zygote_program.py",
}
EVALUATES_ITS_OWN_TEXT = {"launcher/devices.py"}
LOADERS = {"pickle", "cloudpickle", "marshal", "shelve", "yaml"}


def plain(text: str) -> str:
    """Return a text without links and emphasis, on one line."""
    return re.sub(r"[`*]", "", " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).split()))


def sentences_of(page: str, after: str, until: str) -> list[str]:
    """Return the sentences of a part of a page, and the first cell of each row of its tables."""
    text = (ROOT / page).read_text() + END
    assert after in text
    assert until in text
    found = []
    for block in re.split(r"\n\n|\n(?=- )", text.partition(after)[2].partition(until)[0]):
        if block.startswith("|"):
            found += [plain(row.split(" | ")[0][1:]) for row in block.strip().splitlines()[2:]]
        elif block.strip() and not block.startswith("#"):
            found += re.split(r"(?<=[.:])\s+(?=[A-Z])", plain(block.removeprefix("- ")))
    return found


def rows_of(part: str) -> dict[str, str]:
    """Return the tests that docs/internals/promises.md names for the sentences of one page."""
    text = (ROOT / "docs" / "internals" / "promises.md").read_text()
    section = text.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    assert max(Counter(words for words, _ in rows).values()) == 1
    return dict(rows)


def test_every_promise_names_its_tests() -> None:
    missing, unused, wrong = [], [], []
    for part, page, after, until in (
        ("SECURITY", "SECURITY.md", "## What Holdfast promises\n", END),
        ("Trust", "docs/concepts/trust.md", "# Trust\n", "## What remains open\n"),
    ):
        rows = rows_of(part)
        sentences = sentences_of(page, after, until)
        missing += [one for one in sentences if not any(one.startswith(words) for words in rows)]
        unused += [words for words in rows if not any(one.startswith(words) for one in sentences)]
        for words, tests in rows.items():
            named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
            wrong += [words] if not named and tests != NO_PROMISE else []
            for path, test in named:
                file = ROOT / "tests" / path
                exists = file.exists() and re.search(
                    rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE
                )
                wrong += [] if exists else [f"{words}: {path}::{test}"]
    assert (missing, unused, wrong) == ([], [], [])


def calls_in(tree: ast.Module) -> set[str]:
    """Return the functions of a module that run code or make objects of any type from data."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in ("eval", "exec"):
            found.add(called.id)
        elif (
            isinstance(called, ast.Attribute)
            and isinstance(called.value, ast.Name)
            and called.value.id in LOADERS
            and called.attr in ("load", "loads", "Unpickler")
        ):
            found.add(f"{called.value.id}.{called.attr}")
    return found


def test_only_a_nodes_own_children_send_it_code_or_pickles() -> None:
    running = set()
    words = re.compile(rf"\b({'|'.join([*LOADERS, 'eval', 'exec'])})\b")
    for path in SRC.rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(SRC))
        if not words.search(text):
            continue  # Parsing takes a hundred times longer.
        tree = ast.parse(text)
        if calls_in(tree):
            running.add(name)
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not {*imported} & LOADERS, f"{name}: import the module, so that its calls are found"
    assert running == PARENTS_AND_CHILDREN | EVALUATES_ITS_OWN_TEXT


def test_no_query_names_a_path() -> None:
    """A client selects output by rank; the agent knows the files."""
    assert set(LogsQuery.__struct_fields__) == {"ranks", "tail", "follow", "grep", "room"}
    assert set(StatusQuery.__struct_fields__) == {"watch", "wait_s"}
    assert set(EventsQuery.__struct_fields__) == {"follow"}
