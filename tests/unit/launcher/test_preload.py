from __future__ import annotations

import functools
import os
import sys
import textwrap
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.launcher import preload
from holdfast.launcher.preload import (
    VariableSetting,
    find_module,
    installed_among,
    is_this_python,
    modules_to_preload,
    path_entries,
    split_at_preparation,
    top_level_steps,
)
from holdfast.run import run_script_path

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = "import json, model\nfrom xml import dom\n"
FOUND = ("json", "xml", "xml.dom")
ACTS = "raise AssertionError('this was imported')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a script that imports a module beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").write_text(SOURCE)
    return write(tmp_path, "model.py")


def write(folder: Path, *names: str) -> Path:
    """Create modules that raise if they are imported."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ACTS)
    return folder


def modules(source: str, *, as_main: bool = True) -> list[str]:
    steps = top_level_steps(textwrap.dedent(source), as_main=as_main)
    return [step[0] for step in steps if not isinstance(step, VariableSetting)]


def test_imports_in_blocks_that_run_at_import_are_found() -> None:
    source = """
        try:
            import a
        except ImportError:
            import not_this
        else:
            import b
        finally:
            import c
        try:
            import d
        except* OSError:
            import nor_this
        with open("x"):
            import e
            if flag:
                import f
            else:
                import g
        def function():
            import later
        class Thing:
            import later
        for one in ():
            import perhaps
    """
    assert modules(source) == list("abcdefg")


@pytest.mark.parametrize(
    ("test", "as_main", "otherwise"),
    [
        ("TYPE_CHECKING", ["b"], ["b"]), ("not typing.TYPE_CHECKING", ["a"], ["a"]),
        ("0", ["b"], ["b"]), ('__name__ == "__main__"', ["a"], ["b"]),
        ('"__main__" != __name__', ["b"], ["a"]), ('not __name__ == "__main__"', ["b"], ["a"]),
        ('__name__ == "x"', ["a", "b"], ["a", "b"]), ("x and y", ["a", "b"], ["a", "b"]),
    ],
)  # fmt: skip
def test_known_conditions_select_imports(
    test: str, as_main: list[str], otherwise: list[str]
) -> None:
    source = f"if {test}:\n import a\nelse:\n import b"
    assert modules(source, as_main=True) == as_main
    assert modules(source, as_main=False) == otherwise


@pytest.mark.parametrize(
    ("setting", "ahead"),
    [
        ('os.environ["HF_HOME"] = "/here"', False),
        ('os.environ.setdefault("OMP_NUM_THREADS", "4")', False),
        ('environ.update({"TORCH_LOGS": name}, X="1")', False),
        ('os.environ.update(PACKAGE_MODE="off")', False),
        ('if rank:\n os.environ["TRANSFORMERS_OFFLINE"] = "1"', False),
        ('os.environ["MY_MODE"] = "1"', True),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = "1"', True),
        ('os.environ["HF_EXPORTED"] = "this"', True),
        ('os.environ["HF_EXPORTED"] = "that"', False),
        ('os.environ.setdefault("HF_EXPORTED", computed())', True),
        ('x["HF_HOME"] = "/here"', True),
    ],
)
def test_imports_after_a_relevant_setting_are_not_preloaded(setting: str, ahead: bool) -> None:
    source = f"import os, before\n{setting}\nimport json, package\nfrom torch import nn\n"
    steps = top_level_steps(source, as_main=True)
    now, prepared, by = split_at_preparation(steps, {"HF_EXPORTED": "this"})
    rest: list[Any] = [("package", ()), ("torch", ("nn",))]
    first: list[Any] = [("os", ()), ("before", ()), ("json", ())]
    assert (now, prepared) == ((first + rest, []) if ahead else (first, rest))
    assert by is None if ahead else by is not None


@pytest.mark.parametrize(
    "source",
    ["import =\n", b"PK\x03\x04\0\0", b"# coding: nope\n", b"\xff\xfe", "-" * 100_000 + "1"],
)
def test_invalid_source_is_reported_in_one_line(source: str | bytes) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (of whatever wording)
        top_level_steps(source, as_main=True)
    assert not isinstance(caught.value, SyntaxError)
    assert "\n" not in str(caught.value)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages."""
    return write(
        tmp_path / "site-packages", "plain.py", "pack/__init__.py", "pack/part.py",
        "pack/deep/__init__.py", "space/inner/__init__.py", "sys.py", "mpi4py/__init__.py",
    )  # fmt: skip


def test_modules_are_found_as_python_would_and_none_is_imported(tmp_path: Path, site: Path) -> None:
    own = write(tmp_path / "own", "plain.py", "space/mine.py")
    (own / "pack").mkdir()  # Without an __init__.py it does not hide the installed package.
    both = path_entries([str(own), str(site)])
    found = {
        name: getattr(find_module(name, both), "installed", None)
        for name in (
            "plain", "pack.part", "space", "space.inner", "space.mine", "gone", "pack.gone",
        )
    }  # fmt: skip
    assert found == {
        "plain": False, "pack.part": True, "space": False, "space.inner": True,
        "space.mine": False, "gone": None, "pack.gone": None,
    }  # fmt: skip


