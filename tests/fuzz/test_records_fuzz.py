"""Any bytes in the reports and records of other nodes are decoded or refused, and never crash an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from wire_strategies import anything

from fake_node import RUN, FakeNode, a_job_of, a_node
from holdfast.core.etcd.calls import Get, Grant, KeepAlive, Request, Revoke, Txn
from holdfast.core.etcd.keys import (
    MARK,
    JobRecord,
    NodeRecord,
    Presence,
    leader_value,
    pack,
    read_leader,
    unpack,
)
from holdfast.core.etcd.leader import LedJob, job_to_lead
from holdfast.core.machine import TICK
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import NodeInfo, View
from holdfast.core.rounds import Job, NodeLost, Rounds, WaitEnded
from holdfast.core.session import StatusChanged
from holdfast.core.shared_state import (
    STATE_MARK,
    CallState,
    RefuseJoin,
    SharedStateSession,
    StateRead,
    StateWritten,
    Timeouts,
    decode,
    encode,
)
from holdfast.etcd import json_gateway
from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure
from holdfast.processes.failures.failure_report import BadReport, FailureReport
from holdfast.processes.failures.failure_report import pack as pack_report
from holdfast.processes.failures.failure_report import unpack as unpack_report

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

untimed = settings(deadline=None, max_examples=300)  # Other programs may use the machine.

DEEP = b"\x91" * 100_000 + b"\x90"
NOT_UTF8 = b"\x81\xa6run_id\xa2\xff\xfe"
THREE = a_job_of(2, 3, max_restarts=2)

# Stored jobs, in every phase.


def nodes_of(count: int) -> list[FakeNode]:
    return [a_node(name, THREE, i, host="h") for i, name in enumerate("abcd"[:count], start=1)]


def play(rounds: Rounds, nodes: list[FakeNode], *events: Any) -> None:
    for one in events:
        for view in rounds.handle(0.0, one):
            for node in nodes:
                if node.receive(view):
                    node.apply()


def jobs() -> list[Job]:
    made = [Job(run_id=RUN)]

    def copy(rounds: Rounds) -> None:
        made.append(decode(encode(rounds.job)))

    rounds, nodes = Rounds(Job(run_id=RUN)), nodes_of(4)
    for node in nodes[:2]:
        play(rounds, nodes, node.status())
        copy(rounds)  # Alone; then about to form.
    play(rounds, nodes, WaitEnded(rounds.job.wait_seq))
    for node in nodes[:2]:
        play(rounds, nodes, node.status())
    copy(rounds)  # Active.
    for node in nodes[2:]:
        play(rounds, nodes, node.status())
    copy(rounds)  # With a joining node, and a standby.
    nodes[0].slow = True
    play(rounds, nodes, nodes[0].leave())
    copy(rounds)  # With a node that left, whose workers still run.
    for _ in range(3):
        play(rounds, nodes, NodeLost(nodes[1].name, nodes[1].info.incarnation, "silent"))
        nodes[1].rejoin(nodes[1].info.incarnation + 10)
        play(rounds, nodes, nodes[1].status())
    copy(rounds)  # With an excluded node.
    again = Rounds(Job(run_id=RUN, term=9))
    claiming = [node for node in nodes if node.is_member]
    play(again, nodes, claiming[0].status())
    copy(again)  # Recovering.
    play(rounds, nodes, claiming[-1].fail(retryable=False, report=b"a report"))
    copy(rounds)  # Failed.
    return made


STATES = [msgspec.msgpack.decode(encode(job)[len(STATE_MARK) :]) for job in jobs()]
leaves = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([2**61, 2**53, 2**64 - 1, 1e300, None, True, [], {}, "", "a", "b", "\x1b[2J"]),
    st.sampled_from(["forming", "recovering", "active", "closed", "failed", "running"]),
    anything,
)


def mutated(data: DataObject, value: Any) -> Any:
    """Return a value in which one part, at any depth, is changed or missing."""
    if not isinstance(value, (dict, list)) or not value or not data.draw(st.integers(0, 9)):
        return data.draw(leaves)
    keys = sorted(value, key=str) if isinstance(value, dict) else range(len(value))
    key = data.draw(st.sampled_from(keys))
    other = dict(value) if isinstance(value, dict) else list(value)
    if not data.draw(st.integers(0, 9)):
        del other[key]
    else:
        other[key] = mutated(data, value[key])
    return other


damaged_bodies = st.one_of(
    st.binary(max_size=60),
    anything.map(msgspec.msgpack.encode),
    st.sampled_from([DEEP, NOT_UTF8, b"", msgspec.msgpack.encode([{"rank": 1}])]),
)


def damaged(data: DataObject, *whole: Any) -> bytes:
    """Return bytes that are similar to one of these, or arbitrary."""
    if data.draw(st.booleans()):
        return data.draw(damaged_bodies)
    value = data.draw(st.sampled_from(whole))
    for _ in range(data.draw(st.integers(1, 3))):
        value = mutated(data, value)
    body = bytearray(msgspec.msgpack.encode(value))
    if body and not data.draw(st.integers(0, 3)):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    return bytes(body)


# Reports.

FAILURES = {
    1: ProcessFailure(1, 41, -9, "", stderr_tail="Traceback", detail="why", host="n"),
    0: ProcessFailure(0, 40, 1, "", order=1, consequence=True),
}
REPORT = msgspec.msgpack.decode(pack_report(FAILURES))


@untimed
@given(st.data())
def test_any_report_is_shown_or_refused(data: DataObject) -> None:
    try:
        found = unpack_report(damaged(data, REPORT))
    except BadReport:
        event("refused")
        return
    error = ChildFailedError("train.py", found)
    assert str(error).replace("\n", "").replace("\t", "").isprintable()
    report = FailureReport.from_error(
        error, run_id=RUN, generation=0, max_restarts=0, log_dir="/logs"
    )
    assert msgspec.json.encode(report)
    event("shown")


# The state that nodes share.


def session(name: str, incarnation: int) -> SharedStateSession:
    """Return the session of a node that belongs to some of the jobs."""
    return SharedStateSession(
        0.0,
        run_id=RUN,
        info=NodeInfo(node=name, incarnation=incarnation, address=name),
        settings=THREE,
        timeouts=Timeouts(absent_s=1.0),
        draw=lambda: 0.5,
    )


def run_node(one: SharedStateSession, state: bytes) -> bytes | None:
    """Run a node with a state for a while; return the resulting state, or None if it refuses the state."""
    now = 0.0
    for phase in (NodePhase.READY, NodePhase.RUNNING, NodePhase.FAILED, NodePhase.LEAVING):
        effects = one.handle(now, StatusChanged(phase, 0))
        for _ in range(20):
            if any(isinstance(effect, RefuseJoin) for effect in effects):
                return None
            if one.call is CallState.READING:
                effects = one.handle(now, StateRead(state, 1))
            elif one.call is CallState.WRITING:
                assert one._offer is not None
                state = one._offer[0]
                effects = one.handle(now, StateWritten())
            else:
                now += 3.0
                effects = one.handle(now, TICK)
    return state


@untimed
@given(st.data())
def test_any_shared_state_is_used_or_refused(data: DataObject) -> None:
    state = STATE_MARK + damaged(data, *STATES)
    try:
        decode(state)
    except ValueError:
        one = session("a", 1)
        one.handle(0.0, StatusChanged(NodePhase.READY, -1))
        (effect,) = one.handle(0.0, StateRead(state, 1))
        assert isinstance(effect, RefuseJoin)
        event("refused")
        return
    for name, incarnation in (("a", 1), ("b", 2), ("z", 99)):
        after = run_node(session(name, incarnation), state)
        if after is not None:
            decode(after)
    event("used")


# Records in etcd.

PRESENCE = Presence("a.example", 4711, "0123456789abcdef" * 2)
NODE = msgspec.msgpack.decode(
    pack(NodeRecord(nodes_of(1)[0].status(), 3, 1001, PRESENCE))[len(MARK) + 1 :]
)
VIEW = msgspec.msgpack.decode(
    pack(View(run_id=RUN, node="a", incarnation=1, term=1, revision=1, role=NodeRole.MEMBER))[
        len(MARK) + 1 :
    ]
)


@untimed
@given(st.data(), st.sampled_from([NodeRecord, View]))
def test_any_record_of_a_node_is_read_or_refused(data: DataObject, kind: type[Any]) -> None:
    found = unpack(kind, MARK + b"=" + damaged(data, NODE, VIEW))
    assert found is None or isinstance(found, kind)
    event(f"{kind.__name__}, refused: {found is None}")


@untimed
@given(st.data())
def test_any_job_is_taken_over_or_refused(data: DataObject) -> None:
    value = MARK + b"=" + damaged(data, *({"job": state, "lease": 7} for state in STATES))
    record = unpack(JobRecord, value)
    event(f"refused: {record is None}")
    if record is None:
        return
    alive = {("a", 1), ("b", 2)}
    led = LedJob(0.0, job_to_lead(record, alive, 5, RUN, 5.0), step_s=1.0, strict=True)
    led.begin(0.0, [], {}, lambda _peer: "gone")
    for now in (3.0, 70.0, 140.0):
        led.handle(now, TICK)
    assert unpack(JobRecord, pack(JobRecord(led.job, 7))) is not None


@untimed
@given(st.data())
def test_any_leader_is_followed_or_not_watched(data: DataObject) -> None:
    text = leader_value("a b", 1001, PRESENCE)
    first = data.draw(st.integers(0, len(text)))
    last = data.draw(st.integers(first, len(text)))
    value = text[:first] + data.draw(st.binary(max_size=4)) + text[last:]
    name, lease, presence = read_leader(value)
    assert isinstance(name, str)
    assert 0 <= lease < 2**63
    if presence is not None:
        assert read_leader(leader_value(name, lease, presence)) == (name, lease, presence)
    event(f"watched: {presence is not None}")


@pytest.mark.parametrize("body", [DEEP, NOT_UTF8])
def test_values_that_msgspec_accepts_are_still_checked(body: bytes) -> None:
    with pytest.raises(BadReport):
        unpack_report(body)
    with pytest.raises(ValueError):  # noqa: PT011 (of any kind)
        decode(STATE_MARK + body)
    assert unpack(JobRecord, MARK + b"=" + body) is None


# Responses of etcd, or of another server at its endpoint.

ANSWERS = [
    {
        "header": {"revision": "7"},
        "succeeded": True,
        "responses": [{"response_range": {"kvs": []}}],
    },
    {"header": {"revision": "7"}, "kvs": [{"key": "YQ==", "value": "Yg==", "mod_revision": "3"}]},
    {"result": {"header": {"revision": "7"}, "events": [{"kv": {"key": "YQ=="}}]}},
    {"result": {"ID": "7", "TTL": "5"}},
    {"ID": "7", "TTL": "5"},
    {"error": {"message": "etcdserver: no space", "grpc_code": 8}},
    {"token": "abc"},
]
REQUESTS: list[Request] = [
    Txn((), (Get(b"a"),)),
    Txn((), (Get(b"a"), Get(b"b"))),
    Grant(5),
    KeepAlive(7),
    Revoke(7),
]


@untimed
@given(st.data(), st.sampled_from([200, 400, 404, 503]))
def test_any_response_of_etcd_is_decoded_or_a_problem(data: DataObject, status: int) -> None:
    if data.draw(st.booleans()):
        body = data.draw(
            st.binary(max_size=60)
            | st.sampled_from([b"[" * 100_000, b'{"token":"\xff\xfe"}', b'{"error":"\xff"}'])
        )
    else:
        body = msgspec.json.encode(mutated(data, data.draw(st.sampled_from(ANSWERS))))
    for request in REQUESTS:
        json_gateway.decode(request, status, body)
    json_gateway.decode_line(body)
    json_gateway.decode_token(status, body)
