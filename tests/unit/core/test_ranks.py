"""Who gets which rank: `order_nodes`, for any nodes there may be."""

from __future__ import annotations

from itertools import pairwise

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


def order(previous: list[str], now: list[str], kind: str = "stable") -> list[str]:
    ranks = {name: rank for rank, name in enumerate(previous)}
    return [node.node for node in order_nodes([info(name) for name in now], ranks, RankOrder(kind))]


def test_examples() -> None:
    assert order([], ["b", "a"]) == ["b", "a"], "the first round is as they came"
    assert order(["a", "b", "c"], ["b", "c", "d"]) == ["d", "b", "c"], "newcomers fill holes"
    assert order(["a", "b", "c"], ["c", "a"]) == ["a", "c"], "a smaller round closes the holes"
    assert order(["a", "b", "c", "d"], ["d", "b", "x"]) == ["x", "b", "d"]


@untimed
@given(names, names, st.sampled_from(["stable", "host", "label"]))
def test_everybody_gets_one_rank(previous: list[str], now: list[str], kind: str) -> None:
    assert sorted(order(previous, now, kind)) == sorted(now)


@untimed
@given(names, names)
def test_those_who_stay_keep_their_order(previous: list[str], now: list[str]) -> None:
    stayed = [name for name in order(previous, now) if name in previous]
    assert stayed == [name for name in previous if name in now]


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
@given(names)
def test_a_round_that_stays_as_it_is_moves_nobody(now: list[str]) -> None:
    assert order(now, sorted(now)) == now


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


@untimed
@given(st.text(max_size=12), st.text(max_size=12))
def test_any_two_names_can_be_compared(one: str, other: str) -> None:
    assert (natural(one) < natural(other)) + (natural(other) < natural(one)) <= 1
    if one == other:
        assert natural(one) == natural(other)


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


def test_no_nodes_no_ranks() -> None:
    assert assign_ranks([]) == []


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
@given(rounds)
def test_all_agree_on_the_sizes(nodes: list[NodeShape]) -> None:
    assigned = assign_ranks(nodes)
    assert {ranks.world_size for ranks in assigned} == {
        sum(node.local_world_size for node in nodes)
    }
    sizes = {(node.role, r.role_world_size) for node, r in zip(nodes, assigned, strict=True)}
    assert len(sizes) == len({node.role for node in nodes})
    assert sum(size for _, size in sizes) == assigned[0].world_size


@untimed
@given(rounds)
def test_role_ranks_are_in_the_order_of_global_ranks(nodes: list[NodeShape]) -> None:
    assigned = list(zip(nodes, assign_ranks(nodes), strict=True))
    for role in {node.role for node in nodes}:
        firsts = [(r.first_role_rank, r.first_rank) for node, r in assigned if node.role == role]
        for (role_rank, rank), (next_role_rank, next_rank) in pairwise(firsts):
            assert role_rank < next_role_rank
            assert rank < next_rank


@untimed
@given(rounds, st.data())
def test_roles_do_not_move_global_ranks(nodes: list[NodeShape], data: st.DataObject) -> None:
    others = [NodeShape(data.draw(roles), node.local_world_size) for node in nodes]
    before = [(r.first_rank, r.world_size) for r in assign_ranks(nodes)]
    assert [(r.first_rank, r.world_size) for r in assign_ranks(others)] == before


@untimed
@given(rounds)
def test_with_one_role_the_two_kinds_of_rank_are_the_same(nodes: list[NodeShape]) -> None:
    for ranks in assign_ranks([NodeShape("worker", node.local_world_size) for node in nodes]):
        assert ranks.first_role_rank == ranks.first_rank
        assert ranks.role_world_size == ranks.world_size


@untimed
@given(rounds, shapes)
def test_a_node_that_comes_last_moves_nobody(nodes: list[NodeShape], last: NodeShape) -> None:
    def firsts(assigned: list[NodeRanks]) -> list[tuple[int, int]]:
        return [(ranks.first_rank, ranks.first_role_rank) for ranks in assigned]

    assert firsts(assign_ranks([*nodes, last]))[:-1] == firsts(assign_ranks(nodes))


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
