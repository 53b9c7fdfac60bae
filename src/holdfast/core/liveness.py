"""Which peers have been silent for too long, as observed by one watcher.

The watcher uses its own monotonic clock and counts only the time during which it was awake: at most
`step_s` of the gap between two readings. So a watcher that was stopped, starved of CPU or suspended does
not mistake its own absence for that of its peers. Their messages are still unread, and they get the rest
of their time after the watcher resumes. Clocks of different hosts are never compared.

A closed connection is better evidence than silence, and has a shorter limit: `grace_s`.

An agent that gets little CPU sends its messages late, although it is alive. It measures how late it is
(`Lateness`) and asks the watcher for patience: for up to `PATIENCE_MAX` further silence limits.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from holdfast.core.limits import PATIENCE_MAX

STEPS_PER_SILENCE = 5
CLOSED = "its connection closed"
EXPIRED_S = 1e6
STOP_SHARE = 0.8
"""The share of the silence limit after which a node's workers must have exited. The rest covers killing
them, and clocks that run at different speeds."""

LATE_SHARE = 0.1
"""An agent is late if a step of it is delayed by this share of the silence limit."""
CALM_SILENCES = 2.0
"""After this many silence limits without a late step, an agent asks for less patience."""

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


class Lateness:
    """How much patience an agent needs, because it gets little CPU. Time during which it was stopped counts, too."""

    def __init__(self, silence_s: float) -> None:
        self.patience = 0
        """For how many further silence limits others should wait for this agent."""
        self._silence_s = silence_s
        self._late_at = 0.0

    def note(self, now: float, late_s: float) -> bool:
        """Note that a step that was due `late_s` ago runs; return whether `patience` changed."""
        before = self.patience
        if late_s >= LATE_SHARE * self._silence_s:
            self._late_at = now
            self.patience = max(before, min(PATIENCE_MAX, 1 + int(4.0 * late_s / self._silence_s)))
        elif before and now - self._late_at >= CALM_SILENCES * self._silence_s:
            self._late_at = now
            self.patience = before - 1
        return self.patience != before


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
        self._patience: dict[Peer, int] = {}  # Of the peers that asked for it.
        self._overdue: dict[
            Peer, float
        ] = {}  # Silent for one limit, with patience left; by last message.

    def __contains__(self, peer: object) -> bool:
        return peer in self._received_at or peer in self._overdue

    def __len__(self) -> int:
        return len(self._received_at) + len(self._overdue)

    def received(self, peer: Peer, now: float) -> None:
        """Note that a message from a peer arrived."""
        self._received_at.pop(peer, None)
        self._overdue.pop(peer, None)
        self._received_at[peer] = self._clock.read(now)
        self._disconnected_at.pop(peer, None)

    def be_patient(self, peer: Peer, patience: int) -> None:
        """Wait for a peer for so many further silence limits, from now on."""
        if patience:
            self._patience[peer] = min(patience, PATIENCE_MAX)
        elif self._patience:
            self._patience.pop(peer, None)

    def disconnected(self, peer: Peer, now: float) -> None:
        """Note that the connection to a peer closed; the peer expires after the grace."""
        if peer in self and peer not in self._disconnected_at:
            self._disconnected_at[peer] = self._clock.read(now)

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer."""
        self._received_at.pop(peer, None)
        self._overdue.pop(peer, None)
        self._patience.pop(peer, None)
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
        overdue = dict(self._overdue)
        for peer, at in self._received_at.items():
            if awake_s - at < self.silence_s:
                break
            overdue[peer] = at
        for peer, at in overdue.items():
            limit_s = self._limit_s(peer)
            if awake_s - at >= limit_s:
                lost.setdefault(peer, f"no heartbeat for {limit_s:g} s")
            else:
                self._received_at.pop(peer, None)
                self._overdue[peer] = at
        for peer, why in lost.items():
            if why is CLOSED:
                del self._disconnected_at[peer]
            else:
                self.forget(peer)
        return lost

    def next_deadline(self, now: float) -> float | None:
        """Return when to call `expired` next, or None if no peer is watched."""
        if not self:
            return None
        awake_s = self._clock.read(now)
        # The clock counts the whole time only if it is read at least every step.
        rest = self._clock.step_s
        if self._received_at:
            rest = min(rest, next(iter(self._received_at.values())) + self.silence_s - awake_s)
        if self._disconnected_at:
            rest = min(rest, next(iter(self._disconnected_at.values())) + self.grace_s - awake_s)
        for peer, at in self._overdue.items():
            rest = min(rest, at + self._limit_s(peer) - awake_s)
        return now + max(0.0, rest)

    def _limit_s(self, peer: Peer) -> float:
        return self.silence_s * (1 + self._patience.get(peer, 0))


class StopDeadline:
    """The time, by a node's own clock, by which its workers must have exited. After it, they may be replaced.

    A node that is silent for `silence_s` is lost. With `needs_answers`, each response renews the
    deadline, counted from the send time of the message that it answers; so a disconnected node stops
    its workers before it is lost. Without it, a node renews the deadline whenever it is awake, so only
    a suspended node exceeds it.
    """

    def __init__(self, *, needs_answers: bool) -> None:
        self.patience = 0
        """For how many further silence limits the others have promised to wait for this node."""
        self._needs_answers = needs_answers
        self._renewed_at: float | None = None

    def answered(self, now: float, sent_at: float) -> None:
        """Note a response to a message that was sent at `sent_at`."""
        if self._needs_answers:
            sent_at = min(sent_at, now)
            self._renewed_at = max(sent_at, self._renewed_at or sent_at)

    def expire(self, now: float) -> None:
        """Let the deadline pass, because the workers are no longer supervised."""
        self._renewed_at, self.patience = now - EXPIRED_S, 0

    def awake(self, now: float) -> None:
        """Note that the node is awake and sends its heartbeats."""
        if not self._needs_answers:
            self._renewed_at = now

    def at(self, silence_s: float) -> float | None:
        """Return when all workers must have exited, or None before the first renewal."""
        return None if self._renewed_at is None else self._renewed_at + STOP_SHARE * silence_s

    def extra_s(self, silence_s: float) -> float:
        """Return how much later the workers may exit if the agent is ready to run and only gets no CPU."""
        return STOP_SHARE * silence_s * self.patience
