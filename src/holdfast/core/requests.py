"""Requests of operators to a job, the reasons to refuse one, and the record of the answers.

In a job of several nodes `core.rounds` decides about requests; on a single node `core.supervision`
does. Both follow these rules:

1.  If a request repeats an earlier id, it gets the earlier answer and has no other effect.
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
    """Why a request is refused, as a value and as text; None and no text if it is granted."""

ANSWERS_MAX = 64
"""A repeated request is recognized by its id until this many later requests have been answered."""


class Action(Enum):
    """The action that an operator requests. Messages carry it as text; an unknown action is refused."""

    RESTART = "restart"
    """Restart all workers, as the next generation; no restart is charged."""
    DRAIN = "drain"
    """Stop the workers of a node, and exclude the node from rounds until it is undrained."""
    UNDRAIN = "undrain"
    STOP = "stop"
    """End the job on all nodes, for good."""


class RequestRefusal(Enum):
    """Why a request is refused. Messages carry it as text, like an `Action`."""

    UNKNOWN = "unknown"
    """This version does not know the action."""
    OVER = "over"
    """The job is over."""
    NO_ROUND = "no-round"
    """No round is active, so there is nothing to restart."""
    NOT_NOW = "not-now"
    """The job is recovering; the same request may be granted soon."""
    NO_SUCH_NODE = "no-such-node"
    NO_SUCH_JOB = "no-such-job"
    TOO_FEW_NODES = "too-few-nodes"
    """Without the node the job would have fewer nodes than it needs, and there is no standby."""
    TOO_MANY = "too-many"
    """A limit is reached."""
    READ_ONLY = "read-only"
    """The operator authenticated with a token that only permits reading."""
    NO_ANSWER = "no-answer"
    """The responsible agent or coordinator did not respond in time, or is not connected."""
    NOT_HERE = "not-here"
    """This job does not provide what was requested, though other jobs do."""
    NO_COORDINATOR = "no-coordinator"
    """The job has several nodes, and this agent can only reach its own."""


GRANTED: Refused = (None, "")


def unknown_action(action: str) -> Refused:
    """Return the refusal of an action that this version does not know, or `GRANTED`."""
    if any(action == one.value for one in Action):
        return GRANTED
    return RequestRefusal.UNKNOWN, f"{action!r} is not known to this version of Holdfast"


def with_answer(
    answers: Mapping[str, Answer], request_id: str, answer: Answer
) -> dict[str, Answer]:
    """Return the answers plus a new one, without the oldest ones beyond `ANSWERS_MAX`."""
    newest = [*answers.items()][-ANSWERS_MAX + 1 :]
    return {**dict(newest), request_id: answer}
