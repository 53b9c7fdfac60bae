"""Text of others, made safe to be shown: of workers, other nodes, etcd, other users' processes.

A terminal obeys what is written to it: escape sequences set its title, fill the clipboard, clear
the screen, and a line break in the wrong place forges a line. So whatever Holdfast itself prints
goes through here: characters that are not printable are shown as Python would write them in a
string (`\\x1b`). That goes for invisible ones too (U+202E turns the order of what follows, U+200B
makes equal what differs) and for halves of characters, which UTF-8 cannot have.

What workers write themselves is theirs, and is passed on as it is; so is JSON, for programs.
"""

from __future__ import annotations

QUOTE_CHARS_MAX = 200
"""How much an error quotes of what another side sent."""
_BLANKS = str.maketrans("\n\r\t", "   ")


def visible(text: str) -> str:
    """Return text of several lines in which only line breaks and tabs are not printable."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


def one_line(text: str, chars_max: int | None = None) -> str:
    """Return text as one printable line, line breaks and tabs as blanks, of `chars_max` at most."""
    line = text if chars_max is None else text[: chars_max + 1]
    if not line.isprintable():
        line = visible(line.replace("\r\n", " ").translate(_BLANKS))
    if chars_max is None or len(line) <= chars_max:
        return line
    return f"{line[: chars_max - 3]}..."


def quoted(text: str) -> str:
    """Return what another side said as a short line, to be part of a message of ours."""
    return one_line(text, QUOTE_CHARS_MAX)
