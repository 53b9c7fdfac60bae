from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.protocol import (
    Ack,
    Failure,
    Heartbeat,
    JobOutcome,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    Status,
    View,
)
from holdfast.wire import limits
from holdfast.wire.checking import CHECKS
from holdfast.wire.errors import BadMessage

NAN, INF = float("nan"), float("inf")

INFO = NodeInfo(node="n1", incarnation=7)
SETTINGS = JobSettings(min_nodes=1, max_nodes=3)
FAILURE = Failure(node="n1", host="h1", rank=2, pid=33, exitcode=-9, summary="killed")
STATUS = Status(seq=0, run_id="job", info=INFO, settings=SETTINGS)
BEAT = Heartbeat(run_id="job", node="n1", incarnation=7, seq=1, term=1, revision=1)
ACK = Ack(run_id="job", node="n1", incarnation=7, seq=-1)
VIEW = View(run_id="job", node="n1", incarnation=7, term=1, revision=1, role=NodeRole.WAITING)


def check(message: object) -> None:
    CHECKS[type(message)](message)


@pytest.mark.parametrize(
    "message",
    [
        STATUS,
        BEAT,
        ACK,
        VIEW,
        replace(STATUS, phase=NodePhase.FAILED, failure=FAILURE, report=b"r"),
        replace(
            VIEW,
            role=NodeRole.CLOSED,
            outcome=JobOutcome.FAILED,
            failure=FAILURE,
            why="words,\nmore words",
        ),
        replace(STATUS, info=replace(INFO, incarnation=2**64 - 1, ports=(0, 65535) * 8)),
        replace(STATUS, settings=replace(SETTINGS, max_restarts=-1, settle_s=0.25)),
        replace(STATUS, run_id="ein Lauf mit Umläuten und 漢字"),
        replace(VIEW, master_addr="fe80::1%eth0", master_port=29500),
    ],
)
def test_sensible_values_pass(message: object) -> None:
    check(message)


COUNTS = [2**62 + 1, -2]


