"""The training script's interface to its agent: heartbeats, progress and sections.

    from holdfast import worker

    for step in range(first_step, 10_000):
        with worker.section("forward and backward", timeout=60):
            ...
        worker.progress(step, total=10_000, loss=loss)

It needs only the standard library, and outside Holdfast the calls do nothing. A call makes a few
stores into a page of memory that the agent reads. It needs no system call and no lock, and takes well
below a microsecond. Each store is one aligned word. So the agent can read the page at any time, even
if the worker was killed between two stores.

The page also keeps a curve: the step and loss at up to 240 past moments, few of which are old. So a
viewer sees the history of a job that nobody watched, and no process has to poll.

The page belongs to the process that makes the first call, until that process exits. All its threads
share it. In its children (forked or not) the calls do nothing: a data loader that is alive does not
prove that the training is.

This module imports nothing else of Holdfast; `processes/workers/pages.py` is the agent's side.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident
from time import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, SupportsFloat

    _Entry = tuple["_Page", int, "_Entry | None"]

__all__ = ["Info", "Section", "heartbeat", "info", "progress", "section"]

PAGE_ENV = "HOLDFAST_WORKER_PAGE"
PREVIOUS_WORLD_SIZE_ENV = "HOLDFAST_PREVIOUS_WORLD_SIZE"
LAST_END_ENV = "HOLDFAST_LAST_END"
NOTICE_FLAGS = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
NOTICE_NAME = "notice"  # The agent's pipe, next to the pages: a byte wakes it up.

# The layout of a page: signed words of 8 bytes, in the machine's byte order. The last byte of the
# first word is the version of the layout. The agent usually reads only the first HEAD_BYTES.
PAGE_BYTES = 12288
HEAD_BYTES = 4096
MAGIC = int.from_bytes(b"\x01hldfst\x02", "big")
SCAN_AT = 1  # Written by the agent: when it will read this page again, or NEVER.
PID = 2
HEARTBEAT = 3  # Times are nanoseconds of the monotonic clock, 0 for not yet.
STEP = 4
STEP_AT = 5
UNWATCHED = 6  # How many sections found no slot.
REQUESTED = 7  # The deadline for which the agent was last woken.
SLOTS = 32
DEADLINES = 8  # One word for each slot: 0 for none, NEVER for a section without a timeout.
ENTERED = DEADLINES + SLOTS
TOTAL = ENTERED + SLOTS  # The number of steps; 0 if the worker has not reported it.
LOSS = TOTAL + 1  # A float of 8 bytes, or NO_LOSS.
BACK_AT = LOSS + 1  # When the step was last lower than the one before; 0 for never.
NAMES_AT = 1024  # In bytes.
NAME_BYTES = 64
NEVER = (1 << 63) - 1
NO_STEP = -1
NO_SLOT = -1
NO_LOSS = NEVER  # As a float, this is a NaN that no computation returns.

# The curve: a ring of points for each level. A point is its time, the step and the loss. Its time is 0 while
# the worker writes it.
CURVE_AT = HEAD_BYTES // 8
LEVELS_S = (2, 15, 120, 1200, 12000)  # The minimum time between two points of a level.
LEVEL_POINTS = 48  # The oldest point of the last level is up to 6.7 days old.
POINT_WORDS = 3
LEVEL_WORDS = LEVEL_POINTS * POINT_WORDS

TIMEOUT_S_MAX = 1e9  # Longer timeouts are cut to this, which is 31 years.
NAMES_MAX = 256  # How many encoded names of sections are cached.
CLAIM_TRIES_MAX = 3
CLAIM_AGAIN_S = 0.001


def heartbeat() -> None:
    """Report that this worker is alive."""
    _words[HEARTBEAT] = monotonic_ns()


def progress(step: int, total: int | None = None, loss: SupportsFloat | None = None) -> None:
    """Report a finished step. The number is arbitrary and need not increase.

    With `total`, the number of steps, the views show an estimate of the remaining time. They also show the
    loss, which may be any number that converts to a float. Both stay until another call changes them.
    """
    global _last_step  # noqa: PLW0603 (one page for the process)
    words = _words
    if total is not None:
        words[TOTAL] = total
    if loss is not None:
        _floats[LOSS] = loss
    words[STEP] = step
    words[STEP_AT] = now = monotonic_ns()
    if step < _last_step:
        words[BACK_AT] = now
    _last_step = step
    if now >= _point_due:
        _add_point(now)


def info() -> Info:
    """Return which worker this is, and why its generation was started."""
    return Info()


class Section:
    """A block of code. With a timeout (seconds), the agent kills a worker that stays in it longer.

    Blocks may be nested, and several threads may enter them at once; each has its own time. The agent
    watches up to 32 at the same time, and keeps 64 bytes of a name. You may enter one object any number
    of times, even recursively. To save most of the cost, create it once and enter it often.
    """

    __slots__ = ("_entries", "_name", "_timeout_ns")

    def __init__(self, name: str, timeout: float | None = None) -> None:
        self._name = _names.get(name) or _encoded(name)
        if timeout is None:
            self._timeout_ns = NEVER
        elif timeout > TIMEOUT_S_MAX:
            self._timeout_ns = int(TIMEOUT_S_MAX * 1e9)
        else:
            self._timeout_ns = int(timeout * 1e9)
        # The last entry of each thread; each entry refers to the previous one.
        self._entries: dict[int, _Entry] = {}

    def __enter__(self) -> None:
        page = _page or _attach()
        words = page.words
        try:
            slot = page.free.pop()
        except IndexError:
            slot = NO_SLOT
        thread, entries = get_ident(), self._entries
        entries[thread] = (page, slot, entries.get(thread))
        if slot == NO_SLOT:
            words[UNWATCHED] += 1
            return
        page.memory[page.names[slot]] = self._name
        now = words[ENTERED + slot] = monotonic_ns()
        deadline = self._timeout_ns
        if deadline != NEVER:
            deadline += now
        # This store publishes the section, so it is the last one.
        words[DEADLINES + slot] = deadline
        if deadline < words[SCAN_AT]:
            words[REQUESTED] = deadline
            page.wake_agent()

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        thread, entries = get_ident(), self._entries
        entry = entries.pop(thread, None)
        if entry is None:
            try:
                thread, entry = entries.popitem()  # Another thread entered it.
            except KeyError:
                return
        page, slot, before = entry
        if before is not None:
            entries[thread] = before
        if slot != NO_SLOT:
            page.words[DEADLINES + slot] = 0
            page.free.append(slot)


section = Section


class Info:
    """Which worker this is. Outside Holdfast it is rank 0 of 1, in generation 0."""

    __slots__ = (
        "fence", "generation", "group_rank", "last_end", "local_rank", "local_world_size",
        "previous_world_size", "rank", "restart_count", "run_id", "supervised", "world_size",
    )  # fmt: skip

    def __init__(self) -> None:
        given = os.environ.get
        self.supervised = "HOLDFAST_GENERATION" in os.environ
        """Whether Holdfast started this worker."""
        self.run_id = given("TORCHELASTIC_RUN_ID", "")
        self.rank = _number("RANK", 0)
        self.world_size = _number("WORLD_SIZE", 1)
        self.local_rank = _number("LOCAL_RANK", 0)
        self.local_world_size = _number("LOCAL_WORLD_SIZE", 1)
        self.group_rank = _number("GROUP_RANK", 0)
        self.generation = _number("HOLDFAST_GENERATION", 0)
        """The number of earlier starts of the job's workers, for any reason."""
        self.fence = _number("HOLDFAST_FENCE", 0)
        """A number that grows with each generation of the job; 0 if there is none."""
        self.restart_count = _number("TORCHELASTIC_RESTART_COUNT", 0)
        """The number of restarts after a failure."""
        previous = _number(PREVIOUS_WORLD_SIZE_ENV, 0)
        self.previous_world_size: int | None = previous or None
        """The world size of the previous generation; None if it is unknown."""
        self.last_end = given(LAST_END_ENV, "")
        """Why the previous generation ended, as text; empty in the first."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"Info({fields})"


_names: dict[str, bytes] = {}


def _encoded(name: str) -> bytes:
    """Return an encoded name, and cache it: there are usually few."""
    if len(_names) >= NAMES_MAX:
        _names.clear()
    encoded = name.encode(errors="replace")[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    _names[name] = encoded
    return encoded


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


# The page.


class _Page:
    """The memory that calls write to: the agent's page, or private memory without a reader."""

    __slots__ = (
        "due", "floats", "folder", "free", "memory", "names", "notice", "places", "words",
    )  # fmt: skip

    def __init__(self, memory: Any, folder: str = "") -> None:
        self.memory = memory
        self.words: Any = memoryview(memory).cast("q")
        self.floats: Any = memoryview(memory).cast("d")
        self.due = [0] * len(LEVELS_S)
        """For each level of the curve, when its next point is due, and below, where it goes."""
        self.places = [0] * len(LEVELS_S)
        self.free = [*range(SLOTS)]
        starts = [NAMES_AT + slot * NAME_BYTES for slot in range(SLOTS)]
        self.names = [slice(start, start + NAME_BYTES) for start in starts]
        self.folder = folder
        self.notice: tuple[int, int, int] | None = (
            None  # A descriptor, and the identity of its file.
        )

    def wake_agent(self) -> None:
        """Make the agent read the page now.

        Opens the pipe each time, since the program may have closed unknown descriptors. Opens it for
        reading too, so that it cannot break. If its folder was removed, uses the first descriptor.
        """
        try:
            fd = os.open(os.path.join(self.folder, NOTICE_NAME), NOTICE_FLAGS)
        except OSError:
            fd = self._kept()
        if fd < 0:
            return  # The agent has exited, and the worker soon will.
        try:
            os.write(fd, b"\0")
        except OSError:
            pass  # The pipe is full, so the agent will read the page anyway.
        if self.notice is None:
            self.notice = _identified(fd)
        elif fd != self.notice[0]:
            os.close(fd)

    def drop_notice(self) -> None:
        """Close the descriptor of the pipe."""
        fd, self.notice = self._kept(), None
        if fd >= 0:
            os.close(fd)

    def _kept(self) -> int:
        """Return the kept descriptor, unless it now refers to another file."""
        try:
            if self.notice is not None and _identified(self.notice[0]) == self.notice:
                return self.notice[0]
        except OSError:
            pass  # The program has closed it.
        return -1


