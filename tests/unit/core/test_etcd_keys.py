"""Keys of a job in etcd: names are unambiguous, and invalid values unpack to None."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_node import RUN, a_job_of, a_node
from holdfast.core.etcd import keys as etcd_keys
from holdfast.core.etcd.calls import end_of_prefix
from holdfast.core.etcd.keys import (
    COMPRESS_FROM_BYTES,
    MARK,
    JobKeys,
    JobRecord,
    NodeRecord,
    Presence,
    leader_value,
    pack,
    read_leader,
    read_record,
    roll_call_number,
    unpack,
    version_refusal,
)
from holdfast.core.phases import NodeRole
from holdfast.core.protocol import ControlPort, View
from holdfast.core.rounds import Job
from holdfast.defaults import PROTOCOL_VERSION
from simulator.etcd_model import in_range

# All names that can be sent.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def a_record(**more: object) -> NodeRecord:
    presence = Presence("a.example", 4711, "0123456789abcdef" * 2)
    control = ControlPort(4712, b"k" * 16)
    return NodeRecord(a_node("a", a_job_of(2, 2), 7, **more).status(), 3, 1001, presence, control)


def a_view(report: bytes = b"") -> View:
    return View(
        run_id=RUN, node="a", incarnation=7, term=1, revision=2, role=NodeRole.CLOSED, report=report
    )


def is_below(keys: JobKeys, key: bytes) -> bool:
    return in_range(key, keys.root, end_of_prefix(keys.root))


@given(NAMES, NAMES, NAMES, NAMES, st.integers(0, 2**63))
def test_different_names_have_different_keys(
    run: str, other_run: str, node: str, other: str, number: int
) -> None:
    mine, others = JobKeys("/p", run), JobKeys("/p", other_run)
    key = mine.node(node, number)
    assert mine.peer_of(key) == mine.peer_of(mine.view(node, number)) == (node, number)
    assert key.count(b"/") == mine.nodes.count(b"/") + 1 == 5
    assert is_below(mine, key)
    assert is_below(others, key) == (run == other_run)
    assert (mine.node(other, number) == key) == (other == node)
    assert mine.view(other, number).startswith(mine.views_of(node)) == (other == node)
    folders = (mine.shared, mine.nodes, mine.views, mine.store)
    assert [key.startswith(folder) for folder in folders] == [False, True, False, False]


@pytest.mark.parametrize("prefix", ["/p", "/p///"])
def test_keys_are_as_documented(prefix: str) -> None:
    keys = JobKeys(prefix, "job")
    assert keys.leader == b"/p/job/shared/leader"
    assert keys.roll_call == b"/p/job/shared/call"
    assert keys.job == b"/p/job/job"
    assert keys.node("a", 255) == b"/p/job/nodes/a/ff"
    assert keys.view("a", 255) == b"/p/job/views/a/ff"
    assert keys.store == b"/p/job/store/"
    for name in (b"", b"a", b"a/", b"a/x/1", b"a/zz", b"\xff/1", b"a/1/"):
        assert keys.peer_of(keys.nodes + name) is None, name


@given(st.binary(max_size=4), st.binary(min_size=1, max_size=5))
def test_range_end_of_a_prefix_excludes_other_keys(prefix: bytes, key: bytes) -> None:
    assert in_range(key, prefix or b"\0", end_of_prefix(prefix)) == key.startswith(prefix)


def test_records_survive_packing() -> None:
    node, view = a_record(), a_view()
    assert unpack(NodeRecord, pack(node)) == node
    assert unpack(View, pack(view)) == view
    job = JobRecord(Job(run_id=RUN, term=4), 1001)
    assert unpack(JobRecord, pack(job)) == job
    large = a_view(b"the same " * 10_000)
    assert len(pack(large)) < 2_000
    assert unpack(View, pack(large)) == large


DEEP = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90"
HALF = pack(a_view(random.Random(1).randbytes(5_000)))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        MARK,
        MARK + b"=",
        MARK + b"z",
        pack(a_view()).replace(MARK, b"hf9"),
        MARK + b"?" + pack(a_view())[4:],
        pack(a_record()),
        pack(a_view())[:-1],
        HALF[:-8],
        HALF[:-2],  # Only the checksum is truncated.
        MARK + b"=" + DEEP,
        MARK + b"z" + zlib.compress(DEEP),
        pack(a_view()).replace(b"run", b"r\xffn"),
    ],
)
def test_an_invalid_value_unpacks_to_none(value: bytes) -> None:
    assert unpack(View, HALF) is not None
    assert unpack(View, value) is None


def test_a_record_of_another_version_is_refused_with_a_hint() -> None:
    leader = leader_value("a b", 1001, None)
    assert read_leader(leader) == ("a b", 0, None)
    for mine in (leader, pack(a_view()), HALF):
        assert version_refusal(mine) == ""
        other = version_refusal(mine.replace(MARK, b"hf%d" % (PROTOCOL_VERSION + 1), 1))
        assert other.endswith("install the same Holdfast on all nodes")
    with pytest.raises(ValueError, match="the same Holdfast"):
        read_record(View, pack(a_view()).replace(MARK, b"hf9", 1))
    for foreign in (b"", b"junk", MARK, b"hfx a 1", b"a 1"):
        assert version_refusal(foreign) == ""


def test_a_record_that_decompresses_above_the_limit_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb = pack(a_view(bytes(200_000)))
    assert unpack(View, bomb) is not None
    monkeypatch.setattr(etcd_keys, "RECORD_BYTES_MAX", 150_000)
    assert unpack(View, bomb) is None


def test_a_damaged_record_is_invalid_but_raises_no_other_error() -> None:
    draw = random.Random(5)
    records = [(NodeRecord, pack(a_record())), (View, pack(a_view(b"x" * COMPRESS_FROM_BYTES)))]
    for kind, value in records * 1_000:
        damaged = bytearray(value)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(value))] = draw.randrange(256)
        found: object = unpack(kind, bytes(damaged))
        assert found is None or isinstance(found, kind)


def test_roll_call_number_of_an_invalid_value_is_0() -> None:
    assert roll_call_number(b"12") == 12
    for other in (b"", b"-1", b"x", b" 1", b"1.0", "٣".encode(), b"9" * 20, b"9" * 10_000):
        assert roll_call_number(other) == 0, other
