"""Makes untrusted text safe to print: text from workers, other nodes, etcd, other users' processes.

A terminal obeys escape sequences, which can set its title, fill the clipboard or clear the screen. A line break in
the wrong place forges a line. So all text that Holdfast itself prints passes through this module. It
escapes unprintable characters as Python does in a string (`\\x1b`). That includes invisible characters
(U+202E reverses the following text, U+200B makes different texts look equal) and lone surrogates, which UTF-8
cannot encode.

The output of workers passes through the agent unchanged, and so does JSON, for programs. `holdfast logs` shows the
output of other people's workers too: on a terminal it keeps colours and escapes the rest.
"""

from __future__ import annotations

QUOTE_CHARS_MAX = 200
"""How many characters of untrusted text an error quotes."""
_BLANKS = str.maketrans("\n\r\t", "   ")


def visible(text: str) -> str:
    """Return text with all unprintable characters escaped, except line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


def one_line(text: str, chars_max: int | None = None) -> str:
    """Return text as one printable line of at most `chars_max`, with spaces for line breaks and tabs."""
    line = text if chars_max is None else text[: chars_max + 1]
    if not line.isprintable():
        line = visible(line.replace("\r\n", " ").translate(_BLANKS))
    if chars_max is None or len(line) <= chars_max:
        return line
    return f"{line[: chars_max - 3]}..."


def quoted(text: str) -> str:
    """Return untrusted text as a short line, for use in a message."""
    return one_line(text, QUOTE_CHARS_MAX)
