"""The columns of the tables of `holdfast top`, its head, and rows in full, made from a `LiveJob`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from holdfast.control.history import RESTART_STAGES, Stage
from holdfast.views.tables import duration, generation, loss_text, share
from holdfast.views.top.table import Cell, Column

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.control.live_job import GenerationRow, LiveJob, NodeRow, RankRow
    from holdfast.wire.messages import EventRecord

BAR = "█"
HEARTBEAT_OLD_S = 30.0
"""An older heartbeat is shown as a warning."""
GOOD = frozenset({"running", "active", "succeeded"})
BAD = frozenset({"failed", "stuck"})


# Numbers for people.


def age(seconds: float) -> str:
    """Return an age; below a second it is `<1s`."""
    return "<1s" if 0 <= seconds < 1 else duration(seconds)


def memory(size: int) -> str:
    """Return an amount of memory in at most five characters: `812M`, `31.2G`."""
    if size <= 0:
        return "-"
    for unit, name in ((1e12, "T"), (1e9, "G")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.1f}{name}" if size < 99.95 * unit else f"{size / unit:.0f}{name}"
    return f"{size / 1e6:.0f}M"


def rate_text(rate: float | None) -> str:
    """Return steps per second."""
    if rate is None:
        return "-"
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def steps_text(low: int, high: int) -> str:
    """Return the lowest step of several ranks, and how far the fastest rank is ahead."""
    if high < 0:
        return "-"
    return f"{high:,}" if low == high else f"{low:,}+{high - low:,}"


def share_text(value: float | None) -> str:
    """Return a share as a whole percentage."""
    return "-" if value is None else f"{100 * value:.0f}%"


def shortened_name(text: str, width: int) -> str:
    """Return a name that fits, without its middle."""
    if cell_len(text) <= width or width < 5:
        return set_cell_size(text, width) if cell_len(text) > width else text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def shortened(text: str, width: int) -> str:
    """Return the beginning of a sentence that fits."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def _kind_of_state(state: str) -> str:
    return "good" if state in GOOD else "bad" if state in BAD else "warn"


def _plain(text: Callable[[Any], str], kind: str = "") -> Callable[[Any, int], list[Cell]]:
    return lambda row, _width: [(text(row), kind)]


def _name(text: Callable[[Any], str], kind: str = "") -> Callable[[Any, int], list[Cell]]:
    return lambda row, width: [(shortened_name(text(row), width), kind)]


def _state(row: Any, width: int) -> list[Cell]:
    kind = _kind_of_state(row.state) if row.state else "dim"
    return [(shortened(row.state or "-", width), kind)]


def _mark(row: Any, _width: int) -> list[Cell]:
    return [(row.mark, "bad" if row.mark == "stalled" else "warn")] if row.mark else [("", "")]


def _beat(row: Any, _width: int) -> list[Cell]:
    age_s = row.heartbeat_age_s
    kind = "dim" if age_s < 0 else "warn" if age_s > HEARTBEAT_OLD_S else ""
    return [(age(age_s), kind)]


def _rate(row: Any, _width: int) -> list[Cell]:
    kind = {"stalled": "bad", "slow": "warn"}.get(row.mark, "") if row.rate is not None else "dim"
    return [(rate_text(row.rate), kind)]


def _cpu(row: Any, _width: int) -> list[Cell]:
    return [(share_text(row.cpu), "dim" if row.cpu is None else "")]


def _loss(row: RankRow, _width: int) -> list[Cell]:
    kind = "dim" if row.loss is None else "bad" if isinstance(row.loss, str) else ""
    return [(loss_text(row.loss), kind)]


def _lag(row: RankRow, _width: int) -> list[Cell]:
    return [(f"{row.lag:,}", "warn" if row.mark else "")] if row.lag else [("-", "dim")]


