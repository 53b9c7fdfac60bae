from __future__ import annotations

import functools
import os
import sys
import textwrap
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli.script import run_script_path
from holdfast.launcher import preload
from holdfast.launcher.preload import (
    FoundModule,
    PathEntry,
    find_module,
    installed_among,
    is_this_python,
    modules_to_preload,
    path_entries,
    top_level_imports,
)

if TYPE_CHECKING:
    from pathlib import Path


def modules(source: str, *, as_main: bool = True) -> list[str]:
    return [module for module, _ in top_level_imports(textwrap.dedent(source), as_main=as_main)]


def test_every_form_of_import_in_order() -> None:
    source = "import a, b.c as d\nfrom e.f import g, h as i\nfrom j import *\nimport a"
    assert top_level_imports(source, as_main=True) == [
        ("a", ()),
        ("b.c", ()),
        ("e.f", ("g", "h")),
        ("j", ("*",)),
        ("a", ()),
    ]


def test_relative_imports_are_not_taken() -> None:
    assert modules("from . import a\nfrom .b import c\nfrom ..d import e\nimport f") == ["f"]


def test_imports_below_blocks_that_a_worker_enters() -> None:
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
            elif other:
                import g
            else:
                import h
    """
    assert modules(source) == list("abcdefgh")


def test_imports_that_wait_for_a_call_are_not_taken() -> None:
    source = """
        def function():
            import a
        class Thing:
            import b
        for one in ():
            import c
        while False:
            import d
        lambda: __import__("e")
    """
    assert modules(source) == []


@pytest.mark.parametrize("name", ["TYPE_CHECKING", "typing.TYPE_CHECKING", "t.TYPE_CHECKING"])
def test_imports_for_a_type_checker_are_not_taken(name: str) -> None:
    source = f"if {name}:\n import a\nelse:\n import b\nif not {name}:\n import c"
    assert modules(source) == ["b", "c"]


def test_constant_conditions() -> None:
    assert modules("if 0:\n import a\nif True:\n import b\nelse:\n import c") == ["b"]


@pytest.mark.parametrize("test", ['__name__ == "__main__"', '"__main__" == __name__'])
def test_what_only_a_main_program_imports(test: str) -> None:
    source = f"if {test}:\n import a\nelse:\n import b\n"
    assert modules(source, as_main=True) == ["a"]
    assert modules(source, as_main=False) == ["b"]


def test_what_all_but_a_main_program_import() -> None:
    source = 'if __name__ != "__main__":\n import a\nif not __name__ == "__main__":\n import b\n'
    assert modules(source, as_main=True) == []
    assert modules(source, as_main=False) == ["a", "b"]


@pytest.mark.parametrize("test", ['__name__ == "x"', "1 < 2 < 3", 'name == "__main__"', "x and y"])
def test_conditions_that_only_the_worker_knows_are_taken_both_ways(test: str) -> None:
    assert modules(f"if {test}:\n import a\nelse:\n import b") == ["a", "b"]


def test_bytes_are_read_in_the_encoding_they_declare() -> None:
    source = "# coding: latin-1\nimport caf\xe9\n".encode("latin-1")
    assert top_level_imports(source, as_main=True) == [("caf\xe9", ())]
    assert top_level_imports("\ufeffimport a".encode(), as_main=True) == [("a", ())]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import a\nimport =\n", r"invalid syntax \(line 2\)"),
        (b"PK\x03\x04\0\0", "null bytes"),
        (b"# coding: nope\n", "encoding"),
        (b"\xff\xfe", "(?i)unicode|utf-8"),
        ("(" * 10_000, "nested|parenthes"),
        ("-" * 100_000 + "1", "nested"),
    ],
)
def test_what_is_not_python_is_told_in_one_line(source: str | bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        top_level_imports(source, as_main=True)
    assert not isinstance(caught.value, SyntaxError)
    assert "\n" not in str(caught.value)


def test_warnings_about_the_source_are_left_to_the_worker() -> None:
    """Warnings are errors in tests: one that came through would end this."""
    assert modules("x = '\\d' is 1\nimport a") == ["a"]


ACTS = "raise AssertionError('this was imported')\n"


def write(folder: Path, *names: str) -> Path:
    """Make files that say so if they are imported."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ACTS)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages."""
    return write(
        tmp_path / "site-packages",
        "plain.py",
        "pack/__init__.py",
        "pack/part.py",
        "pack/deep/__init__.py",
        "pack/deep/end.py",
        "space/inner/__init__.py",
    )


def among(*imports: tuple[str, tuple[str, ...]] | str, folders: list[Path]) -> list[str]:
    written = [(one, ()) if isinstance(one, str) else one for one in imports]
    return installed_among(written, path_entries(map(str, folders)))


# Places.


def test_folders_of_packages_and_of_the_standard_library_count_as_installed() -> None:
    standard = os.path.dirname(os.__file__)
    given = ["/x/site-packages", "/y/dist-packages/", standard, f"{standard}/lib-dynload", "/x", ""]
    places = path_entries(given)
    assert [place.installed for place in places] == [True] * 4 + [False] * 2
    assert places[1] == PathEntry("/y/dist-packages", installed=True)
    assert places[-1].folder == os.getcwd()


