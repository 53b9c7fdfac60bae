"""The membership in a job on a compare-and-set backend: `--rdzv-backend file`, and any `RendezvousBackend`.

Each write names the state that it replaces. If another node has written since, the backend rejects the write, so
nodes that never communicate agree on one history. No other node depends on this process.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from holdfast.core.shared_state import SharedStateSession, Timeouts
from holdfast.membership.backend_driver import BackendDriver, BackendFailed, StateStore
from holdfast.membership.interface import ControlAccess
from holdfast.membership.loop_heartbeat import LoopMonitor
from holdfast.membership.threaded import ThreadedMembership
from holdfast.net.agent_port import OFF, ControlCredentials, open_agent_port
from holdfast.store.prefix_store import PrefixStore
from holdfast.wire.job_summary import summary_of

if TYPE_CHECKING:
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import ControlPort, NodeInfo, Request
    from holdfast.core.rounds import Job
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary


class BackendControl(ControlAccess):
    """Control of a job through the state that its agents share."""

    def __init__(self, membership: BackendMembership) -> None:
        self._membership = membership

    def request(self, request: Request) -> None:
        """Submit an operator's request in this node's status."""
        self._membership.request(request)

    def summary(self) -> JobSummary | None:
        """Return the state of the job as this node last read it."""
        return self._membership.summary()

    def contacts(self) -> Contacts:
        """Return how clients reach the agents, from the shared state."""
        return self._membership.contacts()


class BackendMembership(ThreadedMembership):
    """One node's membership in a job over a backend; it joins with its first report."""

    authority = "the backend"

    def __init__(
        self,
        backend: StateStore,
        *,
        where: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: Timeouts,
        store: Any,
        credentials: ControlCredentials | None = None,
        control: str = OFF,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings)
        self.backend, self.credentials = backend, credentials or ControlCredentials(run_id=run_id)
        self.control = BackendControl(self)
        self._control_setting = control
        self._where, self._timeouts, self._store = where, timeouts, store
        self._session: BackendDriver | None = None

    @property
    def where(self) -> str:
        return self._where

    @property
    def peer(self) -> str:
        return self._where

    def store(self, scope: str) -> PrefixStore:
        return PrefixStore(f"torch.rendezvous.{self.run_id}.{scope}", self._store)

    def close(self, drain_s: float = 0.0) -> None:
        super().close(drain_s)
        if self._session is not None:
            self._session.join()

    # For the handler.

    @property
    def failure(self) -> BackendFailed | None:
        """The last failure of the backend."""
        return self._session.failure if self._session is not None else None

    @property
    def is_unreached(self) -> bool:
        """Whether the backend failed and has never responded."""
        return self._session is not None and self._session.is_unreached

    def refresh(self, limit_s: float) -> bool:
        """Read the state now; return whether the job has ended.

        Raises `BackendFailed`, or `TimeoutError` past the limit.
        """
        assert self._session is not None
        return self._ask(self._session.refresh(limit_s), limit_s)

    # For `BackendControl`.

    def summary(self) -> JobSummary | None:
        """Return the state of the job as this node last read it."""

        async def read() -> JobSummary | None:
            rounds = self._session.session.rounds if self._session is not None else None
            return summary_of(rounds) if rounds is not None else None

        return self._ask(read(), 0.0)

    def contacts(self) -> Contacts:
        """Return how clients reach the agents, from the shared state."""

        async def read() -> Contacts:
            rounds = self._session.session.rounds if self._session is not None else None
            return self.credentials.contacts(ports_of(rounds.job) if rounds is not None else ())

        return self._ask(read(), 0.0)

    # In the thread.

    async def _open(self) -> BackendDriver:
        now = asyncio.get_running_loop().time()
        port = self.control.port = open_agent_port(
            self._info.address,
            self.credentials,
            control=self._control_setting,
            shows_presence=False,
        )
        session = SharedStateSession(
            now,
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            timeouts=self._timeouts,
            draw=random.random,
            fence_floor=int(
                time.time() * 1000
            ),  # For the case that the state is lost on all nodes.
            control=port.control if port is not None else None,
        )
        monitor = LoopMonitor(now, self._mailbox, self._timeouts.lost_after_s)
        self._session = BackendDriver(session, self.backend, self._mailbox.put, monitor)
        return self._session

    async def _shut(self, drain_s: float) -> None:
        del drain_s
        if self._session is not None:
            await self._session.close()
        if self.control.port is not None:
            self.control.port.close()


def ports_of(job: Job) -> list[tuple[str, str, ControlPort | None]]:
    """Return node, address and control port of each agent of a job."""
    return [(name, one.info.address, one.control) for name, one in job.nodes.items()]
