"""What each node of a job is told: the reading side of `core.rounds`, which changes nothing.

It also says who cannot be in a job, and which nodes of an earlier coordinator's round are back.
"""

from __future__ import annotations

from holdfast.core.job import NO_CLAIM, Job, JobPhase, Node
from holdfast.core.news import NodeInfo, Role, Status, View
from holdfast.core.ranks import NodeRanks, NodeShape, assign_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.news import JobSettings

NO_RANKS = NodeRanks(0, 0, 0, 0)
NAMES_MAX = 3
KEY_FACTOR, KEY_MODULUS = 1_000_003, 2**61 - 1


class Seats:
    """Who sits where in the current round, worked out once for as long as it stands."""

    def __init__(self, job: Job) -> None:
        members = job.members
        self.rank_of = {info.node: rank for rank, info in enumerate(members)}
        self.ranks = assign_ranks([NodeShape(info.role, info.local_world_size) for info in members])
        self.key = key_of(members)
        self._incarnations = {info.node: info.incarnation for info in members}
        self.master_addr, self.master_port = "", 0
        if members:
            first = members[0]
            self.master_addr = first.address
            self.master_port = first.ports[max(0, job.generation) % len(first.ports)]
            local = is_loopback(first.address) and bool(job.coordinator_address)
            if local and not all(is_loopback(info.address) for info in members):
                self.master_addr = job.coordinator_address

    def incarnation_of(self, node: str) -> int | None:
        """Return the incarnation of a member, or None of anybody else."""
        return self._incarnations.get(node)


def key_of(members: list[NodeInfo]) -> int:
    """Return a number that only these incarnations in this order have, as good as certainly."""
    key = len(members)
    for info in members:
        key = (key * KEY_FACTOR + info.incarnation) % KEY_MODULUS
    return key


def is_loopback(address: str) -> bool:
    """Return whether an address means another machine to everybody else."""
    return address.startswith("127.") or address == "::1"


def to_node(job: Job, seats: Seats, info: NodeInfo) -> View:
    """Return all that a node which is in the job must know of it."""
    if job.phase is JobPhase.CLOSED:
        return to_outsider(job, info, Role.CLOSED, job.why)
    role, rank = Role.WAITING, -1
    if job.phase is JobPhase.ACTIVE:
        if seats.incarnation_of(info.node) == info.incarnation:
            role, rank = Role.MEMBER, seats.rank_of[info.node]
        elif not job.waiting:
            role = Role.STANDBY
    member = role is Role.MEMBER
    ranks = seats.ranks[rank] if member else NO_RANKS
    return View(
        run_id=job.run_id,
        node=info.node,
        incarnation=info.incarnation,
        term=job.term,
        revision=job.revision,
        role=role,
        why=job.why,
        present=len(job.nodes),
        needed=job.settings.min_nodes if job.settings else 0,
        silence_s=job.silence_s,
        round_term=job.round_term if member else 0,
        round=job.round if member else -1,
        round_key=seats.key if member else 0,
        generation=job.generation,
        restarts=job.restarts,
        rank=rank,
        size=len(job.members) if member else 0,
        first_rank=ranks.first_rank,
        world_size=ranks.world_size,
        first_role_rank=ranks.first_role_rank,
        role_world_size=ranks.role_world_size,
        master_addr=seats.master_addr if member else "",
        master_port=seats.master_port if member else 0,
        failure=job.failure,
    )


def to_outsider(job: Job, info: NodeInfo, role: Role, why: str) -> View:
    """Return what an incarnation that is not in the job is told."""
    return View(
        run_id=job.run_id,
        node=info.node,
        incarnation=info.incarnation,
        term=job.term,
        revision=job.revision,
        role=role,
        why=why,
        generation=job.generation,
        restarts=job.restarts,
        outcome=job.outcome,
        failure=job.failure,
        report=job.report if job.final else b"",
        final=job.final,
    )


def objection(job: Job, status: Status) -> str:
    """Return why a node cannot be in a job, or nothing."""
    asked, info = status.settings, status.info
    if info.fixed_rank >= asked.max_nodes:
        return f"node rank {info.fixed_rank} is not below the number of nodes, {asked.max_nodes}"
    agreed = job.settings
    if agreed is None or not job.nodes:
        return ""
    if info.fixed_rank >= 0:
        for other in job.nodes.values():
            if other.info.fixed_rank == info.fixed_rank and other.info.node != info.node:
                return f"node rank {info.fixed_rank} is {other.info.node}'s already"
    for name, words in _AGREED.items():
        mine, theirs = words(asked), words(agreed)
        if mine != theirs:
            return (
                f"{info.node} was started with {name} {mine}, but the job {job.run_id!r} runs with "
                f"{theirs}; start all nodes of a job alike"
            )
    return ""


_AGREED: dict[str, Callable[[JobSettings], str]] = {
    "--nnodes": lambda settings: f"{settings.min_nodes}:{settings.max_nodes}",
    "--max-restarts": lambda settings: str(settings.max_restarts),
    "--spares": lambda settings: str(settings.spares),
    "rank_order": lambda settings: settings.order,
}


def previous_ranks(job: Job, seats: Seats) -> tuple[dict[str, int], int]:
    """Return who had which rank in the round before, and how many it had."""
    back = claimants(job)
    if not back:
        return seats.rank_of, len(job.members)
    return {node.info.node: node.claimed_rank for node in back}, back[0].claimed_size


def claims(status: Status) -> bool:
    """Return whether a node says that it is in a round."""
    return status.round_term > 0 and status.rank >= 0


def newcomer_says(job: Job) -> str:
    """Return why a round forms that was waited for."""
    if job.round < 0:
        most = job.settings.max_nodes if job.settings else 0
        return "all nodes are here" if len(job.nodes) >= most else "enough nodes are here"
    members = {info.node for info in job.members}
    names = [node for node in job.nodes if node not in members]
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"{', '.join(names[:NAMES_MAX])}{more} joined" if names else "enough nodes are here"


def claimants(job: Job) -> list[Node]:
    """Return, by rank, the nodes that are back of the newest round anybody was in."""
    newest = max((node.claim for node in job.nodes.values()), default=NO_CLAIM)
    back = [node for node in job.nodes.values() if node.claim == newest != NO_CLAIM]
    return sorted(back, key=lambda node: node.claimed_rank)
