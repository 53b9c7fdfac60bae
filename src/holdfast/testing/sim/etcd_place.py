"""Where simulated jobs lie that have no coordinator: etcd, as the world sees it.

What counts is what is stored. So a leader's decisions are shown to the checkers when its
transaction is carried out, not when it is sent and not when its answer arrives: a leader may die
in between. A job that begins anew because nobody was left of it has another life.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import Answer, Get, Request, Txn, TxnDone
from holdfast.core.etcd_keys import JobRecord, Places, unpack
from holdfast.core.news import Status
from holdfast.testing.sim.etcd import SimEtcd
from holdfast.testing.sim.etcd_agent import PREFIX, EtcdAgent
from holdfast.testing.sim.etcd_network import EtcdNetwork

if TYPE_CHECKING:
    from random import Random

    from holdfast.core.etcd_unstored import Written
    from holdfast.core.job import Job
    from holdfast.core.leading import Lead
    from holdfast.core.news import View
    from holdfast.testing.sim.agent import Agent
    from holdfast.testing.sim.ledger import JobTruth
    from holdfast.testing.sim.world import World

FREEZE_S = (0.1, 3.0)


class Life:
    """One line of a job on etcd, however many leaders it has."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"leader (life {self.number})"


class EtcdPlace:
    """A simulated etcd, with the jobs on it."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.paused = False
        self.etcd = SimEtcd()
        self.network = EtcdNetwork(world, self.etcd, rng)
        self.network.on_done = self._done
        self._expected: dict[int, Written] = {}  # By the identity of a transaction it holds.
        self._lives = 0
        self._life_of_job: dict[str, Life] = {}
        self._life_of_lead: dict[Lead, Life] = {}
        self._life_of_term: dict[tuple[str, int], Life] = {}

    @property
    def alive(self) -> bool:
        """Whether it answers."""
        return self.network.alive

    @property
    def host_up(self) -> bool:
        """Whether it refuses connections while it does not."""
        return self.network.host_up

    # What the world asks.

    def job(self, run_id: str) -> Job | None:
        """Return a job as it is stored."""
        answer = self.etcd.perform(self.world.now, Txn((), (Get(Places(PREFIX, run_id).job),)))
        assert isinstance(answer, TxnDone)
        record = unpack(JobRecord, answer.results[0][0].value) if answer.results[0] else None
        return record.job if record is not None else None

    def knows_end_of(self, job: JobTruth) -> bool:
        """Return whether late nodes can learn that a job is over: that it is, is stored."""
        return bool(job.closed_by)

    def new_agent(self, job: JobTruth, node: str, host: str, rng: Random) -> EtcdAgent:
        """Return an agent that uses it."""
        return EtcdAgent(self.world, self, job, node, host, rng)

    def life_of(self, view: View) -> Life:
        """Return which line of its job a view is of."""
        return self._life_of_term[view.run_id, view.term]

    # What happens to it.

    def cut(self, agent: Agent) -> None:
        """Take note that an agent was cut off."""
        assert isinstance(agent, EtcdAgent)
        self.network.cut(agent)

    def die(self, *, host_too: bool) -> None:
        """Let all of its servers end."""
        self.network.go_down(host_too=host_too)

    def return_as(self, _number: int, _rng: Random) -> EtcdPlace:
        """Let it come back, with all it had."""
        self.network.come_back()
        return self

    def pause(self) -> None:
        """Let its servers elect another leader among them, which takes them a while."""
        self.network.elect(FREEZE_S[1])

    def resume(self, _arg: object = None) -> None:
        """Do nothing: an election ends by itself."""

    def compact(self) -> None:
        """Forget all that was before now."""
        self.world.note("etcd", "forgets its history")
        self.etcd.compact(self.etcd.revision)

    def fill(self) -> None:
        """Take no more writes."""
        self.world.note("etcd", "has no space left")
        self.etcd.full = True

    def make_room(self, _arg: object = None) -> None:
        """Take writes again."""
        self.etcd.full = False

    # What is stored.

    def expect(self, written: Written | None, request: Request) -> None:
        """Take note of what a leader's transaction stands for, as it is sent."""
        if written is not None and written.txn is request:
            self._expected[id(request)] = written

    def _done(self, request: Request, answer: Answer) -> None:
        written = self._expected.pop(id(request), None)
        if written is None or not isinstance(answer, TxnDone) or not answer.succeeded:
            return
        life = self._life(written)
        for event, job in written.decisions:
            self._life_of_term[job.run_id, job.term] = life
            self.world.decided(life, job, event if isinstance(event, Status) else None)
        for view in written.views:
            # Whoever is turned away may have heard of higher terms elsewhere.
            self._life_of_term.setdefault((view.run_id, view.term), life)
            self.world.made(life, view)

    def _life(self, written: Written) -> Life:
        lead = written.lead
        run_id = lead.job.run_id
        if lead not in self._life_of_lead:
            if lead.is_new or run_id not in self._life_of_job:
                self._lives += 1
                self._life_of_job[run_id] = Life(self._lives)
            self._life_of_lead[lead] = self._life_of_job[run_id]
        return self._life_of_lead[lead]
