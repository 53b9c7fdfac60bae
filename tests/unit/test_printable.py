"""Text from other processes cannot control the console."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.printable import one_line, quoted, visible

anything = st.text(st.characters(codec=None), max_size=60)


@given(anything)
def test_result_has_only_printable_characters(text: str) -> None:
    assert all(one.isprintable() or one in "\n\t" for one in visible(text))
    assert one_line(text).isprintable()
    visible(text).encode()


@given(anything, st.integers(3, 20))
def test_line_is_cut_at_its_limit(text: str, chars_max: int) -> None:
    line = one_line(text, chars_max)
    assert len(line) <= chars_max
    assert one_line(line, chars_max) == line


def test_unprintable_characters_are_escaped() -> None:
    text = "red\x1b[31m\a\x9b\u202e\u200b\ufeff\udcff \N{SNOWMAN}\n\tnext\r\nlast\r"
    shown = "red\\x1b[31m\\x07\\x9b\\u202e\\u200b\\ufeff\\udcff \N{SNOWMAN}"
    assert visible(text) == f"{shown}\n\tnext\\r\nlast\\r"
    assert one_line(text) == f"{shown}  next last "
    assert [one_line("x" * 10, 10), one_line("x" * 11, 10)] == ["x" * 10, "xxxxxxx..."]
    assert len(quoted("x" * 10_000)) < 1000
