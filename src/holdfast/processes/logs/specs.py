"""The destinations of each worker's output and error file: `LogsSpecs`, `LogsDest`.

The layout below a log directory is TorchElastic's::

    <log_dir>/<run_id>_<8 random digits>/attempt_<restart_count>/
        filtered_stdout.log  filtered_stderr.log     only with duplicate filters
        <local_rank>/stdout.log  stderr.log  error.json

Folders are created just before workers start, and never emptied. A second start with the same restart
count (after a regroup) uses `attempt_<restart_count>_1` and so on. A removed directory is recreated.

A `Std` chooses streams; its text form is one digit for all workers (`3`), or a list of
`local_rank:digit` (`0:1,12:2`), with any number of digits in the rank.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.lazy_dataclass import factory_field, lazy_dataclass
from holdfast.processes.keeper.keeper_client import Keeper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

# A local rank of more digits than this is a typing error, not a machine.
RANK_DIGITS_MAX = 6

# The values of `Std`. They are plain numbers here, since agents start often, and importing `enum` takes
# longer than creating all paths.
OUT, ERR = 1, 2


def parse_streams(given: str) -> int | dict[int, int]:
    """Read a choice of streams: one for all local ranks, or by local rank; see `Std.from_str`."""
    text = given.removesuffix("\n")
    if _is_choice(text):
        return int(text)
    chosen: dict[int, int] = {}
    for entry in text.split(","):
        rank, colon, choice = entry.partition(":")
        if not (colon and _is_rank(rank) and _is_choice(choice)):
            raise UsageError(
                f"{given!r} is not a valid choice of output streams",
                hint="give 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all workers, "
                "or a list by local rank such as 0:1,1:2",
            )
        chosen[int(rank)] = int(choice)
    return chosen


def _is_choice(text: str) -> bool:
    return text in ("0", "1", "2", "3")


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= RANK_DIGITS_MAX


def by_rank(chosen: int | Mapping[int, int], local_world_size: int) -> dict[int, int]:
    """Spread a choice of streams over the local ranks `0 .. local_world_size - 1`."""
    # As plain integers, so that this accepts PyTorch's own `Std` too.
    if isinstance(chosen, int):
        return dict.fromkeys(range(local_world_size), int(chosen))
    return {rank: int(chosen.get(rank, 0)) for rank in range(local_world_size)}


class LogDirectoryTaken(UsageError, NotADirectoryError):
    """A file is where the log directory should be.

    It is also a `NotADirectoryError`, which callers of the TorchElastic API catch.
    """

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the log directory {path} cannot be created: a file has its path",
            hint="name a directory with --log-dir",
        )
        self.errno, self.strerror, self.filename = errno.ENOTDIR, os.strerror(errno.ENOTDIR), path

    def __str__(self) -> str:
        return str(self.args[0])  # An `OSError` would make a text of its fields.


# File systems allow 255 bytes in a name; the random suffix needs a few of them.
NAME_BYTES_MAX = 200

# The value in `LogsDest` for a stream that a worker inherits from the agent.
INHERITED = ""

_warned_of_filters = False


@lazy_dataclass
class LogsDest:
    """The paths for one start of the workers, by local rank.

    A path in `stdouts` or `stderrs` is empty where the worker shares the agent's stream.
    `tee_stdouts` and `tee_stderrs` name those files that are shown on the console as well.
    """

    stdouts: dict[int, str] = factory_field(default_factory=dict)
    stderrs: dict[int, str] = factory_field(default_factory=dict)
    tee_stdouts: dict[int, str] = factory_field(default_factory=dict)
    tee_stderrs: dict[int, str] = factory_field(default_factory=dict)
    error_files: dict[int, str] = factory_field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Chooses the destinations of output, once per job and at each start of the workers.

    `redirects` sends streams to files, `tee` sends them to files and the console. With
    `local_ranks_filter`, only those workers are shown on the console.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: int | Mapping[int, int] = 0,
        tee: int | Mapping[int, int] = 0,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories for one start of workers with these environments by local rank.

        Sets `TORCHELASTIC_ERROR_FILE` in each of the environments.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory for all output."""


