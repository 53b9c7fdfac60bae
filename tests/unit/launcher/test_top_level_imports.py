from __future__ import annotations

import textwrap

import pytest

from holdfast.launcher.top_level_imports import top_level_imports


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