@pytest.mark.parametrize(
    ("message", "field", "values"),
    [
        (BEAT, "run_id", ["", "x" * 1001, "a\nb", "\x1b[2J", "\0"]),
        (BEAT, "node", ["", "x" * 201, "a\tb"]),
        (BEAT, "incarnation", [-1, 2**64]),
        (BEAT, "seq", COUNTS),
        (BEAT, "term", COUNTS),
        (BEAT, "revision", COUNTS),
        (ACK, "run_id", [""]),
        (ACK, "node", [""]),
        (ACK, "incarnation", [-1]),
        (ACK, "seq", COUNTS),
        (STATUS, "seq", COUNTS),
        (STATUS, "run_id", ["", "x" * 1001, "\n"]),
        (STATUS, "generation", COUNTS),
        (STATUS, "assigned_generation", COUNTS),
        (STATUS, "term", COUNTS),
        (STATUS, "round_term", COUNTS),
        (STATUS, "round", COUNTS),
        (STATUS, "rank", [-2, 1_000_000]),
        (STATUS, "size", [-1, 1_000_001]),
        (STATUS, "restarts", [-1, 2**62 + 1]),
        (STATUS, "report", [b"x" * (limits.REPORT_BYTES_MAX + 1)]),
        (VIEW, "run_id", [""]),
        (VIEW, "node", [""]),
        (VIEW, "incarnation", [-1]),
        (VIEW, "term", COUNTS),
        (VIEW, "revision", COUNTS),
        (VIEW, "why", ["x" * 2001]),
        (VIEW, "present", [-1, 1_000_001]),
        (VIEW, "needed", [-1, 1_000_001]),
        (VIEW, "round_term", COUNTS),
        (VIEW, "round", COUNTS),
        (VIEW, "generation", COUNTS),
        (VIEW, "restarts", [-1]),
        (VIEW, "rank", [-2, 1_000_000]),
        (VIEW, "size", [-1, 1_000_001]),
        (VIEW, "first_rank", [-1, 10**11 + 1]),
        (VIEW, "world_size", [-1, 10**11 + 1]),
        (VIEW, "first_role_rank", [-1, 10**11 + 1]),
        (VIEW, "role_world_size", [-1, 10**11 + 1]),
        (VIEW, "master_addr", ["x" * 256, "a\nb"]),
        (VIEW, "master_port", [-1, 65536]),
        (VIEW, "report", [b"x" * (limits.REPORT_BYTES_MAX + 1)]),
    ],
)
def test_absurd_values_are_named(message: Any, field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(BadMessage, match=rf"^{type(message).__name__}\.{field}: ") as raised:
            check(replace(message, **{field: value}))
        assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("node", ["", "x" * 201, "a\nb"]),
        ("incarnation", [-1, 2**64]),
        ("role", ["x" * 256, "\r"]),
        ("local_world_size", [0, -1, 100_001]),
        ("host", ["x" * 256, "a\nb"]),
        ("label", ["x" * 256]),
        ("address", ["x" * 256, "\x7f"]),
        ("ports", [(-1, 0), (0, 65536), (65536, 0), (0, -1), (), (1,) * 17]),
        ("fixed_rank", [-2, 1_000_000]),
    ],
)
def test_absurd_nodes_are_named(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(BadMessage, match=rf"^Status\.info\.{field}: "):
            check(replace(STATUS, info=replace(INFO, **{field: value})))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("min_nodes", [0, -1, 1_000_001]),
        ("max_nodes", [0, -1, 1_000_001]),
        ("spares", [-1, 1_000_001]),
        ("max_restarts", [2**62 + 1, -(2**62) - 1]),
        ("settle_s", [-0.1, 86401.0, NAN, INF, -INF]),
    ],
)
def test_absurd_settings_are_named(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(BadMessage, match=rf"^Status\.settings\.{field}: ") as raised:
            check(replace(STATUS, settings=replace(SETTINGS, **{field: value})))
        assert len(str(raised.value)) < 400


def test_the_minimum_is_not_over_the_maximum() -> None:
    settings = replace(SETTINGS, min_nodes=4, max_nodes=3)
    with pytest.raises(BadMessage, match=r"^Status\.settings: min_nodes 4 is over max_nodes 3$"):
        check(replace(STATUS, settings=settings))


@pytest.mark.parametrize("message", [STATUS, VIEW])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("node", ["x" * 201, "a\nb"]),
        ("host", ["x" * 256, "a\nb"]),
        ("rank", [-2, 10**11]),
        ("pid", [-1, 2**31]),
        ("exitcode", [2**31, -(2**31)]),
        ("summary", ["x" * 4001]),
    ],
)
def test_absurd_failures_are_named(message: Any, field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(BadMessage, match=rf"^Failure\.{field}: "):
            check(replace(message, failure=replace(FAILURE, **{field: value})))


def test_every_field_of_every_message_has_a_rule() -> None:
    """A field that is added to a message and forgotten here would be taken unseen."""
    seen: set[str] = set()

    class Spy:
        def __init__(self, value: Any, path: str) -> None:
            self._value, self._path = value, path

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._value, name)
            seen.add(f"{self._path}.{name}")
            nested = hasattr(value, "__struct_fields__")
            return Spy(value, f"{self._path}.{name}") if nested else value

    status = replace(STATUS, failure=FAILURE)
    view = replace(VIEW, failure=FAILURE)
    expected: set[str] = set()
    for message in (status, view, BEAT, ACK):
        name = type(message).__name__
        CHECKS[type(message)](Spy(message, name))
        for field in message.__struct_fields__:
            expected.add(f"{name}.{field}")
            within = getattr(getattr(message, field), "__struct_fields__", ())
            expected.update(f"{name}.{field}.{one}" for one in within)
    # Enumerations and booleans have no values that are out of range.
    closed = {
        "Status.phase",
        "Status.settings.order",
        "View.refusal",
        "View.role",
        "View.outcome",
        "View.final",
    }
    closed |= {
        f"{one}.failure.{field}" for one in ("Status", "View") for field in ("sudden", "retryable")
    }
    assert expected - seen == closed
