from __future__ import annotations

import functools
import os
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli.script import run_script_path
from holdfast.launcher import preloading
from holdfast.launcher.preloading import is_this_python, modules_to_preload

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = "import json, model\nfrom xml import dom\n"
FOUND = ("json", "xml", "xml.dom")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a script that imports a module beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").write_text(SOURCE)
    (tmp_path / "model.py").write_text("raise AssertionError('this was imported')\n")
    return tmp_path


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return what is said, by its level."""
    said: list[tuple[str, str]] = []
    for level in ("info", "notice"):
        monkeypatch.setattr(
            f"holdfast.messages.{level}", functools.partial(lambda *one: said.append(one), level)
        )
    return said


def auto(*args: Any, python: Any = sys.executable) -> tuple[str, ...]:
    return modules_to_preload(("auto",), python, args)


def finds_nothing(told: list[tuple[str, str]], *args: Any, python: Any = sys.executable) -> str:
    """Return the reason that is given, in one notice, for finding no modules."""
    told.clear()
    assert auto(*args, python=python) == ()
    [(level, text)] = told
    assert level == "notice"
    assert "\n" not in text
    assert text.startswith("--preload auto finds no modules: ")
    return text.partition(": ")[2]


def test_names_are_taken_as_they_are_and_nothing_is_read(told: list[tuple[str, str]]) -> None:
    assert modules_to_preload(("a", "b.c"), "/no/python", ["gone.py"]) == ("a", "b.c")
    assert modules_to_preload((), "/no/python", ["gone.py"]) == ()
    assert told == []


def test_what_auto_finds_stands_in_its_place() -> None:
    wanted = ("first", "auto", "json", "last")
    found = modules_to_preload(wanted, sys.executable, ["-u", "train.py"])
    assert found == ("first", *FOUND, "last")


def test_a_script_is_told_of_with_its_modules(told: list[tuple[str, str]]) -> None:
    assert auto("-u", "train.py", "--lr", "1") == FOUND
    assert told == [("info", "--preload auto finds in train.py: json, xml, xml.dom")]


def test_modules_beside_the_script_are_left_out_wherever_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "json.py").touch()
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert auto(folder / "train.py") == ("xml", "xml.dom")
    os.symlink("../train.py", "link.py")
    assert auto("link.py") == ("xml", "xml.dom")


def test_modules_below_pythonpath_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "work").mkdir()
    (folder / "work" / "json.py").touch()
    monkeypatch.syspath_prepend(folder / "work")
    assert auto("train.py") == ("xml", "xml.dom")


def test_a_module_of_the_working_directory(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("import csv")
    (folder / "pack" / "train.py").write_text(f"{SOURCE}from . import other\nimport pack.other")
    (folder / "pack" / "__main__.py").write_text("import wave")
    assert auto("-u", "-m", "pack.train", "--lr", "1") == FOUND
    assert auto("-um", "train") == FOUND
    assert auto("-m", "pack") == ("wave",)


def test_code_of_the_command_line() -> None:
    assert auto("-c", SOURCE) == FOUND


def test_a_script_run_as_a_function(told: list[tuple[str, str]]) -> None:
    guarded = "if __name__ == '__main__':\n import json"
    with open("guarded.py", "w") as file:
        file.write(guarded)
    assert auto("guarded.py", "--lr", python=run_script_path) == ("json",)
    assert auto("guarded.py") == ("json",)


def function_of(monkeypatch: pytest.MonkeyPatch, module: str, path: Path | None) -> Any:
    """Return a function that seems to be defined in a module that was loaded from a file."""
    made = ModuleType(module)
    made.__file__ = None if path is None else str(path)
    monkeypatch.setitem(sys.modules, module, made)

    def train() -> None:
        raise AssertionError("this was called")

    train.__module__ = module
    return train


def test_the_module_of_a_function_is_not_a_main_program_in_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "jobs.py").write_text(f"{SOURCE}if __name__ == '__main__':\n import wave")
    function = function_of(monkeypatch, "jobs", folder / "jobs.py")
    assert auto(1, python=function) == FOUND
    assert told == [("info", "--preload auto finds in module jobs: json, xml, xml.dom")]
    assert auto(python=functools.partial(functools.partial(function, 1), 2)) == FOUND


def test_functions_whose_module_has_no_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    nowhere = function_of(monkeypatch, "typed_in", None)
    assert finds_nothing(told, python=nowhere) == "the function's module typed_in has no file"
    assert finds_nothing(told, python=print) == "the function's module builtins has no file"


def test_another_interpreter_may_have_other_modules(
    folder: Path, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    (folder / "work").mkdir()
    (folder / "work" / "mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(folder / "work"))
    (folder / "train.py").write_text(f"{SOURCE}import mine, no_such_module")
    assert auto("train.py", python="/opt/python") == ("json", "xml", "no_such_module")
    assert auto("-m", "train", python="/opt/python") == ("json", "xml", "no_such_module")
    assert auto("train.py") == FOUND
    reason = finds_nothing(told, "-m", "json.tool", python="/opt/python")
    assert reason == "there is no source of -m json.tool here"


def test_this_interpreter_is_known_by_any_of_its_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bin").mkdir()
    (folder / "venv").mkdir()
    (folder / "bin" / "python").touch(mode=0o755)
    os.symlink("python", "bin/python3")
    os.symlink("../bin/python", "venv/python")
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{folder}/nowhere:{folder}/bin")
    for same in (sys.executable, f"{folder}/bin/python3", "python", "python3"):
        assert is_this_python(same)
    monkeypatch.setenv("PATH", f"{folder}/venv:{folder}/bin")
    for other in (f"{folder}/venv/python", "python", "python4"):
        assert not is_this_python(other)


def test_a_script_that_imports_nothing_installed(told: list[tuple[str, str]]) -> None:
    with open("plain.py", "w") as file:
        file.write("import model, no_such_module, sys")
    reason = finds_nothing(told, "plain.py")
    assert reason == "plain.py imports none at its top level that are installed"


def test_what_cannot_be_read_is_told_in_one_notice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").touch()
    with zipfile.ZipFile("app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    (folder / "broken.py").write_text("import json\nimport =")
    os.mkfifo("pipe.py")
    assert finds_nothing(told, "app") == "app is a folder"
    assert finds_nothing(told, "app.zip").startswith("app.zip is not Python source: ")
    reason = finds_nothing(told, "broken.py")
    assert reason == "broken.py is not Python source: invalid syntax (line 2)"
    assert finds_nothing(told, "pipe.py") == "pipe.py is no file"
    assert finds_nothing(told, "gone.py") == "gone.py is no file"
    assert finds_nothing(told, "-m", "gone") == "there is no source of -m gone here"
    assert finds_nothing(told, "-m", "xml") == "there is no source of -m xml here"
    monkeypatch.setattr(preloading, "SOURCE_BYTES_MAX", len(SOURCE) - 1)
    assert finds_nothing(told, "train.py").startswith("train.py is larger than ")
    monkeypatch.setattr(preloading, "SOURCE_BYTES_MAX", len(SOURCE))
    assert auto("train.py") == FOUND


@pytest.mark.parametrize("args", [(), ("-",), ("-u", "-", "train.py"), ("-i", "train.py")])
def test_a_python_without_a_program_to_read(
    args: tuple[str, ...], told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/python9")
    reason = finds_nothing(told, *args, python="/bin/python9")
    assert reason == "python9 is not given a Python script, module or command to run"


def test_a_program_that_is_not_python(told: list[tuple[str, str]]) -> None:
    reason = finds_nothing(told, "-c", "exit 0", python="/bin/sh")
    assert reason == "sh is not given a Python script, module or command to run"


def test_a_file_that_may_not_be_read_is_told_in_one_notice(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    """Root, who may run the tests, may read everything: the refusal has to be made up."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert finds_nothing(told, "train.py") == "train.py cannot be read: Permission denied"


def test_extension_modules_have_no_source(folder: Path, told: list[tuple[str, str]]) -> None:
    (folder / f"compiled{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF\0")
    reason = finds_nothing(told, "-m", "compiled")
    assert reason.startswith("-m compiled is not Python source: ")


@pytest.mark.torch
def test_what_torch_imports_for_an_optimizer_is_found_too(folder: Path) -> None:
    (folder / "infer.py").write_text("from torch import nn\n")
    assert "torch._dynamo" not in auto("infer.py")
    (folder / "train.py").write_text("import torch.nn\nmake = lambda: torch.optim.SGD([])\n")
    assert auto("train.py") == ("torch.nn", "torch._dynamo")
    (folder / "other.py").write_text("import json\noptim = 1\n")
    assert auto("other.py") == ("json",)