def _identified(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return fd, found.st_dev, found.st_ino


class _Unattached:
    """Stands in for the words of a page until the first call."""

    __slots__ = ()

    def __setitem__(self, word: int, value: int) -> None:
        _attach().words[word] = value


class _UnattachedFloats:
    """Stands in for the same words as floats."""

    __slots__ = ()

    def __setitem__(self, word: int, value: float) -> None:
        _attach().floats[word] = value


_lock = allocate_lock()
_page: _Page | None = None
_words: Any = _Unattached()
_floats: Any = _UnattachedFloats()
_point_due = 0
_last_step = NO_STEP


def _add_point(now: int) -> None:
    """Add the current step and loss to the levels of the curve that are due."""
    global _point_due  # noqa: PLW0603 (one page for the process)
    page = _page or _attach()
    words, due, places = page.words, page.due, page.places
    for level, interval_s in enumerate(LEVELS_S):
        if now < due[level]:
            break
        due[level] = now + interval_s * 1_000_000_000
        place = places[level]
        places[level] = (place + 1) % LEVEL_POINTS
        at = CURVE_AT + level * LEVEL_WORDS + place * POINT_WORDS
        words[at] = 0
        words[at + 1] = words[STEP]
        words[at + 2] = words[LOSS]
        words[at] = now
    _point_due = due[0]


def _attach() -> _Page:
    global _page, _words, _floats  # noqa: PLW0603 (one page for the process)
    with _lock:
        if _page is None:
            try:
                _page = _claim()
            except (OSError, ValueError):
                pass  # There is no page, or not one of ours.
            if _page is None:
                _page = _Page(bytearray(PAGE_BYTES))
            _words, _floats = _page.words, _page.floats
        return _page


def _claim() -> _Page | None:
    """Return the agent's page; None if there is none or another process has it."""
    path = os.environ.get(PAGE_ENV)
    if not path:
        return None
    import mmap

    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != PAGE_BYTES or not _lock_file(fd):
            return None
        page = _Page(mmap.mmap(fd, PAGE_BYTES), os.path.dirname(path))
    finally:
        os.close(fd)  # The mapping keeps its own descriptor, and so the lock.
    if page.words[0] != MAGIC:
        return None
    for slot in range(SLOTS):  # A process that had the page before and died may have filled them.
        page.words[DEADLINES + slot] = 0
    page.words[TOTAL], page.words[LOSS], page.words[BACK_AT] = 0, NO_LOSS, 0
    page.words[PID] = os.getpid()
    page.wake_agent()  # So that the agent notices the first call.
    return page


def _lock_file(fd: int) -> bool:
    import fcntl
    import time

    for tries in range(CLAIM_TRIES_MAX):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The agent takes the lock briefly to check whether a process holds it.
            if tries < CLAIM_TRIES_MAX - 1:
                time.sleep(CLAIM_AGAIN_S)
        else:
            return True
    return False


def _reset_after_fork() -> None:
    """Leave the page and its sections to the parent."""
    global _lock, _page, _words, _floats  # noqa: PLW0603 (one page for the process)
    global _point_due, _last_step
    _lock = allocate_lock()
    _words, _floats = _Unattached(), _UnattachedFloats()
    _point_due, _last_step = 0, NO_STEP
    if _page is not None:
        _page.memory = bytearray(PAGE_BYTES)
        _page.words = memoryview(_page.memory).cast("q")
        _page.floats = memoryview(_page.memory).cast("d")
        _page.drop_notice()
        _page = None


os.register_at_fork(after_in_child=_reset_after_fork)
