"""The interface of an agent's membership in a job: `Membership`, and `ControlAccess` for `control/`.

::

    agent loop                       membership thread, an asyncio loop
    report, rejoin, leave ─────────► SessionDriver ◄──► core.session
    take ◄──────── Mailbox ◄──────────   │
                              SessionConnection, opened by a Connector

Three modules implement it: `membership.coordinator`, `membership.etcd` and `membership.backend`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.core.supervision import CoordinatorLost, ViewReceived
from holdfast.wire.messages import Contacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordinator.connect import CoordinatorConnector
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.phases import NodePhase
    from holdfast.core.protocol import Failure, Request, View
    from holdfast.membership.loop_heartbeat import LoopHeartbeat
    from holdfast.net.agent_port import AgentPort
    from holdfast.store.store_interface import RoundStore
    from holdfast.wire.messages import JobSummary, NodeReport, Watch

    RenewDeadline = Callable[[float | None, float], None]
    """Takes when the workers must have exited, None for no deadline, and how much later for a starved agent."""

INCARNATION_BITS = 63


class JoinRefused(msgspec.Struct, frozen=True):
    """The job refuses this node, or another program serves the endpoint; retrying does not help."""

    why: str
    """The reason, without the endpoint: the caller adds that."""


class ProtectionChanged(msgspec.Struct, frozen=True):
    """With `--ha`: the job does not survive the loss of a machine any more, or does so again."""

    missing: str
    """The listed machines whose members are missing; empty if the job survives a loss."""


MembershipEvent = ViewReceived | CoordinatorLost | JoinRefused | ProtectionChanged


class Membership(Protocol):
    """One node's membership in a job.

    `fileno()` is readable while `take` has events. A view contains the whole state, so only the newest
    one is kept. One thread at a time may call the methods, in any order, even after `close`.
    """

    run_id: str
    settings: JobSettings
    hosting: bool
    """Whether all other nodes depend on this process."""
    heartbeat: LoopHeartbeat
    """Once the agent's loop has started it, the loop must call `take` regularly."""

    @property
    def view(self) -> View | None:
        """The newest view of this incarnation."""

    @property
    def node(self) -> str:
        """The node's id in the job; `rejoin` may change it."""

    @property
    def where(self) -> str:
        """The endpoint, as a user writes it."""

    @property
    def control(self) -> ControlAccess:
        """Gives `control/` access to the job through this node."""

    @property
    def presence_fd(self) -> int:
        """A socket that must stay open until the workers have exited, or -1."""

    def fileno(self) -> int: ...

    def take(self) -> list[MembershipEvent]:
        """Return the events that arrived since the last call."""

    def report(
        self,
        phase: NodePhase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
        *,
        clear: int = -1,
        cause: str = "",
    ) -> None:
        """Report this node's phase; `cause` is the step of the agent's story that led to the report.

        `clear` has the meaning of `Status.clear`.
        """

    def hold_ports(self, ports: tuple[int, ...]) -> None:
        """Report in the next status that this node reserves these ports for the workers' store."""

    def watch_stop_deadline(self, renew: RenewDeadline) -> None:
        """Call `renew`, from any thread, when the deadline for the workers' exit changes."""

    def rejoin(self, *, cause: str = "") -> int:
        """Join again as a new incarnation after this one was fenced; return the new one's number."""

    def store(self, scope: str) -> RoundStore:
        """Return the store of this job's nodes; each scope has its own keys."""

    def problem(self) -> str:
        """Return why there is no connection and for how long, or an empty string."""

    def leave(self, limit_s: float) -> bool:
        """Report that this node leaves; return whether the report is known to have arrived.

        Waits up to `limit_s`; returns immediately while there is no connection.
        """

    def close(self) -> None:
        """Close the connection; may be called more than once.

        A process that hosts the coordinator first waits until the other nodes know the job's end.
        """


class ControlAccess:
    """Gives `control/` access to the job through this node; the defaults here offer no access.

    Any thread may call.
    """

    has_coordinator = False
    """Whether the job has a coordinator, which `connector` reaches; otherwise use `summary` and `contacts`."""
    port: AgentPort | None = None
    """The port for control clients in a job without a coordinator; the membership opens and closes it."""

    def request(self, request: Request) -> None:
        """Submit an operator's request; `View.answered` contains the outcome."""
        raise NotImplementedError

    def on_watch(self, watched: Callable[[Watch], None]) -> None:
        """Call `watched`, from any thread, when a client of the coordinator watches this node."""

    def send_report(self, report: NodeReport) -> None:
        """Send a report to the clients that watch this node."""

    def connector(self) -> CoordinatorConnector:
        """Return a connector to the coordinator for the running loop."""
        raise NotImplementedError

    def summary(self) -> JobSummary | None:
        """Return the state of the job; may block."""
        return None

    def contacts(self) -> Contacts:
        """Return the contacts of the job's agents; may block."""
        return Contacts()


def random_incarnation() -> int:
    """Return a random number that identifies an incarnation."""
    return secrets.randbits(INCARNATION_BITS)
