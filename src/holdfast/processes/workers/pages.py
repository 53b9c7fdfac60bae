"""The pages of memory in which workers report their progress: the agent's side.

A page is a small file that the worker maps (`holdfast.worker` has the layout). The agent reads it as a
file, so a worker that damages it cannot harm the agent. The agent does not trust the content: it
rejects numbers that are not valid.

The agent does not read pages at intervals. It writes into each page when it will read the page next. If
a worker enters a section that ends before that time, it writes a byte into a pipe. So a worker that
enters one-minute sections a thousand times a second wakes the agent once a minute.

The files are in a directory of shared memory that only its owner can open. An agent holds a lock on
its directory. The keeper of a killed agent removes the directory; otherwise the next agent does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.values import Value
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.worker import (
    BACK_AT,
    CURVE_AT,
    DEADLINES,
    ENTERED,
    HEAD_BYTES,
    HEARTBEAT,
    LEVEL_WORDS,
    LEVELS_S,
    LOSS,
    MAGIC,
    NAME_BYTES,
    NAMES_AT,
    NEVER,
    NO_LOSS,
    NO_STEP,
    NOTICE_NAME,
    PAGE_BYTES,
    PAGE_ENV,
    PID,
    POINT_WORDS,
    REQUESTED,
    SCAN_AT,
    SLOTS,
    STEP,
    STEP_AT,
    TOTAL,
    UNWATCHED,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


class OpenSection(Value):
    """A block that a worker is in."""

    name: str
    entered_ns: int
    deadline_ns: int | None
    """By the monotonic clock; None for a block without a timeout."""


class Progress(Value):
    """The progress of a worker, as it reports it. Times are monotonic, 0 for never."""

    pid: int = 0
    """The process that makes the calls; 0 if there is none."""
    step: int | None = None
    step_ns: int = 0
    total: int | None = None
    """The number of steps that the worker reports; the views show the remaining time only with it."""
    loss: float | None = None
    """The last one, which may be a NaN."""
    pace: float | None = None
    """Steps per second over the last minutes, up to its last step. None without `total`, or too early."""
    heartbeat_ns: int = 0
    """The last sign of life: a heartbeat, or a step."""
    sections: tuple[OpenSection, ...] = ()
    """The blocks it is in, the outermost first."""
    unwatched: int = 0
    """The number of sections that are not watched, because too many were open at once."""


class CurvePoint(Value):
    """A past moment of a worker."""

    at_ns: int
    step: int
    loss: float | None


LAST_POINT = (STEP_AT, STEP, LOSS)
PACE_LEVEL = 1
PACE_S, PACE_STEPS = 300.0, 8
"""A pace covers at least this time and this number of steps, as soon as the worker has run that long."""
PACE_S_MIN, PACE_STEPS_MIN = 10.0, 2
"""With less than this, there is no pace: the first steps of a worker say little."""


class WorkerPage:
    """The page of one worker."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._reported: set[tuple[int, int]] = set()  # Slots and deadlines.
        self._scan_ns = NEVER

    @classmethod
    def create(cls, folder: str, rank: int, start: int = 0) -> WorkerPage:
        """Create the page of a worker; raise `OSError` if there is no space for it.

        `start` numbers the starts of the workers, so that each has its own pages.
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
        words, names = self._read()
        if not words:
            return Progress()
        sections = [
            OpenSection(
                _name_at(names, slot),
                words[ENTERED + slot],
                None if words[DEADLINES + slot] == NEVER else words[DEADLINES + slot],
            )
            for slot in range(SLOTS)
            if words[DEADLINES + slot] > 0
        ]
        sections.sort(key=lambda section: section.entered_ns)
        has_total = words[STEP_AT] > 0 and words[TOTAL] > 0
        return Progress(
            pid=words[PID],
            step=words[STEP] if words[STEP_AT] > 0 else None,
            step_ns=words[STEP_AT],
            total=words[TOTAL] if has_total else None,
            loss=_loss(words[LOSS]),
            pace=self._pace(words) if has_total else None,
            heartbeat_ns=max(words[HEARTBEAT], words[STEP_AT]),
            sections=tuple(sections),
            unwatched=words[UNWATCHED],
        )

    def curve(self) -> bytes:
        """Return the past moments of the worker and its last step, for `points_of`; empty if there are none."""
        points = self._points(0, len(LEVELS_S))
        words, _ = self._read() if points else ([], b"")
        last = [words[at].to_bytes(8, sys.byteorder, signed=True) for at in LAST_POINT if words]
        return points + b"".join(last)

    def _pace(self, words: list[int]) -> float | None:
        """Return steps per second until the last step."""
        since: CurvePoint | None = None
        step, at_ns = words[STEP], words[STEP_AT]
        for point in reversed(points_of(self._points(PACE_LEVEL, PACE_LEVEL + 1))):
            if point.at_ns < words[BACK_AT]:
                break  # The worker has begun again from an earlier step.
            since = point
            age_s = (at_ns - point.at_ns) / 1e9
            if age_s >= PACE_S and step - point.step >= PACE_STEPS:
                break
        if since is None:
            return None
        took_s, steps = (at_ns - since.at_ns) / 1e9, step - since.step
        return steps / took_s if took_s >= PACE_S_MIN and steps >= PACE_STEPS_MIN else None

    def _points(self, first: int, end: int) -> bytes:
        """Return the points of these levels; a point that the worker is writing is blank."""
        size, at = (end - first) * LEVEL_WORDS * 8, (CURVE_AT + first * LEVEL_WORDS) * 8
        try:
            once, again = os.pread(self._fd, size, at), os.pread(self._fd, size, at)
        except OSError:
            return b""  # It was closed meanwhile.
        if len(once) != size or not once.strip(b"\0"):
            return b""
        if once == again:
            return once
        # If both reads agree on a point, the worker did not write it between them.
        width = POINT_WORDS * 8
        pairs = ((once[at : at + width], again[at : at + width]) for at in range(0, size, width))
        return b"".join(one if one == other else bytes(width) for one, other in pairs)

    def planned_scan(self) -> float | None:
        """Return the time of the next scan, which the page shows to the worker."""
        return None if self._scan_ns == NEVER else self._scan_ns / 1e9

    def requested_scan(self) -> float | None:
        """Return the deadline of the section for which the worker last requested a scan."""
        words, _ = self._read()
        return words[REQUESTED] / 1e9 if words and 0 < words[REQUESTED] < NEVER else None

    def next_deadline(self, after: float = 0.0) -> float | None:
        """Return the earliest deadline of the sections that the worker is in.

        Only deadlines later than `after` count; `expired` returns the others.
        """
        after_ns = int(after * 1e9)
        words, _ = self._read()
        if not words:
            return None
        nearest = min(
            (
                deadline
                for slot, deadline in enumerate(words[DEADLINES : DEADLINES + SLOTS])
                if after_ns < deadline < NEVER and (slot, deadline) not in self._reported
            ),
            default=NEVER,
        )
        return None if nearest == NEVER else nearest / 1e9

    def expired(self, now: float) -> list[OpenSection]:
        """Return the sections whose deadline has passed, each once, the earliest first.

        A section counts only if two consecutive reads agree on it, and its process is alive.
        """
        first, _ = self._read()
        now_ns = int(now * 1e9)
        entered = [*enumerate(first[DEADLINES : DEADLINES + SLOTS])]
        self._reported.intersection_update(entered)
        late = [
            slot
            for slot, deadline in entered
            if 0 < deadline <= now_ns and (slot, deadline) not in self._reported
        ]
        if not late or not self._is_in_use():
            return []
        second, names = self._read()
        found = []
        for slot in sorted(late, key=lambda slot: first[DEADLINES + slot]):
            deadline = first[DEADLINES + slot]
            if second and second[DEADLINES + slot] == deadline:
                self._reported.add((slot, deadline))
                found.append(OpenSection(_name_at(names, slot), second[ENTERED + slot], deadline))
        return found

    def plan_scan(self, at: float | None) -> None:
        """Write the time of the next scan into the page; None for no scan."""
        at_ns = NEVER if at is None else int(at * 1e9)
        if at_ns != self._scan_ns:
            self._scan_ns = at_ns
            try:
                os.pwrite(self._fd, at_ns.to_bytes(8, sys.byteorder), SCAN_AT * 8)
            except OSError:
                pass  # The worker then requests unnecessary scans, or exits soon.

    def close(self) -> None:
        # Clear `_fd` before closing: another thread may be about to read.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            try:
                os.unlink(self.path)
            except OSError:
                pass  # It was removed already.

    def _write_all(self) -> None:
        # Write all of it, so that every part of the worker's page has memory.
        blank = bytearray(PAGE_BYTES)
        words = memoryview(blank).cast("q")
        words[0], words[SCAN_AT], words[STEP], words[LOSS] = MAGIC, NEVER, NO_STEP, NO_LOSS
        if os.write(self._fd, blank) != PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def _read(self) -> tuple[list[int], bytes]:
        """Return the words and the names; both empty if the page was closed."""
        try:
            found = os.pread(self._fd, HEAD_BYTES, 0)
        except OSError:
            return [], b""  # It was closed meanwhile, or is not readable.
        if len(found) != HEAD_BYTES:
            return [], b""
        words = memoryview(found)[:NAMES_AT].cast("q").tolist()
        return (words, found[NAMES_AT:]) if words[0] == MAGIC else ([], b"")

    def _is_in_use(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False


def points_of(curve: bytes) -> list[CurvePoint]:
    """Return the points of a curve in the order of their times."""
    words = memoryview(curve).cast("q").tolist()
    points = {
        words[at]: CurvePoint(words[at], words[at + 1], _loss(words[at + 2]))
        for at in range(0, len(words), POINT_WORDS)
        if words[at] > 0
    }
    return [points[at_ns] for at_ns in sorted(points)]


def _loss(word: int) -> float | None:
    if word == NO_LOSS:
        return None
    return float(memoryview(word.to_bytes(8, sys.byteorder, signed=True)).cast("d")[0])


def _name_at(names: bytes, slot: int) -> str:
    name = names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES]
    return name.partition(b"\0")[0].decode(errors="replace")


SHARED_MEMORY = "/dev/shm"  # noqa: S108 (a directory only its owner can open is made there)
FOLDER_PREFIX = "holdfast-pages-"
SWEPT_MAX = 64
"""The limit for directories of killed agents that one start removes."""
CHECKED_MAX = 10_000  # Folder names to check for leftovers; one check takes a microsecond.
SWEPT_AGE_S = 60.0
"""The minimum age of a leftover: the agent of a younger directory may not have locked it yet."""

NOTICE_BYTES_MAX = 1 << 16
CURVES_MAX, CURVE_RANKS_MAX = 16, 8
"""The generations whose curves are kept, and the workers of each. A curve has 6 kB."""
SETTLE_S = 0.1
"""The delay before a second scan, because the first may have missed a write of the worker."""


class WorkerPages:
    """The pages of an agent's workers, one set for each generation.

    Wait until `fileno()` is readable or `next_deadline()` passes, then call `take(now)`.
    """

    def __init__(self, parent: str | None = None) -> None:
        """Create the directory and the pipe. Raises `OSError` if that fails."""
        self._parent = parent or _parent()
        self.folder = ""
        self._folder_fd = self._notice = -1
        _sweep(self._parent)
        self._make()
        self._pages: dict[int, WorkerPage] = {}
        self._curves: deque[list[bytes]] = deque(maxlen=CURVES_MAX)
        self._starts = 0
        self._scan_at: float | None = None
        self._settle_at: float | None = None
        self.was_requested = False
        """Whether a worker requested the last scan."""

    def begin(self, ranks: Iterable[int]) -> None:
        """Create pages for the workers of a generation, and close the last generation's.

        Raises `OSError` if the directory was removed, and no other can be created.
        """
        self.end()
        if not os.path.exists(os.path.join(self.folder, NOTICE_NAME)):
            console.warning(
                f"{self.folder} was removed; creating a new folder for the workers' progress"
            )
            self._remove()
            self._make()
        # Use a new path each time: a process of the last generation may open its page only now.
        self._starts += 1
        for rank in ranks:
            try:
                self._pages[rank] = WorkerPage.create(self.folder, rank, self._starts)
            except OSError as problem:
                console.warning(
                    f"workers from {rank} on cannot report progress: no page in {self.folder}: "
                    f"{problem.strerror}"
                )
                break

    def end(self) -> None:
        curves = self._current_curves()
        if curves:
            self._curves.append(curves)
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        self._scan_at = self._settle_at = None

    def environment(self, rank: int) -> dict[str, str]:
        page = self._pages.get(rank)
        return {PAGE_ENV: page.path} if page is not None else {}

    def progress(self, rank: int) -> Progress:
        page = self._pages.get(rank)
        return page.read() if page is not None else Progress()

    def steps(self) -> list[tuple[int, int, float]]:
        """Return local rank, last step and its time (monotonic, seconds) of each worker with a step."""
        found = [(rank, page.read()) for rank, page in self._pages.items()]
        return [(rank, one.step, one.step_ns / 1e9) for rank, one in found if one.step is not None]

    def curves(self) -> list[list[bytes]]:
        """Return the curves of some workers, by generation; the last ones are those of the current pages."""
        return [*self._curves, self._current_curves()]

    def _current_curves(self) -> list[bytes]:
        pages = islice(self._pages.values(), CURVE_RANKS_MAX)
        return [curve for page in pages if (curve := page.curve())]

    def fileno(self) -> int:
        """Return the descriptor that is readable when a worker requests a scan."""
        return self._notice

    def next_deadline(self) -> float | None:
        """Return when `take` is due, by the monotonic clock; None for never."""
        times = [at for at in (self._scan_at, self._settle_at) if at is not None]
        return min(times, default=None)

    def take(self, now: float) -> list[tuple[int, OpenSection]]:
        """If a scan is due, read the pages; return the expired sections, by local rank."""
        requested = self.was_requested = self._take_notice()
        deadline = self.next_deadline()
        if not requested and (deadline is None or now < deadline):
            return []
        settling = not requested and (self._scan_at is None or now < self._scan_at)
        self._settle_at = None if settling else now + SETTLE_S
        late: list[tuple[int, OpenSection]] = []
        times: list[float] = []
        for rank, page in self._pages.items():
            planned = page.planned_scan()
            if planned is not None and planned <= now:
                # Do this first, so that a section that is entered after the scan requests another.
                page.plan_scan(None)
            late += [(rank, section) for section in page.expired(now)]
            # Keep a planned scan even if the worker has left its section meanwhile. Otherwise the next such
            # section would request it again.
            ahead = [at for at in (planned, page.requested_scan()) if at is not None and at > now]
            at = page.next_deadline(after=now)
            if at is not None:
                ahead.append(at)
            if ahead:
                times.append(min(ahead))
                page.plan_scan(min(ahead))
        self._scan_at = min(times, default=None)
        return late

    def close(self) -> None:
        if self._folder_fd < 0:
            return
        self.end()
        self._remove()

    def _make(self) -> None:
        name = f"{FOLDER_PREFIX}{os.getuid()}-{os.urandom(8).hex()}"
        self.folder = os.path.join(self._parent, name)
        Keeper.remove_if_killed(self.folder)
        try:
            os.mkdir(self.folder, 0o700)
            self._open()
        except OSError:
            self._remove()
            raise

    def _open(self) -> None:
        self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _lock_folder(self._folder_fd)
        notice = os.path.join(self.folder, NOTICE_NAME)
        os.mkfifo(notice, 0o600)
        self._notice = os.open(notice, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _remove(self) -> None:
        _remove(os.path.join(self.folder, NOTICE_NAME))
        _remove_folder(self.folder)
        Keeper.keep_if_killed(self.folder)
        for fd in (self._notice, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._folder_fd = self._notice = -1

    def _take_notice(self) -> bool:
        try:
            return bool(os.read(self._notice, NOTICE_BYTES_MAX))
        except BlockingIOError:
            return False


def _parent() -> str:
    if os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 (as above)


def _lock_folder(folder_fd: int) -> bool:
    """Lock a directory of pages; its agent holds the lock until it exits."""
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(parent: str) -> None:
    """Remove the folders of killed agents of this user; other users may have the same names."""
    prefix = f"{FOLDER_PREFIX}{os.getuid()}-"
    names = [name for name in _names_in(parent) if name.startswith(prefix)]
    folders = (os.path.join(parent, name) for name in names[:CHECKED_MAX])
    for folder in [folder for folder in folders if _is_leftover(folder)][:SWEPT_MAX]:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        if os.fstat(fd).st_uid == os.getuid() and _lock_folder(fd):
            for inner in _names_in(folder):
                _remove(os.path.join(folder, inner))
            _remove_folder(folder)
        os.close(fd)


def _is_leftover(folder: str) -> bool:
    """Whether a folder belongs to this user alone and is old enough to be a leftover."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return is_private and time.time() - found.st_mtime > SWEPT_AGE_S


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # Not readable, or another agent has just removed it.


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # It was removed already.


def _remove_folder(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # It was removed already, or is not empty.
