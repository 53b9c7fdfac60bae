"""Where a job lies in etcd: names keep their place, and what cannot be read is None."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_node import RUN, a_job_of, a_node
from holdfast.core.etcd import keys
from holdfast.core.etcd.calls import end_of_prefix
from holdfast.core.etcd.keys import (
    COMPRESS_FROM_BYTES,
    MARK,
    JobKeys,
    JobRecord,
    NodeRecord,
    get_prefix,
    pack,
    roll_call_number,
    unpack,
)
from holdfast.core.protocol import NodeRole, View
from holdfast.core.rounds import Job
from holdfast.testing.sim.etcd import in_range

# Whatever can be in a name that can be sent at all.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
AWKWARD = [
    "",
    " ",
    ".",
    "..",
    "/",
    "a/b",
    "job",
    "shared/leader",
    "%2F",
    "%",
    "ä",
    "节点",
    "\0",
    "🜂",
]


def a_record(**more: object) -> NodeRecord:
    return NodeRecord(a_node("a", a_job_of(2, 2), 7, **more).status(), 3)


def a_view(report: bytes = b"") -> View:
    return View(
        run_id=RUN, node="a", incarnation=7, term=1, revision=2, role=NodeRole.CLOSED, report=report
    )


def below(places: JobKeys, key: bytes) -> bool:
    return in_range(key, places.root, end_of_prefix(places.root))


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_names_keep_their_place(name: str) -> None:
    for run_id, node in ((name, "a"), ("job", name), (name, name)):
        places = JobKeys("/holdfast/", run_id)
        for key, folder in (
            (places.node(node, 0xABC), places.nodes),
            (places.view(node, 0xABC), places.views),
        ):
            assert places.peer_of(key) == (node, 0xABC)
            assert key.count(b"/") == folder.count(b"/") + 1
            assert key.startswith(folder)
            assert key.isascii()
        assert places.root.count(b"/") == 3
        assert places.view(node, 1).startswith(places.views_of(node))


@given(NAMES, NAMES, NAMES, NAMES, st.integers(0, 2**63))
def test_no_two_names_share_a_place(
    run: str, other_run: str, node: str, other: str, number: int
) -> None:
    mine, others = JobKeys("/p", run), JobKeys("/p", other_run)
    key = mine.node(node, number)
    assert mine.peer_of(key) == (node, number)
    assert below(mine, key)
    assert below(others, key) == (run == other_run)
    assert (mine.node(other, number) == key) == (other == node)
    assert mine.view(other, number).startswith(mine.views_of(node)) == (other == node)
    folders = (mine.shared, mine.nodes, mine.views, mine.store)
    assert [key.startswith(folder) for folder in folders] == [False, True, False, False]


@pytest.mark.parametrize("prefix", ["/p", "/p/", "/p///"])
def test_how_a_prefix_ends_is_no_matter(prefix: str) -> None:
    places = JobKeys(prefix, "job")
    assert places.leader == b"/p/job/shared/leader"
    assert places.roll_call == b"/p/job/shared/call"
    assert places.job == b"/p/job/job"
    assert places.node("a", 255) == b"/p/job/nodes/a/ff"
    assert places.view("a", 255) == b"/p/job/views/a/ff"
    assert places.store == b"/p/job/store/"


def test_keys_of_others_are_nobodys() -> None:
    places = JobKeys("/p", "job")
    for name in (b"", b"a", b"a/", b"a/x/1", b"a/zz", b"\xff/1", b"a/1/"):
        assert places.peer_of(places.nodes + name) is None, name


def test_all_below_is_all_that_is_there() -> None:
    get = get_prefix(b"/p/job/nodes/")
    assert (get.key, get.end, get.keys_only) == (b"/p/job/nodes/", b"/p/job/nodes0", False)
    assert get_prefix(b"/p/", keys_only=True).keys_only


# Records.


def test_records_come_back_as_they_were() -> None:
    node, view = a_record(), a_view()
    assert unpack(NodeRecord, pack(node)) == node
    assert unpack(View, pack(view)) == view
    job = JobRecord(Job(run_id=RUN, term=4, succeeded={"a"}), 1001)
    assert unpack(JobRecord, pack(job)) == job


def test_large_records_are_stored_smaller() -> None:
    view = a_view(b"the same " * 10_000)
    small = pack(view)
    assert len(small) < 2_000
    assert unpack(View, small) == view
    assert pack(a_view()).startswith(MARK + b"=")
    assert pack(a_view(b"x" * COMPRESS_FROM_BYTES)).startswith(MARK + b"z")


def test_of_another_version_is_none() -> None:
    value = pack(a_record())
    assert unpack(NodeRecord, value.replace(MARK, b"hf2")) is None
    assert unpack(NodeRecord, MARK + b"?" + value[4:]) is None
    assert unpack(NodeRecord, b"") is None
    assert unpack(NodeRecord, MARK) is None
    assert unpack(NodeRecord, MARK + b"=") is None
    assert unpack(NodeRecord, MARK + b"z") is None


def test_a_record_of_another_kind_is_none() -> None:
    assert unpack(View, pack(a_record())) is None
    assert unpack(JobRecord, pack(a_view())) is None


def test_what_a_later_version_adds_does_not_hinder() -> None:
    known = msgspec.msgpack.decode(pack(a_record())[4:])
    more = msgspec.msgpack.encode({**known, "mood": ["fine"]})
    assert unpack(NodeRecord, MARK + b"=" + more) == a_record()


def test_half_a_record_is_none() -> None:
    whole = pack(a_view(random.Random(1).randbytes(5_000)))
    assert whole.startswith(MARK + b"z")
    assert unpack(View, whole) is not None
    assert unpack(View, whole[:-8]) is None
    assert unpack(View, whole[:-2]) is None, "even if only its checksum is not whole"
    assert unpack(View, pack(a_view())[:-1]) is None


def test_what_would_unpack_to_too_much_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = pack(a_view(bytes(250_000)))
    assert len(bomb) < 10_000
    assert unpack(View, bomb) is not None
    monkeypatch.setattr(keys, "RECORD_BYTES_MAX", 200_000)
    assert unpack(View, bomb) is None


def test_what_is_deeper_than_anybody_digs_is_none() -> None:
    deep = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90"
    assert unpack(NodeRecord, MARK + b"=" + deep) is None
    assert unpack(NodeRecord, MARK + b"z" + zlib.compress(deep)) is None


def test_text_that_is_none_is_none() -> None:
    value = pack(a_record(host="somewhere"))
    assert unpack(NodeRecord, value.replace(b"somewhere", b"some\xffhere")) is None


def test_no_damage_does_more_than_make_a_record_unreadable() -> None:
    draw = random.Random(5)
    records = [(NodeRecord, pack(a_record())), (View, pack(a_view(b"x" * COMPRESS_FROM_BYTES)))]
    for kind, value in records * 2_000:
        damaged = bytearray(value)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(value))] = draw.randrange(256)
        found: object = unpack(kind, bytes(damaged))
        assert found is None or isinstance(found, kind)


def test_the_number_of_a_roll_call() -> None:
    assert roll_call_number(b"12") == 12
    for other in (b"", b"-1", b"x", b" 1", b"1.0", "٣".encode(), b"9" * 20, b"9" * 10_000):
        assert roll_call_number(other) == 0, other
