"""What operators request of a job, why a request is refused, and the record of the answers.

`core.rounds` decides about the requests to a job of many nodes, `core.supervision` about those to a
job of one. Both follow these rules:

1.  A request that is repeated under the same id gets the same answer, and nothing else happens.
2.  If a request cannot be granted now, it is refused with a reason.
3.  No request is charged to the restart budget.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    Answer = TypeVar("Answer")
    Refused = tuple["RequestRefusal | None", str]
    """Why a request is refused, as a value and in words; None if it is granted."""

ANSWERS_MAX = 64
"""A request is recognized by its id until this many others have been answered after it."""


class Action(Enum):
    """What an operator can request. In a message it is text: an unknown action is refused."""

    RESTART = "restart"
    """Start all workers again, as the next generation; no restart is charged."""
    DRAIN = "drain"
    """Stop the workers of a node, and exclude the node from rounds until it is undrained."""
    UNDRAIN = "undrain"
    STOP = "stop"
    """End the job on all nodes, for good."""


class RequestRefusal(Enum):
    """Why a request is refused; in messages it is text, as an `Action` is."""

    UNKNOWN = "unknown"
    """This version does not know the action."""
    OVER = "over"
    """The job is over."""
    NO_ROUND = "no-round"
    """No round is active that could be restarted."""
    NOT_NOW = "not-now"
    """The job is being recovered: the same request may be granted in a moment."""
    NO_SUCH_NODE = "no-such-node"
    NO_SUCH_JOB = "no-such-job"
    TOO_FEW_NODES = "too-few-nodes"
    """Without the node the job would have fewer than it needs, and there is no standby."""
    TOO_MANY = "too-many"
    """A limit is reached."""
    READ_ONLY = "read-only"
    """The operator proved a token that allows reading only."""
    NO_ANSWER = "no-answer"
    """The agent or coordinator that must answer did not respond in time, or is not connected."""
    NOT_HERE = "not-here"
    """Other jobs have it, this job does not."""
    NO_COORDINATOR = "no-coordinator"
    """The job has several nodes, and this agent can reach its own alone."""


GRANTED: Refused = (None, "")


def unknown_action(action: str) -> Refused:
    """Return the refusal of an action that this version does not know, or `GRANTED`."""
    if any(action == one.value for one in Action):
        return GRANTED
    return RequestRefusal.UNKNOWN, f"{action!r} is not known to this version of Holdfast"


def with_answer(
    answers: Mapping[str, Answer], request_id: str, answer: Answer
) -> dict[str, Answer]:
    """Return the answers with a new one; the oldest is dropped above `ANSWERS_MAX`."""
    newest = [*answers.items()][-ANSWERS_MAX + 1 :]
    return {**dict(newest), request_id: answer}
