"""A small world around `core.rounds` that can be copied, compared and advanced by one step.

It has a coordinator, nodes that apply their views, and for each node at most one view in transit: a newer
view replaces an older one, as it does in a node. Statuses arrive immediately. `steps` lists all possible next
steps; those in `FAULTS` may happen `faults_left` times in total.
"""

from __future__ import annotations

from itertools import permutations

import msgspec

from fake_node import FakeNode, a_node
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import View  # noqa: TC001 (msgspec reads the annotations)
from holdfast.core.rounds import Job, JobPhase, NodeLost, Rounds, WaitEnded, WaitKind

RUN = "run"
# The steps that are faults; a healthy world takes all other steps by itself.
FAULTS = ("crash", "suspect", "leave", "fail", "drop", "restart")

Step = tuple[str, int]  # The kind, and the index of the node; -1 if there is none.


class World(msgspec.Struct):
    """The coordinator's state, the nodes, and the views in transit."""

    settings: JobSettings
    job: Job
    nodes: list[FakeNode | None]
    views: list[View | None]
    born: list[int]
    faults_left: int
    prompt: bool
    """Whether nodes apply a view immediately; otherwise other steps may happen in between."""
    coordinators: int = 1
    viewed_by: list[int] = []
    """The coordinator of each node's view, which numbers its rounds."""


def a_world(settings: JobSettings, nodes: int, faults: int, *, prompt: bool = False) -> World:
    """Return a new world."""
    nobody: list[FakeNode | None] = [None] * nodes
    return World(
        settings,
        Job(run_id=RUN),
        nobody,
        [None] * nodes,
        [0] * nodes,
        faults,
        prompt,
        viewed_by=[0] * nodes,
    )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(World).decode


def frozen(world: World) -> bytes:
    """Return a world as bytes."""
    return _encode(world)


def thawed(data: bytes) -> World:
    """Return a copy of a world."""
    return _decode(data)


# Possible steps.


def steps(world: World) -> list[Step]:
    """Return all possible next steps."""
    found: list[Step] = []
    job = world.job
    closed = job.phase is JobPhase.CLOSED
    for i, node in enumerate(world.nodes):
        if node is None:
            # Nodes are alike, so new nodes join in a fixed order.
            if not closed and all(world.born[:i]):
                found.append(("join", i))
            if _missing(world, i) is not None:
                found.append(("detect loss", i))
            continue
        if _missing(world, i) is not None:
            found.append(("detect loss", i))
        if node.role is not NodeRole.CLOSED:
            found.append(("report", i))
        if world.views[i] is not None:
            found.append(("receive", i))
        if _must_react(node):
            found.append(("follow", i))
        if closed:
            continue
        if node.is_member and node.phase is NodePhase.RUNNING:
            found.append(("succeed", i))
        found += [(name, i) for name in _faults_of(world, i)]
    if job.waiting:
        found.append(("wait over", -1))
    if job.exclusions:
        found.append(("exclusion over", -1))
    if world.faults_left and not closed and job.nodes:
        found.append(("restart", -1))
    return found


def _faults_of(world: World, i: int) -> list[str]:
    if not world.faults_left:
        return []
    node = world.nodes[i]
    assert node is not None
    found = ["crash", "leave"]
    if _is_known(world, node):
        found.append("suspect")
    if node.is_member and node.phase is NodePhase.RUNNING:
        found.append("fail")
    if world.views[i] is not None:
        found.append("drop")
    return found


def _must_react(node: FakeNode) -> bool:
    if node.role in (NodeRole.FENCED, NodeRole.REFUSED):
        return True
    return msgspec.structs.replace(node).apply()


def _known(world: World, i: int) -> int | None:
    known = world.job.nodes.get(name_of(i))
    return known.info.incarnation if known else None


def _missing(world: World, i: int) -> int | None:
    """Return an incarnation that has exited, but that the job still considers alive."""
    node = world.nodes[i]
    for departed in world.job.departed.values():
        if departed.info.node == name_of(i):
            return departed.info.incarnation
    known = _known(world, i)
    return known if node is None or known != node.info.incarnation else None


