"""The order of a round's nodes by rank, stable across the rounds of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.job_settings import RankOrder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.core.protocol import NodeInfo


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
                natural(node.host if order is RankOrder.HOST else node.label),
                previous.get(node.node, len(previous) + len(nodes)),
            ),
        )
    return _stable(nodes, previous)


def _stable(nodes: Sequence[NodeInfo], previous: Mapping[str, int]) -> list[NodeInfo]:
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


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares numbers within names by value."""
    words: list[str] = []
    for char in text:
        if words and char.isdecimal() == words[-1][-1].isdecimal():
            words[-1] += char
        else:
            words.append(char)
    return tuple((int(word), "") if word[0].isdecimal() else (-1, word) for word in words)
