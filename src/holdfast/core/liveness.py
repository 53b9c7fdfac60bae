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
CLOSED = "its connection closed"
EXPIRED_S = 1e6
STOP_SHARE = 0.8
"""A node's workers are gone after this share of the time after which it counts as lost. The rest is
for what killing them takes, and for clocks that do not run alike."""

Peer = TypeVar("Peer")  # Whatever its watcher knows a peer by.


class AttendedClock:
    """Counts the seconds in which its owner looked at least every `step_s`."""

    def __init__(self, now: float, step_s: float) -> None:
        self.step_s = step_s
        self._looked_at = now
        self._attended = 0.0

    def look(self, now: float) -> float:
        """Note that the owner is awake at `now`; return the time it was awake in all."""
        self._attended = self.peek(now)
        self._looked_at = now
        return self._attended

    def peek(self, now: float) -> float:
        """Return what `look` would, and note nothing; any thread may ask."""
        gap = now - self._looked_at
        return self._attended + (min(gap, self.step_s) if gap > 0.0 else 0.0)


class LoopWatch:
    """Whether a loop still turns, as a thread beside it can tell: it asks, and the loop answers.

    `look` at least every `step_s`, and ask again after each answer. A process that was stopped or
    starved as a whole is not taken for a loop that hangs.
    """

    def __init__(self, now: float, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_stuck = False
        self.step_s = limit_s / STEPS_PER_SILENCE
        self._clock = AttendedClock(now, self.step_s)
        self._answered_at = 0.0

    def look(self, now: float, *, answered: bool) -> bool:
        """Take note whether the last question was answered; return whether `is_stuck` changed."""
        at = self._clock.look(now)
        if answered:
            self._answered_at = at
        was_stuck, self.is_stuck = self.is_stuck, at - self._answered_at >= self.limit_s
        return self.is_stuck != was_stuck


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

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer."""
        self._heard.pop(peer, None)
        self._cut.pop(peer, None)

    def overdue(self, now: float) -> dict[Peer, str]:
        """Return those who are lost and why, and forget them.

        One whose connection closed is returned again when it was silent for long enough, unless
        it is heard of or forgotten before: only then is it certain what it must have done by itself.
        """
        attended = self._clock.look(now)
        lost: dict[Peer, str] = {}
        for peer, at in self._cut.items():
            if attended - at < self.grace_s:
                break
            lost[peer] = CLOSED
        for peer, at in self._heard.items():
            if attended - at < self.silence_s:
                break
            lost.setdefault(peer, f"no sign of life for {self.silence_s:g} s")
        for peer, why in lost.items():
            if why is CLOSED:
                del self._cut[peer]
            else:
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


class StopDeadline:
    """Until when a node's workers may run, by its own clock: later others may take their place.

    A node that is silent for `silence_s` is lost. It cannot know whether it is heard unless it gets
    an answer. With `needs_answers` each answer renews the deadline, counted from when that was sent
    which it answers; so a node that is cut off stops its workers before it is lost. Without, it is
    enough that the node is awake: one that was stopped may have been silent without knowing it.
    """

    def __init__(self, *, needs_answers: bool) -> None:
        self._needs_answers = needs_answers
        self._renewed_at: float | None = None

    def answered(self, now: float, sent_at: float) -> None:
        """Take note of an answer to what was sent then."""
        if self._needs_answers:
            sent_at = min(sent_at, now)
            self._renewed_at = max(sent_at, self._renewed_at or sent_at)

    def expire(self, now: float) -> None:
        """Take note that nobody supervises the workers any more: the time is over."""
        self._renewed_at = now - EXPIRED_S

    def awake(self, now: float) -> None:
        """Take note that the node is awake, and sends what it must."""
        if not self._needs_answers:
            self._renewed_at = now

    def at(self, silence_s: float) -> float | None:
        """Return when the workers must be gone, or None if that was not renewed yet."""
        return None if self._renewed_at is None else self._renewed_at + STOP_SHARE * silence_s
