"""The story of a job in a file: every step of every state machine in this process, with its cause.

One line per step, its fields separated by tabs::

    STEP  CAUSE  STATE  EVENT  EFFECTS

`STEP` is `node/machine#number`. `CAUSE` is the step that led to this one, or the message that did
(`n1/status#5`, `n1/view#2.7`). A step that sends a message lists it in its effects, so a failure can be
traced across all nodes. One write appends one line, so several agents can share a file. Only its
owner can read it: errors of workers may contain secrets. There are no times: the clocks of hosts differ, and
`holdfast story` orders steps by their causes.
"""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.machine import Step, Story, short_text
from holdfast.errors import UsageError
from holdfast.printable import one_line
from holdfast.side_thread import SideThread

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Self

STDERR = "-"


STORY_ENV = "HOLDFAST_DEBUG"
WRITE_S = 0.5
"""Limit for writing a step. Machines run in event loops, which a slow file must not block."""


def writing_story(path: str) -> AbstractContextManager[object]:
    """Return the context in which machines write their steps to this file, or to the file that `HOLDFAST_DEBUG` names."""
    target = path or os.environ.get(STORY_ENV, "")
    if not target:
        return nullcontext()
    return StoryFile(target, source="--story" if path else STORY_ENV)


class StoryFile:
    """While it is entered, all machines of this process write their steps to the file."""

    def __init__(self, path: str, *, source: str) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.dup(2) if path == STDERR else os.open(path, flags, 0o600)
        except OSError as problem:
            raise UsageError(
                f"{source}: cannot write {path!r}: {problem.strerror}; accepted: a file, or "
                "- for standard error"
            ) from None
        found = os.fstat(self._fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid != os.geteuid() and path != STDERR:
            os.close(self._fd)
            raise UsageError(
                f"{source}: {path!r} belongs to another user (uid {found.st_uid}); accepted: a file of yours"
            )
        self._writer = SideThread("holdfast-story", WRITE_S)

    def __enter__(self) -> Self:
        Story.sink = self._write
        return self

    def __exit__(self, *problem: object) -> None:
        Story.sink = None
        if not self._writer.is_hanging:  # Otherwise the descriptor is still in use.
            os.close(self._fd)

    def _write(self, step: Step) -> None:
        try:
            self._writer.call(os.write, self._fd, line_of(step).encode(errors="replace"))
        except OSError as problem:
            Story.sink = None
            console.warning(f"stopped writing the story: {problem.strerror or problem}")


def line_of(step: Step) -> str:
    """Return a step as a line of the file."""
    effects = ", ".join(short_text(effect) for effect in step.effects)
    state = "" if step.state is None else short_text(step.state)
    fields = (step.id, step.cause, state, short_text(step.event), effects)
    return "\t".join(one_line(" ".join(field.split())) for field in fields) + "\n"
