"""The screens over the tables of `holdfast top`: a question, logs, stacks, help."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Footer, Input, Label, Static

from holdfast.control.job_client import ControlProblem, JobNotFound, JobUnreachable
from holdfast.control.stack_groups import grouped
from holdfast.core.limits import REQUEST_WHY_CHARS_MAX
from holdfast.printable import visible
from holdfast.views.top.table import TextView
from holdfast.wire.messages import LogsQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult

    from holdfast.control.job_client import JobClient, NodeStacks
    from holdfast.wire.messages import LogLines

    Client = Callable[[], JobClient | None]

TAIL_LINES = 1_000
"""The number of earlier lines to show of each worker."""
LINE_CHARS_MAX = 4_000
GATHER_S = 0.1
"""Lines within this time are shown together."""
WAIT_S = 0.5
STACKS_AT_ONCE = 32
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Escape sequences for colours, titles and cursors."""

HELP = """\
[b]Views[/b]  1 ranks   2 nodes   3 timeline   4 events   Tab the next one
  ↑ ↓ PgUp PgDn Home End, or j k g G; Enter opens a row

[b]Look closer[/b]
  l  logs of the rank or of all ranks of the node, live
  t  stacks of the node's workers, equal ones grouped; T for all nodes
  h  the time that the history covers: all, two hours, ten minutes
  s  sort ranks: slowest, furthest behind, oldest heartbeat, most memory
  m  only marked ranks: slow, behind or stalled
  /  find: a rank, a range such as 8-15, or part of a name; Esc shows all

[b]Change something[/b] (after a confirmation)
  r  restart all workers; no restart is charged
  d  drain the node, or undrain it
  x  stop the job, on all nodes
  q  quit; the job continues

[b]slow[/b]     below 80 % of the median rate
[b]behind[/b]   at least three steps and two seconds behind the fastest rank
[b]stalled[/b]  no step for five times the usual duration of a step
[b]BEAT[/b]     age of the last heartbeat: the last call of holdfast.worker
"""


class ConfirmScreen(ModalScreen[str | None]):
    """Requests a confirmation of a change; the result is the reason, or None if the user declines."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss(None)", "no")]
    DEFAULT_CSS = """
    ConfirmScreen { align: center middle; }
    ConfirmScreen > Vertical {
        width: 64; max-width: 95%; height: auto; max-height: 95%;
        border: round $warning; background: $surface; padding: 0 2;
    }
    ConfirmScreen Label { width: 100%; }
    ConfirmScreen #what { text-style: bold; color: $warning; }
    ConfirmScreen Input { margin: 1 0 0 0; border: tall $primary-muted; }
    ConfirmScreen Horizontal { height: 3; align-horizontal: right; }
    ConfirmScreen Button { margin-left: 2; }
    """

    def __init__(self, title: str, consequence: str, button: str) -> None:
        super().__init__()
        self._title, self._consequence, self._button = title, consequence, button

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._title, id="what", markup=False)
            yield Label(self._consequence, markup=False)
            yield Input(
                placeholder="reason, for the consoles of all nodes (may be empty)",
                max_length=REQUEST_WHY_CHARS_MAX,
                id="reason",
            )
            with Horizontal():
                yield Button("Cancel", id="no")
                yield Button(self._button, variant="warning", id="yes")

    @on(Input.Submitted)
    def _focus_confirmation(self) -> None:
        self.query_one("#yes").focus()

    @on(Button.Pressed)
    def _answered(self, event: Button.Pressed) -> None:
        reason = self.query_one("#reason", Input).value.strip()
        self.dismiss(reason if event.button.id == "yes" else None)


class HelpScreen(ModalScreen[None]):
    """The keys and the marks."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter,ctrl+c", "dismiss(None)", "close")
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > Static {
        width: 78; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; border-subtitle-color: $text-muted;
        background: $surface; padding: 0 1; overflow-y: auto;
    }
    """

    def compose(self) -> ComposeResult:
        text = Static(HELP)
        text.border_title, text.border_subtitle = "holdfast top", "Esc closes"
        yield text


class TextScreen(Screen[None]):
    """A text on the whole screen, with a search."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+c", "leave", "back", key_display="Esc"),
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "find_next(1)", "next"),
        Binding("N", "find_next(-1)", "previous"),
    ]
    DEFAULT_CSS = """
    TextScreen #title { height: 1; background: $surface; color: $accent; text-style: bold; padding: 0 1; }
    TextScreen #note { height: 1; color: $text-muted; padding: 0 1; }
    TextScreen Input { height: 1; border: none; padding: 0 1; display: none; }
    TextScreen TextView { height: 1fr; }
    """
    FOLLOWS = False

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        yield Static(self._title, id="title", markup=False)
        yield TextView(follows=self.FOLLOWS)
        yield Static("", id="note", markup=False)
        yield Input(placeholder="search", id="search", compact=True)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.view.focus()

    @property
    def view(self) -> TextView:
        return self.query_one(TextView)

    def note(self, text: str) -> None:
        """Show a note."""
        self.query_one("#note", Static).update(text)

    def action_leave(self) -> None:
        search = self.query_one("#search", Input)
        if search.has_focus:
            search.display = False
            self.view.focus()
        else:
            self.dismiss(None)

    def action_search(self) -> None:
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    def action_find_next(self, by: int) -> None:
        self.view.move_to_found(by)

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        found = self.view.find(event.value)
        self.note(f"{found} lines contain {event.value!r}" if event.value else "")

    @on(Input.Submitted)
    def _move_to_first_match(self) -> None:
        self.query_one("#search", Input).display = False
        self.view.focus()
        self.view.move_to_found(-1)


