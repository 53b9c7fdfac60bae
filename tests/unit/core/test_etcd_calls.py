"""The range of all keys that begin alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.etcd.calls import end_of_prefix
from holdfast.testing.sim.etcd import in_range


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        (b"a", b"b"),
        (b"/jobs/a/", b"/jobs/a0"),
        (b"a\xff", b"b"),
        (b"a\xfe\xff\xff", b"a\xff"),
        (b"\xff\xff", b"\0"),  # Nothing comes after it: to etcd that is all there is.
        (b"", b"\0"),
    ],
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert end_of_prefix(prefix) == end


@given(st.binary(max_size=4), st.binary(min_size=1, max_size=5))
def test_a_range_has_the_keys_that_begin_alike_and_no_others(prefix: bytes, key: bytes) -> None:
    assert in_range(key, prefix or b"\0", end_of_prefix(prefix)) == key.startswith(prefix)


@given(st.binary(min_size=1, max_size=4), st.binary(max_size=3))
def test_whatever_follows_a_prefix_is_in_its_range(prefix: bytes, rest: bytes) -> None:
    assert in_range(prefix + rest, prefix, end_of_prefix(prefix))
