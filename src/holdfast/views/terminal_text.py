"""The output of other people's workers, made safe for a terminal."""

from __future__ import annotations

import codecs
import re

from holdfast.printable import visible

RESET = "\x1b[0m"
_COLOURS = re.compile(r"(\x1b\[[0-9;:]{0,32}m)")
_UNFINISHED = re.compile(r"(?:\r|\x1b(?:\[[0-9;:]{0,32})?)\Z")


class TerminalText:
    """The output of one worker, made safe for a terminal chunk by chunk: colours stay, the rest is escaped.

    A carriage return starts a new line: it could overwrite the rank in front of the line. Each line ends
    with the default colours.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""  # The start of a sequence that the next chunk completes.

    def add(self, chunk: bytes) -> str:
        """Return what a terminal may show of the output so far."""
        text = self._held + self._decoder.decode(chunk)
        unfinished = _UNFINISHED.search(text)
        self._held = unfinished[0] if unfinished else ""
        text = text.removesuffix(self._held).replace("\r\n", "\n").replace("\r", "\n")
        if "\x1b" not in text:
            return visible(text)
        parts = _COLOURS.split(text)  # Each second part is a colour.
        text = "".join(part if at % 2 else visible(part) for at, part in enumerate(parts))
        if len(parts) > 1:
            text = text.replace("\n", f"{RESET}\n")
            text = text if text.endswith("\n") else text + RESET
        return text
