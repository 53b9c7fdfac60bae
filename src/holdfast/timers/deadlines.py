"""Many deadlines, of which only the next one matters.

A deadline is known by its owner and a name: an owner (a worker's process) may have any number of
them at once, each set, moved and released by itself, and all forgotten when the owner is gone.
Times come in as arguments, by any one clock. Setting and releasing cost the logarithm of what is
set, and nothing is ever looked through to find what is due.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

# Of the heap, entries that no longer count are kept until there are this many more than others.
STALE_MAX = 64


class Deadlines:
    """Deadlines by owner and name. Sleep until `next_deadline`, then take what is `due`."""

    def __init__(self) -> None:
        self._set: dict[int, dict[str, tuple[float, int]]] = {}
        self._heap: list[tuple[float, int, int, str]] = []
        self._count = 0
        self._serial = 0  # Which entry of the heap is the one that counts.

    def __len__(self) -> int:
        return self._count

    def owners(self) -> list[int]:
        """Return whoever has a deadline."""
        return [*self._set]

    def of(self, owner: int) -> dict[str, float]:
        """Return the deadlines of an owner, by name."""
        return {name: at for name, (at, _) in self._set.get(owner, {}).items()}

    def set(self, owner: int, name: str, at: float) -> None:
        """Set a deadline, or move the one of that owner and name; nothing else changes."""
        names = self._set.setdefault(owner, {})
        if name not in names:
            self._count += 1
        self._serial += 1
        names[name] = (at, self._serial)
        heappush(self._heap, (at, self._serial, owner, name))
        self._tidy()

    def release(self, owner: int, name: str) -> bool:
        """Drop one deadline; return whether there was one."""
        names = self._set.get(owner)
        if names is None or names.pop(name, None) is None:
            return False
        if not names:
            del self._set[owner]
        self._count -= 1
        self._tidy()
        return True

    def forget(self, owner: int) -> None:
        """Drop all deadlines of an owner."""
        self._count -= len(self._set.pop(owner, ()))
        self._tidy()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, None while there is none."""
        while self._heap:
            if self._counts(self._heap[0]):
                return self._heap[0][0]
            heappop(self._heap)
        return None

    def due(self, now: float) -> list[tuple[int, str]]:
        """Take all deadlines up to `now`, the earliest first; they are not set any more."""
        taken: list[tuple[int, str]] = []
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            if self._counts(entry):
                _, _, owner, name = entry
                taken.append((owner, name))
                self.release(owner, name)
        return taken

    def _counts(self, entry: tuple[float, int, int, str]) -> bool:
        at, serial, owner, name = entry
        return self._set.get(owner, {}).get(name) == (at, serial)

    def _tidy(self) -> None:
        """Drop what no longer counts from the heap, before it outgrows what does."""
        if len(self._heap) > 2 * self._count + STALE_MAX:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapify(self._heap)
