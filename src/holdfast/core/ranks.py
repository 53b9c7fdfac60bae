"""The ranks of a round's workers, computed from its nodes.

Global ranks are contiguous on a node and follow the order of the nodes, whatever their roles. Role ranks
count the workers of one role in the same order. Nodes may have different numbers of workers.
`core.node_order` determines the order of the nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Sequence


class NodeShape(Value):
    """The properties of a node that affect ranks: its role and its number of workers."""

    role: str
    local_world_size: int


class NodeRanks(Value):
    """The ranks of a node's first worker, and the total numbers of workers."""

    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int


def assign_ranks(nodes: Sequence[NodeShape]) -> list[NodeRanks]:
    """Return the ranks of each node, in the order of the nodes."""
    role_sizes: dict[str, int] = {}
    for node in nodes:
        role_sizes[node.role] = role_sizes.get(node.role, 0) + node.local_world_size
    world_size = sum(role_sizes.values())
    assigned = []
    next_rank = 0
    next_role_rank = dict.fromkeys(role_sizes, 0)
    for node in nodes:
        assigned.append(
            NodeRanks(next_rank, world_size, next_role_rank[node.role], role_sizes[node.role])
        )
        next_rank += node.local_world_size
        next_role_rank[node.role] += node.local_world_size
    return assigned


def identical_ranks(group_rank: int, group_world_size: int, local_world_size: int) -> NodeRanks:
    """Return a node's ranks if all nodes have the same role and number of workers."""
    world_size = group_world_size * local_world_size
    first = group_rank * local_world_size
    return NodeRanks(first, world_size, first, world_size)
