"""The states that nodes and their coordinator report to each other: phases, roles, refusals, outcomes.

The messages of `core.protocol` carry them. They have their own module because an agent without a
coordinator does not load the messages.
"""

from __future__ import annotations

from enum import Enum


class NodePhase(Enum):
    """The phase of a node, as the node reports it."""

    READY = "ready"
    """Its workers have exited. It waits for a generation after `Status.generation`."""
    RUNNING = "running"
    """It starts or runs the workers of `Status.generation`."""
    FAILED = "failed"
    """A worker of `Status.generation` failed; the node stops or has stopped the others."""
    SUCCEEDED = "succeeded"
    """All workers of `Status.generation` succeeded."""
    LEAVING = "leaving"
    """It leaves the job and stops its workers."""
    CLOSING = "closing"
    """It closes the job, for all nodes."""


class NodeRole(Enum):
    """The role of a node in its job, as the coordinator decided."""

    WAITING = "waiting"
    """The node is not in a round yet, or its round is broken."""
    STANDBY = "standby"
    """The round is full; the node waits to replace another."""
    MEMBER = "member"
    """The node is in the round and runs the workers of `View.generation`."""
    FENCED = "fenced"
    """The job continued without this incarnation. The node must stop its workers and rejoin."""
    REFUSED = "refused"
    """The node cannot join this job; `View.refusal` and `View.why` have the reason."""
    CLOSED = "closed"
    """The job is over; `View.outcome` has the outcome."""


class RefusalReason(Enum):
    """Why a node cannot join a job."""

    REPLACED = "replaced"
    """Another agent has the same node id: an earlier agent that is alive, or a newer agent that replaced
    this one."""
    SETTINGS = "settings"
    """The node's settings differ from the job's, its rank is invalid, or it reports numbers that no node
    of this job can have received."""
    TOO_MANY_JOBS = "too-many-jobs"
    """The coordinator accepts no more jobs."""
    TOO_MANY_NODES = "too-many-nodes"
    """The coordinator accepts no more nodes for this job."""


class JobOutcome(Enum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
