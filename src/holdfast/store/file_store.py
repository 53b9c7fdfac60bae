"""A store in a folder that all nodes see: one file per key.

Writers hold the folder's lock. Readers need no lock: a writer replaces a file by renaming a complete one
over it. A wait polls, with growing pauses up to a tenth of a second: inotify does not see changes made
on another host. Values do not survive a power loss; neither does the job.

```text
k<key>                     a value; h<beginning>-<hash> if the key is too long for a file name
.key.h<...>                the complete key of such a file
.queue.<name>              "<first> <count>", while the queue is not empty
.queue.<name>.<number>     one value of that queue
.barrier.<name>            "<turn> <arrived>": how often all have passed, how many have arrived since
.lock                      the lock
.new.<random>              an unfinished file, renamed when complete
```

Only this user can access the folder: another writer could impersonate nodes, and redirect writes with links.
Files are readable and writable for their owner only. Links are not followed.

The lock is `fcntl.lockf`, which works on NFS, and which the kernel releases when its holder dies.
It does not exclude threads of one process, and the kernel releases it when the process closes any descriptor
of the file. So a Python lock guards each lock file: a process opens it only once at a time. Acquiring the
lock polls, since a blocking call has no timeout.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote
from weakref import WeakValueDictionary

from holdfast.errors import EnvironmentProblem
from holdfast.store.memory_store import (
    DEFAULT_TIMEOUT_S,
    add_to_counter,
    as_bytes,
    as_seconds,
    barrier_timed_out,
    named,
    wait_timed_out,
)
from holdfast.store.store_errors import QueueEmptyError, StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


POLL_S_MIN = 0.001
POLL_S_MAX = 0.1
LOCK_S_MAX = 30.0
"""How long to wait for a lock. A holder needs it only for a few file operations, so a longer hold means that
the holder hangs."""

_BUSY = (errno.EACCES, errno.EAGAIN)


class _ThreadLock:
    """A lock between threads of this process; a class, since locks cannot be weakly referenced."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _ThreadLocks:
    """The locks between threads that are in use, by the path of the file."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child: the holders of these locks are in the parent."""
        self.lock = threading.Lock()
        self.by_path: WeakValueDictionary[str, _ThreadLock] = WeakValueDictionary()


_table = _ThreadLocks()
os.register_at_fork(after_in_child=_table.forget)


