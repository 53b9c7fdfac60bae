"""Nodes that apply what `core.rounds` decides: the other side of its tests.

A `FakeNode` remembers what a real node does (`core.session`) and nothing more. It is plain data,
so that whole worlds of them can be copied and compared. Its workers start the moment it reports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.protocol import (
    Failure,
    Heartbeat,
    JobSettings,
    NodeInfo,
    NodePhase,
    NodeRole,
    Status,
    View,
)

if TYPE_CHECKING:
    from holdfast.core.ranks import RankOrder

RUN = "run"


def a_job_of(least: int, most: int, **more: float | RankOrder) -> JobSettings:
    """Return the settings of a job with so many nodes."""
    return msgspec.structs.replace(JobSettings(min_nodes=least, max_nodes=most), **more)


class FakeNode(msgspec.Struct):
    """One incarnation of a node, and what it last heard."""

    info: NodeInfo
    settings: JobSettings
    run_id: str = RUN
    seq: int = 0
    phase: NodePhase = NodePhase.READY
    generation: int = -1
    term: int = 0
    revision: int = 0
    role: NodeRole | None = None
    round_term: int = 0
    round: int = -1
    round_key: int = 0
    assigned_generation: int = -1
    rank: int = -1
    size: int = 0
    restarts: int = 0
    failure: Failure | None = None
    report: bytes = b""

    @property
    def name(self) -> str:
        """Its id."""
        return self.info.node

    @property
    def is_member(self) -> bool:
        """Whether it believes to be in a round."""
        return self.role is NodeRole.MEMBER

    def status(self) -> Status:
        """Return its whole status, under a new number."""
        self.seq += 1
        return self.last_status()

    def last_status(self) -> Status:
        """Return its last status, as the network may bring it a second time."""
        return Status(
            seq=self.seq,
            run_id=self.run_id,
            info=self.info,
            settings=self.settings,
            phase=self.phase,
            generation=self.generation,
            term=self.term,
            round_term=self.round_term,
            round=self.round,
            round_key=self.round_key,
            assigned_generation=self.assigned_generation,
            rank=self.rank,
            size=self.size,
            restarts=self.restarts,
            failure=self.failure,
            report=self.report,
        )

    def heartbeat(self) -> Heartbeat:
        """Return which view it has."""
        return Heartbeat(
            run_id=self.run_id,
            node=self.name,
            incarnation=self.info.incarnation,
            seq=self.seq,
            term=self.term,
            revision=self.revision,
        )

    def accepts(self, view: View) -> bool:
        """Return whether a view is for this incarnation and newer than what it has."""
        mine = view.incarnation == self.info.incarnation
        return mine and (view.term, view.revision) > (self.term, self.revision)

    def receive(self, view: View) -> bool:
        """Take in a view, if it is newer."""
        if not self.accepts(view):
            return False
        member = view.role is NodeRole.MEMBER
        self.term, self.revision, self.role = view.term, view.revision, view.role
        self.round_term = view.round_term if member else 0
        self.round = view.round if member else -1
        self.round_key = view.round_key if member else 0
        self.assigned_generation = view.generation if member else -1
        self.rank = view.rank if member else -1
        self.size = view.size if member else 0
        self.restarts = max(self.restarts, view.restarts)
        return True

    def apply(self) -> bool:
        """Do to its workers what its view asks for; return whether it has something new to report."""
        if self.is_member:
            if self.assigned_generation <= self.generation:
                return False
            self.generation = self.assigned_generation
            self.phase, self.failure, self.report = NodePhase.RUNNING, None, b""
            return True
        if self.phase is NodePhase.READY or self.role in (None, NodeRole.CLOSED):
            return False
        self.phase, self.failure, self.report = NodePhase.READY, None, b""
        return True

    def fail(self, *, retryable: bool = True, sudden: bool = False, report: bytes = b"") -> Status:
        """Report that one of its workers failed."""
        self.phase = NodePhase.FAILED
        self.failure = Failure(
            node=self.name,
            rank=self.rank,
            exitcode=1,
            summary=f"a worker of {self.name} failed",
            retryable=retryable,
            sudden=sudden,
        )
        self.report = report
        return self.status()

    def succeed(self) -> Status:
        """Report that all its workers are done."""
        self.phase = NodePhase.SUCCEEDED
        return self.status()

    def leave(self) -> Status:
        """Report that it leaves."""
        self.phase = NodePhase.LEAVING
        return self.status()

    def begin_anew(self, incarnation: int) -> None:
        """Become another incarnation, as a node that was fenced does."""
        self.info = msgspec.structs.replace(self.info, incarnation=incarnation)
        self.role = None
        self.phase, self.failure, self.report = NodePhase.READY, None, b""
        self.round_term, self.round, self.assigned_generation = 0, -1, -1
        self.rank, self.size = -1, 0


def a_node(name: str, settings: JobSettings, incarnation: int, **more: object) -> FakeNode:
    """Return a node that nobody has heard of."""
    info = NodeInfo(node=name, incarnation=incarnation, address=f"{name}.example")
    return FakeNode(msgspec.structs.replace(info, **more), settings)
