"""The pages of all workers of an agent, and the pipe by which they ask for a look.

Nothing is looked at every so often. The agent writes into each page when it will look at it next; a
worker that enters a section which ends before that puts a byte into the pipe. So a worker that
enters sections of a minute's length a thousand times in a second wakes the agent once a minute.

The files are in a folder of shared memory that only its owner can open. An agent holds a lock on
its folder: those of agents that were killed are removed by the next that starts.
"""

from __future__ import annotations

import os
import time

from holdfast import messages
from holdfast.processes.worker_page import Progress, WorkerPage
from holdfast.worker import NOTICE_NAME, PAGE_ENV

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.processes.worker_page import Section

SHARED_MEMORY = "/dev/shm"  # noqa: S108 (a folder only its owner can open is made there)
FOLDER_PREFIX = "holdfast-pages-"
SWEPT_MAX = 64
"""So many folders of agents that were killed are removed at a start."""
SWEPT_AGE_S = 60.0
"""A folder that is younger may be one that its agent has not locked yet."""

NOTICE_BYTES_MAX = 1 << 16
SETTLE_S = 0.1
"""After a look there is one more: a store of the worker's may not have been seen yet."""


class WorkerPages:
    """The pages of an agent's workers, one set for each generation.

    Wait until `fileno()` can be read or for `next_deadline()`, then `take(now)`.
    """

    def __init__(self, parent: str | None = None) -> None:
        """Make the folder and the pipe. Raises `OSError` where that cannot be done."""
        self._parent = parent or _parent()
        self.folder = ""
        self._folder_fd = self._notice = -1
        _sweep(self._parent)
        self._make()
        self._pages: dict[int, WorkerPage] = {}
        self._starts = 0
        self._look_at: float | None = None
        self._settle_at: float | None = None
        self.was_asked = False
        """Whether a worker asked for the last look."""

    def begin(self, ranks: Iterable[int]) -> None:
        """Make new pages for the workers of a generation; those of the last are given up.

        Raises `OSError` where the folder was removed, and no other can be made.
        """
        self.end()
        if not os.path.exists(os.path.join(self.folder, NOTICE_NAME)):
            messages.warning(f"{self.folder} has been removed: another is made for the workers")
            self._remove()
            self._make()
        # Another path each time: a process of the last generation may only now look for its page.
        self._starts += 1
        for rank in ranks:
            try:
                self._pages[rank] = WorkerPage.create(self.folder, rank, self._starts)
            except OSError as problem:
                messages.warning(
                    f"worker {rank} cannot tell its progress: no page in {self.folder}: {problem}"
                )

    def end(self) -> None:
        """Give up the pages of a generation that has ended."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        self._look_at = self._settle_at = None

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a worker is to have in its environment."""
        page = self._pages.get(rank)
        return {PAGE_ENV: page.path} if page is not None else {}

    def progress(self, rank: int) -> Progress:
        """Return what a worker has said so far."""
        page = self._pages.get(rank)
        return page.read() if page is not None else Progress()

    def fileno(self) -> int:
        """Return the descriptor that can be read when a page wants to be looked at."""
        return self._notice

    def next_deadline(self) -> float | None:
        """Return when to look at the latest, by the monotonic clock; None for not at all."""
        times = [at for at in (self._look_at, self._settle_at) if at is not None]
        return min(times, default=None)

    def take(self, now: float) -> list[tuple[int, Section]]:
        """Look, if it is time to; return the sections that should have been left, by local rank."""
        asked = self.was_asked = self._take_notice()
        deadline = self.next_deadline()
        if not asked and (deadline is None or now < deadline):
            return []
        settling = not asked and (self._look_at is None or now < self._look_at)
        self._settle_at = None if settling else now + SETTLE_S
        late: list[tuple[int, Section]] = []
        times: list[float] = []
        for rank, page in self._pages.items():
            planned = page.planned_look()
            if planned is not None and planned <= now:
                # First of all: a section that is entered after the look asks for another.
                page.plan_look(None)
            late += [(rank, section) for section in page.expired(now)]
            # A look that is still to come stays, even if the section it was for has been left, and
            # was so before this look: otherwise the next such section would ask for it again.
            ahead = [at for at in (planned, page.asked_look()) if at is not None and at > now]
            at = page.next_deadline(after=now)
            if at is not None:
                ahead.append(at)
            if ahead:
                times.append(min(ahead))
                page.plan_look(min(ahead))
        self._look_at = min(times, default=None)
        return late

    def close(self) -> None:
        """Remove everything."""
        if self._folder_fd < 0:
            return
        self.end()
        self._remove()

    def _make(self) -> None:
        name = f"{FOLDER_PREFIX}{os.getuid()}-{os.urandom(8).hex()}"
        self.folder = os.path.join(self._parent, name)
        os.mkdir(self.folder, 0o700)
        try:
            self._open()
        except OSError:
            self._remove()
            raise

    def _open(self) -> None:
        self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _hold(self._folder_fd)
        notice = os.path.join(self.folder, NOTICE_NAME)
        os.mkfifo(notice, 0o600)
        self._notice = os.open(notice, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _remove(self) -> None:
        _remove(os.path.join(self.folder, NOTICE_NAME))
        _remove_folder(self.folder)
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


def _hold(folder_fd: int) -> bool:
    """Take the lock of a folder of pages; its agent has it for as long as that lives."""
    import fcntl

    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(parent: str) -> None:
    """Remove what agents of this user left that were killed."""
    prefix = f"{FOLDER_PREFIX}{os.getuid()}-"
    left = [name for name in _names_in(parent) if name.startswith(prefix)]
    for name in left[:SWEPT_MAX]:
        folder = os.path.join(parent, name)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        found = os.fstat(fd)
        old = time.time() - found.st_mtime > SWEPT_AGE_S
        if old and found.st_uid == os.getuid() and _hold(fd):
            for inner in _names_in(folder):
                _remove(os.path.join(folder, inner))
            _remove_folder(folder)
        os.close(fd)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # It cannot be looked into, or another agent that starts just now was first.


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # It is gone already.


def _remove_folder(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # Likewise; or somebody has put something in it.