RANKS = (
    Column("RANK", 5, _plain(lambda row: str(row.rank)), right=True),
    Column("NODE", 10, _name(lambda row: row.node), flex=3, width_max=32),
    Column("HOST", 10, _name(lambda row: row.host, "dim"), flex=2, width_max=32, from_width=110),
    Column("PID", 8, _plain(lambda row: str(row.pid or "-"), "dim"), right=True, from_width=110),
    Column("STATE", 9, _state),
    Column("STEP", 9, _plain(lambda row: f"{row.step:,}" if row.step >= 0 else "-"), right=True),
    Column("STEPS/S", 7, _rate, right=True),
    Column("BEHIND", 6, _lag, right=True),
    Column("BEAT", 6, _beat, right=True),
    Column("CPU", 5, _cpu, right=True),
    Column("MEM", 5, _plain(lambda row: memory(row.rss_bytes)), right=True),
    Column("LOSS", 9, _loss, right=True, from_width=120),
    Column("", 7, _mark),
    Column("SECTION", 14, _name(lambda row: row.section, "dim"), flex=2, from_width=130),
)
NODES = (
    Column("NODE", 10, _name(lambda row: row.node), flex=3, width_max=32),
    Column("HOST", 10, _name(lambda row: row.host, "dim"), flex=2, width_max=32, from_width=110),
    Column("STATE", 8, _state),
    Column("RANKS", 8, _name(lambda row: row.ranks_text or "-")),
    Column("UP", 5, _plain(lambda row: f"{row.running}/{row.size}" if row.ranks else "-")),
    Column("STEP", 9, _plain(lambda row: f"{row.step_min:,}" if row.step_min >= 0 else "-"),
           right=True),
    Column("STEPS/S", 7, _rate, right=True),
    Column("BEAT", 5, _beat, right=True),
    Column("CPU", 5, _cpu, right=True),
    Column("MEM", 5, _plain(lambda row: memory(row.rss_bytes)), right=True),
    Column("GPU", 5, _plain(lambda row: share_text(row.gpu)), right=True, from_width=100),
    Column("", 7, _mark),
)  # fmt: skip


def _stage(name: Stage) -> Callable[[Any, int], list[Cell]]:
    def cells(row: GenerationRow, _width: int) -> list[Cell]:
        seconds = row.stages.get(name)
        return [(duration(seconds), "dim" if seconds is None else "")]

    return cells


def _stage_bar(row: GenerationRow, width: int) -> list[Cell]:
    """Return the stages of a restart as a bar."""
    total = row.down_s
    if not total:
        return [("", "")]
    cells: list[Cell] = []
    drawn, passed = 0, 0.0
    for name in RESTART_STAGES:
        passed += row.stages.get(name, 0.0)
        upto = round(width * passed / total)
        if upto > drawn:
            cells.append((BAR * (upto - drawn), f"stage-{name}"))
            drawn = upto
    return cells


def _ended(row: GenerationRow, width: int) -> list[Cell]:
    if not row.is_over:
        return [("running", "good")]
    return [(shortened(row.ended_by or "-", width), "")]


TIMELINE = (
    Column("GEN", 4, _plain(lambda row: str(row.number)), right=True),
    Column("RAN", 6, _plain(lambda row: duration(row.ran_s)), right=True),
    Column("RANKS", 6, _plain(lambda row: str(row.world_size or "-"), "dim"), right=True,
           from_width=110),
    Column("DETECT", 6, _stage(Stage.DETECT), right=True, kind="stage-detect"),
    Column("STOP", 6, _stage(Stage.STOP), right=True, kind="stage-stop"),
    Column("REGROUP", 7, _stage(Stage.REGROUP), right=True, kind="stage-regroup"),
    Column("START", 6, _stage(Stage.START), right=True, kind="stage-start"),
    Column("WARMUP", 6, _stage(Stage.WARMUP), right=True, kind="stage-warmup"),
    Column("DOWN", 6, _plain(lambda row: duration(row.down_s or None)), right=True, from_width=110),
    Column("STAGES", 16, _stage_bar, flex=1, from_width=110),
    Column("ENDED BY", 12, _ended, flex=3),
)  # fmt: skip


def _time_text(event: EventRecord) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event.wall))


EVENTS = (
    Column("TIME", 8, _plain(_time_text, "dim")),
    Column("NODE", 10, _name(lambda row: row.source or "job"), flex=1),
    Column(
        "EVENT",
        40,
        lambda row, width: [(shortened(row.text or row.kind.value, width), "")],
        flex=6,
    ),
)


# The head.


