"""Outside `_impl`, `holdfast.elastic` has names and no code; peers/ compares the names with torch's."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast.elastic

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(holdfast.elastic.__file__).parent
FILES = sorted(file for file in ROOT.rglob("*.py") if "_impl" not in file.parts)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_there_are_only_imports_and_a_list_of_names(file: Path) -> None:
    docstring, *rest = ast.parse(file.read_text()).body
    assert isinstance(docstring, ast.Expr)
    for node in rest:
        if isinstance(node, ast.Assign):
            assert [ast.unparse(target) for target in node.targets] == ["__all__"]
        else:
            assert isinstance(node, ast.ImportFrom)


def modules() -> Iterator[Any]:
    for file in FILES:
        needs_torch = file.stem == "elastic_distributed_sampler"
        yield pytest.param(module_of(file), marks=[pytest.mark.torch] if needs_torch else [])


@pytest.mark.parametrize("name", list(modules()))
def test_every_listed_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert [one for one in listed if not hasattr(module, one)] == []


def test_modules_are_reached_through_their_package_as_with_torch() -> None:
    program = (
        "import holdfast.elastic.multiprocessing as workers\n"
        "import holdfast.elastic.agent.server as agent\n"
        "workers.errors.record, workers.errors.handlers, workers.errors.error_handler\n"
        "workers.api.Std, workers.redirects.redirect, workers.tail_log.TailLog\n"
        "workers.subprocess_handler.handlers, workers.subprocess_handler.subprocess_handler\n"
        "agent.api.Worker, agent.local_elastic_agent.LocalElasticAgent\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
