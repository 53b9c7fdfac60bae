"""The story of a simulated run: what happened, in the order in which it did, for a person to read.

Lines are kept as they are cheapest, and put in words only when they are asked for.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from holdfast.core.news import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.news import View

STORY_LINES_MAX = 1_000


class Story:
    """The last lines of a run, or all of them."""

    def __init__(self, *, lines_max: int | None = STORY_LINES_MAX) -> None:
        self._lines: deque[tuple[float, object, str, object]] = deque(maxlen=lines_max)

    def note(self, now: float, who: object, what: str, about: object = None) -> None:
        """Write down what somebody did; `about` is put where `what` has `{0}`."""
        self._lines.append((now, who, what, about))

    def lines(self) -> Iterator[str]:
        """Return what happened, line by line."""
        for now, who, what, about in self._lines:
            text = what.format(about) if about is not None else what
            yield f"{now:10.4f} s  {who!s:<16}  {text}"


class Shown:
    """A view, in the words of a story."""

    __slots__ = ("_view",)

    def __init__(self, view: View) -> None:
        self._view = view

    def __format__(self, _spec: str) -> str:
        view = self._view
        what = f"is told: {view.role.value}"
        if view.role is Role.MEMBER:
            what += f" of round {view.round_term}.{view.round}, rank {view.rank} of {view.size}"
        if view.outcome is not None:
            what += f", {view.outcome.value}{' (final)' if view.final else ''}"
        return (
            f"{what}, generation {view.generation}, restarts {view.restarts}"
            f" [{view.term}.{view.revision}] {view.why}"
        )
