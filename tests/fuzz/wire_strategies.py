"""Arbitrary messages, drawn from what the types themselves say.

Every struct is taken apart by `msgspec.inspect`, so a message or a field that is added is drawn
from then on. The structs of `core.protocol` say nothing of limits; `RANGES` does, by field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from holdfast.core.protocol import NODE_ID_CHARS_MAX, RUN_ID_CHARS_MAX, Failure, JobSettings
from holdfast.core.ranks import RankOrder
from holdfast.wire import limits
from holdfast.wire.messages import Message

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# Drawn lengths are short for speed; the limits themselves are tried in the unit tests.
LENGTH_MAX = 12

printable = st.characters(exclude_categories=["C", "Z"])
any_text = st.characters(exclude_categories=["Cs"])
COUNTED_MIN, COUNTED_MAX = -1, limits.REPORTED_COUNTER_MAX
counts = st.integers(COUNTED_MIN, COUNTED_MAX)
nodes = st.integers(0, limits.NODES_MAX)


def names(least: int, most: int) -> SearchStrategy[str]:
    return st.text(printable, min_size=least, max_size=min(most, LENGTH_MAX))


RANGES: dict[str, SearchStrategy[Any]] = {
    "run_id": names(1, RUN_ID_CHARS_MAX),
    "node": names(1, NODE_ID_CHARS_MAX),
    "incarnation": st.integers(0, limits.INCARNATION_MAX),
    "round_key": st.integers(0, limits.INCARNATION_MAX),
    "rank": st.integers(-1, limits.NODES_MAX - 1),
    "fixed_rank": st.integers(-1, limits.NODES_MAX - 1),
    "local_world_size": st.integers(1, limits.LOCAL_WORLD_SIZE_MAX),
    "size": nodes,
    "present": nodes,
    "needed": nodes,
    "spares": nodes,
    "restarts": st.integers(0, limits.REPORTED_COUNTER_MAX),
    "first_rank": st.integers(0, limits.WORLD_SIZE_MAX),
    "world_size": st.integers(0, limits.WORLD_SIZE_MAX),
    "first_role_rank": st.integers(0, limits.WORLD_SIZE_MAX),
    "role_world_size": st.integers(0, limits.WORLD_SIZE_MAX),
    "master_port": st.integers(0, limits.PORT_MAX),
    "ports": st.lists(st.integers(0, limits.PORT_MAX), min_size=1, max_size=limits.PORTS_MAX).map(
        tuple
    ),
    "pid": st.integers(0, limits.PID_MAX),
    "exitcode": st.integers(-limits.EXITCODE_MAX, limits.EXITCODE_MAX),
    "settle_s": st.floats(0, limits.SETTLE_S_MAX),
    "silence_s": st.floats(0, limits.AWAY_S_MAX),
    "away_s": st.floats(0, limits.AWAY_S_MAX),
    "order": st.sampled_from(RankOrder),
    **dict.fromkeys(["host", "role", "label", "address", "master_addr"], names(0, 255)),
}


def _of(kind: inspect.Type) -> SearchStrategy[Any]:
    """Return what draws a value of a type, within the limits it has."""
    match kind:
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high) if low is not None else counts
        case inspect.FloatType(ge=low, le=high):
            return st.floats(low, high)
        case inspect.StrType(min_length=least, max_length=most):
            most = LENGTH_MAX if most is None else min(most, LENGTH_MAX)
            return st.text(any_text, min_size=least or 0, max_size=most)
        case inspect.BytesType(min_length=least):
            return st.binary(min_size=least or 0, max_size=(least or 0) + LENGTH_MAX)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.ListType(item_type=item):
            return st.lists(_of(item), max_size=3)
        case inspect.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=3).map(tuple)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case inspect.StructType(cls=cls):
            return structs(cls)
    raise AssertionError(f"no strategy for {kind}")


def structs(cls: type[msgspec.Struct]) -> SearchStrategy[Any]:
    """Return what draws a struct: any fields that may be left out are sometimes left out."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    unlimited = cls.__module__ == Failure.__module__
    fields = {
        one.name: RANGES[one.name]
        if unlimited and one.name in RANGES and not isinstance(one.type, inspect.EnumType)
        else _of(one.type)
        for one in info.fields
    }
    needed = {one.name for one in info.fields if one.required}
    drawn = st.fixed_dictionaries(
        {name: value for name, value in fields.items() if name in needed},
        optional={name: value for name, value in fields.items() if name not in needed},
    )
    if cls is JobSettings:
        sizes = st.tuples(*[st.integers(1, limits.NODES_MAX)] * 2).map(sorted)
        return st.builds(
            lambda rest, size: cls(**{**rest, "min_nodes": size[0], "max_nodes": size[1]}),
            drawn,
            sizes,
        )
    return drawn.map(lambda values: cls(**values))


MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = get_args(Message)
messages: SearchStrategy[Message] = st.one_of(*map(structs, MESSAGE_TYPES))

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(any_text, max_size=LENGTH_MAX)
    | st.binary(max_size=LENGTH_MAX),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(any_text, max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
"""Whatever msgpack can say."""