def test_installed_modules_are_chosen_once_and_in_order(tmp_path: Path, site: Path) -> None:
    own = write(tmp_path / "own", "model.py", "src/part.py")
    imports = [
        ("pack.deep", ()), ("model", ()), ("gone", ()), ("pack", ("part", "SomeClass", "*")),
        ("pack.deep", ()), ("sys", ()), ("holdfast", ()), ("mpi4py", ()), ("src.gone", ()),
    ]  # fmt: skip
    entries = path_entries([str(own), str(site)])
    assert installed_among(imports, entries) == ["pack.deep", "pack", "pack.part"]
    # If not all folders are known, a module that is in none of them counts as installed.
    own_only = path_entries([str(own)])
    assert installed_among(imports[:3], own_only, missing_counts=True) == ["pack.deep", "gone"]


def auto(*args: Any, python: Any = sys.executable) -> tuple[str, ...]:
    return modules_to_preload(("auto",), python, args)


def test_auto_is_replaced_by_the_modules_it_finds() -> None:
    wanted = ("first", "auto", "json", "last")
    found = modules_to_preload(wanted, sys.executable, ["-u", "train.py"])
    assert found == ("first", *FOUND, "last")
    assert modules_to_preload(("a", "b.c"), "/no/python", ["gone.py"]) == ("a", "b.c")


def test_modules_next_to_the_script_or_on_the_path_are_excluded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "json.py", "work/xml.py", "elsewhere/x")
    monkeypatch.chdir(folder / "elsewhere")
    assert auto(folder / "train.py") == ("xml", "xml.dom")
    os.symlink("../train.py", "link.py")
    monkeypatch.syspath_prepend(folder / "work")
    assert auto("link.py") == ()


def test_auto_reads_the_source_of_scripts_modules_and_functions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "pack/__init__.py")
    (folder / "pack" / "train.py").write_text(f"{SOURCE}from . import other\nimport pack.other")
    (folder / "pack" / "__main__.py").write_text("import wave")
    assert auto("-u", "-m", "pack.train", "--lr", "1") == FOUND
    assert auto("-m", "pack") == ("wave",)
    assert auto("-c", SOURCE) == FOUND
    # The module of a function is not a main program in workers; a script of --run-path is.
    (folder / "jobs.py").write_text(f"{SOURCE}if __name__ == '__main__':\n import wave")
    assert auto("jobs.py", "--lr", python=run_script_path) == (*FOUND, "wave")
    module = ModuleType("jobs")
    module.__file__ = str(folder / "jobs.py")
    monkeypatch.setitem(sys.modules, "jobs", module)
    function = functools.partial(lambda: None)
    function.func.__module__ = "jobs"
    monkeypatch.syspath_prepend(folder)
    assert auto(python=functools.partial(function, 1)) == FOUND


def test_modules_of_another_interpreter_are_searched_on_its_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write(folder / "work", "mine.py")))
    (folder / "train.py").write_text(f"{SOURCE}import mine, no_such_module")
    assert auto("train.py", python="/opt/python") == ("json", "xml", "no_such_module")
    assert auto("train.py") == FOUND


def test_this_interpreter_is_recognised_by_all_its_paths(
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


@pytest.mark.parametrize(
    "args",
    [("app",), ("broken.py",), ("pipe.py",), ("gone.py",), ("-m", "gone"), ("-m", "xml"), (), ("-",),
     ("-i", "train.py"), ("large.py",), ("plain.py",)],
)  # fmt: skip
def test_auto_without_modules_prints_one_notice(
    args: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("holdfast.console.notice", lines.append)
    monkeypatch.setattr(preload, "SOURCE_BYTES_MAX", 100)
    write(folder, "app/__main__.py")
    (folder / "broken.py").write_text("import json\nimport =")
    (folder / "large.py").write_text("import json\n" * 10)
    (folder / "plain.py").write_text("import model, no_such_module, sys")
    os.mkfifo("pipe.py")
    assert auto(*args) == ()
    [line] = lines
    assert "\n" not in line
    assert args[-1:] != ("app",) or "app" in line


@pytest.mark.torch
def test_module_that_torch_imports_for_an_optimizer_is_preloaded(folder: Path) -> None:
    (folder / "infer.py").write_text("from torch import nn\n")
    assert "torch._dynamo" not in auto("infer.py")
    (folder / "train.py").write_text("import torch.nn\nmake = lambda: torch.optim.SGD([])\n")
    assert auto("train.py") == ("torch.nn", "torch._dynamo")
