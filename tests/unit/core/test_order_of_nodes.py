"""Who gets which rank: `order_nodes`, for any nodes there may be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.news import NodeInfo
from holdfast.core.ranks import natural, order_nodes

untimed = settings(deadline=None)  # Others may need the machine meanwhile.
names = st.lists(st.sampled_from("abcdefghijkl"), unique=True, min_size=1, max_size=8)


def info(name: str, **more: str | int) -> NodeInfo:
    return NodeInfo(node=name, incarnation=1, **more)  # type: ignore[arg-type]


def order(previous: list[str], now: list[str], kind: str = "stable") -> list[str]:
    ranks = {name: rank for rank, name in enumerate(previous)}
    return [node.node for node in order_nodes([info(name) for name in now], ranks, kind)]


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
    ordered = order_nodes(nodes, before, kind)
    where = [getattr(node, kind) for node in ordered]
    assert where == sorted(where, key=lambda place: int(place[1:]))
    for place in set(where):  # Those who were there before come first, and in their old order.
        here = [before.get(node.node, 1000) for node in ordered if getattr(node, kind) == place]
        assert here == sorted(here)


def test_a_fixed_rank_counts_before_all_else() -> None:
    nodes = [info("a", fixed_rank=1, host="h1"), info("b", fixed_rank=0, host="h2")]
    for kind in ("stable", "host", "label"):
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
