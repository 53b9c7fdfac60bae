"""The app of `holdfast top`: a head, one of four tables, a row in full, and keys.

The app renders a `LiveJob`. `drive` receives the job and a function to call after every change, and
returns the driver that keeps the job up to date (`control.job_feed.Feed`).
"""

from __future__ import annotations

import math
import os
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import msgspec
from rich.cells import chop_cells
from textual import on
from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input

from holdfast.control.job_client import ControlProblem, JobUnreachable
from holdfast.control.live_job import LiveJob
from holdfast.core.requests import Action
from holdfast.views.top import columns, screens, sparklines
from holdfast.views.top.table import Cell, Lines, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual import events
    from textual.app import ComposeResult

    from holdfast.control.job_client import JobClient
    from holdfast.control.live_job import NodeRow, RankRow

Row = TypeVar("Row", "RankRow", "NodeRow")

SHOW_S = 0.1
"""Changes within this time are shown together."""
TICK_S = 1.0
TALL_LINES = 36
"""From this height on, the timeline is below every other table."""
NAMES = ("ranks", "nodes", "timeline", "events")
SORTS: dict[str, Callable[[RankRow], Any]] = {
    "rank": lambda row: row.rank,
    "slowest": lambda row: (math.inf if row.rate is None else row.rate, row.rank),
    "behind": lambda row: (-row.lag, row.rank),
    "heartbeat": lambda row: (-row.heartbeat_age_s, row.rank),
    "memory": lambda row: (-row.rss_bytes, row.rank),
}

IN_FULL: dict[str, Callable[[Any], str]] = {
    "ranks": columns.rank_in_full,
    "nodes": columns.node_in_full,
    "timeline": columns.generation_in_full,
    "events": columns.event_in_full,
}


class JobUpdater(Protocol):
    """Keeps a job up to date: a `Feed` or a fake."""

    client: JobClient | None

    async def run(self) -> None: ...


class Block(Lines, can_focus=False):
    """A few lines that do not scroll."""

    DEFAULT_CSS = "Block { overflow: hidden hidden; }"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._cells: list[list[Cell]] = []

    def show(self, cells: list[list[Cell]]) -> None:
        self._cells = cells
        if self.size.height:
            self.redraw()

    def line_count(self) -> int:
        return min(len(self._cells), self.size.height)

    def line(self, at: int, width: int) -> tuple[list[Cell], bool]:
        del width
        return self._cells[at], False


