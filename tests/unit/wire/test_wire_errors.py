from __future__ import annotations

import pytest

from holdfast.wire import errors
from holdfast.wire.errors import HandshakeRefused, WireError, quoted


def test_every_error_about_the_other_side_is_a_wire_error() -> None:
    found = [one for one in vars(errors).values() if isinstance(one, type)]
    assert len(found) == 6
    assert all(issubclass(one, WireError) for one in found)


def test_a_refusal_says_whether_trying_again_may_help() -> None:
    assert HandshakeRefused("no").permanent
    refused = HandshakeRefused("full", permanent=False, reply=b"bytes")
    assert (str(refused), refused.why, refused.permanent, refused.reply) == (
        "full", "full", False, b"bytes",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words", "plain words"),
        ("", ""),
        ("two\nlines\x1b[31m", "two?lines?[31m"),
        ("x" * 10, "x" * 10),
        ("x" * 11, "xxxxxxx..."),
    ],
)
def test_the_other_sides_words_become_one_short_line(text: str, shown: str) -> None:
    assert quoted(text, 20 if "\n" in text or " " in text else 10) == shown
