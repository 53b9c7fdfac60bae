"""Rounds among nodes that do anything at any time, and a network that repeats itself.

`Cluster` keeps its own record of what each node received and did, and checks the invariants after
every step. At each step a second machine, made of the encoded state of the first, must say and do
the same: so that a job's state can be handed from one watcher to the next at any time.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fake_node import RUN, FakeNode, a_job_of, a_node
from holdfast.core.protocol import JobOutcome, NodePhase, NodeRole, Status, View
from holdfast.core.ranks import RankOrder
from holdfast.core.rounds import (
    CloseRequested,
    Job,
    JobEvent,
    JobPhase,
    NodeLost,
    Rounds,
    WaitEnded,
)

names = st.sampled_from("abcde")
HEALING_STEPS_MAX = 200


def copied(job: Job) -> Job:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)


class Cluster(RuleBasedStateMachine):
    @initialize(
        least=st.integers(1, 3), more=st.integers(0, 2), restarts=st.integers(0, 2),
        spares=st.integers(0, 1), order=st.sampled_from([RankOrder.STABLE, RankOrder.HOST]),
    )  # fmt: skip
    def make(self, least: int, more: int, restarts: int, spares: int, order: RankOrder) -> None:
        self.settings = a_job_of(
            least, least + more, max_restarts=restarts, spares=spares, order=order
        )
        self.rounds = Rounds(Job(run_id=RUN))
        self.nodes: dict[str, FakeNode] = {}
        self.old: list[Status] = []  # What the network may bring again.
        self.old_nodes: list[FakeNode] = []
        self.incarnations = 0
        self.charged = 0
        self.closed: tuple[JobOutcome | None, str] | None = None
        self.generation = -1
        self.coordinators = 1
        self.formed: dict[tuple[int, int, int], tuple[tuple[str, int], ...]] = {}

    # Telling the machine, and what it tells.

    def give(self, event: JobEvent) -> None:
        if isinstance(event, Status):
            self.old.append(event)
        twin = Rounds(copied(self.rounds.job))
        before = self.rounds.job.restarts
        views = self.rounds.handle(0.0, event)
        assert twin.handle(0.0, event) == views, "a copy of the state decides otherwise"
        assert copied(twin.job) == copied(self.rounds.job)
        self.rounds.check()
        charged = self.rounds.job.restarts - before
        failed = isinstance(event, Status) and event.phase is NodePhase.FAILED
        assert charged <= 0 or failed or self.coordinators > 1
        for view in views:
            self.deliver(view)

    def deliver(self, view: View) -> None:
        for node in [*self.nodes.values(), *self.old_nodes]:
            if node.info.incarnation != view.incarnation:
                continue
            assert view.generation >= (
                node.assigned_generation if view.role is NodeRole.MEMBER else -1
            )
            node.receive(view)

    def alive(self, name: str) -> FakeNode | None:
        return self.nodes.get(name)

    def born(self, name: str) -> FakeNode:
        self.incarnations += 1
        host = f"h{'abcde'.index(name) // 2}"
        self.nodes[name] = node = a_node(name, self.settings, self.incarnations, host=host)
        return node

    # What nodes do.

    @rule(name=names)
    def joins(self, name: str) -> None:
        if name in self.nodes:
            self.old_nodes.append(self.nodes[name])
        self.give(self.born(name).status())

    @rule(name=names)
    def applies_its_view(self, name: str) -> None:
        node = self.alive(name)
        if node is None or node.role is None:
            return
        if node.role is NodeRole.REFUSED:
            self.old_nodes.append(self.nodes.pop(name))
        elif node.role is NodeRole.FENCED:
            self.incarnations += 1
            node.begin_anew(self.incarnations)
            self.give(node.status())
        elif node.apply():
            self.give(node.status())

    @rule()
    def all_apply_their_views(self) -> None:
        for name in list(self.nodes):
            self.applies_its_view(name)

    @rule(name=names, retryable=st.sampled_from([True, True, True, False]), sudden=st.booleans())
    def fails(self, name: str, retryable: bool, sudden: bool) -> None:
        node = self.alive(name)
        if node is not None and node.is_member and node.phase is NodePhase.RUNNING:
            self.give(node.fail(retryable=retryable, sudden=sudden))

    @rule(name=names)
    def succeeds(self, name: str) -> None:
        node = self.alive(name)
        if node is not None and node.is_member and node.phase is NodePhase.RUNNING:
            self.give(node.succeed())

    @rule(name=names)
    def leaves(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            self.old_nodes.append(node)
            self.give(node.leave())

    @rule(name=names)
    def sends_its_status(self, name: str) -> None:
        node = self.alive(name)
        if node is not None:
            self.give(node.status())

    @rule(name=names)
    def beats(self, name: str) -> None:
        node = self.alive(name)
        if node is not None:
            view = self.rounds.behind(node.heartbeat())
            if view is not None:
                self.deliver(view)
            assert self.rounds.behind(node.heartbeat()) is None

    # What happens to them.

    @rule(name=names, dies=st.booleans())
    def is_lost(self, name: str, dies: bool) -> None:
        known = self.rounds.job.nodes.get(name)
        if known is None:
            return
        if dies and name in self.nodes:
            self.old_nodes.append(self.nodes.pop(name))
        self.give(NodeLost(name, known.info.incarnation, "silence"))

    @rule(late=st.booleans())
    def time_is_up(self, late: bool) -> None:
        self.give(WaitEnded(self.rounds.job.wait_seq - late))

    @rule(which=st.integers(0, 1000))
    def the_network_repeats_itself(self, which: int) -> None:
        if self.coordinators == 1 and self.old:
            status = self.old[-1 - which % min(len(self.old), 20)]
            before = copied(self.rounds.job)
            self.give(status)
            self.old.pop()
            after = copied(self.rounds.job)
            after.revision = before.revision  # That it was turned away once more.
            known = before.nodes.get(status.info.node)
            if known is not None or status.info.incarnation in before.retired:
                assert after == before, "an old status has changed something"

    @rule(which=st.integers(0, 1000))
    def one_that_is_out_sends_a_status(self, which: int) -> None:
        out = [one for one in self.old_nodes if one.info.incarnation in self.rounds.job.retired]
        if out and self.coordinators == 1:
            before = copied(self.rounds.job)
            node = out[which % len(out)]
            (view,) = self.rounds.handle(0.0, node.status())
            assert view.role in (NodeRole.FENCED, NodeRole.REFUSED)
            before.revision += 1
            assert copied(self.rounds.job) == before

    @rule()
    def the_coordinator_begins_anew(self) -> None:
        if self.rounds.job.phase is not JobPhase.CLOSED:
            self.rounds = Rounds(Job(run_id=RUN))
            self.coordinators += 1
            self.generation = -1
            self.old.clear()
            self.old_nodes.clear()

    @rule()
    def somebody_closes_it(self) -> None:
        if self.incarnations > 12:
            self.give(CloseRequested(JobOutcome.STOPPED, "enough"))

    # What holds at all times.

    @invariant()
    def rounds_are_sound(self) -> None:
        job = self.rounds.job
        if job.phase is not JobPhase.ACTIVE:
            return
        assert self.settings.min_nodes <= len(job.members) <= self.settings.max_nodes
        assert len({info.node for info in job.members}) == len(job.members)
        for info in job.members:
            known = job.nodes.get(info.node)
            here = known is not None and known.info.incarnation == info.incarnation
            assert here or info.node in job.succeeded
        which = (self.coordinators, job.round_term, job.round)
        who = tuple((info.node, info.incarnation) for info in job.members)
        assert self.formed.setdefault(which, who) == who, "a round has changed"

    @invariant()
    def the_generation_only_grows(self) -> None:
        assert self.rounds.job.generation >= self.generation
        self.generation = self.rounds.job.generation

    @invariant()
    def closed_is_final(self) -> None:
        job = self.rounds.job
        if self.closed is not None:
            assert (job.outcome, job.why) == self.closed
        if job.phase is JobPhase.CLOSED:
            self.closed = (job.outcome, job.why)

    @invariant()
    def enough_nodes_do_not_wait_for_nothing(self) -> None:
        job = self.rounds.job
        if job.phase is JobPhase.FORMING and len(job.nodes) >= self.settings.min_nodes:
            assert job.waiting
        if job.phase is JobPhase.RECOVERING:
            assert job.waiting

    def teardown(self) -> None:
        """With faults over and enough nodes, a round is running in bounded time."""
        if not hasattr(self, "rounds"):
            return
        for name in "abcde"[: self.settings.min_nodes]:
            if name not in self.nodes:
                self.joins(name)
        for _ in range(HEALING_STEPS_MAX):
            if self.rounds.job.phase is JobPhase.CLOSED or self.is_running():
                return
            for name in list(self.nodes):
                self.sends_its_status(name)
                self.beats(name)
                self.applies_its_view(name)
            for name, known in list(self.rounds.job.nodes.items()):
                if name not in self.nodes:
                    self.give(NodeLost(name, known.info.incarnation, "silence"))
            for name in "abcde"[: self.settings.min_nodes]:
                if name not in self.nodes:  # It was refused.
                    self.joins(name)
            if self.rounds.wait is not None:
                self.time_is_up(late=False)
        raise AssertionError(f"no round forms: {self.rounds.job} {self.nodes}")

    def is_running(self) -> bool:
        job = self.rounds.job
        if job.phase is not JobPhase.ACTIVE:
            return False
        for info in job.members:
            node = self.nodes.get(info.node)
            if node is None or node.info != info:
                if info.node not in job.succeeded:
                    return False
            elif not node.is_member or node.generation != job.generation:
                return False
        return True


Cluster.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRoundsInACluster = Cluster.TestCase
