from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from holdfast.core.protocol import Ack, Heartbeat, JobSettings, NodeInfo, NodeRole, Status, View
from holdfast.wire.errors import BadMessage
from holdfast.wire.messages import (
    STORE_OPS,
    Challenge,
    Goodbye,
    HandshakeMessage,
    Hello,
    JobSummary,
    Message,
    NodeSummary,
    Proof,
    Refusal,
    StatusReply,
    StatusRequest,
    StoreCall,
    StoreResult,
    Welcome,
    check,
    decode,
    decode_handshake,
    encode,
)

NONCE = bytes(32)

ONE_OF_EACH: list[Message] = [
    Status(
        seq=1,
        run_id="job",
        info=NodeInfo(node="n", incarnation=1, ports=(1, 2)),
        settings=JobSettings(min_nodes=1, max_nodes=2),
    ),
    Heartbeat(run_id="job", node="n", incarnation=1, seq=1, term=1, revision=1),
    Ack(run_id="job", node="n", incarnation=1, seq=1),
    View(run_id="job", node="n", incarnation=1, term=1, revision=1, role=NodeRole.STANDBY),
    Hello(nonce=NONCE),
    Challenge(version=1, nonce=NONCE, token_wanted=True, proof=bytes(32)),
    Proof(proof=bytes(32)),
    Welcome(version=1),
    Refusal(why="no", permanent=False),
    Goodbye(why="done"),
    StoreCall(id=1, run_id="job", scope="r1", op="wait", keys=("a", "b"), timeout_s=1.5),
    StoreResult(id=1, ok=False, why="no such key"),
    StatusRequest(id=1),
    StatusReply(
        id=1,
        jobs=[
            JobSummary(
                run_id="job",
                phase="running",
                nodes=[NodeSummary(node="n", rank=0)],
                history=["round 0 formed"],
            )
        ],
    ),
]


def body(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_the_examples_are_all_there_are() -> None:
    assert {type(one) for one in ONE_OF_EACH} == set(get_args(Message))


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda one: type(one).__name__)
def test_each_message_comes_back_as_it_was(message: Message) -> None:
    check(message)
    for kind in (bytes, bytearray, memoryview):
        assert decode(kind(encode(message))) == message


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda one: type(one).__name__)
def test_messages_cannot_be_changed(message: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(message, message.__struct_fields__[0], 1)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda one: type(one).__name__)
def test_no_beginning_of_a_message_is_a_message(message: Message) -> None:
    whole = encode(message)
    for length in range(len(whole)):
        with pytest.raises(BadMessage):
            decode(whole[:length])
    with pytest.raises(BadMessage, match="trailing"):
        decode(whole + b"\0")


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda one: type(one).__name__)
def test_a_stranger_can_say_only_what_belongs_to_the_handshake(message: Message) -> None:
    if isinstance(message, HandshakeMessage):
        assert decode_handshake(encode(message)) == message
    else:
        with pytest.raises(BadMessage, match="no message of the handshake: Invalid value"):
            decode_handshake(encode(message))


def test_fields_of_a_newer_version_are_passed_over() -> None:
    assert decode(body(type="goodbye", why="x", extra={"deep": [1, {"er": None}]})) == Goodbye(
        why="x"
    )


def test_what_is_absurd_in_a_status_is_found() -> None:
    beat = Heartbeat(run_id="job", node="", incarnation=1, seq=1, term=1, revision=1)
    with pytest.raises(BadMessage, match=r"Heartbeat\.node: 0 characters are not within 1 and 200"):
        decode(encode(beat))
    with pytest.raises(BadMessage, match=r"Heartbeat\.node"):
        check(beat)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "missing required field `type`"),
        ({"type": "nonsense"}, "Invalid value 'nonsense'"),
        ({"type": 3}, "Expected `str`"),
        ({"type": "hello"}, "missing required field `nonce`"),
        ({"type": "hello", "nonce": b"short"}, "length >= 16"),
        ({"type": "hello", "nonce": bytes(65)}, "length <= 64"),
        ({"type": "hello", "nonce": NONCE, "version_min": 0}, ">= 1"),
        ({"type": "hello", "nonce": NONCE, "version_max": 2**31}, "<= 2147483647"),
        ({"type": "hello", "nonce": NONCE, "magic": "x" * 9}, "length <= 8"),
        ({"type": "welcome", "version": "1"}, "Expected `int`, got `str`"),
        ({"type": "goodbye", "why": "x" * 2001}, "length <= 2000"),
        ({"type": "proof", "proof": bytes(65)}, "length <= 64"),
        ({"type": "query", "id": -1}, ">= 0"),
        ({"type": "query", "id": True}, "got `bool`"),
        ({"type": "answer", "id": 1, "jobs": [{"run_id": "x" * 1001}]}, "length <= 1000"),
        ({"type": "answer", "id": 1, "jobs": [{}] * 10_001}, "length <= 10000"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, object], why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        decode(body(**fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "drop_table"),
        ("run_id", ""),
        ("run_id", "x" * 1001),
        ("scope", "x" * 1201),
        ("keys", ["x" * 4001]),
        ("keys", ["x"] * 10_001),
        ("keys", "abc"),
        ("value", "text"),
        ("value", bytes(480 * 1024 + 1)),
        ("expected", bytes(480 * 1024 + 1)),
        ("amount", 2**63),
        ("amount", 1.5),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", 2_592_001.0),
    ],
)
def test_absurd_store_calls_are_refused(field: str, value: object) -> None:
    fields: dict[str, object] = {"type": "store_call", "id": 1, "run_id": "job", "op": "set"}
    assert decode(body(**fields)) == StoreCall(id=1, run_id="job", op="set")
    with pytest.raises(BadMessage, match=field):
        decode(body(**{**fields, field: value}))


def test_every_operation_of_a_store_can_be_asked_for() -> None:
    assert len(STORE_OPS) == 9
    for op in STORE_OPS:
        check(StoreCall(id=1, run_id="job", op=op))


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
    "a number": b"\x01",
    "a list": b"\x91\x01",
    "a time stamp": b"\xd6\xff\x00\x00\x00\x00",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_hostile_bodies_are_bad_messages_of_one_short_line(bomb: bytes) -> None:
    for decoded_by in (decode, decode_handshake):
        with pytest.raises(BadMessage, match=r"no message of (ours|the handshake): ") as raised:
            decoded_by(bomb)
        line = str(raised.value)
        assert line.isprintable()
        assert len(line) < 300
