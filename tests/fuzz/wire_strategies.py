"""Arbitrary messages, generated from their types, and arbitrary reads of a stream.

`msgspec.inspect` describes every struct, so new messages and fields are included automatically. Names and messages for
users are printable; the types do not say so.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from holdfast.core.job_settings import SETTINGS, TYPES, JobSettings
from holdfast.core.limits import ADDRESS_CHARS, INCARNATION_MAX
from holdfast.wire.messages import Message

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# Lengths are short for speed; the unit tests check the limits.
LENGTH_MAX = 12

printable = st.characters(exclude_categories=["C", "Z"])
any_text = st.characters(exclude_categories=["Cs"])
of_addresses = st.sampled_from(ADDRESS_CHARS)
NAMES = {
    "run_id",
    "node",
    "new_id",
    "host",
    "role",
    "label",
    "id",
    "action",
    "what",
    "source",
    "kind",
}
ADDRESSES = {"address", "master_addr"}
SHOWN = {
    "activity",
    "why",
    "summary",
    "stuck",
    "slow",
    "wait_reason",
    "request_text",
    "who",
    "state",
    "section",
    "text",
}


def _of(kind: inspect.Type, characters: SearchStrategy[str] = any_text) -> SearchStrategy[Any]:
    """Return a strategy for values of a type, within its limits."""
    match kind:
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, INCARNATION_MAX if high is None else high)
        case inspect.FloatType(ge=low, le=high):
            return st.floats(low, high)
        case inspect.StrType(min_length=least, max_length=most):
            most = LENGTH_MAX if most is None else min(most, LENGTH_MAX)
            return st.text(characters, min_size=least or 0, max_size=most)
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
        case inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(_of(item), min_size=least or 0, max_size=3).map(tuple)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case inspect.StructType(cls=cls):
            return structs(cls)
        case inspect.NamedTupleType(cls=cls) if cls is JobSettings:
            return job_settings()
    raise AssertionError(f"no strategy for {kind}")


def characters_of(name: str) -> SearchStrategy[str]:
    """Return a strategy for the characters of a field."""
    if name in ADDRESSES:
        return of_addresses
    return printable if name in NAMES | SHOWN else any_text


def job_settings() -> SearchStrategy[JobSettings]:
    """Return a strategy for valid settings of a job."""
    values: dict[str, SearchStrategy[Any]] = {}
    for name, setting in SETTINGS.items():
        kind = TYPES[name]
        if issubclass(kind, Enum):
            values[name] = st.sampled_from(kind)
        elif kind is float:
            values[name] = st.floats(setting.least, setting.most)
        else:
            values[name] = st.integers(int(setting.least), int(setting.most))
    sizes = st.tuples(values.pop("min_nodes"), values.pop("max_nodes")).map(sorted)
    return st.builds(
        lambda rest, size: JobSettings(*size, **rest), st.fixed_dictionaries(values), sizes
    )


def structs(cls: type[msgspec.Struct]) -> SearchStrategy[Any]:
    """Return a strategy for a struct, which sometimes omits optional fields."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    fields = {one.name: _of(one.type, characters_of(one.name)) for one in info.fields}
    needed = {one.name for one in info.fields if one.required}
    drawn = st.fixed_dictionaries(
        {name: value for name, value in fields.items() if name in needed},
        optional={name: value for name, value in fields.items() if name not in needed},
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
"""Any value that msgpack can encode."""

cuts = st.lists(st.integers(1, 30), min_size=1, max_size=5)


def cut(stream: bytes, sizes: list[int]) -> list[bytes]:
    """Split a stream into reads of these sizes, repeatedly."""
    reads, at, turn = [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        reads.append(stream[at : at + size])
        at, turn = at + size, turn + 1
    return reads
