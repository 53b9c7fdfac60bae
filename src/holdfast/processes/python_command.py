"""The command line of a Python interpreter, taken apart: its flags, its program, its arguments.

The one thing to know: only what is surely understood is taken. An interactive Python, one that
reads its program from standard input, and options that are not known here are `None`, and are
left to the interpreter itself.
"""

from __future__ import annotations

import os
import sys

from holdfast.core.facts import Fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN_FLAGS = "bBdEIOPqRsSu"
FLAGS_WITH_VALUE = "WX"
PROGRAM_FLAGS = "cm"


class PythonCommand(Fact):
    """`kind` is `script`, `m` or `c`; `what` is the path, the module or the text."""

    program: str
    flags: tuple[str, ...]
    kind: str
    what: str
    args: tuple[str, ...]

    def words(self) -> list[str]:
        """Return the command in the form it is mostly written in."""
        kind = [] if self.kind == "script" else [f"-{self.kind}"]
        return [self.program, *self.flags, *kind, self.what, *self.args]

    def starts_like(self, other: PythonCommand) -> bool:
        """Whether both begin with the same interpreter, set up in the same way."""
        return (self.program, self.flags) == (other.program, other.flags)


def parse_command(argv: Sequence[str]) -> PythonCommand | None:
    """Take a command apart; None if it is no Python's, or not one that runs a program."""
    program, *words = argv
    name = os.path.basename(program)
    if program != sys.executable and not name.startswith("python"):
        return None
    flags: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            return PythonCommand(program, tuple(flags), "script", word, tuple(words))
        letters = word[1:]
        if not letters or letters.startswith("-"):
            return None  # Standard input, or a long option.
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in PLAIN_FLAGS:
                flags.append(f"-{letter}")
                continue
            if letter not in FLAGS_WITH_VALUE + PROGRAM_FLAGS or not (letters or words):
                return None
            value, letters = letters or words.pop(0), ""
            if letter in PROGRAM_FLAGS:
                return PythonCommand(program, tuple(flags), letter, value, tuple(words))
            flags += [f"-{letter}", value]
    return None
