"""The lines Holdfast itself says to the person, on standard error.

`logging` is not imported for this: it would cost a tenth of the start-up. A program that has
set up logging of its own gets these lines on the logger `holdfast`; everyone else gets one
plain line each. The variable `LOGLEVEL` chooses what is shown, as it does for `torchrun`.
"""

from __future__ import annotations

import os
import sys

DEBUG, INFO, NOTICE, WARNING, ERROR, NOTHING = 10, 20, 25, 30, 40, 50
# How long a line waits for a console that is full; then it is dropped.
CONSOLE_MS_MAX = 200
# How much a console takes for certain that says it takes something: what a pipe has to, and in one
# piece. A character may become ten bytes where the console does not know it.
PIECE_CHARS_MAX = 4096
PIECE_CHARS_MAX_NOT_ASCII = PIECE_CHARS_MAX // 10

# How much is told of what an exception says: it may have a whole batch of data in it.
PROBLEM_CHARS_MAX = 500

_LEVELS = {
    "DEBUG": DEBUG, "INFO": INFO, "WARNING": WARNING, "WARN": WARNING, "ERROR": ERROR,
    "CRITICAL": NOTHING, "FATAL": NOTHING, "NOTSET": NOTICE, "": NOTICE,
}  # fmt: skip


def threshold() -> int:
    """Return the lowest level that is shown; an unknown `LOGLEVEL` counts as none."""
    return _LEVELS.get(os.environ.get("LOGLEVEL", "").upper(), NOTICE)


def check_level() -> None:
    """Say that `LOGLEVEL` is no level, if so; a command does once, when it starts."""
    level = os.environ.get("LOGLEVEL", "")
    if level.upper() not in _LEVELS:
        warning(f"LOGLEVEL: {level!r} is ignored; accepted: DEBUG, INFO, WARNING, ERROR, CRITICAL")


def log(level: int, text: str) -> None:
    """Tell the person `text` if the level is shown. Never raises: a closed console is no fault."""
    logging = sys.modules.get("logging")
    if logging is not None and logging.getLogger("holdfast").hasHandlers():
        logging.getLogger("holdfast").log(level, text)
        return
    if level < threshold():
        return
    try:
        write_line(f"[holdfast] {text}")
    except (OSError, ValueError, AttributeError):
        pass  # No console (closed, or None under pythonw-like hosts): nothing to tell it.


_unfinished = False  # Whether the last line could be written only in part.


def write_line(line: str) -> None:
    """Write a line to standard error; raise `OSError` if it does not take it soon.

    Supervision must not wait for a console that is stuck: a pager nobody scrolls, a terminal held
    by Ctrl-S, a log collector that hangs.
    """
    global _unfinished  # noqa: PLW0603 (there is one console)
    stream = sys.stderr
    if stream is None:
        raise OSError("there is no standard error")
    text = f"{line}\n"
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        stream.write(text)  # A stream of Python's own, such as a notebook's, is never stuck.
        stream.flush()
        return
    import select
    import time

    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if _unfinished:
        text = f"\n{text}"
    deadline = time.monotonic() + CONSOLE_MS_MAX / 1000
    size = PIECE_CHARS_MAX if text.isascii() else PIECE_CHARS_MAX_NOT_ASCII
    for start in range(0, len(text), size):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            _unfinished = _unfinished or start > 0
            raise OSError(f"the console takes no line for {CONSOLE_MS_MAX} ms")
        stream.write(text[start : start + size])
        stream.flush()
    _unfinished = False


def debug(text: str) -> None:
    """Say something only a developer of Holdfast wants to see."""
    log(DEBUG, text)


def info(text: str) -> None:
    """Say something that helps to follow a job."""
    log(INFO, text)


def notice(text: str) -> None:
    """Say how the job as a whole goes on: few lines, shown unless `LOGLEVEL` asks for less."""
    log(NOTICE, text)


def warning(text: str) -> None:
    """Say something the person should know, while the job goes on."""
    log(WARNING, text)


def error(text: str) -> None:
    """Say why the job, or a part of it, failed."""
    log(ERROR, text)


def describe(problem: BaseException) -> str:
    """Return what an exception is and says, in one line; one that cannot say it is only named."""
    name = type(problem).__name__
    try:
        said = str(problem)
    except Exception:  # noqa: BLE001 (an exception may be anybody's, and as faulty as the rest)
        return name
    if len(said) > PROBLEM_CHARS_MAX:
        said = f"{said[:PROBLEM_CHARS_MAX]}…"
    return " ".join(f"{name}: {said}".split())
