"""Limits and hostile bodies; tests/fuzz checks that messages survive a round trip."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect
from msgspec.structs import replace

from holdfast.core import limits as core_limits
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Ack, Failure, Heartbeat, NodeInfo, Status, View
from holdfast.wire import wire_limits as limits
from holdfast.wire.frames import encode_frame
from holdfast.wire.messages import (
    Goodbye,
    Message,
    StoreCall,
    StoreResult,
    check,
    decode,
    decode_handshake,
    encode,
)
from holdfast.wire.wire_errors import BadMessage

INFO = NodeInfo(node="n1", incarnation=7)
SETTINGS = JobSettings(min_nodes=1, max_nodes=3)
FAILURE = Failure(node="n1", host="h1", rank=2, pid=33, exitcode=-9, summary="killed")
STATUS = Status(seq=0, run_id="job", info=INFO, settings=SETTINGS, failure=FAILURE)
BEAT = Heartbeat(run_id="job", node="n1", incarnation=7, seq=1, term=1, revision=1)
ACK = Ack(run_id="job", node="n1", incarnation=7, seq=-1)
VIEW = View(
    run_id="job", node="n1", incarnation=7, term=1, revision=1, role=NodeRole.WAITING,
    failure=FAILURE, why="words,\nmore words",
)  # fmt: skip
WIDE = "\N{ROCKET}"  # Text is limited in characters, a frame in bytes.


@pytest.mark.parametrize(
    "message",
    [
        replace(STATUS, info=replace(INFO, incarnation=2**64 - 1, ports=(0, 65535) * 8)),
        replace(STATUS, settings=SETTINGS._replace(max_restarts=-1, settle_s=0.25)),
        replace(STATUS, run_id="ein Lauf mit Umläuten und 漢字"),
        replace(VIEW, master_addr="fe80::1%eth0", master_port=29500),
        ACK,
    ],
)
def test_valid_values_are_accepted(message: Message) -> None:
    check(message)


@pytest.mark.parametrize(
    ("message", "path", "values"),
    [
        (BEAT, "run_id", ["", "x" * 1001, "a\nb", "\x1b[2J", "\0"]),
        (BEAT, "seq", [2**62 + 1, -2]),
        (ACK, "incarnation", [-1]),
        # A coordinator increments the numbers that a node reports.
        (STATUS, "generation", [2**53 + 1, -2]),
        (STATUS, "term", [2**53 + 1]),
        (STATUS, "restarts", [-1, 2**53 + 1]),
        (STATUS, "rank", [-2, 1_000_000]),
        (STATUS, "report", [b"x" * (core_limits.REPORT_BYTES_MAX + 1)]),
        (STATUS, "info.node", ["", "x" * 201, "a\nb"]),
        (STATUS, "info.address", ["x" * 256, "\x7f", "a b", "$(id)", "a;b", "x\n", "[::1]", "é"]),
        (STATUS, "info.local_world_size", [0, 100_001]),
        (STATUS, "info.ports", [(-1, 0), (0, 65536), (), (1,) * 17]),
        (STATUS, "settings.min_nodes", [0, 4, 1_000_001]),
        (STATUS, "settings.settle_s", [-0.1, 86401.0, float("nan"), float("inf")]),
        (STATUS, "failure.host", ["x" * 256, "a\nb"]),
        (VIEW, "failure.summary", ["x" * 4001]),
        (VIEW, "world_size", [-1, 10**11 + 1]),
        (VIEW, "master_port", [-1, 65536]),
        (VIEW, "master_addr", ["`id`", "a'b", "-o ProxyCommand=x"]),
    ],
)
def test_values_out_of_range_are_refused(message: Any, path: str, values: list[object]) -> None:
    first, _, rest = path.partition(".")
    for value in values:
        field = getattr(message, first)
        if isinstance(field, JobSettings):
            field = field._replace(**{rest: value})  # type: ignore[arg-type]
        else:
            field = replace(field, **{rest: value}) if rest else value
        with pytest.raises(BadMessage) as raised:
            check(replace(message, **{first: field}))
        line = str(raised.value)
        assert line.isprintable()
        assert len(line) < 400


def test_every_number_and_text_has_a_limit() -> None:
    """Without this test, a new field without a limit would go unnoticed."""
    seen: set[type] = set()

    def look(kind: inspect.Type, where: str) -> None:
        match kind:
            case inspect.IntType(ge=low, le=high):
                assert low is not None, where
                assert high is not None or where.endswith(("incarnation", "round_key")), where
            case inspect.FloatType(ge=low, le=high):
                assert None not in (low, high), where
            case inspect.StrType(max_length=most) | inspect.BytesType(max_length=most):
                assert most is not None, where
            case inspect.ListType(item_type=item, max_length=most):
                assert most is not None, where
                look(item, where)
            case inspect.VarTupleType(item_type=item, max_length=most):
                assert most is not None, where
                look(item, where)
            case inspect.UnionType(types=types):
                for one in types:
                    look(one, where)
            case inspect.StructType(cls=cls, fields=fields):
                if cls not in seen:
                    seen.add(cls)
                    for field in fields:
                        look(field.type, f"{cls.__name__}.{field.name}")

    look(inspect.type_info(Message), "")
    assert {NodeInfo, Failure} < seen


def test_the_largest_messages_fit_into_a_frame() -> None:
    name, node = WIDE * core_limits.NAME_CHARS_MAX, WIDE * core_limits.NODE_ID_CHARS_MAX
    run_id = WIDE * core_limits.RUN_ID_CHARS_MAX
    status = replace(
        STATUS,
        run_id=run_id,
        info=replace(INFO, node=node, role=name, host=name, label=name, address="x" * len(name)),
        phase=NodePhase.FAILED,
        failure=Failure(node=node, host=name, summary=WIDE * core_limits.SUMMARY_CHARS_MAX),
        report=b"x" * core_limits.REPORT_BYTES_MAX,
    )
    call = StoreCall(
        id=core_limits.COUNTER_MAX,
        run_id=run_id,
        scope=WIDE * limits.STORE_SCOPE_CHARS_MAX,
        op="compare_set",
        keys=(WIDE * limits.STORE_KEY_CHARS_MAX,),
        value=b"x" * limits.STORE_VALUE_BYTES_MAX,
        expected=b"y" * limits.STORE_VALUE_BYTES_MAX,
    )
    for message in (status, call):
        assert decode(encode_frame(message)[4:]) == message


def body(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_unknown_fields_are_ignored() -> None:
    assert decode(body(type="goodbye", why="x", extra=[1, {"er": None}])) == Goodbye(why="x")


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "drop_table"},
        {"keys": ["x" * 4001]},
        {"value": bytes(480 * 1024 + 1)},
        {"amount": 2**63},
        {"timeout_s": float("nan")},
        {"type": "hello", "nonce": b"short"},
        {"type": "answer", "jobs": [{}] * 10_001},
    ],
)
def test_invalid_messages_of_other_kinds_are_refused(fields: dict[str, object]) -> None:
    good: dict[str, object] = {"type": "store_call", "id": 1, "run_id": "job", "op": "set"}
    assert decode(body(**good)) == StoreCall(id=1, run_id="job", op="set")
    with pytest.raises(BadMessage):
        decode(body(**{**good, **fields}))


BOMBS = {
    "a list of four billion": b"\x83\xa4type\xa6answer\xa2id\x01\xa4jobs\xdd\xff\xff\xff\xff",
    "a tuple of as many": b"\x83\xa4type\xaastore_call\xa2id\x01\xa4keys\xdd\xff\xff\xff\xff",
    "a map of as many": b"\xdf\xff\xff\xff\xff\xa4type\xa7goodbye",
    "text of four gigabytes": b"\x82\xa4type\xa7goodbye\xa3why\xdb\xff\xff\xff\xff",
    "nesting without an end": b"\x82\xa4type\xa7goodbye\xa3new" + b"\x91" * 1_000_000,
    "nesting before the tag": b"\x82\xa3new" + b"\x81\x01" * 500_000,
    "text that is not UTF-8": b"\x82\xa4type\xa7goodbye\xa3why\xa2\xff\xfe",
    "a byte that msgpack never uses": b"\xc1",
    "a tag of half a megabyte": b"\x81\xa4type\xdb\x00\x08\x00\x00" + b"\n" * 0x80000,
    "nothing": b"",
    "a time stamp": b"\xd6\xff\x00\x00\x00\x00",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_hostile_bodies_are_bad_messages_of_one_short_line(bomb: bytes) -> None:
    for decoded_by in (decode, decode_handshake):
        with pytest.raises(BadMessage) as raised:
            decoded_by(bomb)
        line = str(raised.value)
        assert line.isprintable()
        assert len(line) < 300


def test_unauthenticated_peer_can_send_only_handshake_messages() -> None:
    for message in (STATUS, BEAT, ACK, VIEW, StoreCall(id=1, run_id="job", op="get")):
        with pytest.raises(BadMessage):
            decode_handshake(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        Goodbye(why="half a character: \udcff"),
        StoreCall(id=1, run_id="job", op="add", amount=2**64),
        StoreCall(id=1, run_id="job", op="set", value=object()),  # type: ignore[arg-type]
    ],
)
def test_message_that_cannot_be_encoded_is_a_bad_message(message: Message) -> None:
    with pytest.raises(BadMessage, match=type(message).__name__):
        encode_frame(message)


EVIL = "gone\x1b[2J\x9b31m\u202e\n[holdfast] all is well"
SHOWN = "gone\\x1b[2J\\x9b31m\\u202e [holdfast] all is well"


def test_received_text_is_printable() -> None:
    """It is not refused, because a node may send the text of its workers unchanged."""
    failure = Failure(node="a", host="h", summary=EVIL)
    status = decode(encode(replace(STATUS, failure=failure, stuck=EVIL)))
    assert isinstance(status, Status)
    assert status.failure == replace(failure, summary=SHOWN)
    assert status.stuck == SHOWN
    texts = {"why": EVIL, "slow": EVIL, "wait_reason": EVIL}
    view = decode(encode(replace(VIEW, failure=failure, **texts)))
    assert isinstance(view, View)
    assert (view.why, view.slow, view.wait_reason) == (SHOWN, SHOWN, SHOWN)
    assert view.failure == status.failure
    assert decode(encode(StoreResult(id=1, ok=False, why=EVIL))) == StoreResult(
        id=1, ok=False, why=SHOWN
    )


def test_escaped_text_stays_within_its_limit() -> None:
    longest = replace(VIEW, why="\x1b" * core_limits.WHY_CHARS_MAX)
    check(decode(encode(longest)))
