"""The destinations of each worker's output and error file: their paths and descriptors.

`LogsSpecs` chooses the paths of a start, `LogsDest` holds them, and `WorkerStdio` opens them.

The layout below a log directory is TorchElastic's::

    <log_dir>/<run_id>_<8 random digits>/attempt_<restart_count>/
        filtered_stdout.log  filtered_stderr.log     only with duplicate filters
        <local_rank>/stdout.log  stderr.log  stdout.tail  stderr.tail  error.json

Folders are created just before workers start, and never emptied. A second start with the same restart
count (after a regroup) uses `attempt_<restart_count>_1` and so on. A removed directory is recreated. A program that
calls `reify` itself, and then starts workers with the same specs, gets the same folder twice.

A worker writes a redirected stream to a file itself. Other streams pass through the agent, which shows
them on the console, keeps the end of standard error for the failure report, and keeps a longer tail of
both streams on disk (`log_tail`). If the console is a terminal, workers write to a pseudo-terminal.
Without a tail, workers inherit standard output.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import select
import sys
import termios
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, UsageError, shortage_hint
from holdfast.lazy_dataclass import factory_field, lazy_dataclass
from holdfast.processes.failures import tracebacks
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.keeper.keeper_program import remove_tree
from holdfast.processes.logs import follower, lines
from holdfast.processes.logs.log_tail import LogTail, TailWriter, remove_tail
from holdfast.processes.logs.std import Std, to_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn, TextIO

    from holdfast.processes.logs.follower import LogFollower, PipeStream
    from holdfast.processes.logs.lines import Sink


class LogDirectoryTaken(UsageError, NotADirectoryError):
    """A file is where the log directory should be.

    It is also a `NotADirectoryError`, which callers of the TorchElastic API catch.
    """

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the log directory {path} cannot be created: a file exists at this path",
            hint="name a directory with --log-dir",
        )
        self.errno, self.strerror, self.filename = errno.ENOTDIR, os.strerror(errno.ENOTDIR), path

    def __str__(self) -> str:
        return str(self.args[0])  # An `OSError` would format its fields.


# File systems allow 255 bytes in a name; the random suffix needs a few of them.
NAME_BYTES_MAX = 200

# The first part of the name of each temporary directory.
TEMPORARY_NAME = "holdfast"

# The value in `LogsDest` for a stream without a file, which is shown on the console.
INHERITED = ""

# The last starts of workers whose tails are kept: the output of the workers before a restart shows why
# there was one.
STARTS_WITH_TAILS = 2

_warned_of_filters = False


@lazy_dataclass
class LogsDest:
    """The paths for one start of the workers, by local rank.

    A path in `stdouts` or `stderrs` is empty if the worker shares the agent's stream.
    `tee_stdouts` and `tee_stderrs` name the files that are also shown on the console. `tail_stdouts` and
    `tail_stderrs` name the tails of the streams that have no file.
    """

    stdouts: dict[int, str] = factory_field(default_factory=dict)
    stderrs: dict[int, str] = factory_field(default_factory=dict)
    tee_stdouts: dict[int, str] = factory_field(default_factory=dict)
    tee_stderrs: dict[int, str] = factory_field(default_factory=dict)
    error_files: dict[int, str] = factory_field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""
    tail_stdouts: dict[int, str] = factory_field(default_factory=dict)
    tail_stderrs: dict[int, str] = factory_field(default_factory=dict)


class LogsSpecs(ABC):
    """Chooses the destinations of output, once per job and at each start of the workers.

    `redirects` sends streams to files, `tee` sends them to files and the console. With
    `local_ranks_filter`, only those workers are shown on the console.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: int | Mapping[int, int] = Std.NONE,
        tee: int | Mapping[int, int] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the directories for one start of workers. `envs` has their environments by local rank.

        Sets `TORCHELASTIC_ERROR_FILE` in each environment.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory for all output."""


class DefaultLogsSpecs(LogsSpecs):
    """TorchElastic's layout below `log_dir`; without it, below a temporary directory.

    With `log_dir="/dev/null"` there is no directory: redirected streams are discarded, and streams of
    `tee` only go to the console.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: int | Mapping[int, int] = Std.NONE,
        tee: int | Mapping[int, int] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        # Make it absolute now: a worker that changes its directory must not write elsewhere.
        root = absolute(log_dir) if log_dir else None
        super().__init__(root, redirects, tee, local_ranks_filter)
        self._is_temporary = False
        self._is_shared = False
        self._is_for_one_launch = False
        self._run_dir: str | None = None
        self._attempt_dir: str | None = None
        self._free_attempt = ("", "")  # Name and directory, until workers are started with them.
        self._run_dir_owner = -1  # The owner of the run's directory, as the file system reports it.
        self._tails: list[list[str]] = []  # Of the last starts.
        self._claim_fd = -1  # The locked file in a temporary directory that is removed at the end.

    @property
    def root_log_dir(self) -> str:
        """The directory for all output; reading this property creates it."""
        if self._root_log_dir is None:
            self._root_log_dir = _make_temporary_dir()
            self._is_temporary = True
            if self._is_for_one_launch and self.keeps_nothing:
                Keeper.remove_if_killed(self._root_log_dir)
                self._claim_fd = _claim(self._root_log_dir)
        elif self._root_log_dir != os.devnull:
            _make_dirs(self._root_log_dir)
        return self._root_log_dir

    @property
    def given_log_dir(self) -> str | None:
        """The directory that the user chose; None if it is temporary."""
        return None if self._is_temporary else self._root_log_dir

    def check(self) -> None:
        """Raise if the directory that the user chose cannot be used; create nothing."""
        root = self.given_log_dir
        problem = problem_of_making(root) if root is not None and root != os.devnull else None
        if root is not None and problem is not None:
            _cannot_make(root, problem)

    @property
    def is_kept_only_on_failure(self) -> bool:
        """Whether a job that does not fail removes its directory at the end."""
        own = self._root_log_dir is None or self._is_temporary
        return own and not self._is_shared and self.keeps_nothing

    @property
    def keeps_records(self) -> bool:
        """Whether the job keeps its records, however it ends."""
        return self._root_log_dir != os.devnull and not self.is_kept_only_on_failure

    @property
    def run_dir(self) -> str | None:
        """The directory of this run, or None if no workers have been started with one."""
        return self._run_dir

    @property
    def attempt_dir(self) -> str | None:
        """The directory of the last start of the workers, or None if there was none."""
        return self._attempt_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        size = len(envs)
        redirects, tees = to_map(self._redirects, size), to_map(self._tee, size)
        if self._root_log_dir == os.devnull:
            return self._discard(envs, redirects, tees)
        attempt_dir = self._make_attempt_dir(envs.get(0, {}))
        dest = LogsDest(
            filtered_stdout=os.path.join(attempt_dir, "filtered_stdout.log"),
            filtered_stderr=os.path.join(attempt_dir, "filtered_stderr.log"),
        )
        for rank, env in envs.items():
            worker_dir = os.path.join(attempt_dir, str(rank))
            _make_dir(worker_dir)
            dest.error_files[rank] = os.path.join(worker_dir, "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[rank]
            for std, name, files, shown, tails in (
                (Std.OUT, "stdout", dest.stdouts, dest.tee_stdouts, dest.tail_stdouts),
                (Std.ERR, "stderr", dest.stderrs, dest.tee_stderrs, dest.tail_stderrs),
            ):
                if not (redirects[rank] | tees[rank]) & std:
                    files[rank] = INHERITED if self._is_shown(rank) else os.devnull
                    tails[rank] = os.path.join(worker_dir, f"{name}.tail")
                    continue
                files[rank] = os.path.join(worker_dir, f"{name}.log")
                if tees[rank] & std and self._is_shown(rank):
                    shown[rank] = files[rank]
        self._tails.append([*dest.tail_stdouts.values(), *dest.tail_stderrs.values()])
        self._remove_tails(self._tails[:-STARTS_WITH_TAILS])
        return dest

    def for_another_run(self) -> DefaultLogsSpecs:
        """Return the same choices for another run with its own directories.

        Two runs share a temporary root only if its files are kept, or if it exists already: one run
        must not remove the files of another.
        """
        other = DefaultLogsSpecs(None, self._redirects, self._tee, self._local_ranks_filter)
        other._is_for_one_launch = True
        if self._root_log_dir is not None or not self.keeps_nothing:
            other._root_log_dir = self._root_log_dir or self.root_log_dir
            other._is_temporary, other._is_shared = self._is_temporary, True
        return other

    @property
    def is_temporary(self) -> bool:
        return self._is_temporary

    @property
    def keeps_nothing(self) -> bool:
        """Whether no stream of any worker goes to a file."""
        return not any(
            chosen if isinstance(chosen, int) else any(chosen.values())
            for chosen in (self._redirects, self._tee)
        )

    def discard_if_temporary(self) -> None:
        """Remove the root directory and its contents, if it is temporary."""
        if self._is_temporary and not self._is_shared and self._root_log_dir is not None:
            _remove_tree(self._root_log_dir)
            self.keep()
            self._root_log_dir = self._run_dir = None
            self._is_temporary = False

    def discard_if_empty(self) -> bool:
        """Remove a temporary directory if it contains no data; return whether it was removed."""
        if not self._is_temporary or self._root_log_dir is None:
            return False
        if self._run_dir is not None:
            for folder, _, names in os.walk(self._run_dir):
                if any(os.path.getsize(os.path.join(folder, name)) for name in names):
                    return False
            _remove_tree(self._run_dir)
            self._run_dir = None
        try:
            os.rmdir(self._root_log_dir)
        except OSError:
            pass  # Another run has something in it.
        return True

    def discard_tails(self) -> None:
        """Remove the tails of the workers' output."""
        self._remove_tails(self._tails)

    def _remove_tails(self, tails: list[list[str]]) -> None:
        for one in [*tails]:
            for path in one:
                remove_tail(path)
            self._tails.remove(one)

    def keep(self) -> None:
        """Keep the directory from now on, even if this process is killed."""
        if self._root_log_dir is not None:
            Keeper.keep_if_killed(self._root_log_dir)
        if self._claim_fd >= 0:
            assert self._root_log_dir is not None
            _remove_file(os.path.join(self._root_log_dir, CLAIM_FILE))
            os.close(self._claim_fd)
            self._claim_fd = -1

    def _discard(
        self, envs: dict[int, dict[str, str]], redirects: dict[int, Std], tees: dict[int, Std]
    ) -> LogsDest:
        dest = LogsDest(filtered_stdout=os.devnull, filtered_stderr=os.devnull)
        for rank, env in envs.items():
            dest.error_files[rank] = os.devnull
            env["TORCHELASTIC_ERROR_FILE"] = ""
            for std, files in ((Std.OUT, dest.stdouts), (Std.ERR, dest.stderrs)):
                seen = tees[rank] & std or not redirects[rank] & std
                files[rank] = INHERITED if seen and self._is_shown(rank) else os.devnull
        return dest

    def _is_shown(self, rank: int) -> bool:
        return not self._local_ranks_filter or rank in self._local_ranks_filter

    def use_attempt(self) -> None:
        """Note that workers are about to start with the last attempt's directory."""
        self._free_attempt = ("", "")

    def _make_attempt_dir(self, env: dict[str, str]) -> str:
        if self._run_dir is not None and _owner_of(self._run_dir) != self._run_dir_owner:
            self._replace_run_dir()
        if self._run_dir is None:
            run_id = _as_name(env.get("TORCHELASTIC_RUN_ID", "test_run_id"))
            self._run_dir = _make_unique_dir(os.path.join(self.root_log_dir, run_id))
            self._run_dir_owner = _owner_of(self._run_dir)
        attempt = _as_name(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        plain = os.path.join(self._run_dir, f"attempt_{attempt}")
        name, path = self._free_attempt
        if name == plain and _has_no_files(path):
            return path  # The program reified these specs before it passed them on.
        path, again = plain, 0
        while not _make_dir(path):
            again += 1
            path = f"{plain}_{again}"
        self._attempt_dir, self._free_attempt = path, (plain, path)
        return path

    def _replace_run_dir(self) -> None:
        """Replace a directory that was removed, for example by a cleaner of temporary folders."""
        assert self._run_dir is not None
        console.warning(
            f"the log directory {self._run_dir} was removed or replaced while the job ran"
        )
        if self._is_temporary:
            self.keep()
            # Under a new name: in a shared directory, the old path may now belong to another user.
            self._root_log_dir = self._run_dir = None
            self._is_shared = False
        else:
            _make_dirs(os.path.dirname(self._run_dir))
            if not _make_dir(self._run_dir, 0o700):
                # Another process has created it, and may use its files.
                self._run_dir = _make_unique_dir(self._run_dir)
                console.warning(f"logs are in {self._run_dir} from now on")
            self._run_dir_owner = _owner_of(self._run_dir)

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return (
            self._root_log_dir == other._root_log_dir
            and self._redirects == other._redirects
            and self._tee == other._tee
            and self._local_ranks_filter == other._local_ranks_filter
        )

    # Not hashable: equal objects differ as soon as they create directories.
    __hash__ = None  # type: ignore[assignment]


def usable_filters(filtered_path: str, filters: Sequence[str] | None) -> tuple[bytes, ...]:
    """Return the duplicate filters as bytes; none if there is no file for their lines.

    `filtered_path` is `LogsDest.filtered_stdout` or `.filtered_stderr`. Warns once if the filters
    have no effect.
    """
    global _warned_of_filters  # noqa: PLW0603 (once per process)
    if filters and filtered_path in ("", os.devnull):
        if not _warned_of_filters:
            _warned_of_filters = True
            console.warning("the duplicate filters are ignored: the log directory is /dev/null")
        return ()
    return tuple(text.encode("utf-8", "surrogateescape") for text in filters or ())


def absolute(log_dir: str) -> str:
    """Return the absolute path of a log directory; raise if the current directory was removed."""
    try:
        return os.path.abspath(log_dir)
    except FileNotFoundError as problem:
        raise EnvironmentProblem(
            f"the log directory {log_dir} cannot be resolved: the current directory no longer "
            "exists",
            hint="change to an existing directory, or use an absolute path",
        ) from problem


def _as_name(text: str) -> str:
    """Convert `text` to a name that is valid as one part of a path, and still recognizable."""
    name = "".join("_" if char in "/\\" or not char.isprintable() else char for char in text)
    return os.fsencode(name)[:NAME_BYTES_MAX].decode("utf-8", "ignore")


def _random_suffix() -> str:
    return os.urandom(4).hex()


def _remove_tree(path: str) -> None:
    """Remove a temporary directory and its contents."""
    try:
        remove_tree(path)
    except OSError as problem:
        console.info(f"the temporary directory {path} was not removed: {problem.strerror}")


def _make_unique_dir(stem: str) -> str:
    """Create the directory `<stem>_<random>`, which only this user can enter, and return its path."""
    path = f"{stem}_{_random_suffix()}"
    while not _make_dir(path, 0o700):
        path = f"{stem}_{_random_suffix()}"
    return path


def _owner_of(path: str) -> int:
    """Return the owner of a directory; -1 if the path is a link or not a directory."""
    try:
        return -1 if os.path.islink(path) or not os.path.isdir(path) else os.lstat(path).st_uid
    except OSError:
        return -1


def _has_no_files(folder: str) -> bool:
    return os.path.isdir(folder) and not any(names for _, _, names in os.walk(folder))


def _temporary_folder() -> str:
    given = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    for folder in (os.path.abspath(one) for one in given if one):
        if os.access(folder, os.W_OK | os.X_OK) and os.path.isdir(folder):
            return folder
    return "/tmp"  # noqa: S108 - directories in it have a random name and mode 0700


def _make_temporary_dir() -> str:
    return _make_unique_dir(os.path.join(_temporary_folder(), TEMPORARY_NAME))


# An agent removes its temporary directory at the end of the job, and its keeper does so if the agent is
# killed. If both are killed, a later agent of the same user finds the directory by this file: the agent that
# created it has locked it, and then written its host into it. Some network file systems do not show locks of
# other hosts.
CLAIM_FILE = "in-use"
HOST_BYTES_MAX = 256


def _claim(folder: str) -> int:
    """Create the locked file in a temporary directory; -1 if that is not possible."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(os.path.join(folder, CLAIM_FILE), flags, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, os.uname().nodename.encode())
    except OSError:
        pass  # Without a host in it, nobody removes the directory.
    return fd


def remove_abandoned_directories() -> None:
    """Remove the temporary directories of this user's agents that were killed together with their keepers."""
    try:
        with os.scandir(_temporary_folder()) as entries:
            folders = [one.path for one in entries if one.name.startswith(f"{TEMPORARY_NAME}_")]
    except OSError:
        return
    for folder in folders:
        # In a folder that others can write to, they could have created the file.
        if _owner_of(folder) == os.geteuid() and not os.lstat(folder).st_mode & 0o077:
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: str) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(os.path.join(folder, CLAIM_FILE), flags)
    except OSError:
        return  # It is kept.
    try:
        if os.read(fd, HOST_BYTES_MAX) == os.uname().nodename.encode():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(folder)
    except OSError:
        pass  # Its agent runs.
    finally:
        os.close(fd)


def _remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # It was removed already.


def _make_dir(path: str, mode: int = 0o777) -> bool:
    """Create one directory; return whether it is new."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    except OSError as problem:
        _cannot_make(path, problem)
    return True


def _make_dirs(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as problem:
        _cannot_make(path, problem)


def problem_of_making(path: str) -> OSError | None:
    """Return why a folder cannot be created, or written to if it exists; create nothing."""
    while not os.path.lexists(path):
        path = os.path.dirname(path) or os.curdir
    if not os.path.isdir(path):
        return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if not os.access(path, os.W_OK | os.X_OK):
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return None


def _cannot_make(path: str, problem: OSError) -> NoReturn:
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        raise LogDirectoryTaken(path) from problem
    raise EnvironmentProblem(
        f"the log directory {path} cannot be created: {problem.strerror}",
        hint="name a writable directory with --log-dir",
    ) from problem


# The descriptors of a worker, and what the agent keeps of its output.

# The part of a worker's standard error that the agent keeps for the report: a few hundred lines.
TAIL_BYTES_MAX = 64 * 1024
# How long a report waits for the rest of a worker's output. After one timeout it does not wait again: the
# console may be blocked.
CATCH_UP_S = 1.0
# How long the end of a job waits for the disk to write the tails.
DISK_S_MAX = 2.0
STDIN, STDOUT, STDERR = 0, 1, 2


def is_descriptor(stream: TextIO | None, fd: int) -> bool:
    """Whether a Python stream is the process's own descriptor, so that workers can inherit it.

    In a notebook or under a test runner's capture `sys.stdout` is a different object. The output of
    workers that inherit descriptor 1 would then be invisible.
    """
    try:
        return stream is not None and stream.fileno() == fd
    except (OSError, ValueError, AttributeError):
        return False


def reserve_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if they are closed.

    Otherwise a pipe of this process could get such a number, and replace a worker's stream.
    """
    for fd in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number, which is this one.


class WorkerStdio:
    """Opens the streams of each worker, and follows them where necessary.

    Following begins with `begin_following`, after the workers were requested, so that its imports do
    not delay them. A caller that watches the descriptors from `begin_with_files` can delay the call
    until there is something to read.
    """

    def __init__(
        self,
        dest: LogsDest,
        *,
        prefixes: Mapping[int, str],
        stdout_filters: Sequence[str] = (),
        stderr_filters: Sequence[str] = (),
        capture_stderr: bool = True,
        log_tail: int = 0,
    ) -> None:
        """`log_tail` is the size of the tail of each worker's output; 0 for none."""
        reserve_standard_descriptors()
        self._dest = dest
        self._prefixes = {rank: prefix.encode() for rank, prefix in prefixes.items()}
        self._filters = {
            STDOUT: usable_filters(dest.filtered_stdout, stdout_filters),
            STDERR: usable_filters(dest.filtered_stderr, stderr_filters),
        }
        self._capture_stderr = capture_stderr
        self._tail_bytes_max = log_tail // 2  # Of each stream.
        self._tails: dict[tuple[int, int], LogTail] = {}
        self._tail_writer: TailWriter | None = None
        self._disk_stuck = False
        self._has_complained = False
        self.tail_files: dict[tuple[int, int], str] = {}
        """The tails by local rank and stream."""
        self._follower: LogFollower | None = None
        self._console_stuck = False
        self._closed = False
        self._is_behind = False
        self._pipes: dict[tuple[int, int], int] = {}
        self._hidden: set[tuple[int, int]] = set()
        self._files: list[tuple[int, int, str]] = []
        self._captured: dict[tuple[int, int], PipeStream] = {}
        self._sinks: dict[tuple[int, bool], Sink] = {}
        self._filtered: dict[int, Sink] = {}
        self._filtered_files: dict[int, TextIO] = {}

    def open(self, rank: int) -> dict[int, int]:
        """Return fresh descriptors for a worker's streams 0, 1 and 2; close them once it runs."""
        opened = {STDIN: self._open_stdin()}
        try:
            for which, paths in ((STDOUT, self._dest.stdouts), (STDERR, self._dest.stderrs)):
                opened[which] = self._open_output(rank, which, paths.get(rank, ""))
        except BaseException:
            for fd in opened.values():
                os.close(fd)
            raise
        return opened

    def note_files(self, rank: int) -> None:
        """Note the files of a worker that opens its streams itself; following begins later."""
        for which, paths in ((STDOUT, self._dest.stdouts), (STDERR, self._dest.stderrs)):
            if paths.get(rank):
                self._files.append((rank, which, paths[rank]))

    def begin_with_files(self) -> list[int]:
        """Follow the files; return the descriptors of all other streams."""
        for which, filters in self._filters.items():
            if filters:  # Create the file even if no stream matches.
                self._filtered_sink(which)
        for rank, which, path in self._files:
            self._follow_file(rank, which, path)
        self._files.clear()
        return [*self._pipes.values()]

    def begin_following(self) -> None:
        self.begin_with_files()
        for (rank, which), fd in self._pipes.items():
            # Without a tail, other processes could interrupt a worker's stdout as well.
            sink = None
            if (rank, which) not in self._hidden:
                sink = self._console_sink(which, favors_speed=which == STDOUT)
            # Several workers on one pipe must not break each other's lines.
            raw = len(self._prefixes) == 1 or os.isatty(which)
            self._captured[rank, which] = self._follow().follow_fd(
                fd,
                to=sink,
                tail_bytes_max=TAIL_BYTES_MAX if which == STDERR else 0,
                raw=raw,
                keep=self._keep_in(self._tails.pop((rank, which), None)),
                terminal_fd=which if os.isatty(fd) else -1,
                breaks=which == STDOUT,
            )
        self._pipes.clear()

    def has_unread(self) -> bool:
        """Whether a worker has written output that is not followed yet."""
        poll = select.poll()
        for fd in self._pipes.values():
            poll.register(fd, select.POLLIN)
        # For a stream that ends without data the kernel reports POLLHUP, but not POLLIN.
        return any(events & select.POLLIN for _, events in poll.poll(0))

    def finish(self) -> None:
        """Forward the rest of the output; call it when the workers have exited.

        If the console blocks for too long, later calls do not wait for it.
        """
        if self._follower is not None and not self._console_stuck:
            self._console_stuck = not self._follower.finish_all()
        if self._tail_writer is not None and not self._disk_stuck:
            self._disk_stuck = not self._tail_writer.flush(DISK_S_MAX)

    def close(self) -> None:
        for fd in self._pipes.values():
            os.close(fd)
        self._pipes.clear()
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()
        if self._follower is not None:
            self._follower.close(drain_s_max=0 if self._console_stuck else None)
            self._follower = None
        if self._tail_writer is not None:
            self._tail_writer.close(0 if self._disk_stuck else DISK_S_MAX)
            self._tail_writer = None
        for sink in self._filtered.values():
            sink.close()
        for file in self._filtered_files.values():
            file.close()
        self._closed = True

    def filtered_file(self, which: int) -> TextIO | None:
        """Return the file of a stream's filtered lines, open for appending; None without filters.

        Callers may read its name or write to it. `close` closes it.
        """
        if not self._filters[which]:
            return None
        if which not in self._filtered_files:
            self._filtered_files[which] = open(  # noqa: SIM115 (closed by `close`)
                self._filtered_path(which), "a", errors="replace", buffering=1
            )
            if self._closed:
                self._filtered_files[which].close()
        return self._filtered_files[which]

    def stderr_tail(self, rank: int) -> str:
        """Return the end of a worker's standard error; empty if it is not kept."""
        captured = self._captured.get((rank, STDERR))
        if captured is not None:
            # The last output often contains the reason for the exit, and may be unread.
            if not self._is_behind:
                self._is_behind = not captured.catch_up(CATCH_UP_S)
            return captured.tail(TAIL_BYTES_MAX).decode(errors="replace")
        path = self._dest.stderrs.get(rank, "")
        if not path or path == os.devnull:
            return ""
        try:
            with open(path, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES_MAX))
                return stream.read(TAIL_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""

    def stderr_written(self, rank: int) -> int:
        """Return how many bytes a worker has written to the pipe of its standard error; 0 without a pipe."""
        captured = self._captured.get((rank, STDERR))
        return captured.written() if captured is not None else 0

    def log_tail(self, rank: int, tail: str) -> tuple[int, int]:
        """Return the position (in bytes from the start) and the time (in nanoseconds since the epoch)
        of the last traceback in the end of a worker's standard error; -1 and 0 if unknown.
        """
        found = tracebacks.find_last_traceback(tracebacks.readable_lines(tail))
        if found is None:
            return -1, 0
        captured = self._captured.get((rank, STDERR))
        if captured is None:
            try:  # Only the worker writes this file, so the traceback is no later than the last write.
                return -1, os.stat(self._dest.stderrs[rank]).st_mtime_ns
            except (OSError, KeyError):
                return -1, 0
        after = sum(len(line.encode()) + 1 for line in tail.split("\n")[found[0] :]) - 1
        position = max(0, captured.written() - after)
        arrival_ns = captured.arrival_ns(position)
        return position, time.time_ns() - time.monotonic_ns() + arrival_ns if arrival_ns else 0

    def _open_stdin(self) -> int:
        # If Python's stdin is closed, descriptor 0 may now be another file of this process.
        if sys.__stdin__ is not None and not sys.__stdin__.closed:
            try:
                return os.dup(STDIN)
            except OSError:
                pass
        return os.open(os.devnull, os.O_RDONLY)

    def _open_output(self, rank: int, which: int, path: str) -> int:
        hidden = path == os.devnull
        tail = None if path and not hidden else self._open_tail(rank, which)
        keeps = tail is not None or (which == STDERR and self._capture_stderr)
        if path and not (hidden and keeps):
            self._files.append((rank, which, path))
            return self._open_file(path)
        console = sys.stdout if which == STDOUT else sys.stderr
        inheritable = is_descriptor(console, which) and not hidden
        if inheritable and not keeps:
            console.flush()
            return os.dup(which)
        read, write = self._open_pipe(which, is_terminal=inheritable and os.isatty(which))
        self._pipes[rank, which] = read
        if tail is not None:
            self._tails[rank, which] = tail
        if hidden:  # The console does not show it, but a report or the tail needs it.
            self._hidden.add((rank, which))
        return write

    def _open_tail(self, rank: int, which: int) -> LogTail | None:
        name = "tail_stdouts" if which == STDOUT else "tail_stderrs"
        path = getattr(self._dest, name, {}).get(rank)  # A `LogsDest` of torch has neither.
        inherits = which == STDERR and not self._capture_stderr
        if not path or not self._tail_bytes_max or inherits:
            return None
        try:
            tail = LogTail(path, self._tail_bytes_max, self._complain)
        except OSError as problem:
            self._complain(f"cannot create {path}: {problem.strerror}")
            return None
        self.tail_files[rank, which] = path
        return tail

    def _keep_in(self, tail: LogTail | None) -> Callable[[bytes], None] | None:
        if tail is None:
            return None
        if self._tail_writer is None:
            try:
                self._tail_writer = TailWriter()
            except RuntimeError as problem:
                self._complain(str(problem))
                tail.close()
                return None
        return functools.partial(self._tail_writer.write, tail)

    def _complain(self, text: str) -> None:
        """Report the first problem of the tails; the others probably have the same reason."""
        if not self._has_complained:
            self._has_complained = True
            console.warning(f"holdfast logs may lack output: {text}")

    def _open_file(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except OSError as problem:
            raise EnvironmentProblem(
                f"cannot write {path}: {problem.strerror}", hint=shortage_hint(problem.errno)
            ) from None

    def _follow_file(self, rank: int, which: int, path: str) -> None:
        teed = rank in (self._dest.tee_stdouts if which == STDOUT else self._dest.tee_stderrs)
        filters = self._filters[which]
        if path == os.devnull or (not teed and not filters):
            return
        self._follow().follow_file(
            path,
            prefix=self._prefixes.get(rank, b""),
            to=self._console_sink(which) if teed else None,
            filters=filters,
            filtered_to=self._filtered_sink(which) if filters else None,
        )

    def _open_pipe(self, which: int, *, is_terminal: bool) -> tuple[int, int]:
        if not is_terminal:
            return os.pipe()
        read, write = os.openpty()
        # The real terminal adds carriage returns; this one must not.
        attributes = termios.tcgetattr(write)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(write, termios.TCSANOW, attributes)
        follower.copy_terminal_size(which, write)
        return read, write

    def _follow(self) -> LogFollower:
        if self._follower is None:
            self._follower = follower.LogFollower()
            self._follower.start()
        return self._follower

    def _console_sink(self, which: int, *, favors_speed: bool = False) -> Sink:
        if (which, favors_speed) not in self._sinks:
            stream = sys.stdout if which == STDOUT else sys.stderr
            self._sinks[which, favors_speed] = lines.Sink.of_stream(
                stream, favors_speed=favors_speed
            )
        return self._sinks[which, favors_speed]

    def _filtered_sink(self, which: int) -> Sink:
        """Return where the filtered lines of a stream go; all ranks share it."""
        if which not in self._filtered:
            self._filtered[which] = lines.Sink.to_file(self._filtered_path(which))
        return self._filtered[which]

    def _filtered_path(self, which: int) -> str:
        return self._dest.filtered_stdout if which == STDOUT else self._dest.filtered_stderr
