"""The jobs of a coordinator in a file, for its successor.

The file is JSON. Each write replaces it atomically: the coordinator writes a new file, syncs it, and renames it.
Only its owner can read it. A coordinator holds a lock on `FILE.lock`, because two coordinators would overwrite
each other's jobs.

A separate thread writes, so a file system that hangs does not stop the coordinator.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.bounded import MALFORMED
from holdfast.core.coordinator_machine import CLOSED_JOB_KEEP_S
from holdfast.core.protocol import View
from holdfast.core.saved_jobs import SavedJob  # noqa: TC001 (msgspec reads the annotation)
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.coordinator_machine import Answer, CoordinatorMachine

UNFINISHED_KEEP_S = 24 * 3600.0
"""A job that starts again later than this is a new job with the same name."""
STORE_S = 2.0
"""How long nodes wait for a decision to be stored. If the file system is slower, the coordinator continues the
job and warns that the file is behind."""
CLOSE_S = 1.0
BYTES_MAX = 64 * 1024 * 1024


class _Contents(msgspec.Struct, kw_only=True):
    format: int
    saved_at: float
    """The time of day on this machine, in seconds since 1970."""
    jobs: list[SavedJob]


class StateFile:
    """The file at a path, locked for this process; raises `UsageError` if it cannot be used."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._lock = self._acquire_lock()
        try:
            self.saved_jobs = self._load()
            """The jobs that an earlier coordinator stored; None if there was none."""
            self._store(self.saved_jobs or [])  # Report an unwritable file now.
        except BaseException:
            os.close(self._lock)
            raise
        self._changed = threading.Condition()
        self._next: tuple[list[SavedJob], Callable[[str], None]] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="holdfast-state", daemon=True)
        self._thread.start()

    def save(self, saved_jobs: list[SavedJob], done: Callable[[str], None]) -> None:
        """Store these jobs; then call `done`, in another thread, with the problem or an empty text.

        Writes run one at a time. If several wait, only the last one is performed, and only its `done` is called.
        """
        with self._changed:
            self._next = (saved_jobs, done)
            self._changed.notify()

    def close(self, limit_s: float) -> None:
        """Perform the pending write, within the limit, and release the file; may be called more than once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(limit_s)
        if not self._thread.is_alive() and self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self) -> None:
        while True:
            with self._changed:
                while self._next is None and not self._is_closed:
                    self._changed.wait()
                if self._next is None:
                    return
                (saved_jobs, done), self._next = self._next, None
            problem = ""
            try:
                self._store(saved_jobs)
            except UsageError as error:
                problem = str(error)
            done(problem)

    # The file itself.

    def _acquire_lock(self) -> int:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(f"{self.path}.lock", flags, 0o600)
        except OSError as error:
            raise self._refusal(f"cannot write to its folder: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise self._refusal("another coordinator uses it; set another file for each") from None
        except OSError as error:
            os.close(lock)
            raise self._refusal(f"cannot lock it: {error.strerror}") from None
        return lock

    def _load(self) -> list[SavedJob] | None:
        try:
            with open(self.path, "rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                text = file.read(BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal(f"cannot read it: {error.strerror}") from None
        if owner not in (os.geteuid(), 0):
            raise self._refusal(f"it belongs to another user (uid {owner}); choose another name")
        if not text:
            return None
        try:
            contents = msgspec.json.decode(text, type=_Contents)
        except MALFORMED as error:
            raise self._refusal(
                f"it is not a coordinator's state ({error}); choose another name, or move it away"
            ) from None
        if contents.format != PROTOCOL_VERSION or len(text) > BYTES_MAX:
            raise self._refusal("another version of Holdfast wrote it; choose another name")
        age_s = time.time() - contents.saved_at
        return [
            one
            for one in contents.jobs
            if age_s < (UNFINISHED_KEEP_S if one.outcome is None else CLOSED_JOB_KEEP_S)
        ]

    def _store(self, saved_jobs: list[SavedJob]) -> None:
        contents = _Contents(format=PROTOCOL_VERSION, saved_at=time.time(), jobs=saved_jobs)
        beside = f"{self.path}.new"
        try:
            if os.path.lexists(beside):
                # A killed process left it, or another user created it to get a copy.
                os.unlink(beside)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(beside, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(contents))
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, self.path)
            folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._refusal(f"cannot write it: {error.strerror}") from None

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"state file {self.path}: {why}")


class WriteAhead:
    """Sends a coordinator's answers once the decisions in them are stored; belongs to a loop."""

    def __init__(
        self,
        file: StateFile,
        machine: CoordinatorMachine,
        send: Callable[[Sequence[Answer]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._file = file
        self._machine = machine
        self._send = send
        self._warn = warn
        self._loop = asyncio.get_running_loop()
        # The last state that was submitted for storing, by run id.
        self._stored: dict[str, object] = {}
        self._withheld: list[Sequence[Answer]] = []
        self._in_progress: list[Sequence[Answer]] | None = None
        self._is_behind = False  # Whether another write is needed after the current one.
        self._hangs = False
        self._timer: asyncio.TimerHandle | None = None

    def send(self, answers: Sequence[Answer]) -> None:
        """Send these answers after all earlier ones."""
        is_new = any(self._is_new(one.run_id) for one in answers if type(one) is View)
        if not is_new and self._in_progress is None:
            self._send(answers)
            return
        self._withheld.append(answers)
        self._is_behind = self._is_behind or is_new
        if self._in_progress is None:
            self._store()

    def close(self) -> None:
        """Release the file."""
        if self._timer is not None:
            self._timer.cancel()
        self._file.close(CLOSE_S)

    def _is_new(self, run_id: str) -> bool:
        rounds = self._machine.jobs.get(run_id)
        if rounds is None:
            return False
        job = rounds.job
        mark = (job.term, job.round, job.generation, job.restarts, job.fence, job.outcome)
        is_new = self._stored.get(run_id) != mark
        self._stored[run_id] = mark
        return is_new

    def _store(self) -> None:
        batch, self._withheld = self._withheld, []
        self._is_behind = False
        self._stored = {
            one: mark for one, mark in self._stored.items() if one in self._machine.jobs
        }
        self._in_progress = batch

        def done(problem: str) -> None:
            try:
                self._loop.call_soon_threadsafe(self._stored_all, batch, problem)
            except RuntimeError:
                pass  # The coordinator has stopped.

        self._file.save(self._machine.saved_jobs(), done)
        if self._hangs:
            self._release(batch)
        else:
            self._timer = self._loop.call_later(STORE_S, self._report_late, batch)

    def _stored_all(self, batch: list[Sequence[Answer]], problem: str) -> None:
        self._hangs = False
        if problem:
            self._warn(f"{problem}; the next coordinator will not know the state of its jobs")
        if self._in_progress is batch:
            self._release(batch)

    def _report_late(self, batch: list[Sequence[Answer]]) -> None:
        self._hangs = True
        self._warn(
            f"state file {self._file.path}: nothing was stored for {STORE_S:g} s; jobs continue, "
            "but the next coordinator may not know their state"
        )
        if self._in_progress is batch:
            self._release(batch)

    def _release(self, batch: list[Sequence[Answer]]) -> None:
        self._in_progress = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for answers in batch:
            self._send(answers)
        if self._is_behind:
            self._store()
            return
        rest, self._withheld = self._withheld, []
        for answers in rest:
            self._send(answers)
