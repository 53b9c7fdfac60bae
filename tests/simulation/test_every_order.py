"""An exhaustive search over a few nodes, a few faults and a coordinator.

All interleavings are explored, breadth first, until no new world is found or a limit is reached: joins,
detected and wrongly suspected losses, crashes and new incarnations, leaves, failures, successes, late and
lost views, ended waits, coordinators that lose their state. Worlds that differ only in arbitrary numbers
count as equal. In each world the invariants hold, and without further faults each world reaches a running
round, or the end of the job.
"""

from __future__ import annotations

from collections import deque

import pytest
from node_worlds import (
    Step,
    World,
    a_world,
    fingerprint,
    frozen,
    healing_step,
    is_well,
    orders,
    steps,
    take,
    thawed,
)

from fake_node import a_job_of
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import JobOutcome, NodeRole
from holdfast.core.rounds import Job, JobPhase, eligible_count

HEALING_STEPS_MAX = 40


class Explorer:
    """Takes every step from every world, and checks each world once."""

    def __init__(self, start: World) -> None:
        self.seen = {fingerprint(start)}
        self.queue: deque[tuple[bytes, tuple[Step, ...]]] = deque([(frozen(start), ())])
        self.heals_in: dict[int, int] = {}
        self.steps = 0
        self.resumed = 0
        self.phases: set[JobPhase] = set()

    def explore(self, states_max: int | None = None) -> None:
        while self.queue and (states_max is None or len(self.seen) < states_max):
            before, path = self.queue.popleft()
            for step in steps(thawed(before)):
                world = thawed(before)
                try:
                    self._take(world, before, step)
                except AssertionError as error:
                    raise AssertionError(f"{error} after {[*path, step]}") from error
                key = fingerprint(world)
                if key not in self.seen:
                    self.seen.add(key)
                    self.queue.append((frozen(world), (*path, step)))

    def _take(self, world: World, before: bytes, step: Step) -> None:
        self.steps += 1
        take(world, step)
        check_state(world)
        check_change(thawed(before), step, world)
        if fingerprint(world) in self.seen:
            return
        self.phases.add(world.job.phase)
        check_healing(world, self.heals_in)
        if is_well(world):
            self.resumed += check_return(world)


def check_state(world: World) -> None:
    """Check the invariants of a world."""
    job = world.job
    ranks: dict[tuple[int, int], dict[int, str]] = {}
    sizes: dict[tuple[int, int], int] = {}
    # A coordinator without state may reuse the number of a round that it does not know.
    known = [
        node if viewed_by == world.coordinators else None
        for node, viewed_by in zip(world.nodes, world.viewed_by, strict=True)
    ]
    for node in known:
        if node is None or not node.is_member:
            continue
        which = (node.round_term, node.round)
        holder = ranks.setdefault(which, {}).setdefault(node.rank, node.name)
        assert holder == node.name, f"{holder} and {node.name} have the same rank in {which}"
        assert sizes.setdefault(which, node.size) == node.size, f"two sizes of {which}"
        assert 0 <= node.rank < node.size
        assert world.settings.min_nodes <= node.size <= world.settings.max_nodes
    if job.phase is JobPhase.ACTIVE:
        assert len({info.node for info in job.members}) == len(job.members)
        assert world.settings.min_nodes <= len(job.members) <= world.settings.max_nodes
        for info in job.members:
            known_node = job.nodes.get(info.node)
            is_known = known_node is not None and known_node.info.incarnation == info.incarnation
            assert is_known or info.node in job.succeeded, (
                f"the round continues without {info.node}"
            )
        for node in known:
            claims = node is not None and (node.round_term, node.round)
            if node is not None and claims == (job.round_term, job.round):
                assert job.members[node.rank] == node.info, "members got different rounds"
                assert node.size == len(job.members)
    assert job.restarts <= world.settings.max_restarts
    if job.phase is JobPhase.FORMING and not job.waiting and job.settings:
        counted = eligible_count(job)
        assert counted < job.settings.min_nodes, "enough nodes wait, but no round is about to form"
    if job.phase is JobPhase.RECOVERING:
        assert job.waiting


