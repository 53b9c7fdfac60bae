"""The lines Holdfast itself says to the person, on standard error.

`logging` is not imported for this: it would cost a tenth of the start-up. A program that has
set up logging of its own gets these lines on the logger `holdfast`; everyone else gets one
plain line each. The variable `LOGLEVEL` chooses what is shown, as it does for `torchrun`.
"""

from __future__ import annotations

import os
import sys

DEBUG, INFO, NOTICE, WARNING, ERROR = 10, 20, 25, 30, 40
# How long a line waits for a console that is full; then it is dropped.
CONSOLE_MS_MAX = 200

_LEVELS = {"DEBUG": DEBUG, "INFO": INFO, "WARNING": WARNING, "WARN": WARNING, "ERROR": ERROR}


def threshold() -> int:
    """Return the lowest level that is shown; an unknown `LOGLEVEL` counts as none."""
    return _LEVELS.get(os.environ.get("LOGLEVEL", "").upper(), NOTICE)


def say(level: int, text: str) -> None:
    """Tell the person `text` if the level is shown. Never raises: a closed console is no fault."""
    logging = sys.modules.get("logging")
    if logging is not None and logging.getLogger("holdfast").hasHandlers():
        logging.getLogger("holdfast").log(level, text)
        return
    if level < threshold() or not _takes_lines():
        return
    try:
        sys.stderr.write(f"[holdfast] {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # No console (closed, or None under pythonw-like hosts): nothing to tell it.


def _takes_lines() -> bool:
    """Whether the console takes a line soon. Supervision must not wait for one that is stuck:

    a pager nobody scrolls, a terminal held by Ctrl-S, a log collector that hangs.
    """
    import select

    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return sys.stderr is not None  # A stream of Python's own, such as a notebook's.
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(CONSOLE_MS_MAX))


def debug(text: str) -> None:
    """Say something only a developer of Holdfast wants to see."""
    say(DEBUG, text)


def info(text: str) -> None:
    """Say something that helps to follow a job."""
    say(INFO, text)


def notice(text: str) -> None:
    """Say how the job as a whole goes on: few lines, shown unless `LOGLEVEL` asks for less."""
    say(NOTICE, text)


def warning(text: str) -> None:
    """Say something the person should know, while the job goes on."""
    say(WARNING, text)


def error(text: str) -> None:
    """Say why the job, or a part of it, failed."""
    say(ERROR, text)
