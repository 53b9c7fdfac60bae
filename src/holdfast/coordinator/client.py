"""One node's side of a connection: performs what `core.membership` asks for.

The machine says when to connect, what to send and when to give up; this owns the link and the one
timer. It takes no thread, so a loop can run thousands of nodes. Whoever uses it gets told through
callbacks, which must not block:

- `on_view` for each newer view;
- `on_gave_up` when the coordinator stayed away past the limit (it is still tried after that);
- `on_away` when a coordinator that was there stays away for a moment, and `on_back`;
- `on_refused` when trying again cannot help, as with a wrong token; then nothing more is tried. A
  node that was in touch before is not turned away like that: another program may have the port
  for a moment, and the limit for an absent coordinator applies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.coordinator.dialing import LinkProblem
from holdfast.coordinator.store_calls import StoreCalls
from holdfast.core.membership import (
    DropLink,
    Effect,
    Event,
    GiveUp,
    Link,
    LinkClosed,
    LinkOpened,
    Membership,
    OpenLink,
    Rejoined,
    Said,
    Send,
    Tell,
    Tick,
)
from holdfast.core.news import Ack, Beat, Failure, Phase, Role, Status, View
from holdfast.wire.limits import NAME_CHARS_MAX, REPORT_BYTES_MAX, SUMMARY_CHARS_MAX, clip
from holdfast.wire.messages import StoreResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.wire.messages import Message

CLOSE_S = 1.0  # For what is still to be sent at the end.
AWAY_TOLD_S = 1.0  # Shorter absences are nobody's concern.


class GaveUp(msgspec.Struct, frozen=True):
    """The coordinator was away for too long, or this side of it is broken."""

    why: str
    """The last problem. Whoever tells the person adds the endpoint, here and in `Refused`."""
    away_s: float = 0.0


class Refused(msgspec.Struct, frozen=True):
    """The coordinator does not want this node, or is none; trying again does not help."""

    why: str


class Carries(Protocol):
    """A link, to a coordinator or to what stands for one; `dialing.Link` says what is what."""

    ended: asyncio.Future[None]
    on_message: Callable[[Any], None] | None
    on_closed: Callable[[str], None] | None
    problem: LinkProblem | None

    def say(self, message: Status | Beat) -> None:
        """Carry what the node says."""

    def send(self, frame: bytes) -> None:
        """Carry a frame of the coordinator's store."""

    def close(self, why: str) -> None:
        """End once everything is said."""

    def drop(self) -> object:
        """End now."""


class Dials(Protocol):
    """Opens links."""

    async def dial(self) -> Carries:
        """Return a link, or raise `LinkProblem`."""