@contextmanager
def locked(path: str, timeout_s: float = LOCK_S_MAX, folder: int | None = None) -> Iterator[None]:
    """Hold the lock on this file, which is created if missing and never removed.

    `folder` is a descriptor of its folder, if the caller has one. Raises `StoreTimeoutError` if
    another holds it for too long, and `OSError` if it cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    with _table.lock:
        mine = _table.by_path.setdefault(os.path.realpath(path), _ThreadLock())
    if not mine.lock.acquire(timeout=timeout_s):
        raise StoreTimeoutError(_lock_problem(path, timeout_s))
    try:
        name = path if folder is None else os.path.basename(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            _acquire(descriptor, path, deadline, timeout_s)
            yield
        finally:
            os.close(descriptor)  # This releases the lock.
    finally:
        mine.lock.release()


def _acquire(descriptor: int, path: str, deadline: float, timeout_s: float) -> None:
    for pause in pauses():
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in _BUSY:
                raise
        else:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(_lock_problem(path, timeout_s))
        time.sleep(min(pause, left))


def pauses() -> Iterator[float]:
    """Yield growing pauses between two polls of a file."""
    pause = POLL_S_MIN
    while True:
        yield pause
        pause = min(POLL_S_MAX, pause * 1.5)


def _lock_problem(path: str, timeout_s: float) -> str:
    return f"another process or host has held the lock {path} for more than {timeout_s:g} s"


# The folder.

NAME_CHARS_MAX = 200  # File systems accept 255 bytes; the rest is for marks and numbers.
STALE_TRIES_MAX = 5
UNFINISHED_S = 60.0
"""A file that is unfinished for longer belongs to a process that was killed. With a lower value, it could
belong to a process that is only stopped."""

LOCK_MARK, NEW_MARK = ".lock", ".new."

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SharedFolder:
    """One folder of this user, created if it does not exist, unless `make` is false.

    All operations use a descriptor of the folder, and the owner is checked on it. So another user cannot replace
    the folder between the check and the operation.
    """

    def __init__(
        self,
        path: str,
        *,
        make: bool = True,
        parent: SharedFolder | None = None,
    ) -> None:
        self.path = path
        self._parent = parent
        self._seen: tuple[int, ...] = ()  # The folder's identity when it was checked.
        self._is_swept = False
        if make:
            with self._name_and_parent() as (name, folder):
                make_folder(path, name, folder)
            try:
                self.refresh()  # This checks the folder.
            except OSError as problem:
                why = "it is a link" if os.path.islink(path) else problem.strerror
                raise _unusable(path, why) from None

    def subfolder(self, name: str) -> SharedFolder:
        """Return a folder in this one, created if it does not exist."""
        return SharedFolder(self._path_of(name), parent=self)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the folder; raise `EnvironmentProblem` if it is not this user's.

        When a folder is opened, an NFS client queries its server; otherwise it may cache for up to a minute
        that a name is missing.
        """
        with self._name_and_parent() as (name, folder):
            descriptor = os.open(name, _FOLDER, dir_fd=folder)
        try:
            found = os.fstat(descriptor)
            seen = found.st_dev, found.st_ino, found.st_uid, found.st_mode
            if seen != self._seen:
                check_private(descriptor, self.path)
                self._seen = seen
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _name_and_parent(self) -> Iterator[tuple[str, int | None]]:
        """Yield the folder's name, and a descriptor of its parent, if the name is not the whole path."""
        if self._parent is None:
            yield self.path, None
        else:
            with self._parent.opened() as folder:
                yield os.path.basename(self.path), folder

    @contextmanager
    def locked(self, timeout_s: float = LOCK_S_MAX) -> Iterator[None]:
        """Hold the lock, which is a file in the folder."""
        path = self._path_of(LOCK_MARK)
        with self.opened() as folder, locked(path, timeout_s, folder):
            yield

    def exists(self, name: str) -> bool:
        try:
            with self.opened() as folder:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        If another host replaces the file during the read, NFS may report it as stale; then it is reread.
        """
        for attempt in range(1, STALE_TRIES_MAX + 1):
            try:
                with self.opened() as folder:
                    return _content(name, folder)
            except FileNotFoundError:
                return None
            except OSError as problem:
                if problem.errno != errno.ESTALE or attempt == STALE_TRIES_MAX:
                    raise
        raise AssertionError("unreachable")

    def read_pair(self, name: str) -> tuple[int, int]:
        """Return the two numbers in a file; zeros if it does not exist."""
        content = self.read(name)
        if content is None:
            return 0, 0
        first, second = content.split()
        return int(first), int(second)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file. The caller holds the lock."""
        new = _new_name()
        with self.opened() as folder:
            try:
                with open(os.open(new, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
                    file.write(content)
                    self._sweep(folder, file.fileno())
                os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _unlink(new, folder)
                raise

    def create(self, name: str, content: bytes) -> bool:
        """Create a file with its whole content, on disk; return False if the name is taken.

        This needs no lock: of several callers one succeeds.
        """
        new = _new_name()
        with self.opened() as folder:
            try:
                with open(os.open(new, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                    self._sweep(folder, file.fileno())
                    try:
                        os.link(
                            new, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
                        )
                        is_created = True
                    except (FileExistsError, FileNotFoundError):  # The second: `new` was swept.
                        # NFS may repeat a request whose response is lost; the repetition fails.
                        is_created = os.fstat(file.fileno()).st_nlink == 2
            finally:
                _unlink(new, folder)
            os.fsync(folder)
        return is_created

    def write_pair(self, name: str, first: int, second: int) -> None:
        """Replace the content of a file with two numbers. The caller holds the lock."""
        self.write(name, b"%d %d" % (first, second))

    def remove(self, name: str) -> bool:
        """Remove a file, and return whether it existed. The caller holds the lock."""
        with self.opened() as folder:
            return _unlink(name, folder)

    def names(self) -> list[str]:
        """Return the names of all files that do not begin with a dot."""
        with self.opened() as folder:
            return [name for name in os.listdir(folder) if not name.startswith(".")]

    def refresh(self) -> None:
        """Make a network file system forget its cache of missing names."""
        with self.opened():
            pass

    def poll_times(self, timeout_s: float) -> Iterator[None]:
        """Yield each time a poll is due: at least once, and a last time at the deadline."""
        deadline = time.monotonic() + timeout_s
        for pause in pauses():
            self.refresh()
            left = deadline - time.monotonic()
            yield
            if left <= 0:
                return
            time.sleep(min(pause, left))

    def _sweep(self, folder: int, new: int) -> None:
        """On the first call, remove the unfinished files of killed processes: those much older than `new`."""
        if self._is_swept:
            return
        self._is_swept = True
        old = os.fstat(new).st_mtime - UNFINISHED_S  # By the clock of the file system.
        for name in os.listdir(folder):
            if name.startswith(NEW_MARK):
                with suppress(FileNotFoundError):
                    if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < old:
                        os.unlink(name, dir_fd=folder)

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name)


def file_name(key: str) -> str:
    """Return a file name for any key: readable if possible, and never beginning with a dot."""
    name = "k" + quote(key, safe="._-")
    if len(name) <= NAME_CHARS_MAX:
        return name
    return f"h{name[1:100]}-{hashlib.sha256(key.encode()).hexdigest()}"


def make_folder(path: str, name: str, parent: int | None) -> None:
    """Create a private folder and its parents, if they do not exist.

    With `parent` it is `name` in that folder. Raises `EnvironmentProblem` if that fails.
    """
    try:
        if parent is None:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass  # Its type and owner are checked when it is opened.
    except OSError as problem:
        raise _unusable(path, problem.strerror) from None


def check_private(descriptor: int, path: str) -> None:
    """Raise `EnvironmentProblem` unless this user owns the folder and no other user can write to it."""
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE:
        return
    # Some network file systems have neither users nor modes, or map root to another user.
    mine = _stored_owner_and_mode(descriptor, path)
    if found.st_uid != mine.st_uid:
        raise _unusable(
            path, f"it belongs to another user (uid {found.st_uid})", "remove it, or choose another"
        )
    if found.st_mode & _OTHERS_WRITE and not mine.st_mode & _OTHERS_WRITE:
        raise _unusable(
            path, f"other users can write to it (mode {found.st_mode & 0o7777:o})", "chmod 700"
        )


def _stored_owner_and_mode(folder: int, path: str) -> os.stat_result:
    """Return the owner and mode that the file system reports for a private file of this user."""
    name = _new_name()
    try:
        descriptor = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
    except OSError as problem:
        raise _unusable(path, problem.strerror) from None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        _unlink(name, folder)


def _new_name() -> str:
    return f"{NEW_MARK}{os.urandom(8).hex()}"


def _content(name: str, folder: int) -> bytes:
    with open(
        os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb"
    ) as file:
        return file.read()


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _unusable(path: str, why: str | None, hint: str = "") -> EnvironmentProblem:
    return EnvironmentProblem(
        f"cannot use the shared folder {path!r}: {why}",
        hint=hint or "choose a folder that all nodes can write to",
    )


# The store.

VALUE_BYTES_MAX = 8 * 1024 * 1024  # The same as for a TCPStore.

HASHED = "h"  # The first letter of a file name that does not contain the whole key.
KEY_MARK, QUEUE_MARK, BARRIER_MARK = ".key.", ".queue.", ".barrier."


class FileStore:
    """Keys and values as files of one folder, created if it does not exist. See `Store`."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | SharedFolder,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not isinstance(folder, SharedFolder):
            folder = SharedFolder(os.path.realpath(folder))
        self.folder = folder.path
        self.path = folder.path
        """What the user named to select this store, as in torch's."""
        self._files = folder
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda _: as_bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._change(key, lambda now: b"%d" % add_to_counter(key, now, amount)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._await(keys, self._exists, self._seconds(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        self._files.refresh()
        return all(map(self._exists, keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = as_bytes(expected)

        def compare(now: bytes | None) -> bytes | None:
            if now is None and wanted:
                return None
            return as_bytes(desired) if now is None or now == wanted else now

        return self._change(key, compare, otherwise=wanted)

    def append(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda now: (now or b"") + as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: dict[str, bytes] = {}

        def read(key: str) -> bool:
            value = self._files.read(file_name(key))
            if value is not None:
                values[key] = value
            return value is not None

        self._await(keys, read, self._timeout_s)
        return [values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        given = [(key, as_bytes(value)) for key, value in zip(keys, values, strict=True)]
        for key, value in given:
            _check_size(key, value)
        with self._files.locked():
            for key, value in given:
                self._write(key, value)

    def delete_key(self, key: str) -> bool:
        name = file_name(key)
        with self._files.locked():
            was_there = self._files.remove(name)
            if name.startswith(HASHED):
                self._files.remove(KEY_MARK + name)
            return was_there

    def num_keys(self) -> int:
        return len(self._files.names())

    def list_keys(self) -> list[str]:
        return [key for key in map(self._key_of, self._files.names()) if key is not None]

    def queue_push(self, key: str, value: str | bytes) -> None:
        _check_size(key, as_bytes(value))
        queue = QUEUE_MARK + file_name(key)
        with self._files.locked():
            first, count = self._files.read_pair(queue)
            self._files.write(f"{queue}.{first + count}", as_bytes(value))
            self._files.write_pair(queue, first, count + 1)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queue = QUEUE_MARK + file_name(key)
        for _ in self._files.poll_times(self._timeout_s if block else 0):
            # Check without the lock: other callers need it to push.
            value = self._pop(queue) if self._files.exists(queue) else None
            if value is not None:
                return value
        if block:
            raise wait_timed_out([key], self._timeout_s, self._where)
        raise QueueEmptyError(f"the queue {named([key])}{self._where} is empty")

    def queue_len(self, key: str) -> int:
        self._files.refresh()
        return self._files.read_pair(QUEUE_MARK + file_name(key))[1]

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """See `Store`. A caller that times out is no longer counted; after all have passed, the
        next caller starts a new barrier. A caller that is killed while it waits stays counted.
        """
        seconds = self._seconds(timeout)
        barrier = BARRIER_MARK + file_name(key)
        turn, arrived = self._arrive(key, world_size)
        if arrived >= world_size:
            return
        passed = False
        try:
            for _ in self._files.poll_times(seconds):
                passed = self._files.read_pair(barrier)[0] != turn
                if passed:
                    return
        finally:  # A signal handler may have ended the wait.
            if not passed:
                passed, arrived = self._withdraw(key, turn)
        if not passed:
            raise barrier_timed_out(key, arrived, world_size, seconds, self._where)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._timeout_s = as_seconds(timeout)

    def clone(self) -> FileStore:
        other = FileStore(self._files, self._timeout_s)
        other.path = self.path
        return other

    def has_extended_api(self) -> bool:
        return True

    def _change(
        self, key: str, change: Callable[[bytes | None], bytes | None], otherwise: bytes = b""
    ) -> bytes:
        """Replace a value by `change(value)`, and return the new value.

        If the new value is None, nothing changes, and `otherwise` is returned.
        """
        with self._files.locked():
            now = self._files.read(file_name(key))
            value = change(now)
            if value is None:
                return otherwise
            if value != now:
                _check_size(key, value)
                self._write(key, value)
            return value

    def _write(self, key: str, value: bytes) -> None:
        name = file_name(key)
        if name.startswith(HASHED) and not self._files.exists(KEY_MARK + name):
            self._files.write(KEY_MARK + name, key.encode())
        self._files.write(name, value)

    def _await(self, keys: Sequence[str], exists: Callable[[str], bool], timeout_s: float) -> None:
        """Poll until all keys exist at the same time."""
        order = list(dict.fromkeys(keys))
        for _ in self._files.poll_times(timeout_s):
            if self._all_exist(order, exists):
                return
        # A key that was missing at the last poll may exist now.
        missing = [key for key in order if not exists(key)] or order[:1]
        raise wait_timed_out(missing, timeout_s, self._where)

    def _all_exist(self, order: list[str], exists: Callable[[str], bool]) -> bool:
        """Check keys up to the first missing one, which is checked first next time."""
        for place, key in enumerate(order):
            if not exists(key):
                order.insert(0, order.pop(place))
                return False
        if len(order) < 2:
            return True
        with self._files.locked():  # Another caller may have deleted one meanwhile.
            return all(map(exists, order))

    def _exists(self, key: str) -> bool:
        name = file_name(key)
        return self._files.exists(name) or self._files.exists(QUEUE_MARK + name)

    def _key_of(self, name: str) -> str | None:
        """Return the key of a file, or None if it was deleted just now."""
        if not name.startswith(HASHED):
            return unquote(name[1:])
        key = self._files.read(KEY_MARK + name)
        return None if key is None else key.decode()

    def _pop(self, queue: str) -> bytes | None:
        with self._files.locked():
            first, count = self._files.read_pair(queue)
            if not count:
                return None
            entry = f"{queue}.{first}"
            value = self._files.read(entry)
            if count > 1:
                self._files.write_pair(queue, first + 1, count - 1)
            else:
                self._files.remove(queue)
            self._files.remove(entry)
            return value

    def _arrive(self, key: str, world_size: int) -> tuple[int, int]:
        """Register at a barrier; return its turn, and how many have arrived."""
        name = file_name(key)
        with self._files.locked():
            add_to_counter(key, self._files.read(name), 0)  # Raises if the value is not a counter.
            turn, arrived = self._files.read_pair(BARRIER_MARK + name)
            arrived += 1
            self._write(key, b"%d" % arrived)
            after = (turn, arrived) if arrived < world_size else (turn + 1, 0)
            self._files.write_pair(BARRIER_MARK + name, *after)
            return turn, arrived

    def _withdraw(self, key: str, turn: int) -> tuple[bool, int]:
        """Unregister; return whether all arrived before that, and how many were registered."""
        name = file_name(key)
        with self._files.locked():
            now, arrived = self._files.read_pair(BARRIER_MARK + name)
            if now != turn:
                return True, arrived
            self._files.write_pair(BARRIER_MARK + name, turn, arrived - 1)
            if self._files.exists(name):
                self._write(key, b"%d" % (arrived - 1))
            return False, arrived

    def _seconds(self, timeout: timedelta | float | None) -> float:
        return self._timeout_s if timeout is None else as_seconds(timeout)

    @property
    def _where(self) -> str:
        return f" in {self.folder}"


def _check_size(key: str, value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(
            f"{named([key])}: a value of {len(value)} bytes is too large; the limit is {VALUE_BYTES_MAX}"
        )
