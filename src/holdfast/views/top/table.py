"""Tables and texts of any length; only the visible part is rendered.

A table requests the cells of visible rows only, and redraws the lines whose cells changed. So a job of
a thousand ranks costs little more than one of twenty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.style import Style
    from textual import events

Cell = tuple[str, str]
"""A text and its style: one of `KINDS`, or empty."""
KINDS = ("dim", "good", "warn", "bad", "accent", "head", "cursor", "found", "stage-detect",
         "stage-stop", "stage-regroup", "stage-start", "stage-warmup")  # fmt: skip
GAP = " "
LINES_MAX = 20_000
"""The limit for lines of a text; older lines are dropped."""


class Column(NamedTuple):
    """One column of a table."""

    title: str
    width: int
    """The minimum."""
    cells: Callable[[Any, int], list[Cell]]
    """The cells of a row at this width."""
    right: bool = False
    flex: int = 0
    """Its share of the remaining width."""
    width_max: int = 1_000
    from_width: int = 0
    """The minimum width of the table; in a narrower one the column is hidden."""
    kind: str = ""
    """The style of its title."""


class Lines(ScrollView, can_focus=True):
    """A scrollable list of lines; only the visible ones are created."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "page up", show=False),
        Binding("pagedown,ctrl+f,space", "page(1)", "page down", show=False),
        Binding("home,g", "edge(-1)", "first", show=False),
        Binding("end,G", "edge(1)", "last", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"lines--{kind}" for kind in KINDS}
    HEAD_LINES = 0
    DEFAULT_CSS = """
    Lines {
        scrollbar-size-vertical: 1;
        overflow-x: hidden;
        overflow-y: scroll;
        scrollbar-background: $background;
        scrollbar-color: $panel-lighten-2;
        & > .lines--dim { text-style: dim; }
        & > .lines--good { color: $success; }
        & > .lines--warn { color: $warning; }
        & > .lines--bad { color: $error; text-style: bold; }
        & > .lines--accent { color: $accent; text-style: bold; }
        & > .lines--head { color: $text-muted; background: $surface; text-style: bold; }
        & > .lines--cursor { background: $primary-muted; }
        & > .lines--found { background: $warning; color: $background; }
        & > .lines--stage-detect { color: $error; }
        & > .lines--stage-stop { color: $warning; }
        & > .lines--stage-regroup { color: #b48ead; }
        & > .lines--stage-start { color: $primary; }
        & > .lines--stage-warmup { color: $success; }
    }
    """

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._drawn: dict[int, tuple[list[Cell], bool]] = {}
        self._kind_styles: dict[str, Style] = {}

    # For subclasses.

    def line_count(self) -> int:
        raise NotImplementedError

    def line(self, at: int, width: int) -> tuple[list[Cell], bool]:
        """Return a line's cells, and whether the cursor is on it."""
        raise NotImplementedError

    def head(self, width: int) -> list[Cell]:
        raise NotImplementedError

    # Drawing.

    @property
    def page(self) -> int:
        """How many lines are visible."""
        return max(1, self.scrollable_content_region.height - self.HEAD_LINES)

    def redraw(self) -> None:
        """Redraw the lines that changed."""
        size = self.scrollable_content_region.size
        height = self.line_count() + self.HEAD_LINES
        if self.virtual_size != (size.width, height):
            self.virtual_size = Size(size.width, height)
        for y in range(size.height):
            drawn = self._content(y, size.width)
            if self._drawn.get(y) != drawn:
                self._drawn[y] = drawn
                self.refresh_line(y + self.scroll_offset.y)

    def _content(self, y: int, width: int) -> tuple[list[Cell], bool]:
        if y < self.HEAD_LINES:
            return self.head(width), False
        at = y - self.HEAD_LINES + self.scroll_offset.y
        return self.line(at, width) if at < self.line_count() else ([], False)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        cells, is_at_cursor = self._drawn[y] = self._content(y, width)
        background = self.rich_style
        if y < self.HEAD_LINES:
            background = self.style_of("head")
        elif is_at_cursor:
            background += self.style_of("cursor")
        segments = [
            Segment(text, background + self.style_of(kind) if kind else background)
            for text, kind in cells
            if text
        ]
        # Adjacent segments of one style become one, which saves bytes on a slow connection.
        return Strip(segments).adjust_cell_length(width, background).simplify()

    def style_of(self, kind: str) -> Style:
        style = self._kind_styles.get(kind)
        if style is None:
            partial = kind != "head"
            style = self.get_component_rich_style(f"lines--{kind}", partial=partial)
            self._kind_styles[kind] = style
        return style

    def notify_style_update(self) -> None:
        self._kind_styles.clear()
        super().notify_style_update()

    def on_resize(self, event: events.Resize) -> None:
        del event
        self._drawn.clear()
        self.redraw()

    # Moving.

    def action_move(self, by: int) -> None:
        self.scroll_to(y=self.scroll_offset.y + by, animate=False)

    def action_page(self, by: int) -> None:
        self.scroll_to(y=self.scroll_offset.y + by * self.page, animate=False)

    def action_edge(self, where: int) -> None:
        self.scroll_to(y=0 if where < 0 else self.line_count(), animate=False)