def head(job: LiveJob, width: int, now: float) -> list[list[Cell]]:
    """Return three lines: the job, its progress, and the last change or problem."""
    one = job.header
    if not one.run_id:
        return [[("holdfast top", "accent")], [], [(job.problem, "warn")]]
    goodput = f"{'≤' if one.goodput_is_upper_bound else ''}{share(one.goodput)}"
    spares = one.present - one.members
    first = [
        [("generation " if width >= 100 else "gen ", "dim"), (generation(one.generation), "")],
        [("restarts ", "dim"), (f"{one.restarts}/{one.max_restarts}", _budget_kind(job))],
        [("goodput ", "dim"), (goodput, "")],
        [("up ", "dim"), (duration(one.elapsed_s), "")],
    ]
    second = [
        [
            ("nodes ", "dim"),
            (f"{one.members}/{one.max_nodes}", ""),
            (f"+{spares}" if spares > 0 else "", "dim"),
        ],
        [("ranks ", "dim"), (f"{one.running}/{one.ranks}", "" if _all_run(job) else "warn")],
        [
            ("step ", "dim"),
            (steps_text(one.step_min, one.step_max), ""),
            (f" of {one.total:,}" if one.total > 0 else "", "dim"),
        ],
        [(rate_text(one.rate), ""), (" steps/s" if width >= 100 else "/s", "dim")],
        *(
            [[("ETA ", "dim"), (duration(one.eta_s), "")]]
            if one.total > 0 and not job.is_over
            else []
        ),
        [("cores ", "dim"), (_cores(one.cpu), "")],
        [("mem ", "dim"), (memory(one.rss_bytes), "")],
    ]
    name = shortened_name(one.run_id, max(8, width // 4))
    state = one.state if job.end is None else job.end.outcome.value
    top = [(f" {name} ", "accent"), (f" {state} ", _kind_of_state(state)), ("  ", "")]
    return [
        top + _joined(first, width - _width(top)),
        [(" ", ""), *_joined(second, width - 1)],
        [(" ", ""), *_newest_event(job, width - 1, now)],
    ]


def _cores(cpu: float | None) -> str:
    if cpu is None:
        return "-"
    return f"{cpu:.0f}" if cpu >= 100 else f"{cpu:.1f}"


def _budget_kind(job: LiveJob) -> str:
    one = job.header
    return "bad" if one.restarts >= one.max_restarts > 0 else "warn" if one.restarts else ""


def _all_run(job: LiveJob) -> bool:
    return job.header.running == job.header.ranks


def _newest_event(job: LiveJob, width: int, now: float) -> list[Cell]:
    one = job.header
    if job.problem:
        if job.end is not None:
            return [(shortened(f"the job is over: {job.end.why}", width), "accent")]
        since = duration(job.age_s(now))
        return [(shortened(f"not up to date ({since}): {job.problem}", width), "bad")]
    if one.delay:
        return [(shortened(one.delay, width), "warn")]
    if one.why:
        return [("last change: ", "dim"), (shortened(one.why, width - 13), "")]
    return [("", "")]


def _joined(parts: list[list[Cell]], width: int) -> list[Cell]:
    """Return as many parts as fit, with equal gaps."""
    gap = 3 if sum(_width(one) + 3 for one in parts) - 3 <= width else 2
    cells: list[Cell] = []
    for part in parts:
        if _width(cells) + _width(part) > width:
            break
        cells += [*part, (" " * gap, "")]
    return cells[:-1]


def _width(cells: list[Cell]) -> int:
    return sum(cell_len(text) for text, _ in cells)


# A row in full.


def rank_in_full(row: RankRow) -> str:
    """Return a rank in full."""
    facts = [
        f"rank {row.rank} on {row.node}" + (f" ({row.host})" if row.host not in ("", row.node) else ""),
        f"local rank {row.local_rank}" if row.local_rank >= 0 else "",
        f"pid {row.pid}" if row.pid else "",
        row.state,
        f"in {row.section}" if row.section else "",
        f"last step {age(row.step_age_s)} ago" if row.step_age_s >= 0 else "reports no steps",
        f"ETA {duration(row.eta_s)}" if row.total > 0 else "",
        f"loss {loss_text(row.loss)}" if row.loss is not None else "",
        f"{row.lag:,} behind the fastest" if row.lag else "",
        row.mark,
    ]  # fmt: skip
    return " · ".join(one for one in facts if one)


def node_in_full(row: NodeRow) -> str:
    """Return a node in full."""
    facts = [
        f"node {row.node}",
        f"host {row.host}" if row.host else "",
        row.address,
        row.state,
        f"ranks {row.ranks_text}" if row.ranks_text else "no ranks",
        f"generation {generation(row.generation)}",
        f"steps {steps_text(row.step_min, row.step_max)}" if row.step_max >= 0 else "",
        row.mark,
    ]
    return " · ".join(one for one in facts if one)


def generation_in_full(row: GenerationRow) -> str:
    """Return a generation in full."""
    stages = ", ".join(
        f"{name} {duration(row.stages[name])}" for name in RESTART_STAGES if name in row.stages
    )
    facts = [
        f"generation {row.number}",
        f"before it {duration(row.down_s)}: {stages}" if stages else "",
        f"ran {duration(row.ran_s)}" if row.ran_s is not None else "",
        f"ended by: {row.ended_by or 'unknown'}" if row.is_over else "running",
    ]  # fmt: skip
    return " · ".join(one for one in facts if one)


def event_in_full(row: EventRecord) -> str:
    """Return an event in full."""
    rank = f" · rank {row.rank}" if row.rank >= 0 else ""
    return f"{_time_text(row)} · {row.source or 'job'}{rank} · {row.text or row.kind.value}"
