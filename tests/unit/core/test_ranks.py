"""The order of nodes and the ranks of workers, for random nodes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.protocol import NodeInfo
from holdfast.core.ranks import NodeShape, RankOrder, assign_ranks, identical_ranks, order_nodes

untimed = settings(deadline=None)  # The host may be busy.
names = st.lists(st.sampled_from("abcdefghijkl"), unique=True, min_size=1, max_size=8)


def info(name: str, **more: str | int) -> NodeInfo:
    return NodeInfo(node=name, incarnation=1, **more)  # type: ignore[arg-type]


def order(previous: list[str], now: list[str]) -> list[str]:
    ranks = {name: rank for rank, name in enumerate(previous)}
    return [
        node.node for node in order_nodes([info(name) for name in now], ranks, RankOrder.STABLE)
    ]


@untimed
@given(names, names)
def test_survivors_keep_their_ranks_where_the_size_allows(
    previous: list[str], now: list[str]
) -> None:
    ordered = order(previous, now)
    for name in now:
        if name not in previous:
            continue
        old, new = previous.index(name), ordered.index(name)
        # A node moves down only to make room for itself and the nodes above it.
        above = sum(previous.index(other) > old for other in now if other in previous)
        assert new == min(old, len(now) - 1 - above)


@untimed
@given(
    st.lists(st.tuples(st.sampled_from(["h2", "h10", "h1"]), st.integers(0, 1)), max_size=8),
    st.sampled_from(["host", "label"]),
)
def test_nodes_with_the_same_host_or_label_have_adjacent_ranks(
    places: list[tuple[str, int]], kind: str
) -> None:
    nodes = [info(str(i), **{kind: place}) for i, (place, _) in enumerate(places)]
    stayed = [str(i) for i, (_, stayed) in enumerate(places) if stayed]
    before = {name: rank for rank, name in enumerate(reversed(stayed))}
    ordered = order_nodes(nodes, before, RankOrder(kind))
    where = [getattr(node, kind) for node in ordered]
    assert where == sorted(where, key=lambda place: int(place[1:]))
    for place in set(where):  # Earlier members come first, in their old order.
        here = [before.get(node.node, 1000) for node in ordered if getattr(node, kind) == place]
        assert here == sorted(here)


roles = st.sampled_from(["trainer", "reader", "evaluator"])
shapes = st.builds(NodeShape, roles, st.integers(1, 8))
rounds = st.lists(shapes, min_size=1, max_size=20)


@untimed
@given(rounds)
def test_every_rank_is_assigned_once_in_the_order_of_the_nodes(nodes: list[NodeShape]) -> None:
    ranks: list[int] = []
    role_ranks: dict[str, list[int]] = {}
    for node, given_ranks in zip(nodes, assign_ranks(nodes), strict=True):
        for worker in range(node.local_world_size):
            ranks.append(given_ranks.first_rank + worker)
            role_ranks.setdefault(node.role, []).append(given_ranks.first_role_rank + worker)
    assert ranks == list(range(len(ranks)))
    assert {r.world_size for r in assign_ranks(nodes)} == {len(ranks)}
    for node, given_ranks in zip(nodes, assign_ranks(nodes), strict=True):
        held = role_ranks[node.role]
        assert held == list(range(given_ranks.role_world_size))


@untimed
@given(st.integers(1, 50), st.integers(1, 16), roles)
def test_identical_ranks_equal_assigned_ranks_for_equal_nodes(
    group_world_size: int, local_world_size: int, role: str
) -> None:
    general = assign_ranks([NodeShape(role, local_world_size)] * group_world_size)
    fast = [
        identical_ranks(group_rank, group_world_size, local_world_size)
        for group_rank in range(group_world_size)
    ]
    assert fast == general
