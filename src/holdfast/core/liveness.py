"""Which peers have been silent for too long, as far as one watcher can know.

The watcher goes by its own monotonic clock, and counts only the time in which it was awake: of a
gap between two looks, no more than `step_s` counts. So a watcher that was stopped, starved of CPU
or suspended does not take its own absence for that of all the others: their messages lie unread,
and they get the rest of their time after it is back. Nothing here compares clocks of two hosts.

A cut (a closed connection) is better evidence than silence, and has a shorter time: `grace_s`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

STEPS_PER_SILENCE = 5

Peer = TypeVar("Peer")  # Whatever its watcher knows a peer by.


class AttendedClock:
    """Counts the seconds in which its owner looked at least every `step_s`."""

    def __init__(self, now: float, step_s: float) -> None:
        self.step_s = step_s
        self._looked_at = now
        self._attended = 0.0

    def look(self, now: float) -> float:
        """Note that the owner is awake at `now`; return the time it was awake in all."""
        gap = now - self._looked_at
        if gap > 0.0:
            self._attended += min(gap, self.step_s)
        self._looked_at = now
        return self._attended


class Liveness(Generic[Peer]):
    """The watch over any number of peers; every call costs the same however many there are.

    Call `overdue` no later than `next_deadline` asks for, and whatever has arrived before it.
    """

    def __init__(self, now: float, *, silence_s: float, grace_s: float) -> None:
        self.silence_s = silence_s
        self.grace_s = grace_s
        self._clock = AttendedClock(now, silence_s / STEPS_PER_SILENCE)
        self._heard: dict[Peer, float] = {}  # In the order of the times.
        self._cut: dict[Peer, float] = {}  # Likewise.

    def __contains__(self, peer: object) -> bool:
        return peer in self._heard

    def __len__(self) -> int:
        return len(self._heard)

    def heard(self, peer: Peer, now: float) -> None:
        """Take note of a sign of life."""
        self._heard.pop(peer, None)
        self._heard[peer] = self._clock.look(now)
        self._cut.pop(peer, None)

    def cut(self, peer: Peer, now: float) -> None:
        """Take note that the connection to a peer closed; it is overdue after the grace."""
        if peer in self._heard and peer not in self._cut:
            self._cut[peer] = self._clock.look(now)

    def cuts(self) -> list[Peer]:
        """Return those whose connections closed and who may still come back, the longest first."""
        return [*self._cut]

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer."""
        self._heard.pop(peer, None)
        self._cut.pop(peer, None)

    def overdue(self, now: float) -> dict[Peer, str]:
        """Return those who are lost and why, and forget them."""
        attended = self._clock.look(now)
        lost: dict[Peer, str] = {}
        for peer, at in self._cut.items():
            if attended - at < self.grace_s:
                break
            lost[peer] = "its connection closed"
        for peer, at in self._heard.items():
            if attended - at < self.silence_s:
                break
            lost.setdefault(peer, f"no sign of life for {self.silence_s:g} s")
        for peer in lost:
            self.forget(peer)
        return lost

    def next_deadline(self, now: float) -> float | None:
        """Return when to look next, or None while no peer is watched."""
        if not self._heard:
            return None
        attended = self._clock.look(now)
        rest = next(iter(self._heard.values())) + self.silence_s - attended
        if self._cut:
            rest = min(rest, next(iter(self._cut.values())) + self.grace_s - attended)
        # Looking at least every step is what makes the whole of the time count.
        return now + max(0.0, min(rest, self._clock.step_s))
