"""The lines that Holdfast itself prints for the user, on standard error.

This module does not import `logging`, which would cost a tenth of the start-up. If the program has set up logging,
the logger `holdfast` receives these lines; otherwise each is one plain line. The variable `LOGLEVEL` selects the
lines, as for `torchrun`.

Colours are for people: only `is_coloured` decides about them, and only text that is about to be written to a stream
gets them (`paint`).
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING

from holdfast.printable import one_line
from holdfast.side_thread import SideThread

if TYPE_CHECKING:
    from typing import TextIO


DEBUG, INFO, NOTICE, WARNING, ERROR, NOTHING = 10, 20, 25, 30, 40, 50
# How long to wait for a full console before dropping the line.
CONSOLE_MS_MAX = 200
# How much a writable console accepts in one piece: at least as much as a pipe. A character may become
# ten bytes if the console cannot encode it.
PIECE_CHARS_MAX = 4096
PIECE_CHARS_MAX_NOT_ASCII = PIECE_CHARS_MAX // 10

# How much of an exception's text is shown: it may contain a whole batch of data.
PROBLEM_CHARS_MAX = 500

# Styles, by ECMA-48.
DIM, RED, YELLOW = "2", "31", "33"

_LEVELS = {
    "DEBUG": DEBUG, "INFO": INFO, "WARNING": WARNING, "WARN": WARNING, "ERROR": ERROR,
    "CRITICAL": NOTHING, "FATAL": NOTHING, "NOTSET": NOTICE, "": NOTICE,
}  # fmt: skip


def threshold() -> int:
    """Return the lowest printed level; an unknown `LOGLEVEL` counts as unset."""
    return _LEVELS.get(os.environ.get("LOGLEVEL", "").upper(), NOTICE)


def check_level() -> None:
    """Warn if `LOGLEVEL` is not a level; a command calls this once, at its start."""
    level = os.environ.get("LOGLEVEL", "")
    if level.upper() not in _LEVELS:
        warning(f"LOGLEVEL: {level!r} is ignored; accepted: DEBUG, INFO, WARNING, ERROR, CRITICAL")


def log(level: int, text: str) -> None:
    """Print `text` in one line, if the level is enabled. Never raises, even if the console is closed."""
    text = one_line(text)
    logging = sys.modules.get("logging")
    if logging is not None and logging.getLogger("holdfast").hasHandlers():
        logging.getLogger("holdfast").log(level, text)
        return
    if level < threshold():
        return
    try:
        write_line(paint(f"[holdfast] {text}", _style_of(level), sys.stderr))
    except (OSError, ValueError, AttributeError):
        pass  # There is no console, or it is closed.


def is_coloured(stream: TextIO | None) -> bool:
    """Whether text for a stream gets colours: on a terminal, unless the user's variables say otherwise.

    The order is Python's: NO_COLOR, then FORCE_COLOR and CLICOLOR_FORCE, then TERM. An empty variable counts as unset.
    """
    if stream is None or os.environ.get("NO_COLOR"):
        return False
    if any(
        os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")
    ):
        return True
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False  # It is closed.


def paint(text: str, style: str, stream: TextIO | None) -> str:
    """Return text for a stream in a style, if the stream has colours."""
    return f"\x1b[{style}m{text}\x1b[0m" if text and is_coloured(stream) else text


def _style_of(level: int) -> str:
    return RED if level >= ERROR else YELLOW if level >= WARNING else DIM


def error_line(prog: str, text: str) -> str:
    """Return the line on standard error with which a command fails."""
    return f"{prog}: {paint('error:', RED, sys.stderr)} {text}\n"


_unfinished = False  # Whether only a part of the last line was written.
_file_writer: SideThread | None = (
    None  # For a file, which `poll` reports as ready even if it hangs.
)


def write_line(line: str) -> None:
    """Write a line to standard error; raise `OSError` if that blocks.

    Supervision must not wait for a stuck console: an idle pager, a terminal stopped by Ctrl-S, a log collector that
    hangs, a file on a hanging file system.
    """
    global _unfinished  # noqa: PLW0603 (there is one console)
    stream = sys.stderr
    if stream is None:
        raise OSError("standard error is closed")
    text = f"{line}\n"
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        stream.write(text)  # A stream without a descriptor, such as a notebook's, never blocks.
        stream.flush()
        return
    if _is_file(descriptor):
        _write_to_file(stream, text)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if _unfinished:
        text = f"\n{text}"
    deadline = time.monotonic() + CONSOLE_MS_MAX / 1000
    size = PIECE_CHARS_MAX if text.isascii() else PIECE_CHARS_MAX_NOT_ASCII
    for start in range(0, len(text), size):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            _unfinished = _unfinished or start > 0
            raise OSError(f"the console has been blocked for {CONSOLE_MS_MAX} ms")
        stream.write(text[start : start + size])
        stream.flush()
    _unfinished = False


def _is_file(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mode & 0o170_000 == 0o100_000  # `stat.S_ISREG`, without import.


def _write_to_file(stream: TextIO, text: str) -> None:
    global _file_writer  # noqa: PLW0603 (there is one console)
    if _file_writer is None:
        _file_writer = SideThread("holdfast-console", CONSOLE_MS_MAX / 1000)

    def write() -> None:
        stream.write(text)
        stream.flush()

    _file_writer.call(write)


def debug(text: str) -> None:
    """Print a message for developers of Holdfast."""
    log(DEBUG, text)


def info(text: str) -> None:
    """Print a message that helps to follow a job."""
    log(INFO, text)


def notice(text: str) -> None:
    """Print a step of the whole job: few lines, shown by default."""
    log(NOTICE, text)


def warning(text: str) -> None:
    """Print a warning; the job continues."""
    log(WARNING, text)


def error(text: str) -> None:
    """Print why the job, or a part of it, failed."""
    log(ERROR, text)


def describe(problem: BaseException) -> str:
    """Return the type and text of an exception in one line; only the type if it has no text."""
    name = type(problem).__name__
    try:
        text = str(problem)
    except Exception:  # noqa: BLE001 (a user's `__str__` may raise anything)
        return name
    if len(text) > PROBLEM_CHARS_MAX:
        text = f"{text[:PROBLEM_CHARS_MAX]}…"
    return " ".join(f"{name}: {text}".split())
