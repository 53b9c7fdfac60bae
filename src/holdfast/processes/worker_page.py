"""The page of memory in which one worker tells how it goes on: the agent's side.

It is a small file that the worker maps (`holdfast.worker` has the layout). The agent reads it as a
file, so that nothing a worker does to it can hurt the agent, and believes nothing it finds there:
every number is taken as it is, or not at all.
"""

from __future__ import annotations

import errno
import os
import sys

from holdfast.core.facts import Fact
from holdfast.worker import (
    ASKED,
    DEADLINES,
    ENTERED,
    HEARTBEAT,
    LOOK_AT,
    MAGIC,
    NAME_BYTES,
    NAMES_AT,
    NEVER,
    NO_STEP,
    PAGE_BYTES,
    PID,
    SLOTS,
    STEP,
    STEP_AT,
    UNWATCHED,
)


class Section(Fact):
    """A block that a worker is in."""

    name: str
    entered_ns: int
    deadline_ns: int | None
    """By the monotonic clock; None for a block without a timeout."""


class Progress(Fact):
    """How far a worker is, as it says itself. Times are by the monotonic clock, 0 for never."""

    pid: int = 0
    """The process that makes the calls, 0 if none does."""
    step: int | None = None
    step_ns: int = 0
    heartbeat_ns: int = 0
    """The last sign of life: a heartbeat, or a step."""
    sections: tuple[Section, ...] = ()
    """The blocks it is in, the outermost first."""
    unwatched: int = 0
    """How many sections could not be watched, since there were too many at once."""


class WorkerPage:
    """The page of one worker."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._told: set[tuple[int, int]] = set()  # Slots and deadlines that were told already.
        self._look_ns = NEVER

    @classmethod
    def create(cls, folder: str, rank: int, start: int = 0) -> WorkerPage:
        """Make the page of a worker, for the so-manieth start of it.

        Raises `OSError` where there is no room for it.
        """
        path = os.path.join(folder, f"{rank}.{start}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        page = cls(path, fd)
        try:
            page._write_all()
        except OSError:
            page.close()
            raise
        return page

    def read(self) -> Progress:
        """Return what the worker has said so far."""
        words, names = self._read()
        if not words:
            return Progress()
        sections = [
            Section(
                _name_at(names, slot),
                words[ENTERED + slot],
                None if words[DEADLINES + slot] == NEVER else words[DEADLINES + slot],
            )
            for slot in range(SLOTS)
            if words[DEADLINES + slot] > 0
        ]
        sections.sort(key=lambda section: section.entered_ns)
        return Progress(
            pid=words[PID],
            step=words[STEP] if words[STEP_AT] > 0 else None,
            step_ns=words[STEP_AT],
            heartbeat_ns=max(words[HEARTBEAT], words[STEP_AT]),
            sections=tuple(sections),
            unwatched=words[UNWATCHED],
        )

    def planned_look(self) -> float | None:
        """Return when the page is looked at next, as the worker was let know."""
        return None if self._look_ns == NEVER else self._look_ns / 1e9

    def asked_look(self) -> float | None:
        """Return the deadline of the section for whose sake the worker last asked for a look."""
        words, _ = self._read()
        return words[ASKED] / 1e9 if words and 0 < words[ASKED] < NEVER else None

    def next_deadline(self, after: float = 0.0) -> float | None:
        """Return when the worker is to have left the section it has to leave first.

        Only what is later than `after` counts: `expired` tells of the others.
        """
        after_ns = int(after * 1e9)
        words, _ = self._read()
        if not words:
            return None
        nearest = min(
            (
                deadline
                for slot, deadline in enumerate(words[DEADLINES : DEADLINES + SLOTS])
                if after_ns < deadline < NEVER and (slot, deadline) not in self._told
            ),
            default=NEVER,
        )
        return None if nearest == NEVER else nearest / 1e9

    def expired(self, now: float) -> list[Section]:
        """Return the sections that should have been left by now, each once, the earliest first.

        A section counts only if two looks agree on it, and if the process that is in it lives.
        """
        first, _ = self._read()
        now_ns = int(now * 1e9)
        entered = [*enumerate(first[DEADLINES : DEADLINES + SLOTS])]
        self._told.intersection_update(entered)
        late = [
            slot
            for slot, deadline in entered
            if 0 < deadline <= now_ns and (slot, deadline) not in self._told
        ]
        if not late or not self._is_in_use():
            return []
        second, names = self._read()
        found = []
        for slot in sorted(late, key=lambda slot: first[DEADLINES + slot]):
            deadline = first[DEADLINES + slot]
            if second and second[DEADLINES + slot] == deadline:
                self._told.add((slot, deadline))
                found.append(Section(_name_at(names, slot), second[ENTERED + slot], deadline))
        return found

    def plan_look(self, at: float | None) -> None:
        """Let the worker know when its page is looked at next; None for not at all."""
        at_ns = NEVER if at is None else int(at * 1e9)
        if at_ns != self._look_ns:
            self._look_ns = at_ns
            try:
                os.pwrite(self._fd, at_ns.to_bytes(8, sys.byteorder), LOOK_AT * 8)
            except OSError:
                pass  # Then the worker asks for looks that are not needed, or its end is near.

    def close(self) -> None:
        """Give the page back; a worker that still writes to it writes for nobody."""
        fd, self._fd = self._fd, -1  # In this order: another thread may be about to read.
        if fd >= 0:
            os.close(fd)
            try:
                os.unlink(self.path)
            except OSError:
                pass  # Somebody has removed it.

    def _write_all(self) -> None:
        # All of it is written, so that the worker never meets a page that has no memory behind it.
        blank = bytearray(PAGE_BYTES)
        words = memoryview(blank).cast("q")
        words[0], words[LOOK_AT], words[STEP] = MAGIC, NEVER, NO_STEP
        if os.write(self._fd, blank) != PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def _read(self) -> tuple[list[int], bytes]:
        """Return the words and the names, empty if there is no page any more."""
        try:
            found = os.pread(self._fd, PAGE_BYTES, 0)
        except OSError:
            return [], b""  # It was given back meanwhile, or cannot be read.
        if len(found) != PAGE_BYTES:
            return [], b""
        words = memoryview(found)[:NAMES_AT].cast("q").tolist()
        return (words, found[NAMES_AT:]) if words[0] == MAGIC else ([], b"")

    def _is_in_use(self) -> bool:
        """Whether the process that has the page lives: it holds a lock for as long."""
        import fcntl

        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False


def _name_at(names: bytes, slot: int) -> str:
    name = names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES]
    return name.partition(b"\0")[0].decode(errors="replace")
