"""Which peers have been silent for too long, as observed by one watcher.

The watcher uses its own monotonic clock and counts only the time during which it was awake: at most
`step_s` of the gap between two readings. So a watcher that was stopped, starved of CPU or suspended does
not mistake its own absence for that of its peers. Their messages are still unread, and they get the rest
of their time after the watcher resumes. Clocks of different hosts are never compared.

A closed connection is better evidence than silence, and has a shorter limit: `grace_s`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

STEPS_PER_SILENCE = 5
CLOSED = "its connection closed"
EXPIRED_S = 1e6
STOP_SHARE = 0.8
"""The share of the silence limit after which a node's workers must have exited. The rest covers killing
them, and clocks that run at different speeds."""

Peer = TypeVar("Peer")  # How the watcher identifies a peer.


class AwakeClock:
    """Counts the seconds during which its owner was awake: at most `step_s` of each gap."""

    def __init__(self, now: float, step_s: float) -> None:
        self.step_s = step_s
        self._read_at = now
        self._awake_s = 0.0

    def read(self, now: float) -> float:
        """Note that the owner is awake at `now`; return the total time that it was awake."""
        self._awake_s = self.peek(now)
        self._read_at = now
        return self._awake_s

    def peek(self, now: float) -> float:
        """Return the result of `read` without a change; any thread may call this."""
        gap = now - self._read_at
        return self._awake_s + (min(gap, self.step_s) if gap > 0.0 else 0.0)


class LoopWatch:
    """Whether a loop is stuck: a watcher thread pings it, and the loop responds.

    Call `check` at least every `step_s`, and send a ping after each response. If the whole process
    was stopped or starved, the loop does not count as stuck.
    """

    def __init__(self, now: float, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_stuck = False
        self.step_s = limit_s / STEPS_PER_SILENCE
        self._clock = AwakeClock(now, self.step_s)
        self._responded_at = 0.0

    def check(self, now: float, *, responded: bool) -> bool:
        """Note whether the loop responded to the last ping; return whether `is_stuck` changed."""
        at = self._clock.read(now)
        if responded:
            self._responded_at = at
        was_stuck, self.is_stuck = self.is_stuck, at - self._responded_at >= self.limit_s
        return self.is_stuck != was_stuck


class Liveness(Generic[Peer]):
    """Watches any number of peers; the cost of a call does not depend on how many.

    Call `expired` no later than `next_deadline`, after `received` for all messages that arrived.
    """

    def __init__(self, now: float, *, silence_s: float, grace_s: float) -> None:
        self.silence_s = silence_s
        self.grace_s = grace_s
        self._clock = AwakeClock(now, silence_s / STEPS_PER_SILENCE)
        self._received_at: dict[Peer, float] = {}  # Ordered by time.
        self._disconnected_at: dict[Peer, float] = {}  # Likewise.

    def __contains__(self, peer: object) -> bool:
        return peer in self._received_at

    def __len__(self) -> int:
        return len(self._received_at)

    def received(self, peer: Peer, now: float) -> None:
        """Note that a message from a peer arrived."""
        self._received_at.pop(peer, None)
        self._received_at[peer] = self._clock.read(now)
        self._disconnected_at.pop(peer, None)

    def disconnected(self, peer: Peer, now: float) -> None:
        """Note that the connection to a peer closed; the peer expires after the grace."""
        if peer in self._received_at and peer not in self._disconnected_at:
            self._disconnected_at[peer] = self._clock.read(now)

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer."""
        self._received_at.pop(peer, None)
        self._disconnected_at.pop(peer, None)

    def expired(self, now: float) -> dict[Peer, str]:
        """Return the lost peers with the reasons, and forget them.

        A peer whose connection closed is returned a second time after `silence_s` without a message:
        by then a node that fences itself has stopped its workers.
        """
        awake_s = self._clock.read(now)
        lost: dict[Peer, str] = {}
        for peer, at in self._disconnected_at.items():
            if awake_s - at < self.grace_s:
                break
            lost[peer] = CLOSED
        for peer, at in self._received_at.items():
            if awake_s - at < self.silence_s:
                break
            lost.setdefault(peer, f"no heartbeat for {self.silence_s:g} s")
        for peer, why in lost.items():
            if why is CLOSED:
                del self._disconnected_at[peer]
            else:
                self.forget(peer)
        return lost

    def next_deadline(self, now: float) -> float | None:
        """Return when to call `expired` next, or None if no peer is watched."""
        if not self._received_at:
            return None
        awake_s = self._clock.read(now)
        rest = next(iter(self._received_at.values())) + self.silence_s - awake_s
        if self._disconnected_at:
            rest = min(rest, next(iter(self._disconnected_at.values())) + self.grace_s - awake_s)
        # The clock counts the whole time only if it is read at least every step.
        return now + max(0.0, min(rest, self._clock.step_s))


class StopDeadline:
    """The time, by a node's own clock, by which its workers must have exited. After it, they may be replaced.

    A node that is silent for `silence_s` is lost. With `needs_answers`, each response renews the
    deadline, counted from the send time of the message that it answers; so a disconnected node stops
    its workers before it is lost. Without it, a node renews the deadline whenever it is awake, so only
    a suspended node exceeds it.
    """

    def __init__(self, *, needs_answers: bool) -> None:
        self._needs_answers = needs_answers
        self._renewed_at: float | None = None

    def answered(self, now: float, sent_at: float) -> None:
        """Note a response to a message that was sent at `sent_at`."""
        if self._needs_answers:
            sent_at = min(sent_at, now)
            self._renewed_at = max(sent_at, self._renewed_at or sent_at)

    def expire(self, now: float) -> None:
        """Let the deadline pass, because the workers are no longer supervised."""
        self._renewed_at = now - EXPIRED_S

    def awake(self, now: float) -> None:
        """Note that the node is awake and sends its heartbeats."""
        if not self._needs_answers:
            self._renewed_at = now

    def at(self, silence_s: float) -> float | None:
        """Return when all workers must have exited, or None before the first renewal."""
        return None if self._renewed_at is None else self._renewed_at + STOP_SHARE * silence_s