class JobScreen(Screen[None]):
    """The job: head, tables, and the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "logs", "logs"),
        Binding("t", "stacks", "stacks"),
        Binding("T", "stacks(True)", "stacks of all", show=False),
        Binding("r", "restart", "restart"),
        Binding("d", "drain", "drain"),
        Binding("x", "stop", "stop"),
        Binding("s", "sort", "sort"),
        Binding("m", "marked", "marked"),
        Binding("slash", "find", "find", key_display="/"),
        Binding("h", "span", "history", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "leave", "quit"),
        Binding("ctrl+c", "leave", "quit", show=False),
        Binding("escape", "all", "all", show=False),
        *(
            Binding(str(number), f"view('{name}')", name, show=False)
            for number, name in enumerate(NAMES, 1)
        ),
        Binding("tab", "next", "next", show=False),
    ]
    CSS = """
    JobScreen { layout: vertical; }
    #head { height: 4; background: $surface; }
    #tabs { height: 1; background: $panel; }
    #full { height: 2; background: $surface; }
    JobScreen Table { height: 1fr; display: none; }
    JobScreen Table.shown { display: block; }
    JobScreen #below { border-top: solid $panel; }
    JobScreen.tall #below { height: 11; display: block; }
    JobScreen.tall.timeline #below { display: none; }
    JobScreen.texts #full { height: 4; }
    #find { height: 1; border: none; padding: 0 1; display: none; }
    """

    def __init__(self, job: LiveJob, client: Callable[[], JobClient | None]) -> None:
        super().__init__()
        self.job = job
        self._client = client
        self.view = "ranks"
        self.sort = "rank"
        self.only_marked = False
        self.wanted = ""
        self.span = next(iter(sparklines.SPANS))
        self._glyphs = sparklines.glyphs_of(os.environ)

    def compose(self) -> ComposeResult:
        yield Block("head")
        yield Block("tabs")
        yield Table(
            "ranks", columns.RANKS, lambda row: (row.node, row.local_rank), empty="no ranks"
        )
        yield Table("nodes", columns.NODES, lambda row: row.node, empty="no nodes")
        yield Table("timeline", columns.TIMELINE, lambda row: row.number, empty="no generation")
        yield Table("events", columns.EVENTS, lambda row: row, empty="no events yet", follows=True)
        below = Table("below", columns.TIMELINE, lambda row: row.number, empty="no generation")
        below.can_focus = False
        yield below
        yield Block("full")
        yield Input(
            placeholder="a rank, a range such as 8-15, part of a name", id="find", compact=True
        )
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.action_view(self.view)

    # Showing.

    def table_of(self, name: str) -> Table:
        return self.query_one(f"#{name}", Table)

    @property
    def table(self) -> Table:
        """The table that is shown."""
        return self.table_of(self.view)

    def block(self, name: str) -> Block:
        return self.query_one(f"#{name}", Block)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height >= TALL_LINES, "tall")
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Show the current state of the job."""
        self.show_head()
        self.table.show(self._rows(self.view))
        below = self.table_of("below")
        if below.size.height:
            below.show(self.job.generations)
        self._show_full()

    def show_head(self) -> None:
        width = self.size.width
        history = sparklines.history_line(self.job, width - 2, self.span, self._glyphs)
        self.block("head").show(
            [*columns.head(self.job, width, monotonic()), [(" ", ""), *history]]
        )
        cells: list[Cell] = [(" ", "")]
        counts = {
            "ranks": len(self.job.ranks),
            "nodes": len(self.job.nodes),
            "timeline": len(self.job.generations),
        }
        for number, name in enumerate(NAMES, 1):
            count = f" {counts[name]}" if name in counts else ""
            kind = "accent" if name == self.view else "dim"
            cells.append((f"{number} {name}{count}   ", kind))
        notes = [
            f"{self.job.header.marked} marked" if self.job.header.marked else "",
            f"by {self.sort}" if self.view == "ranks" and self.sort != "rank" else "",
            "only marked" if self.only_marked else "",
            f"find {self.wanted!r}" if self.wanted else "",
            self._measured() if self.view == "timeline" else "",
        ]
        note = " · ".join(one for one in notes if one)
        used = sum(len(text) for text, _ in cells)
        cells.append((note.rjust(max(0, width - used - 1)), "warn"))
        self.block("tabs").show([cells])

    def _measured(self) -> str:
        one = self.job.header
        is_part = one.measured < one.members
        return f"recorded by {one.measured} of {one.members} nodes" if is_part else ""

    def _show_full(self) -> None:
        row = self.table.selected
        text = ""
        if row is not None:
            text = IN_FULL[self.view](row)
        width = max(10, self.size.width - 2)
        lines = _wrapped(text, width)
        room = max(1, self.block("full").size.height)
        if len(lines) > room:
            lines = [*lines[: room - 1], columns.shortened(" ".join(lines[room - 1 :]), width)]
        self.block("full").show([[(f" {line}", "")] for line in lines])

    def _rows(self, name: str) -> Sequence[Any]:
        job = self.job
        if name == "timeline":
            return job.generations
        if name == "events":
            return [one for one in job.events if self._is_wanted(f"{one.source} {one.text}")]
        if name == "nodes":
            return [
                one
                for one in self._as_last_reported(job.nodes)
                if (one.mark or not self.only_marked)
                and self._is_wanted(f"{one.node} {one.host} {one.state} {one.mark}")
            ]
        rows = self._as_last_reported(job.ranks)
        if self.only_marked:
            rows = [row for row in rows if row.mark]
        if self.wanted:
            ranks = _ranks_of(self.wanted)
            rows = [
                row
                for row in rows
                if (
                    row.rank in ranks
                    if ranks
                    else self._is_wanted(f"{row.node} {row.host} {row.state} {row.mark}")
                )
            ]
        return rows if self.sort == "rank" else sorted(rows, key=SORTS[self.sort])

    def _as_last_reported(self, rows: list[Row]) -> list[Row]:
        """Return ranks or nodes; after the end of the job, without a state, because nothing runs."""
        if not self.job.is_over:
            return rows
        return [msgspec.structs.replace(row, state="", mark="") for row in rows]

    def _is_wanted(self, text: str) -> bool:
        return self.wanted.lower() in text.lower()

    @on(Table.Moved)
    def _moved(self) -> None:
        self._show_full()

    @on(Table.Chosen)
    def _chosen(self, event: Table.Chosen) -> None:
        if event.table.id == "nodes":
            self.wanted = event.row.node
            self.action_view("ranks")
        elif event.table.id == "ranks":
            self.action_logs()
        else:
            lines = IN_FULL[self.view](event.row).split(" · ")
            self.app.push_screen(screens.RowScreen(self.view, lines))

    # Keys that change the view.

    def action_view(self, name: str) -> None:
        self.table.remove_class("shown")
        self.view = name
        self.table.add_class("shown")
        self.set_class(name == "timeline", "timeline")
        self.set_class(name in ("timeline", "events"), "texts")
        self.table.focus()
        self.call_after_refresh(self.show)

    def action_next(self) -> None:
        self.action_view(NAMES[(NAMES.index(self.view) + 1) % len(NAMES)])

    def action_sort(self) -> None:
        names = [*SORTS]
        self.sort = names[(names.index(self.sort) + 1) % len(names)]
        self.table_of("ranks").move_cursor(0)  # The first row is the interesting one.
        self.table_of("ranks").rows = ()
        self.action_view("ranks")

    def action_span(self) -> None:
        names = [*sparklines.SPANS]
        self.span = names[(names.index(self.span) + 1) % len(names)]
        self.show_head()

    def action_marked(self) -> None:
        self.only_marked = not self.only_marked
        self.show()

    def action_find(self) -> None:
        find = self.query_one("#find", Input)
        find.display = True
        find.value = self.wanted
        find.focus()

    def action_all(self) -> None:
        """Show all rows again."""
        self.wanted, self.only_marked = "", False
        self._end_find()

    @on(Input.Changed, "#find")
    def _find_changed(self, event: Input.Changed) -> None:
        self.wanted = event.value.strip()
        self.show()

    @on(Input.Submitted, "#find")
    def _end_find(self) -> None:
        self.query_one("#find", Input).display = False
        self.table.focus()
        self.call_after_refresh(self.show)

    def action_leave(self) -> None:
        self.app.exit()

    def action_help(self) -> None:
        self.app.push_screen(screens.HelpScreen())

    # Keys for requests to the job.

    @property
    def node(self) -> NodeRow | None:
        """The node that is selected, or that has the selected rank."""
        row = self.table.selected
        if self.view not in ("ranks", "nodes") or row is None:
            self.notify("choose a rank (1) or a node (2) first", severity="warning")
            return None
        return next((one for one in self.job.nodes if one.node == row.node), None)

    def action_logs(self) -> None:
        node = self.node
        if node is None:
            return
        job = self.job
        if self.view == "ranks":
            rank: int = self.table.selected.rank
            title = f"logs of rank {rank}, {node.node}"
            self.app.push_screen(
                screens.LogsScreen(title, lambda: job.node_of(rank), [rank], self._client)
            )
        else:
            name = node.node
            self.app.push_screen(
                screens.LogsScreen(f"logs of {name}", lambda: name, [], self._client)
            )

    def action_stacks(self, every: bool = False) -> None:
        if every:
            names = [one.node for one in self.job.nodes if one.ranks]
            self.app.push_screen(screens.StacksScreen("stacks of all nodes", names, self._client))
        elif (node := self.node) is not None:
            title = f"stacks of the workers of {node.node}"
            self.app.push_screen(screens.StacksScreen(title, [node.node], self._client))

    def action_restart(self) -> None:
        job = self.job.header
        self._confirm(
            Action.RESTART,
            f"Restart all {job.ranks} workers of {job.run_id}?",
            f"Generation {job.generation + 1} starts on all nodes. No restart is charged.",
        )

    def action_drain(self) -> None:
        node = self.node
        if node is None:
            return
        if node.drained:
            what = "It is eligible again when the next round forms."
            self._confirm(Action.UNDRAIN, f"Undrain {node.node}?", what, node.node)
        else:
            what = (
                "Its workers stop. It gets no workers until it is undrained. A standby replaces it, "
                "or the job continues with fewer nodes. No restart is charged."
            )
            self._confirm(Action.DRAIN, f"Drain {node.node}?", what, node.node)

    def action_stop(self) -> None:
        job = self.job.header
        what = f"All {job.ranks} workers stop, and all agents exit. This is final."
        self._confirm(Action.STOP, f"Stop {job.run_id}?", what)

    def _confirm(self, action: Action, title: str, consequence: str, node: str = "") -> None:
        if self.job.is_over:
            self.notify("the job is over", severity="warning")
            return

        def answered(reason: str | None) -> None:
            if reason is not None:
                self.run_worker(self._request(action, node, reason))

        self.app.push_screen(
            screens.ConfirmScreen(title, consequence, action.value.capitalize()), answered
        )

    async def _request(self, action: Action, node: str, reason: str) -> None:
        what = f"{action.value} {node}".strip()
        try:
            client = self._client()
            if client is None:
                raise JobUnreachable("the job is not reachable")
            as_is = await client.request(action, node=node, why=reason)
        except ControlProblem as problem:
            self.notify(f"{what}: {problem.message}", severity="error", markup=False)
        else:
            self.notify(as_is or f"{what} accepted", markup=False)


