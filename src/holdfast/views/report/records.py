"""Reads log directories: the timelines of a job's nodes, even if incomplete or damaged.

A folder belongs to one run, or contains the folders of several runs, nodes and jobs. A killed agent or a
full disk leaves an incomplete line; `parse` counts and omits unreadable lines. Nothing in a folder is
trusted: only regular files are opened, and values, lines and files have limits.
`observe/timeline.py` is the writer.
"""

from __future__ import annotations

import os
import re
import stat
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct, defstruct

from holdfast.control.history import History, RunEnd
from holdfast.core.supervision import StopReason
from holdfast.core.values import Value
from holdfast.errors import UsageError
from holdfast.observe import lifecycle
from holdfast.observe.lifecycle import (
    GenerationStarted,
    ProgressSampled,
    RunEnded,
    RunStarted,
    WorkerEnded,
    WorkerFailure,
    WorkersFailed,
)
from holdfast.observe.timeline import KINDS, boot_id, process_start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.control.history import Generation
    from holdfast.observe.lifecycle import LifecycleEvent

FILE_BYTES_MAX = 32 << 20
"""The limit for reading a file. From a longer file, the first `HEAD_BYTES` and the end are read."""
HEAD_BYTES = 1 << 20
LINE_BYTES_MAX = 8 << 20
FOLDERS_MAX = 20_000
"""The limit for folders to search."""
FILES_MAX = 10_000
SAMPLES_MAX, SAMPLES_MIN = 2_000, 50
"""Samples of a rank in one generation. If there are more, every other sample is dropped."""
SAMPLES_IN_ALL = 500_000
"""Samples of all ranks: the more ranks, the fewer samples of each are kept."""
TEXT_CHARS_MAX = 64_000
GENERATIONS_MAX = 10_000
"""The limit for generations of a node."""
TAIL_BYTES = 8 << 10
"""The number of bytes to read from the end of a worker's log."""
REPORT_BYTES_MAX = 16 << 20
DEPTH_MAX = 2
"""The depth of the search below a folder, which may contain log directories, which contain runs."""

Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
BOUNDED: dict[Any, Any] = {float: Seconds, int: Integer, str: Text}

# The lines: a structure for each kind of event, with the fields of the event.


class Host(Struct, frozen=True):
    """The host and the agent's process."""

    name: Text = ""
    boot: Text = ""
    pid: Integer = 0
    born: Text = ""
    holdfast: Text = ""
    python: Text = ""
    system: Text = ""
    cpus: Integer = 0


_VALUES: dict[type, type[Value]] = {}


def _structure(kind: type[Value], tag: str | None = None) -> type[Struct]:
    """Return the structure of a line for an event, or of a value in it."""
    hints = get_type_hints(
        kind, {**vars(lifecycle), "ClassVar": ClassVar, "StopReason": StopReason}
    )
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name in kind.__match_args__:
        default = (vars(kind)[name],) if name in vars(kind) else ()
        fields.append((name, _bounded(hints[name]), *default))
    if kind is lifecycle.RunStarted:
        fields.append(("host", Host, Host()))
    tag_field = None if tag is None else "kind"
    made = defstruct(kind.__name__, fields, tag_field=tag_field, tag=tag, kw_only=True)
    _VALUES[made] = kind
    return made


def _bounded(hint: Any) -> Any:
    """Return a type with its limits."""
    if isinstance(hint, type) and issubclass(hint, Value):
        return _structure(hint)
    if args := get_args(hint):
        inner = tuple(one if one is ... else _bounded(one) for one in args)
        origin: Any = get_origin(hint)
        return (Union if origin is UnionType else origin)[inner]
    return BOUNDED.get(hint, hint)


def _value(found: Any) -> Any:
    """Return the event or the value that a structure holds."""
    if isinstance(found, tuple):
        return tuple(map(_value, found))
    kind = _VALUES.get(type(found))
    if kind is None:
        return found
    return kind(**{name: _value(getattr(found, name)) for name in kind.__match_args__})


_LINES = tuple(_structure(kind, tag) for kind, tag in KINDS.items())
_decode = msgspec.json.Decoder(Union[_LINES]).decode  # noqa: UP007