class RowScreen(TextScreen):
    """A row in full, of any length."""

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__(title)
        self._given = lines

    def on_mount(self) -> None:
        super().on_mount()
        self.view.add([(line, "") for line in self._given])


class LogsScreen(TextScreen):
    """The output of workers, as they write it."""

    FOLLOWS = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("f", "follow", "follow")]

    def __init__(
        self, title: str, where: Callable[[], str], ranks: list[int], client: Client
    ) -> None:
        super().__init__(title)
        self._where, self._ranks, self._client = where, ranks, client
        self._reading = ""
        self._rest: dict[tuple[int, str], str] = {}
        self._unshown: list[tuple[str, str]] = []

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(GATHER_S, self._show)
        self._begin(self._where())

    def _begin(self, node: str) -> None:
        self._reading = node
        self.run_worker(self._follow(node), exclusive=True)

    async def _follow(self, node: str) -> None:
        """Read the logs of a node until the screen is left."""
        tail = TAIL_LINES
        while True:
            client = self._client()
            try:
                if client is None:
                    raise JobUnreachable("the job is not reachable")
                if not node:
                    raise JobNotFound("no node has this rank now")
                wanted = LogsQuery(ranks=self._ranks, tail=tail, follow=True)
                async for lines in client.logs(node, wanted):
                    self.note("")
                    tail = 0
                    self._append_lines(lines)
            except ControlProblem as problem:
                self.note(problem.message)
            await asyncio.sleep(WAIT_S)

    def _append_lines(self, lines: LogLines) -> None:
        whose = (lines.rank, lines.stream)
        text = self._rest.pop(whose, "") + lines.text.decode(errors="replace")
        *whole, rest = text.split("\n")
        if rest:
            self._rest[whose] = rest[-LINE_CHARS_MAX:]
        mark = f"[{lines.rank}] " if len(self._ranks) != 1 else ""
        kind = "warn" if lines.stream == "stderr" else ""
        self._unshown += [(mark + shown(line), kind) for line in whole]

    def _show(self) -> None:
        node = self._where()
        if node and node != self._reading:  # The rank has moved to another node.
            self._begin(node)
        if self._unshown:
            lines, self._unshown = self._unshown, []
            self.view.add(lines)

    def action_follow(self) -> None:
        self.view.follows = not self.view.follows
        self.note("" if self.view.follows else "not following; press f to follow")
        if self.view.follows:
            self.view.scroll_end(animate=False)


class StacksScreen(TextScreen):
    """The stacks of workers, equal ones grouped."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("u", "update", "update")]

    def __init__(self, title: str, nodes: Sequence[str], client: Client) -> None:
        super().__init__(title)
        self._queried, self._client = nodes, client

    def on_mount(self) -> None:
        super().on_mount()
        self.action_update()

    def action_update(self) -> None:
        self.run_worker(self._read(), exclusive=True)

    async def _read(self) -> None:
        client = self._client()
        self.note(f"requesting stacks from {len(self._queried)} nodes ...")
        self.view.clear()
        if client is None:
            self.note("cannot connect to the job")
            return
        at_once = asyncio.Semaphore(STACKS_AT_ONCE)

        async def query(node: str) -> NodeStacks:
            async with at_once:
                return await client.stacks(node)

        found = await asyncio.gather(*(query(node) for node in self._queried))
        groups = grouped([(one.rank, one.text) for node in found for one in node.workers])
        lines = [(f"{group.ranks_text}: {group.frame}", "accent") for group in groups]
        lines += [(f"{node.node}: {node.problem}", "bad") for node in found if node.problem]
        for group in groups:
            lines += [("", ""), (f"{group.ranks_text}: {group.frame}", "accent")]
            lines += [(f"  {shown(line)}", "") for line in group.text.rstrip().split("\n")]
        self.view.add(lines)
        self.note("" if groups else "no stacks")


def shown(line: str) -> str:
    """Return a line of a worker as a terminal would show it, without escape sequences."""
    line = ESCAPES.sub("", line.rstrip("\r"))
    return visible(line.rpartition("\r")[2][:LINE_CHARS_MAX].expandtabs())