class NodeClient:
    """Keeps one node in touch with its coordinator, from `start` until `close`."""

    def __init__(
        self,
        membership: Membership,
        dialer: Dials,
        *,
        on_view: Callable[[View], None],
        on_gave_up: Callable[[GaveUp], None],
        on_refused: Callable[[Refused], None],
        on_away: Callable[[str], None] | None = None,
        on_back: Callable[[], None] | None = None,
        doubt: Callable[[], str] = str,
    ) -> None:
        self.membership = membership
        self.store = StoreCalls(self.send)
        self.down_since: float | None = None
        """When the link was lost, or first tried; None while it is up."""
        self.refused = ""
        self._loop = asyncio.get_running_loop()
        self._dialer = dialer
        self._on_view = on_view
        self._on_gave_up = on_gave_up
        self._on_refused = on_refused
        self._on_away, self._on_back = on_away, on_back
        self._doubt = doubt  # What seems wrong with the attempt to connect that is under way.
        self._away: asyncio.TimerHandle | None = None
        self._told_away = False
        self._link: Carries | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._closed = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to hear: the job's end is known."""
        view = self.membership.view
        return view is not None and view.role is Role.CLOSED and view.final

    @property
    def last_problem(self) -> str:
        """Why there is no link, as far as is known by now; any thread may ask."""
        return self._doubt() or self.membership.last_problem

    def start(self) -> None:
        """Connect."""
        self.down_since = self._loop.time()
        self._handle(Tick())

    def say(
        self,
        phase: Phase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
    ) -> None:
        """Tell the coordinator what the node does now."""
        if failure is not None:
            failure = _sendable(failure)
        self._handle(Said(phase, generation, failure, report[:REPORT_BYTES_MAX]))

    def rejoin(self, incarnation: int) -> None:
        """Begin anew after the node was fenced."""
        self._handle(Rejoined(incarnation))

    async def leave(self, limit_s: float) -> bool:
        """Say that the node goes; return whether the coordinator is known to have heard it."""
        membership = self.membership
        self.say(Phase.LEAVING, membership.status.generation)
        seq = membership.status.seq
        try:
            async with asyncio.timeout(limit_s):
                while not self._closed and membership.link is Link.UP:
                    view = membership.view
                    if membership.heard_seq >= seq:
                        return True
                    if view is not None and view.role in (Role.FENCED, Role.REFUSED, Role.CLOSED):
                        return True  # It is out of the job already.
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        return False

    async def close(self) -> None:
        """Close the link and stop; what was said before is still sent."""
        self._closed = True
        for timer in (self._timer, self._away):
            if timer is not None:
                timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        link, self._link = self._link, None
        if link is not None:
            link.close("the node is done")
            await asyncio.wait([link.ended], timeout=CLOSE_S)
            link.drop()
        self.store.fail("the node's connection was closed")
        self._news.set()

    def send(self, frame: bytes) -> bool:
        """Send a frame if the link is up; return whether it is."""
        if self._link is None:
            return False
        self._link.send(frame)
        return True

    # The machine.

    def _handle(self, event: Event) -> None:
        if self._closed:
            return
        for effect in self.membership.handle(self._loop.time(), event):
            self._perform(effect)
        if not self._closed:
            self._schedule()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                if self._link is not None:
                    self._link.say(message)
            case Tell(view):
                self._on_view(view)
            case OpenLink():
                self._opening = self._loop.create_task(self._open())
            case DropLink(_):
                self._lose_link()
            case GiveUp(away_s, why):
                self._on_gave_up(GaveUp(self._doubt() or why, away_s))

    def _schedule(self) -> None:
        at = self.membership.next_deadline(self._loop.time())
        # A timer that comes too early does no harm and costs less than a new one every time.
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    # The link.

    async def _open(self) -> None:
        try:
            link = await self._dialer.dial()
        except LinkProblem as problem:
            self._opening = None
            self._failed(problem)
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (a bug here must not silence the node)
            self._opening = None
            self._failed(LinkProblem(f"{type(error).__name__}: {error}"))
            return
        self._opening = None
        if self._closed:
            link.drop()
            return
        link.on_message = self._received
        link.on_closed = self._link_closed
        self._link = link
        self.down_since = None
        if not self.membership.is_refused:
            self._is_back()
        self._handle(LinkOpened())
        self.store.link_up()

    def _failed(self, problem: LinkProblem) -> None:
        if problem.permanent and not self.membership.ever_up:
            self._refuse(problem.why)
        else:
            self._handle(LinkClosed(problem.why, problem.permanent))

    def _link_closed(self, why: str) -> None:
        problem = self._link.problem if self._link is not None else None
        permanent = problem is not None and problem.permanent
        self._lose_link()
        # That a link was up says little where a node itself may have to lead, as on etcd.
        if permanent and not self.membership.ever_told:
            self._refuse(why)
        else:
            self._handle(LinkClosed(why, permanent))

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._closed = True
        self.store.fail(why)
        self._on_refused(Refused(why))

    def _lose_link(self) -> None:
        link, self._link = self._link, None
        self.down_since = self._loop.time()
        if self._on_away is not None and self._away is None and self.membership.ever_up:
            self._away = self._loop.call_later(AWAY_TOLD_S, self._stays_away, self._on_away)
        if link is not None:
            link.drop()
        self.store.link_down()
        self._news.set()

    def _stays_away(self, tell: Callable[[str], None]) -> None:
        if not self._closed and not self.is_over:
            self._told_away = True
            tell(self.membership.last_problem)

    def _is_back(self) -> None:
        if self._away is not None:
            self._away.cancel()
            self._away = None
        if self._told_away and self._on_back is not None:
            self._told_away = False
            self._on_back()

    def _received(self, message: Message) -> None:
        kind = type(message)
        if kind is View or kind is Ack:
            # What the coordinator says never brings a deadline nearer than the timer that runs.
            effects = self.membership.handle(self._loop.time(), message)  # type: ignore[arg-type]
            for effect in effects:
                self._perform(effect)
            if self._away is not None and not self.membership.is_refused:
                self._is_back()
            self._news.set()
        elif kind is StoreResult:
            self.store.answered(message)  # type: ignore[arg-type]


def _sendable(failure: Failure) -> Failure:
    """Return a failure that the other side takes, however long or odd the worker's words are."""
    return msgspec.structs.replace(
        failure,
        summary=clip(failure.summary, SUMMARY_CHARS_MAX),
        host=_printable(clip(failure.host, NAME_CHARS_MAX)),
    )


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)
