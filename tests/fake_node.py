"""Nodes that apply the decisions of `core.rounds`, for its tests.

A `FakeNode` has the same state as a real node (`core.session`) and nothing more. It is plain data, so that whole
worlds of nodes can be copied and compared. Its workers start when it reports them. They stop when its view
says so, unless the node is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Failure, Heartbeat, NodeInfo, Status, View
from holdfast.core.session import Rejoined

if TYPE_CHECKING:
    from holdfast.core.ranks import RankOrder

RUN = "run"


def a_job_of(least: int, most: int, **more: float | RankOrder) -> JobSettings:
    """Return the settings of a job with this minimum and maximum of nodes."""
    return JobSettings(least, most)._replace(**more)  # type: ignore[arg-type]


class FakeNode(msgspec.Struct):
    """One incarnation of a node, and its last view."""

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
    known_generation: int = -1
    restarts: int = 0
    fence: int = 0
    failure: Failure | None = None
    report: bytes = b""
    call: int = 0
    start: bool = True
    view_generation: int = -1
    has_workers: bool = False
    slow: bool = False
    reported_clear: int = -1
    reported_term: int = 0
    drained: bool = False
    new_id: str = ""

    @property
    def name(self) -> str:
        """The node's id."""
        return self.info.node

    @property
    def is_member(self) -> bool:
        """Whether its view says that it is a member."""
        return self.role is NodeRole.MEMBER

    @property
    def clear(self) -> int:
        """The first generation whose workers it may have."""
        if self.has_workers:
            return self.generation
        return max(self.generation + 1, self.view_generation + (not self.is_member))

    def status(self) -> Status:
        """Return its complete status, with a new number."""
        self.seq += 1
        self.reported_term, self.reported_clear = self.term, self.clear
        return self.last_status()

    def last_status(self) -> Status:
        """Return its last status, which the network may deliver again."""
        return Status(
            seq=self.seq,
            run_id=self.run_id,
            info=self.info,
            settings=self.settings,
            phase=self.phase,
            generation=self.generation,
            clear=self.reported_clear,
            term=self.term,
            round_term=self.round_term,
            round=self.round,
            round_key=self.round_key,
            assigned_generation=self.assigned_generation,
            rank=self.rank,
            size=self.size,
            known_generation=self.known_generation,
            restarts=self.restarts,
            fence=self.fence,
            failure=self.failure,
            report=self.report,
            call=self.call,
            drained=self.drained,
        )

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the number of its view."""
        return Heartbeat(
            run_id=self.run_id,
            node=self.name,
            incarnation=self.info.incarnation,
            seq=self.seq,
            term=self.term,
            revision=self.revision,
            call=self.call,
        )

    def accepts(self, view: View) -> bool:
        """Return whether a view is for this incarnation and newer than its own."""
        mine = view.incarnation == self.info.incarnation
        return mine and (view.term, view.revision) > (self.term, self.revision)

    def receive(self, view: View) -> bool:
        """Store a view, if it is newer."""
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
        self.known_generation = max(self.known_generation, view.generation)
        self.restarts = max(self.restarts, view.restarts)
        self.fence = max(self.fence, view.fence)
        self.start, self.view_generation = view.start, view.generation
        self.drained, self.new_id = view.drained, view.new_id
        return True

    def apply(self) -> bool:
        """Start or stop its workers as its view says; return whether it has something new to report."""
        if self.is_member:
            if self.assigned_generation <= self.generation:
                return False
            if self.start:
                self.generation = self.assigned_generation
                self.phase, self.failure, self.report = NodePhase.RUNNING, None, b""
                self.has_workers = True
                return True
        if self.role in (None, NodeRole.CLOSED) or (self.has_workers and self.slow):
            return False
        self.has_workers = False
        received = (self.term, self.clear) <= (self.reported_term, self.reported_clear)
        is_new = self.phase is not NodePhase.READY or not received
        self.phase, self.failure, self.report = NodePhase.READY, None, b""
        return is_new

    def fail(self, *, retryable: bool = True, sudden: bool = False, report: bytes = b"") -> Status:
        """Report that one of its workers failed."""
        self.phase, self.has_workers = NodePhase.FAILED, self.slow
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
        """Report that all its workers succeeded."""
        self.phase, self.has_workers = NodePhase.SUCCEEDED, False
        return self.status()

    def leave(self) -> Status:
        """Report that it leaves."""
        self.phase, self.has_workers = NodePhase.LEAVING, self.slow
        return self.status()

    def rejoin(self, incarnation: int) -> None:
        """Become another incarnation, as a fenced node does."""
        self.info = Rejoined(incarnation, self.new_id).applied_to(self.info)
        self.role, self.has_workers = None, False
        self.phase, self.failure, self.report = NodePhase.READY, None, b""
        self.round_term, self.round, self.assigned_generation = 0, -1, -1
        self.rank, self.size = -1, 0


def a_node(name: str, settings: JobSettings, incarnation: int, **more: object) -> FakeNode:
    """Return a node that has not reported yet."""
    info = NodeInfo(node=name, incarnation=incarnation, address=f"{name}.example")
    return FakeNode(msgspec.structs.replace(info, **more), settings)
