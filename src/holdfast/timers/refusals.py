"""What a server does not do, told to the person: each kind a few times, and then no more."""

from __future__ import annotations

from holdfast import messages

NAMED_MAX = 5
"""So many refusals of a kind are told; the rest are only counted."""


class Refusals:
    """Tells of requests that are refused, without letting a faulty script fill the log."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def tell(self, kind: str, detail: str, level: int = messages.WARNING) -> None:
        """Say that a request was refused; `kind` is why, `detail` is which."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= NAMED_MAX:
            messages.say(level, f"{self._where}: {kind}: {detail}")
        if count == NAMED_MAX:
            messages.say(level, f"{self._where}: {kind}: more of these are not told")
