"""Reading log directories: the timelines of a job's nodes, tolerant of whatever is in them.

A folder may be one run's, or one above it with the runs of several nodes and of several jobs. A job
that was killed leaves half a line, a full disk less; a line that cannot be read is counted and left
out. Nothing in a folder is trusted: only regular files are opened, each value has its limits, and
however much was written, only so much of it is read. `observe/timeline.py` is the writer.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from holdfast.control.history import History
from holdfast.core.supervision import StopReason
from holdfast.errors import UsageError
from holdfast.observe import lifecycle
from holdfast.observe.timeline import boot_id, born

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.control.history import Generation
    from holdfast.observe.lifecycle import LifecycleEvent

FILE_BYTES_MAX = 32 << 20
"""Of a longer file its beginning (`HEAD_BYTES`) and its end are read, this much in all."""
HEAD_BYTES = 1 << 20
LINE_BYTES_MAX = 8 << 20
FOLDERS_MAX = 20_000
"""How many folders are looked into."""
FILES_MAX = 10_000
SAMPLES_MAX, SAMPLES_MIN = 2_000, 50
"""Of a rank in one generation; of more every other one is dropped, again and again."""
SAMPLES_IN_ALL = 500_000
"""What to aim at with all ranks: the more there are, the fewer samples are kept of each."""
FAILURES_MAX = 64
"""Of a node in one generation."""
GENERATIONS_MAX = 10_000
"""Of a node; a job that restarts more often is not read by people."""
TAIL_BYTES = 8 << 10
"""Read of the end of a worker's log."""
REPORT_BYTES_MAX = 16 << 20
DEPTH_MAX = 2
"""A log directory has runs, and a folder of the log directories of all nodes has those."""

Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Rank = Annotated[int, Meta(ge=0, lt=10_000_000)]
Number = Annotated[int, Meta(ge=-1, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Step = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Name = Annotated[str, Meta(max_length=4096)]


class Run(Struct, tag_field="kind", tag="run"):
    """A run has started on a node."""

    at: Seconds
    wall: Seconds
    version: int = 1
    run_id: Name = ""
    node: Name = ""
    host: Name = ""
    boot: Name = ""
    pid: Number = 0
    born: Name = ""
    role: Name = ""
    backend: Name = ""
    program: Name = ""
    local_world_size: Number = 0
    max_restarts: Number = 0
    holdfast: Name = ""
    python: Name = ""
    system: Name = ""
    cpus: Number = 0

    def event(self) -> LifecycleEvent:
        return lifecycle.RunStarted(
            self.at, self.wall, self.run_id, self.role, self.backend, "", self.local_world_size,
            self.max_restarts, self.program, self.node,
        )  # fmt: skip


class Standby(Struct, tag_field="kind", tag="standby"):
    """The node has become a standby, or is none any more."""

    at: Seconds
    is_standby: bool = False

    def event(self, _node: NodeRun) -> LifecycleEvent:
        return lifecycle.StandbyChanged(self.at, self.is_standby)


class Rendezvous(Struct, tag_field="kind", tag="rendezvous"):
    """A rendezvous has ended."""

    at: Seconds
    failed: bool = False

    def event(self, _node: NodeRun) -> LifecycleEvent:
        return lifecycle.RendezvousEnded(self.at, 0.0, 0.0, None, None, "failed" * self.failed)


class Started(Struct, tag_field="kind", tag="generation"):
    """All workers of a generation on this node are started."""

    at: Seconds
    generation: Number
    restarts: Count = 0
    node_rank: Rank | None = None
    nodes: Rank | None = None
    world_size: Rank = 0
    fence: Count = 0
    why: str = ""
    logs: Name = ""
    workers: list[tuple[Rank, Rank, Number]] = []

    def event(self, node: NodeRun) -> LifecycleEvent:
        workers = tuple(node.worker(self, rank) for rank, _, _ in self.workers)
        return lifecycle.GenerationStarted(
            self.at, node.wall(self.at), 0.0, self.generation, self.restarts, self.node_rank,
            self.nodes, workers, self.world_size, self.fence, self.why, self.logs,
        )  # fmt: skip


class Heartbeat(Struct, tag_field="kind", tag="heartbeat"):
    """A worker has sent its first heartbeat."""

    at: Seconds
    generation: Number
    rank: Rank

    def event(self, node: NodeRun) -> LifecycleEvent:
        worker = node.worker(node.details[self.generation].started, self.rank)
        return lifecycle.FirstHeartbeat(self.at, self.generation, worker)


class Progress(Struct, tag_field="kind", tag="progress"):
    """The last steps of workers, and when they were."""

    at: Seconds
    generation: Number
    steps: list[tuple[Rank, Step, Seconds]] = []

    def event(self, _node: NodeRun) -> LifecycleEvent:
        return lifecycle.ProgressSampled(self.at, self.generation, tuple(self.steps))


class Exit(Struct, tag_field="kind", tag="exit"):
    """A worker has exited."""

    at: Seconds
    generation: Number
    rank: Rank
    failed: bool

    def event(self, node: NodeRun) -> LifecycleEvent:
        worker = node.worker(node.details[self.generation].started, self.rank)
        return lifecycle.WorkerEnded(
            self.at, node.wall(self.at), self.generation, worker, self.failed
        )


class Stopping(Struct, tag_field="kind", tag="stopping"):
    """What is left of a generation is being stopped."""

    at: Seconds
    generation: Number
    reason: Name = ""
    detail: str = ""

    def event(self, _node: NodeRun) -> LifecycleEvent:
        reason = next((one for one in StopReason if one.value == self.reason), StopReason.SIGNAL)
        return lifecycle.GenerationStopping(self.at, self.generation, reason, self.detail)


class FailedWorker(Struct):
    """A worker that failed, as its agent described it."""

    rank: Rank
    pid: Number = 0
    exitcode: int = 0
    wall: Seconds = 0.0
    local_rank: Number = 0
    consequence: bool = False
    ending: str = ""
    detail: str = ""
    message: str = ""
    traceback: str = ""
    stderr_tail: str = ""

    def failure(self) -> lifecycle.WorkerFailure:
        return lifecycle.WorkerFailure(
            self.rank, self.local_rank, self.pid, self.exitcode, self.wall, self.consequence,
            self.ending, self.detail, self.message, self.traceback, self.stderr_tail,
        )  # fmt: skip


class Stopped(Struct, tag_field="kind", tag="stopped"):
    """All workers of a generation on this node have exited."""

    at: Seconds
    generation: Number

    def event(self, _node: NodeRun) -> LifecycleEvent:
        return lifecycle.GenerationStopped(self.at, self.generation)


class Failures(Struct, tag_field="kind", tag="failures"):
    """Why workers of a generation on this node had failed."""

    at: Seconds
    generation: Number
    failures: list[FailedWorker] = []

    def event(self, _node: NodeRun) -> LifecycleEvent:
        failures = tuple(one.failure() for one in self.failures[:FAILURES_MAX])
        return lifecycle.WorkersFailed(self.at, self.generation, failures)


class Requested(Struct, tag_field="kind", tag="request"):
    """A request of an operator was granted."""

    at: Seconds
    what: str = ""

    def event(self, node: NodeRun) -> LifecycleEvent:
        return lifecycle.Requested(self.at, node.wall(self.at), "", self.what)


class End(Struct, tag_field="kind", tag="end"):
    """A run has ended on a node."""

    at: Seconds
    state: Name = ""
    error: str = ""

    def event(self, node: NodeRun) -> LifecycleEvent:
        took_s = self.at - node.run.at
        wall, restarts = node.wall(self.at), node.run.max_restarts
        return lifecycle.RunEnded(
            self.at, wall, took_s, self.state, 0, 0, restarts, None, None, error=self.error
        )


Line = (
    Run | Standby | Rendezvous | Started | Heartbeat | Progress | Exit | Stopping | Stopped
    | Failures | Requested | End
)  # fmt: skip
_decode = msgspec.json.Decoder(Line).decode


class FinalReport(Struct):
    """What `failure.json` says of the failure that came first; it may have been another node's."""

    class First(FailedWorker):
        """The failure, and where it was."""

        host: Name = ""
        time_ns: Number = 0

    first: First
    exit_status: int = 0


class Details:
    """What a report shows of a generation on a node besides its history."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.samples: dict[int, list[tuple[float, int]]] = {}
        self.exits: list[Exit] = []
        self.failures: list[FailedWorker] = []


class NodeRun:
    """One run on one node: what its timeline says, and what lies beside it."""

    def __init__(self, run: Run, folder: str = "", nodes: int = 1) -> None:
        self.run = run
        self.folder = folder
        ranks = max(1, nodes * run.local_world_size)
        self._samples_max = max(SAMPLES_MIN, min(SAMPLES_MAX, SAMPLES_IN_ALL // ranks))
        self.history = History(generations_max=GENERATIONS_MAX)
        self.history.add(run.event())
        self.details: dict[int, Details] = {}
        """By generation, as in the history."""
        self.end: End | None = None
        self.last_at = run.at
        self.unreadable = 0
        self.is_cut = False
        self.is_alive = False
        self.last_output_wall: float | None = None
        self.final: FinalReport | None = None
        self.tails: dict[tuple[int, str], str] = {}
        """By rank and stream, the end of what workers of the last generation wrote."""

    def wall(self, at: float) -> float:
        """Return a time of the monotonic clock as time of day on this host."""
        return self.run.wall + (at - self.run.at)

    @property
    def generations(self) -> dict[int, Generation]:
        return self.history.generations

    @property
    def last(self) -> Details | None:
        """The last generation."""
        return self.details[max(self.details)] if self.details else None

    def worker(self, started: Started, rank: int) -> lifecycle.WorkerInfo:
        """Return a worker of a generation."""
        found = ((local, pid) for known, local, pid in started.workers if known == rank)
        local_rank, pid = next(found, (-1, 0))
        return lifecycle.WorkerInfo(local_rank, rank, rank, started.world_size, pid)

    def add(self, line: Line) -> None:
        """Add a line; those of a generation whose start is not recorded are left out."""
        assert not isinstance(line, Run)
        self.last_at = max(self.last_at, line.at)
        match line:
            case Started():
                known = self.details.get(line.generation)
                is_again = known is not None and known.started.at == line.at
                if is_again or len(self.details) >= GENERATIONS_MAX:
                    return
                self.details[line.generation] = Details(line)
            case End():
                self.end = line
            case Heartbeat() | Progress() | Exit() | Stopping() | Stopped() | Failures():
                details = self.details.get(line.generation)
                if details is None:
                    return
                self._add_details(details, line)
        self.history.add(line.event(self))

    def _add_details(self, details: Details, line: Line) -> None:
        match line:
            case Progress():
                for rank, step, at in line.steps:
                    known = details.samples.setdefault(rank, [])
                    if not known or known[-1] != (at, step):
                        known.append((at, step))
                    if len(known) > self._samples_max:
                        del known[1:-1:2]
            case Exit():
                details.exits.append(line)
            case Failures():
                details.failures = line.failures[:FAILURES_MAX]


def parse(lines: Iterable[bytes], folder: str = "", nodes: int = 1) -> list[NodeRun]:
    """Return the runs that lines of one timeline tell of, which is one of so many."""
    runs: list[NodeRun] = []
    unreadable = 0
    for text in lines:
        if not text.strip():
            continue
        try:
            if len(text) > LINE_BYTES_MAX:
                raise ValueError("a line too long")
            line = _decode(text)
        except (ValueError, RecursionError):  # `msgspec`'s errors are the former.
            unreadable += 1
            continue
        if runs and line == runs[-1].run:
            continue  # Each file of a timeline begins with it.
        if isinstance(line, Run):
            runs.append(NodeRun(line, folder, nodes))
        elif runs:
            runs[-1].add(line)
        else:
            unreadable += 1  # Its beginning was lost.
    for run in runs[-1:]:
        run.unreadable = unreadable
    return runs


# Files.

ATTEMPT = re.compile(r"attempt_[^/]+")
TIMELINE = re.compile(r"timeline-.*\.jsonl(\.1)?")


def read(
    folders: Sequence[str], tell: Callable[[str], object] = lambda _text: None
) -> list[NodeRun]:
    """Return all runs in these folders; raise `UsageError` if there is no such folder, or none in it.

    `tell` gets a line now and then on how far it is.
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
    """Return the runs of one node's file, and of the one before it that was put aside."""
    folder = os.path.dirname(path)
    before, _ = read_bounded(f"{path}.1", FILE_BYTES_MAX, HEAD_BYTES)
    data, is_cut = read_bounded(path, FILE_BYTES_MAX, HEAD_BYTES)
    lines = [*before.split(b"\n"), *data.split(b"\n")]
    if not data.endswith(b"\n"):
        lines.pop()  # It is being written, or its writer was killed.
    runs = parse(lines, folder, nodes)
    for run in runs:
        run.is_cut = is_cut
    return runs


def look_around(run: NodeRun) -> None:
    """Read what lies beside a node's timeline: its failure report, and how its workers' logs end.

    Logs are only read if no end was recorded: everything that failed before is in the timeline.
    """
    run.final = _final_report(os.path.join(run.folder, "failure.json"))
    run.is_alive = run.end is None and _is_alive(run.run)
    last = run.last
    if run.end is not None or last is None:
        return
    if not ATTEMPT.fullmatch(last.started.logs):
        return
    logs = os.path.join(run.folder, last.started.logs)
    for rank, local_rank, _pid in last.started.workers:
        for stream in ("stderr", "stdout"):
            path = os.path.join(logs, str(local_rank), f"{stream}.log")
            try:
                wall = os.stat(path, follow_symlinks=False).st_mtime
            except OSError:
                continue
            run.last_output_wall = max(run.last_output_wall or wall, wall)
            text, _ = read_bounded(path, TAIL_BYTES, 0)
            if text.strip():
                run.tails[rank, stream] = text.decode(errors="replace")


def _final_report(path: str) -> FinalReport | None:
    data, is_cut = read_bounded(path, REPORT_BYTES_MAX, 0)
    try:
        return msgspec.json.decode(data, type=FinalReport) if data and not is_cut else None
    except (ValueError, RecursionError):
        return None


def _is_alive(run: Run) -> bool:
    """Whether the agent still runs, as far as can be seen from here."""
    return run.boot == boot_id() != "" and run.born == born(run.pid) != ""


def _timelines(folder: str) -> list[str]:
    """Return the timelines in a folder or in those below it."""
    if not os.path.isdir(folder):
        raise UsageError(f"FOLDER: {folder!r} is not a folder; accepted: a log directory")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"FOLDER: {folder!r} cannot be read; accepted: a log directory of yours")
    found: list[str] = []
    level, looked = [folder], 0
    for _ in range(DEPTH_MAX + 1):
        below = []
        for one in level:
            looked += 1
            if looked > FOLDERS_MAX:
                break
            names, inner = _listed(one)
            found += names
            if not names:  # Below a run there are only its logs.
                below += inner
        level = below
    return sorted(found)[:FILES_MAX]


def _listed(folder: str) -> tuple[list[str], list[str]]:
    try:
        with os.scandir(folder) as entries:
            every = [*entries]
    except OSError:
        return [], []  # Another user's, or it was just removed.
    files = {one.path.removesuffix(".1") for one in every if TIMELINE.fullmatch(one.name)}
    return sorted(files), [one.path for one in every if one.is_dir(follow_symlinks=False)]


def read_bounded(path: str, bytes_max: int, head_bytes: int) -> tuple[bytes, bool]:
    """Return a regular file's contents, and whether that is not all: then its beginning and its end.

    Nothing if there is no such file. The line at which it was cut is half a line.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError:
        return b"", False
    with open(fd, "rb", buffering=0) as file:
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return b"", False
            if found.st_size <= bytes_max:
                return file.read(bytes_max) or b"", False
            head = os.pread(fd, head_bytes, 0)
            tail = os.pread(fd, bytes_max - head_bytes, found.st_size - bytes_max + head_bytes)
            return (head + b"\n" if head else b"") + tail, True
        except OSError:
            return b"", False


# Jobs.


def jobs_in(runs: Sequence[NodeRun]) -> list[list[NodeRun]]:
    """Return the runs of all nodes by job, the newest job first.

    Nodes were in one job if they were in one generation, which its fence says. Where nobody counts
    fences, or a node never had a generation, its run id and the time of day have to do.
    """
    leader = [*range(len(runs))]  # Each leads to another of its job, and at last to one for all.
    first: dict[tuple[str, int, int], int] = {}
    for at, run in enumerate(runs):
        for number, one in run.generations.items():
            if one.fence > 0:
                key = (run.run.run_id, number, one.fence)
                leader[_last(leader, at)] = _last(leader, first.setdefault(key, at))
    fenceless = [at for at, run in enumerate(runs) if not _has_fence(run)]
    by_id: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        by_id.setdefault(run.run.run_id, []).append(at)
    for at in fenceless:
        for other in by_id[runs[at].run.run_id]:
            if _overlap(runs[at], runs[other]):
                leader[_last(leader, at)] = _last(leader, other)
    groups: dict[int, list[NodeRun]] = {}
    for at, run in enumerate(runs):
        groups.setdefault(_last(leader, at), []).append(run)
    jobs = [*groups.values()]
    for job in jobs:
        job.sort(key=lambda run: (run.run.wall, run.run.node))
    jobs.sort(key=lambda job: job[0].run.wall, reverse=True)
    return jobs


def _last(leader: list[int], at: int) -> int:
    while leader[at] != at:
        leader[at] = at = leader[leader[at]]
    return at


def _has_fence(run: NodeRun) -> bool:
    return any(one.fence > 0 for one in run.generations.values())


def _overlap(one: NodeRun, other: NodeRun) -> bool:
    return one.run.wall <= other.wall(other.last_at) and other.run.wall <= one.wall(one.last_at)