def test_the_path_of_this_interpreter_has_what_it_should() -> None:
    installed = {place.folder for place in path_entries(sys.path) if place.installed}
    assert os.path.dirname(os.__file__) in installed
    assert os.path.dirname(os.path.dirname(pytest.__file__)) in installed


def test_a_working_directory_that_was_removed_is_no_place(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    own.rmdir()
    assert path_entries(["", "/x"]) == [PathEntry("/x", installed=False)]


# Finding.


def test_modules_are_found_step_by_step_and_none_is_imported(site: Path) -> None:
    places = path_entries([str(site)])
    before = set(sys.modules)
    deep = find_module("pack.deep", places)
    assert deep is not None
    assert deep.origin == str(site / "pack/deep/__init__.py")
    assert deep.below == (PathEntry(str(site / "pack/deep"), installed=True),)
    end = find_module("pack.deep.end", places)
    assert end is not None
    assert end.below == ()
    for missing in ("gone", "pack.gone", "pack.gone.end", "plain.part", "", "pack..deep"):
        assert find_module(missing, places) is None
    assert {
        name for name in sys.modules if name not in before and name.startswith("pack.")
    } == set()


def test_the_first_place_decides(own: Path, site: Path) -> None:
    write(own, "plain.py")
    first = find_module("plain", path_entries([str(own), str(site)]))
    assert first == FoundModule(str(own / "plain.py"), installed=False, below=())
    last = find_module("plain", path_entries([str(site), str(own)]))
    assert last == FoundModule(str(site / "plain.py"), installed=True, below=())


def test_a_folder_without_init_does_not_hide_an_installed_package(own: Path, site: Path) -> None:
    (own / "pack").mkdir()
    found = find_module("pack.part", path_entries([str(own), str(site)]))
    assert found is not None
    assert found.installed


def test_packages_spread_over_several_places(own: Path, site: Path) -> None:
    write(own, "space/mine.py")
    places = path_entries([str(own), str(site)])
    whole = find_module("space", places)
    assert whole is not None
    assert not whole.installed
    inner, mine = find_module("space.inner", places), find_module("space.mine", places)
    assert inner is not None
    assert mine is not None
    assert (inner.installed, mine.installed) == (True, False)
    alone = find_module("space", path_entries([str(site)]))
    assert alone is not None
    assert alone.installed


def test_modules_within_an_archive_are_found(tmp_path: Path) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("pack/__init__.py", ACTS)
        file.writestr("pack/part.py", ACTS)
    found = find_module("pack.part", path_entries([str(archive)]))
    assert found == FoundModule(f"{archive}/pack/part.py", installed=False, below=())


# Choosing.


def test_installed_modules_are_chosen_once_and_in_order(own: Path, site: Path) -> None:
    write(own, "model.py", "plain.py")
    chosen = among("pack.deep", "model", "plain", "gone", "pack", "pack.deep", folders=[own, site])
    assert chosen == ["pack.deep", "pack"]


def test_names_that_are_modules_are_chosen_with_their_package(site: Path) -> None:
    names = ("part", "SomeClass", "deep", "*")
    assert among(("pack", names), folders=[site]) == ["pack", "pack.part", "pack.deep"]
    assert among(("space", ("inner",)), folders=[site]) == ["space", "space.inner"]


def test_what_the_interpreter_has_anyway_is_left_out(site: Path) -> None:
    write(site, "holdfast/__init__.py", "sys.py", "mpi4py/__init__.py", "mpi4py/MPI.py")
    skipped = ("__future__", "__main__", "sys", "time", "holdfast", "holdfast.errors", "mpi4py")
    assert among(*skipped, ("mpi4py", ("MPI",)), "plain", folders=[site]) == ["plain"]


def test_modules_of_the_standard_library_are_installed() -> None:
    chosen = installed_among(
        [("json", ("decoder",)), ("math", ()), ("os", ())], path_entries(sys.path)
    )
    assert chosen[:2] == ["json", "json.decoder"]
    assert "os" in chosen


def test_what_is_in_no_place_counts_if_the_places_are_not_all(own: Path) -> None:
    write(own, "model.py", "src/part.py")
    imports = [
        ("torch.nn", ("Linear",)),
        ("model", ()),
        ("src.part", ()),
        ("src", ()),
        ("src.gone", ()),
        ("sys", ()),
        ("numpy", ()),
    ]
    places = path_entries([str(own)])
    assert installed_among(imports, places, missing_counts=True) == ["torch.nn", "numpy"]


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
            f"holdfast.console.{level}", functools.partial(lambda *one: said.append(one), level)
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
    monkeypatch.setattr(preload, "SOURCE_BYTES_MAX", len(SOURCE) - 1)
    assert finds_nothing(told, "train.py").startswith("train.py is larger than ")
    monkeypatch.setattr(preload, "SOURCE_BYTES_MAX", len(SOURCE))
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
