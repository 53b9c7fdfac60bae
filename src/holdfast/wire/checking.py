"""Whether the values of a status, beat, ack or view are within their limits.

The structs of `core.protocol` are also built by the machines themselves and by the simulator, so they
carry no limits of their own; what came over the wire is checked here, once, after decoding. The
tables below are the rules.

It does not check that a message makes sense in the state a job is in: that is for the machines.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from holdfast.core.protocol import (
    NODE_ID_CHARS_MAX,
    RUN_ID_CHARS_MAX,
    Ack,
    Failure,
    Heartbeat,
    Status,
    View,
)
from holdfast.errors import InternalError
from holdfast.wire.errors import BadMessage, quoted
from holdfast.wire.limits import (
    AWAY_S_MAX,
    COUNTER_MAX,
    EXITCODE_MAX,
    INCARNATION_MAX,
    LOCAL_WORLD_SIZE_MAX,
    NAME_CHARS_MAX,
    NODES_MAX,
    PID_MAX,
    PORT_MAX,
    PORTS_MAX,
    REPORT_BYTES_MAX,
    REPORTED_COUNTER_MAX,
    SETTLE_S_MAX,
    SUMMARY_CHARS_MAX,
    WHY_CHARS_MAX,
    WORLD_SIZE_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = (0, COUNTER_MAX)
SAID = (-1, REPORTED_COUNTER_MAX)
COUNT_OR_NONE = (-1, COUNTER_MAX)  # -1 stands for "none yet" where things are numbered from 0.
NODE_RANK = (-1, NODES_MAX - 1)
NODE_COUNT = (0, NODES_MAX)
WORLD = (0, WORLD_SIZE_MAX)
PORT = (0, PORT_MAX)
INCARNATION = (0, INCARNATION_MAX)
RUN_ID = (1, RUN_ID_CHARS_MAX)
NODE_ID = (1, NODE_ID_CHARS_MAX)
NAME = (0, NAME_CHARS_MAX)


class Rules:
    """The ranges of a struct's numbers and of the lengths of its names.

    A field may be one of a struct within (`info.node`). A name is also free of control characters,
    since it ends up on consoles.
    """

    def __init__(
        self,
        struct: type,
        numbers: dict[str, tuple[float, float]],
        names: dict[str, tuple[int, int]],
    ) -> None:
        self.struct = struct
        self._numbers = numbers
        self._names = names
        # The whole table as one expression, compiled from our own names and figures: a quarter of
        # the time that going through the table takes.
        terms = [f"{low} <= it.{name} <= {high}" for name, (low, high) in numbers.items()]
        terms += [
            f"{low} <= len(it.{name}) <= {high} and it.{name}.isprintable()"
            for name, (low, high) in names.items()
        ]
        self._fits: Callable[[object], bool] = eval("lambda it: " + " and ".join(terms))  # noqa: S307

    def check(self, value: object) -> None:
        """Raise `BadMessage` for the first field that is out of its range."""
        if self._fits(value):
            return
        for name, (low, high) in self._numbers.items():
            number = attrgetter(name)(value)
            if not low <= number <= high:  # So it is with NaN.
                raise self.bad(name, f"{number} is not within {low} and {high}")
        for name, (low, high) in self._names.items():
            text = attrgetter(name)(value)
            if not low <= len(text) <= high:
                raise self.bad(name, f"{len(text)} characters are not within {low} and {high}")
            if not text.isprintable():
                raise self.bad(name, f"{quoted(text)!r} has control characters in it")
        raise InternalError(f"{self.struct.__name__}: the two ways to check disagree")

    def bad(self, name: str, why: str) -> BadMessage:
        """Return the error for a field."""
        return BadMessage(f"{self.struct.__name__}.{name}: {why}")


ACK = Rules(
    Ack,
    {"seq": COUNT_OR_NONE, "incarnation": INCARNATION},
    {"run_id": RUN_ID, "node": NODE_ID},
)
BEAT = Rules(
    Heartbeat,
    {
        "seq": COUNT_OR_NONE,
        "incarnation": INCARNATION,
        "term": COUNT_OR_NONE,
        "revision": COUNT_OR_NONE,
    },
    {"run_id": RUN_ID, "node": NODE_ID},
)
FAILURE = Rules(
    Failure,
    {
        "rank": (-1, WORLD_SIZE_MAX - 1),
        "pid": (0, PID_MAX),
        "exitcode": (-EXITCODE_MAX, EXITCODE_MAX),
    },
    {"node": (0, NODE_ID_CHARS_MAX), "host": NAME},
)
STATUS = Rules(
    Status,
    {
        "seq": COUNT_OR_NONE,
        "generation": SAID,
        "assigned_generation": SAID,
        "term": SAID,
        "round_term": SAID,
        "round_key": INCARNATION,
        "round": SAID,
        "rank": NODE_RANK,
        "size": NODE_COUNT,
        "restarts": (0, REPORTED_COUNTER_MAX),
        "away_s": (0.0, AWAY_S_MAX),
        "info.incarnation": INCARNATION,
        "info.local_world_size": (1, LOCAL_WORLD_SIZE_MAX),
        "info.fixed_rank": NODE_RANK,
        "settings.min_nodes": (1, NODES_MAX),
        "settings.max_nodes": (1, NODES_MAX),
        "settings.max_restarts": (-COUNTER_MAX, COUNTER_MAX),  # Below 0 is as good as 0.
        "settings.spares": NODE_COUNT,
        "settings.settle_s": (0.0, SETTLE_S_MAX),
    },
    {
        "run_id": RUN_ID,
        "info.node": NODE_ID,
        "info.role": NAME,
        "info.host": NAME,
        "info.label": NAME,
        "info.address": NAME,
    },
)
VIEW = Rules(
    View,
    {
        "incarnation": INCARNATION,
        "silence_s": (0.0, AWAY_S_MAX),
        "term": COUNT_OR_NONE,
        "revision": COUNT_OR_NONE,
        "present": NODE_COUNT,
        "needed": NODE_COUNT,
        "round_term": COUNT_OR_NONE,
        "round_key": INCARNATION,
        "round": COUNT_OR_NONE,
        "generation": COUNT_OR_NONE,
        "restarts": COUNT,
        "rank": NODE_RANK,
        "size": NODE_COUNT,
        "first_rank": WORLD,
        "world_size": WORLD,
        "first_role_rank": WORLD,
        "role_world_size": WORLD,
        "master_port": PORT,
    },
    {"run_id": RUN_ID, "node": NODE_ID, "master_addr": NAME},
)


def check_status(status: Status) -> None:
    """Raise `BadMessage` if a value of a status is out of its range."""
    STATUS.check(status)
    settings = status.settings
    if settings.min_nodes > settings.max_nodes:
        raise STATUS.bad(
            "settings", f"min_nodes {settings.min_nodes} is over max_nodes {settings.max_nodes}"
        )
    ports = status.info.ports
    if not 1 <= len(ports) <= PORTS_MAX:
        raise STATUS.bad("info.ports", f"{len(ports)} are not within 1 and {PORTS_MAX}")
    if not all(0 <= port <= PORT_MAX for port in ports):
        raise STATUS.bad("info.ports", f"{ports} are not all within 0 and {PORT_MAX}")
    _check_story(STATUS, status.failure, status.report)


def check_view(view: View) -> None:
    """Raise `BadMessage` if a value of a view is out of its range."""
    VIEW.check(view)
    if len(view.why) > WHY_CHARS_MAX:
        raise VIEW.bad("why", f"{len(view.why)} characters are over {WHY_CHARS_MAX}")
    _check_story(VIEW, view.failure, view.report)


def _check_story(rules: Rules, failure: Failure | None, report: bytes) -> None:
    if len(report) > REPORT_BYTES_MAX:
        raise rules.bad("report", f"{len(report)} bytes are over {REPORT_BYTES_MAX}")
    if failure is None:
        return
    FAILURE.check(failure)
    if len(failure.summary) > SUMMARY_CHARS_MAX:
        count = len(failure.summary)
        raise FAILURE.bad("summary", f"{count} characters are over {SUMMARY_CHARS_MAX}")


CHECKS: dict[type, Callable[[Any], None]] = {
    Ack: ACK.check,
    Heartbeat: BEAT.check,
    Status: check_status,
    View: check_view,
}
"""What to call for a message of each type that needs checking after it was decoded."""
