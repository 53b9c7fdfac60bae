"""The laws of ranks, for any nodes there may be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.ranks import NodeRanks, NodeShape, assign_ranks, identical_ranks

untimed = settings(deadline=None)  # Others may need the machine meanwhile.

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
