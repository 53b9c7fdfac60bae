"""The invariants of rounds: what was formed, who was told of it, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.job import JobPhase
from holdfast.core.news import Role
from holdfast.testing.sim.checking import Checker

if TYPE_CHECKING:
    from holdfast.core.news import View
    from holdfast.testing.sim.agent import Agent
    from holdfast.testing.sim.ledger import Decision
    from holdfast.testing.sim.world import World


class OneRound(Checker):
    """A job has one active round at a time, and a round once formed never changes.

    A coordinator that came back may carry a round on only if it is whole: all members, each of
    the same round and no other.
    """

    def decided(self, decision: Decision) -> None:
        """Compare the active round with how it was formed."""
        truth = decision.truth
        if truth is None:
            return
        members = [(info.node, info.incarnation) for info in decision.job.members]
        if members != truth.members:
            self.violated(
                f"round {decision.after.round} of {decision.job.run_id} was formed with "
                f"{truth.members} and now has {members}"
            )
        if not decision.adopted:
            return
        for _node, incarnation in members:
            own = self.world.ledger.agent_of[incarnation].round
            if own is not truth:
                self.violated(f"{members} were carried on as one round and never were one")


class RankOnce(Checker):
    """No rank is held twice in a round, and no node has two."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._held: dict[tuple[int, int], dict[int, int]] = {}

    def decided(self, decision: Decision) -> None:
        """Look at the members of a round that forms."""
        nodes = [info.node for info in decision.job.members]
        if decision.after.phase is JobPhase.ACTIVE and len(set(nodes)) != len(nodes):
            self.violated(f"a node is twice in {nodes}")

    def told(self, agent: Agent, view: View) -> None:
        """Compare with what other nodes were told of this round."""
        if view.role is not Role.MEMBER:
            return
        truth = self.world.round_meant(agent, view)
        if truth is None:
            return
        held = self._held.setdefault((truth.number, view.generation), {})
        if held.setdefault(view.rank, view.incarnation) != view.incarnation:
            self.violated(f"rank {view.rank} of generation {view.generation} is held twice")


class SizeInBounds(Checker):
    """A round has between min and max nodes."""

    def decided(self, decision: Decision) -> None:
        """Count the members of the active round."""
        settings = self.world.job_of(decision.job.run_id).settings
        if decision.after.phase is JobPhase.ACTIVE:
            size = len(decision.job.members)
            if not settings.min_nodes <= size <= settings.max_nodes:
                self.violated(f"a round of {size}, not {settings.min_nodes}:{settings.max_nodes}")


class SameRound(Checker):
    """All members of a round are told the same round, and nobody else is told of it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._told: dict[tuple[int, int], tuple[object, ...]] = {}

    def told(self, agent: Agent, view: View) -> None:
        """Compare with the round as it was formed, and with what others were told."""
        if view.role is not Role.MEMBER:
            return
        truth = self.world.round_meant(agent, view)
        if truth is None:
            self.violated(f"{agent.node} was told of round {view.round}, which never was")
        here = truth.members[view.rank] if 0 <= view.rank < len(truth.members) else None
        if here != (view.node, view.incarnation):
            self.violated(f"{view.node} was told rank {view.rank}, where {here} is")
        if (view.size, view.world_size) != (len(truth.members), truth.world_size):
            self.violated(f"{view.node} was told of {view.size} nodes, {view.world_size} workers")
        shared = (view.size, view.world_size, view.master_addr, view.master_port)
        if self._told.setdefault((truth.number, view.generation), shared) != shared:
            self.violated(f"{view.node} was told {shared}, not what others were told")


class GenerationGrows(Checker):
    """Generations only grow: for the job with every round, for each node with every start."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._round_of: dict[tuple[int, str, int], int] = {}

    def decided(self, decision: Decision) -> None:
        """Compare with the generation before, and with the rounds of this one."""
        before, after = decision.before, decision.after
        if before is not None:
            if after.generation < before.generation:
                self.violated(f"generation {after.generation} after {before.generation}")
            formed = after.phase is JobPhase.ACTIVE and not decision.adopted
            if formed and after.round != before.round and after.generation == before.generation:
                self.violated(f"round {after.round} reuses generation {after.generation}")
        if decision.truth is not None:
            key = (decision.coordinator.number, decision.job.run_id, after.generation)
            number = decision.truth.number
            if self._round_of.setdefault(key, number) != number:
                self.violated(f"two rounds have generation {after.generation}")

    def told(self, agent: Agent, view: View) -> None:
        """Compare with what the node was told before."""
        last = agent.told
        if last is not None and view.role is Role.MEMBER and last.role is Role.MEMBER:
            newer = (view.term, view.revision) > (last.term, last.revision)
            if not newer or view.generation < last.generation:
                self.violated(
                    f"{agent.node} was told of generation {view.generation} (term {view.term}, "
                    f"revision {view.revision}) after {last.generation} ({last.term}, "
                    f"{last.revision})"
                )


class RanksStable(Checker):
    """Those who stay keep their order, and their ranks too if the round does not shrink."""

    def decided(self, decision: Decision) -> None:
        """Compare a new round with the one before, where ranks are meant to be stable."""
        before, after = decision.before, decision.after
        if before is None or after.phase is not JobPhase.ACTIVE or after.members is before.members:
            return
        if decision.adopted or before.phase is JobPhase.RECOVERING:
            return
        if self.world.job_of(decision.job.run_id).settings.order != "stable":
            return
        old = {info.node: rank for rank, info in enumerate(before.members)}
        stayed = [
            (old[info.node], rank) for rank, info in enumerate(after.members) if info.node in old
        ]
        if stayed != sorted(stayed):
            self.violated(f"those who stayed changed their order: {stayed}")
        grown = len(after.members) >= len(before.members)
        if grown and any(was != now for was, now in stayed):
            self.violated(f"ranks changed in a round that has room for all: {stayed}")
