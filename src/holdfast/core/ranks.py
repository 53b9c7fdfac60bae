"""The ranks of a round's workers, computed from its nodes.

Global ranks are contiguous on a node and follow the order of the nodes, whatever their roles. Role ranks
count the workers of one role in the same order. Nodes may have different numbers of workers.
`order_nodes` determines the order of the nodes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.core.protocol import NodeInfo


class RankOrder(Enum):
    """How the nodes of a round are ranked."""

    STABLE = "stable"
    """Members of the previous round keep their ranks."""
    HOST = "host"
    """Nodes on the same host get adjacent ranks."""
    LABEL = "label"
    """Nodes with the same label get adjacent ranks."""


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


# The order of the nodes.


def order_nodes(
    nodes: Sequence[NodeInfo], previous: Mapping[str, int], order: RankOrder
) -> list[NodeInfo]:
    """Return the nodes of a round by rank. `nodes` are in the order in which they joined.

    If nodes have fixed ranks, those decide. `HOST` and `LABEL` group nodes with an equal host or
    label, in natural order (`node2` before `node10`). Otherwise ranks are stable: nodes of the
    previous round keep their order, and also their ranks where the size allows; new nodes fill the
    gaps.
    """
    if any(node.fixed_rank >= 0 for node in nodes):
        return sorted(nodes, key=lambda node: node.fixed_rank)
    if order is not RankOrder.STABLE:
        return sorted(
            nodes,
            key=lambda node: (
                natural_sort_key(node.host if order is RankOrder.HOST else node.label),
                previous.get(node.node, len(previous) + len(nodes)),
            ),
        )
    return _in_previous_order(nodes, previous)


def _in_previous_order(nodes: Sequence[NodeInfo], previous: Mapping[str, int]) -> list[NodeInfo]:
    stayed = sorted(
        (node for node in nodes if node.node in previous), key=lambda node: previous[node.node]
    )
    ranked: list[NodeInfo | None] = [None] * len(nodes)
    above = len(nodes)
    for node in reversed(stayed):  # From the highest rank down: each leaves room for the next one.
        above = min(previous[node.node], above - 1)
        ranked[above] = node
    newcomers = (node for node in nodes if node.node not in previous)
    return [node if node is not None else next(newcomers) for node in ranked]


def natural_sort_key(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares numbers within names by value."""
    words: list[str] = []
    for char in text:
        if words and char.isdecimal() == words[-1][-1].isdecimal():
            words[-1] += char
        else:
            words.append(char)
    return tuple((int(word), "") if word[0].isdecimal() else (-1, word) for word in words)
