"""A simulated agent on etcd: as any other, but that its link is a session at etcd.

It may have to lead its job; `core.etcd_session` and what it holds decide all of that. When it ends
of its own accord it hands over first, as a real agent does before its process is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd_asking import Ask, Unwatch, Watch
from holdfast.core.etcd_effects import Closed, Heard, Left, Opened
from holdfast.core.membership import LinkClosed, LinkOpened, Tick
from holdfast.testing.sim.agent import Agent

if TYPE_CHECKING:
    from random import Random

    from holdfast.core.etcd_calls import Answer, Change, Problem
    from holdfast.core.etcd_effects import Effect as SessionEffect
    from holdfast.core.news import Beat, Status, View
    from holdfast.core.supervision import Event
    from holdfast.testing.sim.etcd_place import EtcdPlace
    from holdfast.testing.sim.ledger import JobTruth, Teller
    from holdfast.testing.sim.world import World

PREFIX = "/sim"
LEASE_S = 5.0
LEAVE_S = 2.0
OPS_MAX = 4  # So that few nodes suffice for a leader to die between two portions.


class EtcdAgent(Agent):
    """One agent process, from its start to its end."""

    def __init__(
        self, world: World, place: EtcdPlace, job: JobTruth, node: str, host: str, rng: Random
    ) -> None:
        super().__init__(world, job, node, host, rng)
        self._place = place
        self._departs = False
        self.session = world.rules.session(
            run_id=job.run_id,
            info=self.info,
            prefix=PREFIX,
            lease_s=LEASE_S,
            strict=True,
            rounds=world.rules.rounds,
        )
        self.session.address = self.address
        self.session.leadership.is_observed = True
        self.session.leadership.ops_max = OPS_MAX

    @property
    def leads(self) -> bool:
        """Whether it is the leader of its job, as far as it knows."""
        return self.session.leadership.lead is not None

    # What happens to it.

    def tick(self) -> None:
        """See what time has brought."""
        now = self.clock
        self._do_all(self.session.tick(now))
        if self.alive and not self._departs:
            self._perform(self.membership.handle(now, Tick()))
            if self.alive:
                self.arm(self.membership.next_deadline(now))
        if self.alive:
            self.arm(self.session.next_deadline(now))

    def answered(self, parcel: tuple[int, Answer]) -> None:
        """Take in an answer of etcd."""
        self._do_all(self.session.answered(self.clock, *parcel))

    def changed(self, parcel: tuple[int, int, tuple[Change, ...]]) -> None:
        """Take in what a watch tells."""
        number, _revision, changes = parcel
        self._do_all(self.session.changed(self.clock, number, changes))

    def watch_ended(self, parcel: tuple[int, Problem]) -> None:
        """Take note that a watch is over."""
        self._do_all(self.session.watch_ended(*parcel))

    def happens(self, event: Event) -> None:
        """Give the workers' machine an event, unless it has come to its end."""
        if not self._departs:
            super().happens(event)

    # The session.

    def teller(self, view: View) -> Teller:
        """Return whose word a view is."""
        return self._place.life_of(view)

    def _send(self, message: Status | Beat) -> None:
        self._do_all(self.session.send(self.clock, message))

    def _open(self) -> None:
        self._do_all(self.session.open())

    def _drop(self) -> None:
        self._do_all(self.session.drop())

    def _do_all(self, effects: list[SessionEffect]) -> None:
        network = self._place.network
        for effect in effects:
            if not self.alive:
                return
            match effect:
                case Ask(number, request):
                    self._place.expect(self.session.leadership.writing, request)
                    network.ask(self, number, request)
                case Watch(number, key, end, start_revision):
                    network.watch(self, number, key, end, start_revision)
                case Unwatch(number):
                    network.unwatch(self, number)
                case Heard(message):
                    if not self._departs:
                        self._perform(self.membership.handle(self.clock, message))
                case Opened():
                    self._member(LinkOpened())
                case Closed(why, permanent):
                    self.world.note(self, "loses its session: {0}", why)
                    self._member(LinkClosed(why, permanent))
                case Left():
                    self._go()
        if self.alive:
            self.arm(self.session.next_deadline(self.clock))

    def _depart(self) -> None:
        self.left = True
        self._departs = True
        self.workers.vanish()
        self.after(LEAVE_S, self._go)
        self._do_all(self.session.leave())

    def _go(self, _arg: object = None) -> None:
        if self.alive:
            self._end()
            self.world.ends(self)

    def _end(self) -> None:
        self.alive = False
        self.workers.vanish()