def check_change(before: World, step: Step, after: World) -> None:
    """Check that a step changed nothing that it must not change."""
    what = step[0]
    was, now = before.job, after.job
    if what != "restart":
        assert now.generation >= was.generation, "the generation decreased"
        assert (now.round_term, now.round) >= (was.round_term, was.round)
        assert now.term >= was.term
        check_charge(was, what, now)
        if was.phase is JobPhase.CLOSED:
            assert now.phase is JobPhase.CLOSED, "a closed job reopened"
            assert now.outcome is was.outcome
        elif now.phase is JobPhase.CLOSED:
            if now.outcome is JobOutcome.SUCCEEDED:
                assert now.succeeded == {info.node for info in now.members}
            else:
                assert now.outcome is JobOutcome.FAILED
                assert now.failure is not None
                assert now.restarts == after.settings.max_restarts
    for old, new in zip(before.nodes, after.nodes, strict=True):
        if old is None or new is None:
            continue
        assert new.generation >= old.generation
        assert new.restarts >= old.restarts
        if new.is_member and new.assigned_generation == new.generation == old.generation:
            assert not old.is_member or (new.rank, new.size) == (old.rank, old.size), (
                "the ranks of running workers changed"
            )


def check_charge(was: Job, what: str, now: Job) -> None:
    """Check that only a failure is charged, and only once."""
    charged = now.restarts - was.restarts
    if what == "leave" and not now.nodes:
        assert now.restarts == 0, "all nodes left on request, but restarts are charged"
    elif was.round_term:
        assert charged in (0, int(what == "fail"))
        assert not charged or now.generation > was.generation
    else:  # Charges of an earlier coordinator, and a failure that could not be reported.
        assert charged >= 0


def check_healing(world: World, heals_in: dict[int, int]) -> None:
    """Check that without further faults a round runs, or the job ends, within a limit."""
    at = thawed(frozen(world))
    passed: list[int] = []
    while (key := fingerprint(at)) not in heals_in:
        assert key not in passed, "it loops"
        assert len(passed) <= HEALING_STEPS_MAX, "it takes too long"
        passed.append(key)
        step = healing_step(at)
        if step is None:
            closed = at.job.phase is JobPhase.CLOSED
            assert closed or is_well(at), f"stuck: {at.job.phase.value}, {at.nodes}"
            heals_in[key] = 0
            passed.pop()
            break
        take(at, step)
        check_state(at)
    far = enumerate(reversed(passed), start=heals_in[key] + 1)
    heals_in |= {each: distance for distance, each in far}
    assert heals_in.get(key, 0) <= HEALING_STEPS_MAX


def check_return(world: World) -> int:
    """Check that a restarted coordinator to which all nodes reconnect changes nothing."""
    members = {info.node for info in world.job.members}
    known = [node.info for node in world.job.nodes.values()]
    behind = any(view is not None for view in world.views)
    if behind or not all(info in known for info in world.job.members):
        return 0
    for node in world.nodes:
        if node is None or node.info in world.job.members:
            continue
        # The node runs or ran another round; if it connects first, that one is resumed.
        if node.is_member or node.generation > world.job.generation:
            return 0
    for order in orders(world):
        new = thawed(frozen(world))
        new.faults_left += 1
        take(new, ("restart", -1))
        for i in order:
            take(new, ("report", i))
        was, now = world.job, new.job
        assert all(now.term > node.term for node in world.nodes if node is not None)
        assert now.phase is JobPhase.ACTIVE, (
            f"{now.phase} after all reconnected in the order {order}"
        )
        assert now.members == was.members
        assert (now.round_term, now.round) == (was.round_term, was.round)
        assert (now.generation, now.restarts) == (was.generation, was.restarts)
        assert now.succeeded == was.succeeded
        for i in order:
            while new.views[i] is not None:
                take(new, ("receive", i))
            node = new.nodes[i]
            assert node is not None
            if node.name in members:
                assert node.role is NodeRole.MEMBER
                assert not node.apply(), "a worker restarts because the coordinator did"
    return 1


@pytest.mark.parametrize(
    ("settings", "nodes", "prompt", "states_max"),
    [
        pytest.param(a_job_of(1, 2), 2, True, None, id="1:2"),
        # The next two cases have 13,067 and 123,059 worlds in total, which would take long.
        pytest.param(a_job_of(2, 2, max_restarts=1), 3, True, 5_000, id="2 and a standby"),
        pytest.param(a_job_of(2, 3), 3, True, 5_000, id="2:3"),
    ],
)
def test_every_order_of_events_keeps_the_invariants_and_leads_to_a_round(
    settings: JobSettings, nodes: int, prompt: bool, states_max: int | None
) -> None:
    explorer = Explorer(a_world(settings, nodes, faults=1, prompt=prompt))
    explorer.explore(states_max)
    assert len(explorer.seen) >= (states_max or 1_000)
    assert explorer.phases == set(JobPhase)
    assert explorer.resumed > 0
