"""The rendezvous at a coordinator: `c10d` and `static`, as people type them.

An agent of ours `enter`s the job and is then sent every decision. Whoever drives
the handler by TorchElastic's interface gets the same rounds through `next_rendezvous`, and is
asked to come again by `num_nodes_waiting`; restarts are then counted by that caller, not here.
"""

from __future__ import annotations

import os
import select
import time

from holdfast.coordinator.agent_connection import (
    AgentConnection,
    CoordinatorConnection,
    JoinRefused,
    draw_incarnation,
)
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import JobSettings, NodeInfo, NodePhase, NodeRole, View
from holdfast.core.ranks import RankOrder
from holdfast.core.session import SessionTimeouts
from holdfast.errors import UsageError
from holdfast.net.endpoints import format_endpoint, parse_rendezvous_endpoint
from holdfast.net.tls import TlsFiles
from holdfast.net.token import load_token
from holdfast.rendezvous import config, errors
from holdfast.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.handler import (
    CoordinatedRendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.worker_store import PORTS, WorkerStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.coordinator.agent_connection import JobConnection
    from holdfast.rendezvous.config import RendezvousParameters


DEFAULT_PORT = 29400
REPLACED = "another agent took the place of"  # So a refusal begins that `core.rounds` words.
LEAVE_S = 2.0  # How long a node that goes waits to be heard.


def create_coordinator_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """Return the handler of `--rdzv-backend c10d`."""
    return CoordinatorHandler(params)


def create_static_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """Return the handler of `--rdzv-backend static`: ranks are given, the number of nodes fixed."""
    if not params.endpoint:
        raise UsageError("--rdzv-endpoint: static needs HOST:PORT of node 0, or --master-addr")
    rank = config.parse(params).rank
    if rank is None:
        raise UsageError("--node-rank: static needs the number of this node, from 0")
    if not 0 <= rank < params.max_nodes:
        raise UsageError(
            f"--node-rank: {rank} is not the number of one of {params.max_nodes} nodes; "
            f"accepted: 0 to {params.max_nodes - 1}"
        )
    return CoordinatorHandler(params, fixed_rank=rank)


class CoordinatorHandler(CoordinatedRendezvousHandler):
    """A node's rendezvous with a coordinator, which may be in this very process."""

    decider = "the coordinator"

    def __init__(self, params: RendezvousParameters, *, fixed_rank: int = -1) -> None:
        self._params = params
        self._config = config.parse(params)
        self._fixed_rank = fixed_rank
        self._worker_store: WorkerStore | None = None
        self._connection: AgentConnection | None = None
        self._generation = -1
        self._stood_by = False
        self.node_id = self._make_node_id()
        self._address()  # What cannot be an endpoint is refused now.

    @property
    def use_agent_store(self) -> bool:
        """The agent of the first node serves the workers' store, unless rank 0 is to do so."""
        return not self._config.worker_store

    @property
    def serves_workers(self) -> bool:
        """Whether the workers of the job depend on this process."""
        return self._worker_store is not None and self._worker_store.is_serving

    @property
    def join_timeout_s(self) -> float:
        """How long a node waits for a round with enough nodes."""
        return self._config.join_timeout

    @property
    def endpoint(self) -> str:
        """The coordinator's endpoint as text."""
        return self._connection.where if self._connection else format_endpoint(*self._address())

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> AgentConnection:
        """Begin to take part in the job, as a node of this shape; once."""
        if self._connection is not None:
            return self._connection
        params, conf = self._params, self._config
        self._worker_store = WorkerStore(ports=PORTS, served=self.use_agent_store)
        settings = JobSettings(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            max_restarts=max_restarts,
            spares=conf.spares,
            settle_s=conf.last_call_timeout,
            order=RankOrder(conf.rank_order),
        )
        info = NodeInfo(
            node=self.node_id,
            incarnation=draw_incarnation(),
            role=role,
            local_world_size=local_world_size,
            host=os.uname().nodename,
            label=conf.label,
            address=params.local_addr or "",
            ports=self._worker_store.numbers,
            fixed_rank=self._fixed_rank,
        )
        self._connection = self._connect(info, settings)
        return self._connection

    def _connect(self, info: NodeInfo, settings: JobSettings) -> AgentConnection:
        """Return a connection that is started."""
        conf = self._config
        token = load_token(os.environ, conf.token_file)
        timeouts = SessionTimeouts(
            beat_s=conf.keep_alive_interval,
            silence_s=conf.lost_after_s,
            away_s=conf.coordinator_timeout,
            first_contact_s=conf.read_timeout or conf.join_timeout,
        )
        tls = None
        if conf.tls_cert or conf.tls_key or conf.tls_ca:
            tls = TlsFiles(
                cert=conf.tls_cert,
                key=conf.tls_key,
                ca=conf.tls_ca,
                server_name=conf.tls_server_name,
            )
        connection = CoordinatorConnection(
            *self._address(),
            run_id=self._params.run_id,
            info=info,
            settings=settings,
            timeouts=timeouts,
            is_host=conf.is_host,
            token=token,
            tls=tls,
            reconnect_grace_s=conf.reconnect_grace,
        )
        connection.start()
        return connection

    # TorchElastic's interface.

    def get_backend(self) -> str:
        """Return the name the handler was asked for by."""
        return self._params.backend

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._params.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a round that it was not in before, and return it."""
        connection = self.enter()
        connection.report(NodePhase.READY, self._generation)
        deadline = time.monotonic() + self._config.join_timeout
        while True:
            view = connection.view
            if view is not None and self._is_new_round(connection, view):
                break
            self._await_news(connection, deadline)
        assert view is not None
        self._generation = view.generation
        connection.report(NodePhase.RUNNING, view.generation)
        return self.info_of(view)

    def serve_workers(self, view: View) -> None:
        """Serve the store of the workers that a view is about, if this node is the first."""
        assert self._worker_store is not None
        self._worker_store.begin(view.generation, is_first=view.rank == 0)

    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view as TorchElastic's agents know rounds."""
        assert self._connection is not None
        self.serve_workers(view)
        store = self._connection.store(f"{view.round_term}/{view.round}/{view.generation}")
        meeting_point = RendezvousStoreInfo(view.master_addr, view.master_port)
        return RendezvousInfo(store, view.rank, view.size, meeting_point)

    def is_closed(self) -> bool:
        """Return whether the job is over, as far as this node was told."""
        view = self._view()
        return view is not None and view.role is NodeRole.CLOSED

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self.enter().report(NodePhase.CLOSING, self._generation)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes this one should make room for; 1 also if its round is broken."""
        view = self._view()
        if view is None or self._generation < 0 or view.role is NodeRole.CLOSED:
            return 0
        stays = view.role is NodeRole.MEMBER and view.generation == self._generation
        return 0 if stays else max(1, view.present - view.size)

    def shutdown(self) -> bool:
        """Leave the job, which goes on without this node, and release what the handler holds."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(LEAVE_S)
            connection.close()
        if self._worker_store is not None:
            self._worker_store.close()
            self._worker_store = None
        return True

    # Common parts.

    def _address(self) -> tuple[str, int]:
        return parse_rendezvous_endpoint(self._params.endpoint, DEFAULT_PORT)

    def _make_node_id(self) -> str:
        if self._config.node_id:
            return self._config.node_id
        if self._fixed_rank >= 0:
            return f"rank-{self._fixed_rank}"  # Whoever comes with this rank takes its place.
        return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(6).hex()}"

    def _view(self) -> View | None:
        if self._connection is None:
            return None
        self._take(self._connection)
        return self._connection.view

    def _take(self, connection: AgentConnection) -> None:
        for news in connection.take():
            match news:
                case CoordinatorLost():
                    raise RendezvousConnectionError(self.describe_loss(news))
                case JoinRefused(why):
                    raise RendezvousConnectionError(self.describe_refusal(why))

    def describe_refusal(self, why: str) -> str:
        """Return that this node cannot be in the job, and why, in one line."""
        given = f"node_id={self._config.node_id}" if self._config.node_id else ""
        if not given and self._fixed_rank >= 0:
            given = f"--node-rank {self._fixed_rank}"
        if given and why.startswith(REPLACED):
            why = f"{why}; was one more started with {given}?"
        return f"{self.endpoint}: {why}"

    def describe_loss(self, gave_up: CoordinatorLost) -> str:
        """Return which coordinator could not be reached, since when and why, in one line."""
        return errors.unreachable(f"{self.decider} at {self.endpoint}", gave_up)

    def _is_new_round(self, connection: AgentConnection, view: View) -> bool:
        match view.role:
            case NodeRole.MEMBER:
                self._stood_by = False
                return view.generation > self._generation
            case NodeRole.STANDBY:
                self._stood_by = True
            case NodeRole.FENCED:
                connection.rejoin()
            case NodeRole.REFUSED:
                raise RendezvousConnectionError(self.describe_refusal(view.why))
            case NodeRole.CLOSED if self._stood_by:
                raise RendezvousGracefulExitError
            case NodeRole.CLOSED:
                raise RendezvousClosedError(f"the job {view.run_id!r} is over: {view.why}")
        return False

    def _await_news(self, connection: AgentConnection, deadline: float) -> None:
        rest = None if self._stood_by else deadline - time.monotonic()
        if rest is not None and rest <= 0:
            raise RendezvousTimeoutError(self.describe_timeout(connection))
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.poll(None if rest is None else max(1, int(rest * 1000)))
        self._take(connection)

    def describe_timeout(self, connection: JobConnection) -> str:
        """Return what was waited for in vain, in one line."""
        problem = connection.problem() or f"no word from {self.decider} at {self.endpoint}"
        return errors.too_few(connection.view, problem, self.endpoint, self.join_timeout_s)
