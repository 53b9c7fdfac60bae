"""Who gets which rank: `order_nodes`, for any nodes there may be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.protocol import NodeInfo
from holdfast.core.ranks import (
    NodeRanks,
    NodeShape,
    RankOrder,
    assign_ranks,
    identical_ranks,
    natural,
    order_nodes,
)

untimed = settings(deadline=None)  # Others may need the machine meanwhile.
names = st.lists(st.sampled_from("abcdefghijkl"), unique=True, min_size=1, max_size=8)


def info(name: str, **more: str | int) -> NodeInfo:
    return NodeInfo(node=name, incarnation=1, **more)  # type: ignore[arg-type]


def order(previous: list[str], now: list[str]) -> list[str]:
    ranks = {name: rank for rank, name in enumerate(previous)}
    return [
        node.node for node in order_nodes([info(name) for name in now], ranks, RankOrder.STABLE)
    ]


def test_examples() -> None:
    assert order([], ["b", "a"]) == ["b", "a"], "the first round is as they came"
    assert order(["a", "b", "c"], ["b", "c", "d"]) == ["d", "b", "c"], "newcomers fill holes"
    assert order(["a", "b", "c"], ["c", "a"]) == ["a", "c"], "a smaller round closes the holes"
    assert order(["a", "b", "c", "d"], ["d", "b", "x"]) == ["x", "b", "d"]


@untimed
@given(names, names)
def test_those_who_stay_keep_their_ranks_where_the_size_allows(
    previous: list[str], now: list[str]
) -> None:
    ordered = order(previous, now)
    for name in now:
        if name not in previous:
            continue
        old, new = previous.index(name), ordered.index(name)
        # One moves down only to make room below the size for itself and those above it.
        above = sum(previous.index(other) > old for other in now if other in previous)
        assert new == min(old, len(now) - 1 - above)


@untimed
@given(names, names)
def test_newcomers_are_in_the_order_in_which_they_came(previous: list[str], now: list[str]) -> None:
    newcomers = [name for name in order(previous, now) if name not in previous]
    assert newcomers == [name for name in now if name not in previous]


@untimed
@given(
    st.lists(st.tuples(st.sampled_from(["h2", "h10", "h1"]), st.integers(0, 1)), max_size=8),
    st.sampled_from(["host", "label"]),
)
def test_nodes_that_share_a_host_or_label_are_together(
    places: list[tuple[str, int]], kind: str
) -> None:
    nodes = [info(str(i), **{kind: place}) for i, (place, _) in enumerate(places)]
    stayed = [str(i) for i, (_, stayed) in enumerate(places) if stayed]
    before = {name: rank for rank, name in enumerate(reversed(stayed))}
    ordered = order_nodes(nodes, before, RankOrder(kind))
    where = [getattr(node, kind) for node in ordered]
    assert where == sorted(where, key=lambda place: int(place[1:]))
    for place in set(where):  # Those who were there before come first, and in their old order.
        here = [before.get(node.node, 1000) for node in ordered if getattr(node, kind) == place]
        assert here == sorted(here)


def test_a_fixed_rank_counts_before_all_else() -> None:
    nodes = [info("a", fixed_rank=1, host="h1"), info("b", fixed_rank=0, host="h2")]
    for kind in RankOrder:
        assert [node.node for node in order_nodes(nodes, {"a": 0, "b": 1}, kind)] == ["b", "a"]


def test_numbers_in_names_count_by_their_value() -> None:
    hosts = ["", "10", "9", "node10", "node2", "node2-b", "node2-a", "rack1-node3", "rack01-node20"]
    assert sorted(hosts, key=natural) == [
        "",
        "node2",
        "node2-a",
        "node2-b",
        "node10",
        "rack1-node3",
        "rack01-node20",
        "9",
        "10",
    ]


roles = st.sampled_from(["trainer", "reader", "evaluator"])
shapes = st.builds(NodeShape, roles, st.integers(1, 8))
rounds = st.lists(shapes, min_size=1, max_size=20)


def ranks_of(shape: NodeShape, given_ranks: NodeRanks) -> list[int]:
    first = given_ranks.first_rank
    return list(range(first, first + shape.local_world_size))


def role_ranks_of(shape: NodeShape, given_ranks: NodeRanks) -> list[int]:
    first = given_ranks.first_role_rank
    return list(range(first, first + shape.local_world_size))


def test_an_example() -> None:
    nodes = [NodeShape("trainer", 2), NodeShape("reader", 1), NodeShape("trainer", 3)]
    assert assign_ranks(nodes) == [
        NodeRanks(first_rank=0, world_size=6, first_role_rank=0, role_world_size=5),
        NodeRanks(first_rank=2, world_size=6, first_role_rank=0, role_world_size=1),
        NodeRanks(first_rank=3, world_size=6, first_role_rank=2, role_world_size=5),
    ]


@untimed
@given(rounds)
def test_every_rank_is_held_once_and_none_is_missing(nodes: list[NodeShape]) -> None:
    assigned = assign_ranks(nodes)
    assert len(assigned) == len(nodes)
    ranks = [rank for pair in zip(nodes, assigned, strict=True) for rank in ranks_of(*pair)]
    # In the order of the nodes and of their workers, which also says contiguous and disjoint.
    assert ranks == list(range(sum(node.local_world_size for node in nodes)))


@untimed
@given(rounds)
def test_every_role_rank_is_held_once_in_its_role(nodes: list[NodeShape]) -> None:
    by_role: dict[str, list[int]] = {}
    for node, ranks in zip(nodes, assign_ranks(nodes), strict=True):
        by_role.setdefault(node.role, []).extend(role_ranks_of(node, ranks))
    for role, held in by_role.items():
        size = sum(node.local_world_size for node in nodes if node.role == role)
        assert held == list(range(size))


@untimed
@given(st.integers(1, 50), st.integers(1, 16), roles)
def test_for_nodes_that_are_alike_nothing_needs_exchanging(
    group_world_size: int, local_world_size: int, role: str
) -> None:
    general = assign_ranks([NodeShape(role, local_world_size)] * group_world_size)
    fast = [
        identical_ranks(group_rank, group_world_size, local_world_size)
        for group_rank in range(group_world_size)
    ]
    assert fast == general
