"""A node's session at etcd, performed: what `core.etcd_session` asks for, on a real etcd.

`EtcdDialer` is to `coordinator.client` what the dialer of a coordinator is: `dial` opens a session
and returns a link that carries what the node says and brings what it is told. The session's lease
and the leadership outlive a link, so there is one dialer for as long as the node is in the job, and
one link at a time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast import messages
from holdfast.coordinator.dialing import LinkProblem
from holdfast.core.etcd_asking import Ask, Unwatch, Watch
from holdfast.core.etcd_effects import Closed, Effect, Heard, Left, Opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd_calls import Change, Problem
    from holdfast.core.etcd_session import EtcdSession
    from holdfast.core.news import Ack, Beat, Status, View
    from holdfast.etcd.client import AsyncEtcd
    from holdfast.etcd.watching import WatchHandle

CALLS_PER_LEASE = 2.5
"""A call that takes longer than the lease by this is given up: another endpoint may be quicker."""


class EtcdLink:
    """One session, as long as it lasts."""

    def __init__(self, dialer: EtcdDialer) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_message: Callable[[Ack | View], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.problem: LinkProblem | None = None
        self._dialer = dialer

    def say(self, message: Status | Beat) -> None:
        """Store what the node says, or show that it lives."""
        self._dialer.send(self, message)

    def send(self, frame: bytes) -> None:
        """Do nothing: the agents' store is in etcd itself, and gets no frames."""

    def close(self, why: str = "") -> None:
        """End the session; what was said is stored already."""
        del why
        self.drop()

    def drop(self) -> bool:
        """End the session now."""
        self._dialer.drop(self)
        if not self.ended.done():
            self.ended.set_result(None)
        return True


class EtcdDialer:
    """Opens sessions of one node, and performs what they ask for; belongs to one loop."""

    def __init__(self, etcd: AsyncEtcd, session: EtcdSession, lease_s: float) -> None:
        self._etcd = etcd
        self._session = session
        self._limit_s = lease_s / CALLS_PER_LEASE
        self._loop = asyncio.get_running_loop()
        self._link: EtcdLink | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._watches: dict[int, WatchHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._early: list[Ack | View] = []

    async def dial(self) -> EtcdLink:
        """Return the link of a session that is open, or raise `LinkProblem`."""
        link = self._link = EtcdLink(self)
        self._early = []
        self._perform(self._session.open())
        try:
            await link.ready
        except asyncio.CancelledError:
            self.drop(link)
            raise
        if link.problem is not None:  # It was over before anybody could look at it.
            raise link.problem
        self._loop.call_soon(self._deliver_early, link)
        return link

    def send(self, link: EtcdLink, message: Status | Beat) -> None:
        """Pass on what the node says over its current link."""
        if link is self._link:
            self._perform(self._session.send(self._loop.time(), message))

    def drop(self, link: EtcdLink) -> None:
        """End the session of a link, if it is the current one."""
        if link is self._link:
            self._link = None
            self._perform(self._session.drop())

    async def leave(self, limit_s: float) -> None:
        """Hand over what this node leads and remove what is its own, as far as there is time."""
        self._perform(self._session.leave())
        try:
            async with asyncio.timeout(limit_s):
                await self._left.wait()
        except TimeoutError:
            pass  # Its lease ends all the same, a little later.

    async def close(self) -> None:
        """Stop whatever is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    # Performing.

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask():
                    task = self._loop.create_task(self._call(effect))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case Watch():
                    self._watch(effect)
                case Unwatch(number):
                    watch = self._watches.pop(number, None)
                    if watch is not None:
                        watch.cancel()
                case Heard(message):
                    self._hear(message)
                case Opened():
                    self._session.address = self._etcd.local_address
                    if self._link is not None and not self._link.ready.done():
                        self._link.ready.set_result(None)
                case Closed(why, permanent):
                    self._close_link(why, permanent=permanent)
                case Left():
                    self._left.set()
        self._schedule()

    async def _call(self, ask: Ask) -> None:
        answer = await self._etcd.call(ask.request, limit_s=self._limit_s)
        self._perform(self._session.answered(self._loop.time(), ask.number, answer))

    def _watch(self, watch: Watch) -> None:
        number = watch.number

        def changed(_revision: int, changes: tuple[Change, ...]) -> None:
            self._perform(self._session.changed(self._loop.time(), number, changes))

        def ended(problem: Problem) -> None:
            self._watches.pop(number, None)
            self._perform(self._session.watch_ended(number, problem))

        self._watches[number] = self._etcd.watch(
            watch.key, watch.end, watch.start_revision, changed, ended
        )

    def _hear(self, message: Ack | View) -> None:
        link = self._link
        if link is None:
            return
        if link.on_message is not None:
            link.on_message(message)
        else:
            self._early.append(message)  # What lay there when the session was opened.

    def _deliver_early(self, link: EtcdLink) -> None:
        early, self._early = self._early, []
        for message in early:
            if link is self._link and link.on_message is not None:
                link.on_message(message)

    def _close_link(self, why: str, *, permanent: bool) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        why = why if permanent else self._of_each_endpoint(why)
        messages.debug(f"the session at etcd ended: {why}")
        link.problem = LinkProblem(why, permanent=permanent)
        if not link.ready.done():
            link.ready.set_exception(link.problem)
        elif link.on_closed is not None:
            link.on_closed(why)

    def _of_each_endpoint(self, why: str) -> str:
        """Return what is wrong with each of several endpoints, if none of them can be reached."""
        tried = self._etcd.tried
        if not len(tried) == len(self._etcd.settings.endpoints) > 1:
            return why
        return "; ".join(f"{endpoint}: {what}" for endpoint, what in sorted(tried.items()))

    def _schedule(self) -> None:
        at = self._session.next_deadline(self._loop.time())
        if self._timer is not None:
            # A timer that comes too early does no harm and costs less than a new one every time.
            if at is None or self._timer.when() <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._session.tick(self._loop.time()))