class Table(Lines):
    """A head, and rows with a cursor on one of them."""

    HEAD_LINES = 1

    class Moved(Message):
        """The cursor moved to another row."""

    class Chosen(Message):
        """A row was chosen, by Enter or a second click."""

        def __init__(self, table: Table, row: Any) -> None:
            super().__init__()
            self.table, self.row = table, row

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "open", show=False)]

    def __init__(
        self,
        name: str,
        columns: Sequence[Column],
        key: Callable[[Any], object],
        *,
        empty: str,
        follows: bool = False,
    ) -> None:
        super().__init__(name)
        self._columns, self._key, self._follows, self._empty = columns, key, follows, empty
        self.rows: Sequence[Any] = ()
        self.cursor = 0
        self._widths: tuple[int, list[tuple[Column, int]]] = (-1, [])

    @property
    def selected(self) -> Any:
        """The row under the cursor; None if there is none."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def show(self, rows: Sequence[Any]) -> None:
        """Show these rows; the cursor stays on its row."""
        old = self.selected
        at_end = self.cursor >= len(self.rows) - 1
        self.rows = rows
        cursor = min(self.cursor, max(0, len(rows) - 1))
        if self._follows and at_end:
            cursor = max(0, len(rows) - 1)
        elif old is not None:
            key = self._key(old)
            if not rows or self._key(rows[cursor]) != key:
                cursor = next((at for at, row in enumerate(rows) if self._key(row) == key), cursor)
        self._set_cursor(cursor)

    def line_count(self) -> int:
        return len(self.rows) or bool(self._empty)

    def head(self, width: int) -> list[Cell]:
        return self._laid_out(width, lambda column, size: [(column.title[:size], column.kind)])

    def line(self, at: int, width: int) -> tuple[list[Cell], bool]:
        if not self.rows:
            return [(f" {self._empty}", "dim")], False
        row = self.rows[at]
        return self._laid_out(width, lambda column, size: column.cells(row, size)), (
            at == self.cursor and self.can_focus
        )

    def _laid_out(self, width: int, cells: Callable[[Column, int], list[Cell]]) -> list[Cell]:
        found: list[Cell] = []
        for column, size in self._layout_of(width):
            found.append((GAP, ""))
            inside = cells(column, size)
            used = sum(cell_len(text) for text, _ in inside)
            pad = (" " * (size - used), "") if used < size else None
            if pad and column.right:
                found.append(pad)
            found += inside if used <= size else [(set_cell_size(inside[0][0], size), inside[0][1])]
            if pad and not column.right:
                found.append(pad)
        return found

    def _layout_of(self, width: int) -> list[tuple[Column, int]]:
        if self._widths[0] != width:
            shown = [one for one in self._columns if width >= one.from_width]
            left = max(0, width - sum(one.width for one in shown) - len(GAP) * len(shown))
            shares = sum(one.flex for one in shown)
            sizes = []
            for one in shown:
                more = left * one.flex // shares if one.flex else 0
                sizes.append(min(one.width_max, one.width + more))
                # Unused width is left for the next columns.
                left -= sizes[-1] - one.width
                shares -= one.flex
            self._widths = (width, list(zip(shown, sizes, strict=True)))
        return self._widths[1]

    # Moving.

    def _set_cursor(self, cursor: int) -> None:
        self.cursor = cursor
        top, page = self.scroll_offset.y, self.page
        if self.size.height:
            # Set the height first, because it limits scrolling.
            self.virtual_size = Size(
                self.scrollable_content_region.width, self.line_count() + self.HEAD_LINES
            )
            if cursor < top:
                self.scroll_to(y=cursor, animate=False, immediate=True)
            elif cursor >= top + page:
                self.scroll_to(y=cursor - page + 1, animate=False, immediate=True)
            self.redraw()

    def move_cursor(self, cursor: int) -> None:
        """Put the cursor on another row."""
        self._set_cursor(max(0, min(len(self.rows) - 1, cursor)))
        self.post_message(self.Moved())

    def action_move(self, by: int) -> None:
        self.move_cursor(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_cursor(self.cursor + by * self.page)

    def action_edge(self, where: int) -> None:
        self.move_cursor(0 if where < 0 else len(self.rows) - 1)

    def action_choose(self) -> None:
        if self.selected is not None:
            self.post_message(self.Chosen(self, self.selected))

    def on_click(self, event: events.Click) -> None:
        at = event.y - self.HEAD_LINES + self.scroll_offset.y
        if event.y >= self.HEAD_LINES and at < len(self.rows) and self.can_focus:
            if at == self.cursor and event.chain > 1:
                self.action_choose()
            self.move_cursor(at)


class TextView(Lines):
    """Lines of untrusted text; `find` marks matches."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__("text")
        self.follows = follows
        self._texts: list[tuple[str, str]] = []
        self._lines: list[tuple[str, str]] = []
        """The texts, wrapped to the width of the screen."""
        self._wrapped_at = 0
        self._found = ""
        self._at = -1

    def line_count(self) -> int:
        return len(self._lines)

    def add(self, texts: Sequence[tuple[str, str]]) -> None:
        """Add lines, each with its style."""
        self._texts += texts
        del self._texts[:-LINES_MAX]
        self._lines += self._wrapped(texts)
        surplus = len(self._lines) - LINES_MAX
        if surplus > 0:
            del self._lines[:surplus]
            self._at = max(-1, self._at - surplus)
        if self.size.height:
            self.redraw()
            if self.follows:
                self.scroll_end(animate=False, immediate=True)
                self.redraw()

    def clear(self) -> None:
        """Remove all lines."""
        self._texts.clear()
        self._lines.clear()
        self._at = -1
        self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        width = self.scrollable_content_region.width
        if width != self._wrapped_at:
            self._wrapped_at = width
            self._lines = self._wrapped(self._texts)[-LINES_MAX:]
            self._at = -1
        super().on_resize(event)
        self.add(())

    def _wrapped(self, texts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        width = self.scrollable_content_region.width or 80
        return [
            (part, kind)
            for text, kind in texts
            for part in ([text] if len(text) * 2 <= width else chop_cells(text, width) or [""])
        ]

    def line(self, at: int, width: int) -> tuple[list[Cell], bool]:
        del width
        text, kind = self._lines[at]
        if not self._found:
            return [(text, kind)], False
        cells: list[Cell] = []
        low, start = text.lower(), 0
        while (where := low.find(self._found, start)) >= 0:
            end = where + len(self._found)
            cells += [(text[start:where], kind), (text[where:end], "found")]
            start = end
        return [*cells, (text[start:], kind)], at == self._at

    def find(self, text: str) -> int:
        """Mark a text; return how many lines contain it."""
        self._found, self._at = text.lower(), -1
        self.redraw()
        return len(self._matching_lines())

    def _matching_lines(self) -> list[int]:
        if not self._found:
            return []
        return [at for at, (text, _) in enumerate(self._lines) if self._found in text.lower()]

    def move_to_found(self, by: int) -> None:
        """Scroll to the next or the previous line with the text."""
        where = self._matching_lines()
        if not where:
            return
        if self._at < 0:
            self._at = self.scroll_offset.y + self.page if by < 0 else self.scroll_offset.y - 1
        later = [at for at in where if at > self._at] or where[:1]
        earlier = [at for at in where if at < self._at] or where[-1:]
        self._at = later[0] if by > 0 else earlier[-1]
        self.follows = False
        self.scroll_to(y=max(0, self._at - self.page // 2), animate=False, immediate=True)
        self.redraw()
