"""The rules that a job must satisfy after any faults, checked against its ledger and its agents' exits.

Each rule is a function from the record of a job to its violations, one line each. A fault excuses what
no launcher can prevent: a frozen process may make one more step when it resumes. With default settings
at a coordinator, not all rules apply: a node that is cut off keeps its workers running (`on_lost`), and a
coordinator without a stored state starts from zero (`state_file`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# How long resumed workers may run before their keeper kills them.
THAW_S = 1.0
ALIVE = ("start", "step", "saving", "failing", "done")
# Faults that are charged as a restart.
CHARGED = ("kill worker", "fail worker", "kill keeper")
BUG = 70
# The longest freeze that costs nothing with default settings, and how long after a fault its cost would show.
FREEZE_S_MAX = 2.0
SMALL_S = 4.0
SHOWN_MAX = 3


class Entry(NamedTuple):
    """One line of the ledger."""

    at_s: float
    event: str
    machine: int
    pid: int
    rank: int
    world: int
    generation: int
    restarts: int
    fence: int
    step: int = 0


class Fault(NamedTuple):
    """A fault of a machine, and its duration."""

    at_s: float
    kind: str
    machine: int
    until_s: float


class End(NamedTuple):
    """The exit and the output of one run of an agent."""

    machine: int
    code: int | None
    by: str
    """The fault that ended it; empty if it exited by itself."""
    printed: str


class Look(NamedTuple):
    """The cluster of each machine of `--ha` at one moment, and whether it had a leader."""

    at_s: float
    members: tuple[tuple[str, bool], ...]


class Record(NamedTuple):
    """The record of a job that has ended."""

    entries: list[Entry]
    faults: list[Fault]
    ends: list[End]
    left: list[str]
    stalled: str
    """The problem, if the job did not recover after the faults."""
    safe: bool = True
    """Whether the job's settings guarantee that generations do not overlap and numbers do not decrease."""
    looks: tuple[Look, ...] = ()
    """The observations of the members of the job's own etcd."""


def read_ledger(lines: Iterable[str]) -> list[Entry]:
    entries = []
    for line in lines:
        at, event, *numbers = line.split()
        entries.append(Entry(int(at) / 1e9, event, *map(int, numbers)))
    return sorted(entries)


def read_looks(lines: Iterable[str]) -> list[Look]:
    looks = []
    for line in lines:
        if not line[:1].isdigit():
            continue  # A line about the token.
        at, *words = line.split()
        members = (word.partition("/") for word in words)
        looks.append(Look(int(at) / 1e9, tuple((name, led == "1") for name, _, led in members)))
    return looks


def violations(record: Record) -> list[str]:
    """Return the violations, each with the name of its rule."""
    return [
        f"{rule.__name__.replace('_', ' ')}: {what}"
        for rule in RULES
        for what in list(rule(record))[:SHOWN_MAX]
    ]


def generations_agree(record: Record) -> Iterator[str]:
    """Workers of a generation have one world size, and each rank runs once."""
    for starts in _starts(record).values():
        generation = starts[0].generation
        worlds = {one.world for one in starts}
        if len({one.generation for one in starts}) > 1:
            yield f"generation {generation} shares its fence with another"
        if len(worlds) > 1:
            yield f"generation {generation} has worlds of {sorted(worlds)}"
        if len({one.restarts for one in starts}) > 1:
            yield f"generation {generation} has several restart counts"
        ranks = [one.rank for one in starts]
        if len(set(ranks)) < len(ranks):
            yield f"generation {generation} has ranks {sorted(ranks)}: one was started twice"
        if any(not 0 <= one.rank < one.world for one in starts):
            yield f"generation {generation} has ranks {sorted(ranks)} in a world of {worlds}"


def numbers_do_not_decrease(record: Record) -> Iterator[str]:
    """No generation, restart count or fence decreases."""
    newest: dict[str, int] = {}
    for one in record.entries:
        if one.event != "start":
            continue
        for name in ("generation", "restarts", "fence") if record.safe else ("fence",):
            value = getattr(one, name)
            if value < newest.get(name, -1) and not _was_frozen(record, one):
                yield (
                    f"a worker of machine {one.machine} started with {name} {value} "
                    f"after {newest[name]}"
                )
            newest[name] = max(value, newest.get(name, -1))


def generations_do_not_overlap(record: Record) -> Iterator[str]:
    """No worker does anything once a worker of a later generation has started."""
    newest = Entry(0.0, "", 0, 0, 0, 0, -1, -1, -1)
    reported: set[int] = set()
    for one in record.entries:
        if one.event == "start" and one.fence > newest.fence:
            newest = one
        elif one.fence < newest.fence and one.event in ALIVE and one.pid not in reported:
            if _was_frozen(record, one) or not (record.safe or _was_connected(record, one)):
                continue
            reported.add(one.pid)
            yield (
                f"rank {one.rank} of generation {one.generation} on machine {one.machine} recorded "
                f"{one.event!r} {one.at_s - newest.at_s:.3f} s after generation {newest.generation} began"
            )