def _is_known(world: World, node: FakeNode) -> bool:
    known = world.job.nodes.get(node.name)
    return known is not None and known.info.incarnation == node.info.incarnation


def name_of(i: int) -> str:
    """Return the id of a node by its index."""
    return "abcdef"[i]


def take(world: World, step: Step) -> list[View]:
    """Take a step; return the resulting views."""
    what, i = step
    if what in FAULTS:
        world.faults_left -= 1
    rounds = Rounds(world.job)
    if what == "wait over":
        return _in_transit(world, rounds.handle(0.0, WaitEnded(world.job.wait_seq)))
    if what == "exclusion over":
        first = next(iter(world.job.exclusions.values()))
        return _in_transit(world, rounds.handle(0.0, WaitEnded(first.until, WaitKind.EXCLUDED)))
    if what == "restart":
        world.job = Job(run_id=RUN)
        world.views = [None] * len(world.views)
        world.coordinators += 1
        return []
    if what == "join":
        world.born[i] += 1
        world.views[i] = None
        incarnation = i * 100 + world.born[i]
        world.nodes[i] = node = a_node(name_of(i), world.settings, incarnation)
        return _in_transit(world, rounds.handle(0.0, node.status()))
    if what == "detect loss":
        incarnation = _missing(world, i) or 0
        return _in_transit(world, rounds.handle(0.0, NodeLost(name_of(i), incarnation, "silence")))
    views = _node_step(world, rounds, what, i)
    rounds.check()
    return _in_transit(world, views)


def _node_step(world: World, rounds: Rounds, what: str, i: int) -> list[View]:
    node = world.nodes[i]
    assert node is not None
    match what:
        case "report":  # A reconnection, or a response to an outdated `Ack`; and a heartbeat.
            views = rounds.handle(0.0, node.status())
            behind = rounds.missing_view(node.heartbeat())
            return views + ([behind] if behind else [])
        case "receive":
            view, world.views[i] = world.views[i], None
            assert view is not None
            assert node.receive(view), "the newest view was ignored as old"
            world.viewed_by[i] = world.coordinators
            if world.prompt and _must_react(node):
                return _react(world, rounds, node, i)
        case "follow":
            return _react(world, rounds, node, i)
        case "succeed":
            return rounds.handle(0.0, node.succeed())
        case "fail":
            return rounds.handle(0.0, node.fail())
        case "leave":
            world.nodes[i], world.views[i] = None, None
            return rounds.handle(0.0, node.leave())
        case "suspect":
            return rounds.handle(0.0, NodeLost(node.name, node.info.incarnation, "silence"))
        case "crash":
            world.nodes[i], world.views[i] = None, None
        case "drop":
            world.views[i] = None
        case _:
            raise AssertionError(what)
    return []


def _react(world: World, rounds: Rounds, node: FakeNode, i: int) -> list[View]:
    if node.role is NodeRole.REFUSED:
        world.nodes[i], world.views[i] = None, None
        return []
    if node.role is NodeRole.FENCED:
        world.born[i] += 1
        world.views[i] = None
        node.rejoin(i * 100 + world.born[i])
    else:
        node.apply()
    return rounds.handle(0.0, node.status())


def _in_transit(world: World, views: list[View]) -> list[View]:
    for view in views:
        i = "abcdef".index(view.node)
        node = world.nodes[i]
        if node is not None and node.info.incarnation == view.incarnation:
            world.views[i] = view
    return views


# The steps of a world without further faults.


def is_well(world: World) -> bool:
    """Return whether a round runs on all of its members."""
    job = world.job
    if job.phase is not JobPhase.ACTIVE:
        return False
    for rank, info in enumerate(job.members):
        known = job.nodes.get(info.node)
        gone = known is None or known.info.incarnation != info.incarnation
        if gone and info.node in job.succeeded:
            continue
        node = world.nodes["abcdef".index(info.node)]
        if node is None or node.info.incarnation != info.incarnation:
            return False
        if (node.rank, node.size, node.generation) != (rank, len(job.members), job.generation):
            return False
        if node.phase not in (NodePhase.RUNNING, NodePhase.SUCCEEDED):
            return False
    return True