class Top(App[None]):
    """A running job in a terminal."""

    TITLE = "holdfast top"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, drive: Callable[[LiveJob, Callable[[], None]], JobUpdater]) -> None:
        super().__init__()
        self.animation_level = "none"
        self.job = LiveJob()
        self.driver = drive(self.job, self._changed)
        self.page = JobScreen(self.job, lambda: self.driver.client)
        self._is_due = False

    def on_mount(self) -> None:
        self.push_screen(self.page)
        self.run_worker(self.driver.run())
        self.set_interval(TICK_S, self._tick)

    def _changed(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.set_timer(SHOW_S, self._show)

    def _show(self) -> None:
        self._is_due = False
        if self.is_running and self.page.is_mounted:
            self.page.show()

    def _tick(self) -> None:
        """Show the age of the state while the job does not respond."""
        if self.job.problem and self.is_running and self.page.is_mounted:
            self.page.show_head()


def _wrapped(text: str, width: int) -> list[str]:
    """Return a sentence in lines, broken between words if possible."""
    lines: list[str] = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines += chop_cells(word, width) or [""]
    return [line for line in lines if line] or [""]


def _ranks_of(text: str) -> frozenset[int] | range:
    """Return the ranks in a search; none if it is not a rank or a range."""
    low, dash, high = text.partition("-")
    if low.isdecimal() and (high.isdecimal() if dash else not high):
        return range(int(low), int(high if dash else low) + 1)
    return frozenset()