def restarts_are_failures(record: Record) -> Iterator[str]:
    """Only failures of workers are charged."""
    failures = sum(fault.kind in CHARGED for fault in record.faults)
    charged = max((one.restarts for one in record.entries), default=0)
    if charged > failures:
        yield f"{charged} restarts were charged for {failures} failures"


def job_continues(record: Record) -> Iterator[str]:
    """After the faults the job continues and succeeds."""
    if record.stalled:
        yield record.stalled
    for end in record.ends:
        if not end.by and end.code is None:
            yield f"the agent of machine {end.machine} did not exit"


def exits_are_documented(record: Record) -> Iterator[str]:
    """No bug in Holdfast, no traceback, only documented exit codes."""
    for end in record.ends:
        if end.by:
            continue
        if end.code == BUG or "bug in Holdfast" in end.printed:
            yield f"the agent of machine {end.machine} has a bug: {_last_line(end)}"
        elif "Traceback" in end.printed:
            yield f"the agent of machine {end.machine} printed a traceback"


def sums_are_right(record: Record) -> Iterator[str]:
    """Every rank checks its sums."""
    for one in record.entries:
        if one.event == "wrong":
            yield f"rank {one.rank} of generation {one.generation} has a wrong sum in step {one.step}"


def progress_is_kept(record: Record) -> Iterator[str]:
    """A generation continues from the last step that rank 0 of the previous one saved."""
    fence = saved = newest = 0
    for one in record.entries:
        if one.event != "step" or not one.step:
            continue
        if one.fence > fence:
            # Rank 0 saves before it records that, and may be killed in between.
            if not saved < one.step <= newest + 2:
                yield f"generation {one.generation} continues with step {one.step} after {saved}"
            fence = one.fence
        if one.fence == fence:
            newest = max(newest, one.step)
            saved = max(saved, one.step) if one.rank == 0 else saved


def no_job_is_lost(record: Record) -> Iterator[str]:
    """With `--ha` no agent exits before the work is finished, except killed ones."""
    if not record.looks:
        return
    for end in record.ends:
        if not end.by and end.code:
            yield f"the agent of machine {end.machine} gave up with {end.code}: {_last_line(end)}"


def one_cluster_decides(record: Record) -> Iterator[str]:
    """All observed leaders belong to one cluster."""
    found = {name for look in record.looks for name, has_leader in look.members if has_leader}
    if len(found) > 1:
        yield f"clusters {sorted(found)} have had leaders"


def small_faults_cost_nothing(record: Record) -> Iterator[str]:
    """With `--ha` and default times, these faults stop no worker."""
    starts = [one for one in record.entries if one.event == "start"] if record.looks else []
    for fault in filter(is_small, record.faults):
        others = [one for one in record.faults if one is not fault]
        # Two small faults add up: a resumed node needs an etcd that responds at once.
        if any(one.at_s <= fault.until_s and fault.at_s <= one.until_s for one in others):
            continue
        next_at_s = [one.at_s for one in others if one.at_s > fault.until_s]
        until_s = min(fault.until_s + SMALL_S, *next_at_s, float("inf"))
        late = [one for one in starts if fault.at_s < one.at_s <= until_s]
        if late:
            yield f"{fault.kind} on machine {fault.machine} led to generation {late[0].generation}"


def is_small(fault: Fault) -> bool:
    lasts_s = fault.until_s - fault.at_s
    return fault.kind == "kill member" or (
        fault.kind == "freeze machine" and lasts_s <= FREEZE_S_MAX
    )


def nothing_is_left(record: Record) -> Iterator[str]:
    """No process and no file outlives the job."""
    yield from record.left


RULES: tuple[Callable[[Record], Iterator[str]], ...] = (
    generations_agree,
    numbers_do_not_decrease,
    generations_do_not_overlap,
    restarts_are_failures,
    job_continues,
    exits_are_documented,
    sums_are_right,
    progress_is_kept,
    no_job_is_lost,
    one_cluster_decides,
    small_faults_cost_nothing,
    nothing_is_left,
)


def _starts(record: Record) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = defaultdict(list)
    for one in record.entries:
        if one.event == "start":
            found[one.fence].append(one)
    return found


def _was_frozen(record: Record, one: Entry) -> bool:
    """Whether the machine was frozen, or has just resumed."""
    return any(
        fault.kind.startswith("freeze")
        and fault.machine == one.machine
        and fault.at_s <= one.at_s <= fault.until_s + THAW_S
        for fault in record.faults
    )


def _was_connected(record: Record, one: Entry) -> bool:
    """Whether a machine was connected to the coordinator all the time."""
    return not any(
        fault.at_s <= one.at_s
        and (
            "coordinator" in fault.kind
            or fault.machine == 0
            or (fault.machine == one.machine and fault.kind.split()[0] in ("cut", "mute"))
        )
        for fault in record.faults
    )


def _last_line(end: End) -> str:
    lines = end.printed.strip().splitlines()
    return lines[-1] if lines else "(nothing printed)"