def healing_step(world: World) -> Step | None:
    """Return the next step of a world without further faults."""
    job = world.job
    for i, node in enumerate(world.nodes):
        if world.views[i] is not None:
            return ("receive", i)
        if node is not None and _must_react(node):
            return ("follow", i)
    for i, node in enumerate(world.nodes):
        if _missing(world, i) is not None:
            return ("detect loss", i)
        if node is not None and _known(world, i) is None and job.phase is not JobPhase.CLOSED:
            return ("report", i)
        if node is not None and _needs_report(world, node):
            return ("report", i)
    if job.waiting:
        return ("wait over", -1)
    if job.exclusions:
        return ("exclusion over", -1)
    alive = sum(node is not None for node in world.nodes)
    if alive < world.settings.min_nodes and job.phase is not JobPhase.CLOSED:
        return ("join", world.nodes.index(None))
    return None


def _needs_report(world: World, node: FakeNode) -> bool:
    """Return whether a heartbeat of this node would show that it or the coordinator is behind."""
    known = world.job.nodes.get(node.name)
    if known is None:
        return False
    job = world.job
    if known.seq < node.seq:
        return True
    if job.phase is JobPhase.RECOVERING:
        return False
    counts = job.phase is JobPhase.FORMING and known.sent_present != len(job.nodes)
    return counts or (node.term, node.revision) < (job.term, known.sent_revision)


# Comparison.


def fingerprint(world: World) -> int:
    """Return a hash that is equal for worlds that differ only in arbitrary numbers."""
    job = world.job
    alive = {node.info.incarnation for node in world.nodes if node is not None}
    members = tuple((info.node, info.incarnation) for info in job.members)
    here = tuple(
        (
            known.info.incarnation,
            known.phase,
            known.generation,
            known.failure is not None,
            known.workers,
            known.claim,
            known.claimed_rank if known.claim[0] else 0,
            known.claimed_size if known.claim[0] else 0,
        )
        for known in job.nodes.values()
    )
    out = frozenset((i, fate.superseded) for i, fate in job.retired.items() if i in alive)
    numbers = (job.term, job.round_term, job.round, job.generation, job.restarts, job.released)
    about = (job.phase, *numbers, *job.departed)
    ends = (job.waiting, job.outcome, job.final, job.failure is not None, bool(job.report))
    nodes = tuple(_outline(world, i) for i in range(len(world.nodes)))
    born = tuple(bool(count) for count in world.born)
    done = frozenset(job.succeeded)
    gone = (*job.exclusions, *((node, one.departures) for node, one in job.flaps.items()))
    return hash((about, ends, members, here, done, out, gone, nodes, born, world.faults_left))


def _outline(world: World, i: int) -> object:
    node, view = world.nodes[i], world.views[i]
    if node is None:
        return None
    known = world.job.nodes.get(node.name)
    job = world.job
    forming = job.phase is JobPhase.FORMING
    behind = known is not None and (
        (node.term, node.revision) < (job.term, known.sent_revision),
        forming and known.sent_present != len(job.nodes),
    )
    waiting = view and (
        view.role,
        view.term,
        view.round,
        view.generation,
        view.start,
        view.rank,
        view.size,
    )
    return (
        node.info.incarnation,
        node.phase,
        node.generation,
        node.term,
        node.role,
        (
            node.round_term,
            node.round,
            node.assigned_generation,
            node.rank,
            node.size,
            node.restarts,
        ),
        node.failure is not None,
        (node.start, node.has_workers, node.clear, node.reported_clear, node.reported_term),
        behind,
        known is not None and known.seq < node.seq,
        waiting,
        view is not None and node.accepts(view),
        node.is_member and world.viewed_by[i] == world.coordinators,
    )


def orders(world: World) -> list[tuple[int, ...]]:
    """Return all orders in which the live nodes may reconnect."""
    alive = [i for i, node in enumerate(world.nodes) if node is not None]
    return list(permutations(alive))