class FinalReport(Struct):
    """The first failure in `failure.json`; it may have happened on another node."""

    class FirstFailure(Struct):
        """The failure, and where it was."""

        rank: Integer
        pid: Integer = 0
        exitcode: Integer = 0
        local_rank: Integer = 0
        ending: Text = ""
        detail: Text = ""
        message: Text = ""
        traceback: Text = ""
        stderr_tail: Text = ""
        host: Text = ""
        time_ns: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0

        @property
        def failure(self) -> WorkerFailure:
            return WorkerFailure(
                self.rank, self.local_rank, self.pid, self.exitcode, wall=self.time_ns / 1e9,
                consequence=False, ending=self.ending, detail=self.detail, message=self.message,
                traceback=self.traceback, stderr_tail=self.stderr_tail,
            )  # fmt: skip

    first: FirstFailure
    exit_status: int = 0


class GenerationDetails:
    """The details of one generation on one node, in addition to the node's `History`."""

    def __init__(self, started: GenerationStarted) -> None:
        self.started = started
        self.samples: dict[int, list[tuple[float, int]]] = {}
        self.exits: list[WorkerEnded] = []
        self.failures: tuple[WorkerFailure, ...] = ()


class NodeRun:
    """One run on one node: its timeline, and the files beside it."""

    def __init__(self, run: RunStarted, host: Host, folder: str = "", nodes: int = 1) -> None:
        self.first_line = self.run = run
        self.host = host
        self.folder = folder
        ranks = max(1, nodes * run.local_world_size)
        self._samples_max = max(SAMPLES_MIN, min(SAMPLES_MAX, SAMPLES_IN_ALL // ranks))
        self.history = History(generations_max=GENERATIONS_MAX)
        self.history.add(run)
        self.details: dict[int, GenerationDetails] = {}
        """By generation, as in the history."""
        self.end: RunEnded | None = None
        self.last_at = run.at
        self.unreadable = 0
        self.is_cut = False
        self.is_alive = False
        self.last_output_wall: float | None = None
        self.final: FinalReport | None = None
        self.tails: dict[tuple[int, str], str] = {}
        """The ends of the output of the last generation's workers, by rank and stream."""

    def wall(self, at: float) -> float:
        """Return a time of the monotonic clock as time of day on this host."""
        return self.run.wall + (at - self.run.at)

    @property
    def generations(self) -> dict[int, Generation]:
        return self.history.generations

    @property
    def run_end(self) -> RunEnd:
        """How the run ended."""
        return RunEnd.RUNNING if self.is_alive else self.history.run_end

    @property
    def until(self) -> float:
        """When the record ends, or the last output, on the monotonic clock."""
        if self.end is not None or self.last_output_wall is None:
            return self.last_at
        return max(self.last_at, self.run.at + self.last_output_wall - self.run.wall)

    @property
    def last(self) -> GenerationDetails | None:
        """The last generation."""
        return self.details[max(self.details)] if self.details else None

    def add(self, event: Any) -> None:
        """Add an event; omit it if it belongs to a generation whose start is not recorded."""
        self.last_at = max(self.last_at, event.at)
        match event:
            case GenerationStarted():
                known = self.details.get(event.generation)
                is_again = known is not None and known.started.at == event.at
                if is_again or len(self.details) >= GENERATIONS_MAX:
                    return
                self.details[event.generation] = GenerationDetails(event)
                self._note_name(event)
            case RunEnded():
                self.end = event
            case _ if hasattr(event, "generation"):
                details = self.details.get(event.generation)
                if details is None:
                    return
                self._add_details(details, event)
        self.history.add(event)

    def _note_name(self, event: GenerationStarted) -> None:
        """Note this node's id in the round: it may have got another one when it joined."""
        rank = event.group_rank
        if rank is not None and 0 <= rank < len(event.members):
            self.run = RunStarted(**{**vars(self.run), "node": event.members[rank]})

    def _add_details(self, details: GenerationDetails, event: LifecycleEvent) -> None:
        match event:
            case ProgressSampled():
                for rank, step, at in event.steps:
                    known = details.samples.setdefault(rank, [])
                    if not known or known[-1] != (at, step):
                        known.append((at, step))
                    if len(known) > self._samples_max:
                        del known[1:-1:2]
            case WorkerEnded():
                details.exits.append(event)
            case WorkersFailed():
                details.failures = event.failures[: lifecycle.FAILURES_MAX]


def parse(lines: Iterable[bytes], folder: str = "", nodes: int = 1) -> list[NodeRun]:
    """Return the runs in the lines of one timeline; `nodes` is the number of timelines to read."""
    runs: list[NodeRun] = []
    unreadable = 0
    for text in lines:
        if not text.strip():
            continue
        try:
            if len(text) > LINE_BYTES_MAX:
                raise ValueError("the line is too long")
            line: Any = _decode(text)
        except (ValueError, RecursionError):  # Errors of msgspec are ValueErrors.
            unreadable += 1
            continue
        event = _value(line)
        if runs and event == runs[-1].first_line:
            continue  # Each file of a timeline begins with it.
        if isinstance(event, RunStarted):
            runs.append(NodeRun(event, line.host, folder, nodes))
        elif runs:
            runs[-1].add(event)
        else:
            unreadable += 1  # The beginning of the timeline is missing.
    for run in runs[-1:]:
        run.unreadable = unreadable
    for run in runs:
        run.history.end_record()
    return runs


# Files.

ATTEMPT = re.compile(r"attempt_[^/]+")
TIMELINE = re.compile(r"timeline-.*\.jsonl(\.1)?")


def read(
    folders: Sequence[str], tell: Callable[[str], object] = lambda _text: None
) -> list[NodeRun]:
    """Return all runs in these folders; raise `UsageError` if a folder is missing or has none.

    `tell` receives lines about the progress.
    """
    found = {}
    for folder in folders:
        paths = _timelines(folder)
        if not paths:
            raise UsageError(
                f"FOLDER: no timeline in {folder!r}; accepted: a log directory",
                hint="a job has one if it was started with --log-dir, --redirects or --tee, or failed",
            )
        found.update({os.path.realpath(path): path for path in paths})
    paths = [*found.values()]
    runs: list[NodeRun] = []
    for count, path in enumerate(paths):
        tell(f"read {count} of {len(paths)} timelines")
        runs += read_timeline(path, len(paths))
    return runs


def read_timeline(path: str, nodes: int = 1) -> list[NodeRun]:
    """Return the runs in one node's file, and in the older file if it was rotated."""
    folder = os.path.dirname(path)
    before = read_bounded(f"{path}.1", FILE_BYTES_MAX, HEAD_BYTES)
    data, is_cut, _ = read_bounded(path, FILE_BYTES_MAX, HEAD_BYTES)
    lines = [*before.data.split(b"\n"), *data.split(b"\n")]
    if not data.endswith(b"\n"):
        lines.pop()  # This line is incomplete: the agent is writing it, or was killed.
    runs = parse(lines, folder, nodes)
    for run in runs:
        run.is_cut = is_cut
    return runs


def read_other_files(run: NodeRun) -> None:
    """Read the files beside a node's timeline: its failure report, and the ends of its workers' logs.

    Logs are read only if no end was recorded; earlier failures are in the timeline.
    """
    run.final = _final_report(os.path.join(run.folder, "failure.json"))
    run.is_alive = run.end is None and _is_alive(run.host)
    last = run.last
    if run.end is not None or last is None:
        return
    attempt = os.path.basename(last.started.log_dir)
    if not ATTEMPT.fullmatch(attempt):
        return
    for worker in last.started.workers:
        for stream in ("stderr", "stdout"):
            path = os.path.join(run.folder, attempt, str(worker.local_rank), f"{stream}.log")
            found = read_bounded(path, TAIL_BYTES, 0)
            if found.modified is not None:
                run.last_output_wall = max(run.last_output_wall or 0.0, found.modified)
            if found.data.strip():
                run.tails[worker.global_rank, stream] = found.data.decode(errors="replace")


def _final_report(path: str) -> FinalReport | None:
    data, is_cut, _ = read_bounded(path, REPORT_BYTES_MAX, 0)
    try:
        return msgspec.json.decode(data, type=FinalReport) if data and not is_cut else None
    except (ValueError, RecursionError):
        return None


def _is_alive(host: Host) -> bool:
    """Whether the agent runs on this machine."""
    return host.boot == boot_id() != "" and host.born == process_start_time(host.pid) != ""


def _timelines(folder: str) -> list[str]:
    """Return the timelines in a folder and in the folders below it."""
    place = os.path.realpath(folder)  # Only links in the operator's argument are followed.
    if not os.path.isdir(place):
        raise UsageError(f"FOLDER: {folder!r} is not a folder; accepted: a log directory")
    if not os.access(place, os.R_OK | os.X_OK):
        raise UsageError(f"FOLDER: {folder!r} cannot be read; accepted: a log directory of yours")
    found: list[str] = []
    level, looked = [place], 0
    for _ in range(DEPTH_MAX + 1):
        below = []
        for one in level:
            looked += 1
            if looked > FOLDERS_MAX:
                break
            names, inner = _listed(one)
            found += names
            if not names:  # A run contains only its logs.
                below += inner
        level = below
    return sorted(found)[:FILES_MAX]


def _listed(folder: str) -> tuple[list[str], list[str]]:
    try:
        with os.scandir(folder) as entries:
            every = [*entries]
    except OSError:
        return [], []  # It belongs to another user or was just removed.
    files = {one.path.removesuffix(".1") for one in every if TIMELINE.fullmatch(one.name)}
    return sorted(files), [one.path for one in every if one.is_dir(follow_symlinks=False)]


class Contents(NamedTuple):
    """The contents of a file: nothing if there is no such file."""

    data: bytes = b""
    is_cut: bool = False
    """Whether the middle was cut out. A cut leaves an incomplete line."""
    modified: float | None = None
    """When the file last changed, in time of day."""


def read_bounded(path: str, bytes_max: int, head_bytes: int) -> Contents:
    """Return the contents of a regular file. No component of the path may be a symbolic link."""
    try:
        with open(_open_without_links(path), "rb", buffering=0) as file:
            fd = file.fileno()
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return Contents()
            if found.st_size <= bytes_max:
                return Contents(file.read(bytes_max) or b"", modified=found.st_mtime)
            head = os.pread(fd, head_bytes, 0)
            tail = os.pread(fd, bytes_max - head_bytes, found.st_size - bytes_max + head_bytes)
            return Contents(
                (head + b"\n" if head else b"") + tail, is_cut=True, modified=found.st_mtime
            )
    except OSError:
        return Contents()


def _open_without_links(path: str) -> int:
    """Open a file for reading, folder by folder.

    A folder on the path may belong to another user, who can put a link into it at any time. The link could add a
    file to the report that only the user of this command can read.
    """
    *folders, name = os.path.abspath(path).split("/")[1:]
    held = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for one in folders:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(one, flags, dir_fd=held)
            os.close(held)
            held = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=held)
    finally:
        os.close(held)


# Jobs.


def jobs_in(runs: Sequence[NodeRun]) -> list[list[NodeRun]]:
    """Return the runs of all nodes by job, the newest job first.

    Nodes that ran a generation of the same number and fence belong to one job. A run without a fence belongs
    to the job with the same run id that it overlaps in time.
    """
    joined = _Joined(len(runs))
    with_fence: dict[tuple[str, int, int], int] = {}
    by_id: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        by_id.setdefault(run.run.run_id, []).append(at)
        for number, one in run.generations.items():
            if one.fence > 0:
                joined.join(at, with_fence.setdefault((run.run.run_id, number, one.fence), at))
    for same_id in by_id.values():
        _join_by_time(runs, same_id, joined)
    jobs = joined.groups(runs)
    for job in jobs:
        job.sort(key=lambda run: (run.run.wall, run.run.node))
    jobs.sort(key=lambda job: job[0].run.wall, reverse=True)
    return jobs


def _join_by_time(runs: Sequence[NodeRun], same_id: Iterable[int], joined: _Joined) -> None:
    """Join each run without a fence to all runs that overlap it, in one pass over their starts."""

    def end(at: int) -> float:
        return runs[at].wall(runs[at].last_at)

    with_fence: list[int] = []  # Of runs that are already joined, only the last to end.
    last: int | None = None  # The run without a fence that ends last.
    for at in sorted(same_id, key=lambda at: runs[at].run.wall):
        begin = runs[at].run.wall
        if last is not None and begin <= end(last):
            joined.join(at, last)
        if any(one.fence > 0 for one in runs[at].generations.values()):
            with_fence.append(at)
            continue
        overlapping = [one for one in with_fence if begin <= end(one)]
        for one in overlapping:
            joined.join(at, one)
        with_fence = [max(overlapping, key=end)] if overlapping else []
        last = at if last is None else max(at, last, key=end)


class _Joined:
    """Runs that belong together: a union-find forest, in which all runs of a job have one root."""

    def __init__(self, count: int) -> None:
        self._parents = [*range(count)]

    def join(self, one: int, other: int) -> None:
        self._parents[self._root(one)] = self._root(other)

    def _root(self, at: int) -> int:
        parents = self._parents
        while parents[at] != at:
            parents[at] = at = parents[parents[at]]
        return at

    def groups(self, runs: Sequence[NodeRun]) -> list[list[NodeRun]]:
        found: dict[int, list[NodeRun]] = {}
        for at, run in enumerate(runs):
            found.setdefault(self._root(at), []).append(run)
        return [*found.values()]