class DefaultLogsSpecs(LogsSpecs):
    """TorchElastic's layout below `log_dir`, or below a directory of our own if it is not given.

    `log_dir="/dev/null"` makes no directory at all: redirected streams are discarded, and tee'd
    ones stay on the console as they are.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: int | Mapping[int, int] = 0,
        tee: int | Mapping[int, int] = 0,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        # Absolute from the start: a worker that changes its directory must not write elsewhere.
        root = absolute(log_dir) if log_dir else None
        super().__init__(root, redirects, tee, local_ranks_filter)
        self._is_temporary = False
        self._is_shared = False
        self._is_for_one_launch = False
        self._run_dir: str | None = None
        self._attempt_dir: str | None = None
        self._run_dir_owner = -1  # This user, as the file system takes it.

    @property
    def root_log_dir(self) -> str:
        """The directory for all output; reading this property creates it."""
        if self._root_log_dir is None:
            self._root_log_dir = _make_temporary_dir()
            self._is_temporary = True
            if self._is_for_one_launch and self.keeps_nothing:
                Keeper.bequeath(self._root_log_dir)
        elif self._root_log_dir != os.devnull:
            _make_dirs(self._root_log_dir)
        return self._root_log_dir

    @property
    def is_for_failures_alone(self) -> bool:
        """Whether the directory is removed at the end of a job that does not fail."""
        own = self._root_log_dir is None or self._is_temporary
        return own and not self._is_shared and self.keeps_nothing

    @property
    def keeps_records(self) -> bool:
        """Whether the records of the job stay, however the job ends."""
        return self._root_log_dir != os.devnull and not self.is_for_failures_alone

    @property
    def run_dir(self) -> str | None:
        """The directory of this run, or None as long as no workers were started with one."""
        return self._run_dir

    @property
    def attempt_dir(self) -> str | None:
        """The directory of the last start of the workers, or None if there was none."""
        return self._attempt_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        size = len(envs)
        redirects, tees = by_rank(self._redirects, size), by_rank(self._tee, size)
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
            for std, name, files, shown in (
                (OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
                (ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
            ):
                if not (redirects[rank] | tees[rank]) & std:
                    files[rank] = INHERITED if self._is_shown(rank) else os.devnull
                    continue
                files[rank] = os.path.join(worker_dir, name)
                if tees[rank] & std and self._is_shown(rank):
                    shown[rank] = files[rank]
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
        """Whether no stream of any worker was to be written to a file."""
        return not any(
            chosen if isinstance(chosen, int) else any(chosen.values())
            for chosen in (self._redirects, self._tee)
        )

    def discard_if_temporary(self) -> None:
        """Remove the root directory and its contents, if it is temporary."""
        if self._is_temporary and not self._is_shared and self._root_log_dir is not None:
            _remove_tree(self._root_log_dir)
            Keeper.withhold(self._root_log_dir)
            self._root_log_dir = self._run_dir = None
            self._is_temporary = False

    def discard_if_empty(self) -> bool:
        """Remove a directory that we made up ourselves if nothing was written; return whether."""
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

    def keep(self) -> None:
        """Keep the directory from now on, even if this process is killed."""
        if self._root_log_dir is not None:
            Keeper.withhold(self._root_log_dir)

    def _discard(
        self, envs: dict[int, dict[str, str]], redirects: dict[int, int], tees: dict[int, int]
    ) -> LogsDest:
        dest = LogsDest(filtered_stdout=os.devnull, filtered_stderr=os.devnull)
        for rank, env in envs.items():
            dest.error_files[rank] = os.devnull
            env["TORCHELASTIC_ERROR_FILE"] = ""
            for std, files in ((OUT, dest.stdouts), (ERR, dest.stderrs)):
                seen = tees[rank] & std or not redirects[rank] & std
                files[rank] = INHERITED if seen and self._is_shown(rank) else os.devnull
        return dest

    def _is_shown(self, rank: int) -> bool:
        return not self._local_ranks_filter or rank in self._local_ranks_filter

    def _make_attempt_dir(self, env: dict[str, str]) -> str:
        if self._run_dir is not None and _owner_of(self._run_dir) != self._run_dir_owner:
            self._replace_run_dir()
        if self._run_dir is None:
            run_id = _as_name(env.get("TORCHELASTIC_RUN_ID", "test_run_id"))
            self._run_dir = _make_unique_dir(os.path.join(self.root_log_dir, run_id))
            self._run_dir_owner = _owner_of(self._run_dir)
        attempt = _as_name(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        plain = os.path.join(self._run_dir, f"attempt_{attempt}")
        path, again = plain, 0
        while not _make_dir(path):
            again += 1
            path = f"{plain}_{again}"
        self._attempt_dir = path
        return path

    def _replace_run_dir(self) -> None:
        """Replace a removed directory, as after a cleaner of temporary folders."""
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
    """Return the duplicate filters as bytes; none where there is no file for their lines.

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
            hint="change to an existing directory, or give the absolute path",
        ) from problem


def _as_name(text: str) -> str:
    """Make `text` usable as one part of a path, and still recognizable."""
    name = "".join("_" if char in "/\\" or not char.isprintable() else char for char in text)
    return os.fsencode(name)[:NAME_BYTES_MAX].decode("utf-8", "ignore")


def _random_suffix() -> str:
    return os.urandom(4).hex()


def _remove_tree(path: str) -> None:
    """Remove a temporary directory and its contents; importing `shutil` would take longer."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(entry.path)
                else:
                    os.unlink(entry.path)
        os.rmdir(path)
    except OSError as problem:
        console.info(f"the temporary directory {path} was not removed: {problem.strerror}")


def _make_unique_dir(stem: str) -> str:
    """Make `<stem>_<random>` that only this user can enter, and return its path."""
    path = f"{stem}_{_random_suffix()}"
    while not _make_dir(path, 0o700):
        path = f"{stem}_{_random_suffix()}"
    return path


def _owner_of(path: str) -> int:
    """Return the owner of a directory; -1 if the path is not a directory, or a link."""
    try:
        return -1 if os.path.islink(path) or not os.path.isdir(path) else os.lstat(path).st_uid
    except OSError:
        return -1


def _make_temporary_dir() -> str:
    given = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    folders = [os.path.abspath(folder) for folder in given if folder]
    folders.append("/tmp")  # noqa: S108 - the directory made in it has a random name and mode 0700
    for folder in folders[:-1]:
        if os.access(folder, os.W_OK | os.X_OK) and os.path.isdir(folder):
            return _make_unique_dir(os.path.join(folder, "holdfast"))
    return _make_unique_dir(os.path.join(folders[-1], "holdfast"))


def _make_dir(path: str, mode: int = 0o777) -> bool:
    """Make one directory; return whether it is new."""
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


def _cannot_make(path: str, problem: OSError) -> NoReturn:
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        raise LogDirectoryTaken(path) from problem
    raise EnvironmentProblem(
        f"the log directory {path} cannot be created: {problem.strerror}",
        hint="name a writable directory with --log-dir",
    ) from problem
