"""`DynamicRendezvousHandler`: nodes that come and go, over any `RendezvousBackend`.

The decisions are `core.rounds`'s, the same as a coordinator's; `attendant` is the thread that goes
to the backend. Here is what an agent calls. One of ours `enter`s the job and is then told
everything, as it is by a coordinator (`teammate`). Whoever drives the handler by TorchElastic's
interface gets rounds through `next_rendezvous`, and counts restarts on its own (`participant`). A
handler is used in one way or the other.

What differs from TorchElastic's class of this name: a round that lost a member, or that a member
asks to be started again, makes `num_nodes_waiting` positive on all the others, and so does being
put out while cut off; the store and the workers' meeting point are new with every generation; and
`shutdown` leaves without ending the job for the others, which `set_closed` alone does.
"""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import messages
from holdfast.coordinator.node_line import draw_incarnation
from holdfast.core.news import JobSettings, NodeInfo, Role, View
from holdfast.rendezvous import complaints
from holdfast.rendezvous.attendant import Attendant
from holdfast.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from holdfast.rendezvous.participant import ATTEND_S, Participant, Standing
from holdfast.rendezvous.shared_connection import CHANCES_S, SharedConnection
from holdfast.rendezvous.shared_job import SharedJob
from holdfast.rendezvous.shared_settings import check_settings, job_settings_of, this_node
from holdfast.rendezvous.timeouts import RendezvousSettings, RendezvousTimeout
from holdfast.rendezvous.worker_store import PORTS, WorkerStore
from holdfast.store.prefix import PrefixStore

if TYPE_CHECKING:
    from holdfast.coordinator.client import GaveUp
    from holdfast.rendezvous.backend import RendezvousBackend
    from holdfast.rendezvous.parameters import RendezvousParameters

PATIENCE_S = 60.0
"""How long a node goes on while the backend cannot be reached; then its agent is told."""


class DynamicRendezvousHandler(RendezvousHandler):
    """A node's way into the rounds of a job that is kept in a backend.

    Use `from_backend` or `create_handler`. The constructor takes the parts they are made of.
    """

    def __init__(
        self,
        node: NodeInfo,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: SharedJob,
        *,
        job_settings: JobSettings | None = None,
        patience_s: float = PATIENCE_S,
        endpoint: str = "",
        worker_store: bool = False,
    ) -> None:
        check_settings(settings)
        self.node_id = node.node
        self._settings = settings
        self._backend_name = backend_name
        self._endpoint = endpoint
        self._store = store
        self._shared = state_holder
        self._job_settings = job_settings or job_settings_of(settings)
        self._patience_s = patience_s
        self._worker_store = WorkerStore(ports=PORTS, served=not worker_store)
        self._use_agent_store = not worker_store
        self._node = msgspec.structs.replace(node, ports=self._worker_store.numbers)
        self._interval_s = settings.keep_alive_interval.total_seconds()
        self._lost_after_s = self._interval_s * settings.keep_alive_max_attempt
        participant = Participant(
            time.monotonic(),
            run_id=settings.run_id,
            info=self._node,
            settings=self._job_settings,
            interval_s=self._interval_s,
            lost_after_s=self._lost_after_s,
            new_incarnation=draw_incarnation,
            attend_s=min(ATTEND_S, self.join_timeout_s / 2),
        )
        self._participant = participant
        self._attendant = Attendant(
            state_holder,
            participant,
            name=f"holdfast-rendezvous-{node.node}",
            attempt_s=settings.timeout.heartbeat.total_seconds(),
            patience_s=patience_s,
        )
        self._has_asked = False
        self._connections: list[SharedConnection] = []  # One at most.
        # A handler that is dropped without a `shutdown` must not keep its node alive for ever.
        self._end = weakref.finalize(
            self, _release, self._attendant, self._connections, self._worker_store
        )

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """Return a handler on a backend and a store of the caller's.

        The store is what agents exchange their ranks through; the backend may use the same.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        shared = SharedJob(backend, run_id)
        node = this_node(local_addr)
        return cls(node, settings, backend.name, store, shared)

    @property
    def settings(self) -> RendezvousSettings:
        """What the handler was made with."""
        return self._settings

    @property
    def use_agent_store(self) -> bool:
        """The agent of the first node serves the workers' store, unless rank 0 is to do so."""
        return self._use_agent_store

    @property
    def serves_workers(self) -> bool:
        """Whether the workers of the job depend on this process."""
        return self._worker_store.is_serving

    # For agents that are told.

    @property
    def decides_for_all(self) -> bool:
        """The state in the backend counts restarts and ends the job, for all nodes alike."""
        return True

    @property
    def polls_membership(self) -> bool:
        """Changes are told as they are seen."""
        return False

    @property
    def join_timeout_s(self) -> float:
        """How long a node waits for a round with enough nodes."""
        return self._settings.timeout.join.total_seconds()

    @property
    def endpoint(self) -> str:
        """Where the nodes meet, as a person knows it."""
        return self._endpoint or f"the rendezvous backend {self._backend_name!r}"

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> SharedConnection:
        """Begin to take part in the job, as a node of this shape; once."""
        self._check_open()
        if self._connections:
            return self._connections[0]
        if self._has_asked:
            raise RendezvousError("this handler is in the job by next_rendezvous already")
        replace = msgspec.structs.replace
        connection = SharedConnection(
            self._shared,
            where=self.endpoint,
            run_id=self.get_run_id(),
            info=replace(
                self._node,
                incarnation=draw_incarnation(),
                role=role,
                local_world_size=local_world_size,
            ),
            settings=replace(self._job_settings, max_restarts=max_restarts),
            store=self._store,
            interval_s=self._interval_s,
            lost_after_s=self._lost_after_s,
            attempt_s=self._settings.timeout.heartbeat.total_seconds(),
            patience_s=self._patience_s,
        )
        self._connections.append(connection)
        connection.start()
        return connection

    def serve_workers(self, view: View) -> None:
        """Serve the store of the workers that a view is about, if this node is the first."""
        self._worker_store.begin(view.generation, is_first=view.rank == 0)

    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view as TorchElastic's agents know rounds."""
        (connection,) = self._connections
        self.serve_workers(view)
        # The key is another one in another job of this id, which may have used the same store.
        store = connection.store(f"{view.generation}.{view.round}.{view.round_key:x}")
        meeting_point = RendezvousStoreInfo(view.master_addr, view.master_port)
        return RendezvousInfo(store, view.rank, view.size, meeting_point)

    def too_few(self, connection: SharedConnection) -> str:
        """Return what was waited for in vain, in one line."""
        problem = connection.problem() or f"no round is to be seen at {self.endpoint}"
        return complaints.too_few(connection.view, problem, self.endpoint, self.join_timeout_s)

    def unreachable(self, gave_up: GaveUp) -> str:
        """Return what could not be reached, since when and why, in one line."""
        return complaints.unreachable(self.endpoint, gave_up)

    # TorchElastic's interface.

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend_name

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node and all others of a new round are in it, and return it.

        Called again, it asks for another round, unless there is one already. A standby waits for
        as long as the job runs.
        """
        self._check_open()
        if self._connections:
            raise RendezvousError("this handler has entered the job, and is told of its rounds")
        self._has_asked = True
        number = self._attendant.ask(self._participant.ask_round)
        join_s = self.join_timeout_s
        while True:
            standing, is_done = self._attendant.wait(number, _is_settled, join_s)
            if is_done:
                break
            if standing.role is not Role.STANDBY:
                self._attendant.ask(self._participant.ask_leave)
                raise self._too_late(standing, join_s)
        if standing.refusal:
            raise RendezvousError(standing.refusal)
        if standing.seat is None:
            raise self._is_over(standing)
        return self._info(standing.seat, standing.seat_key)

    def is_closed(self) -> bool:
        """Return whether the job is over for all nodes."""
        return self._look().closed

    def set_closed(self) -> None:
        """End the job for all nodes, and for all that would come later."""
        if self._end.alive:
            number = self._attendant.ask(self._close)
            close_s = self._settings.timeout.close.total_seconds()
            _, is_done = self._attendant.wait(number, lambda standing: standing.closed, close_s)
            if not is_done:
                raise RendezvousTimeoutError(
                    f"the job {self.get_run_id()!r} could not be closed in {close_s:g} s"
                )

    def num_nodes_waiting(self) -> int:
        """Return above 0 if the workers must be started again in another round.

        So it is when a node joined and the others have settled, when one was lost or asked for a
        new start, and when the others went on without this node. It does not wait: the answer is
        that of the last look, a tenth of a second ago, or more in jobs of many nodes.
        """
        if not self._attendant.is_running:
            return self._look().regroup
        return self._attendant.last_seen().regroup

    def shutdown(self) -> bool:
        """Leave the job, and release what the handler holds; False if nobody could be told."""
        if not self._end.alive:
            return True
        is_done = True
        close_s = self._settings.timeout.close.total_seconds()
        for connection in self._connections:
            is_done = connection.leave(close_s)
        if self._attendant.is_running:
            number = self._attendant.ask(self._participant.ask_leave)
            try:
                _, is_done = self._attendant.wait(
                    number, lambda standing: not standing.in_job, close_s
                )
            except RendezvousError as problem:
                messages.warning(f"the other nodes were not told that this one leaves: {problem}")
                is_done = False
        is_gone = self._attendant.stop(CHANCES_S)
        self._end()
        return is_done and is_gone

    def _close(self) -> None:
        self._participant.ask_close("an agent asked for the end of the job")

    def _look(self) -> Standing:
        self._check_open()
        number = self._attendant.ask()
        heartbeat_s = self._settings.timeout.heartbeat.total_seconds()
        standing, is_done = self._attendant.wait(number, lambda _: True, heartbeat_s)
        if not is_done:
            raise RendezvousTimeoutError(
                f"the rendezvous backend {self._backend_name!r} did not answer in {heartbeat_s:g} s"
            )
        return standing

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RendezvousClosedError("the rendezvous handler was shut down")

    def _info(self, seat: View, key: str) -> RendezvousInfo:
        messages.info(
            f"round {seat.round}, generation {seat.generation} of the job {self.get_run_id()!r}: "
            f"node {seat.rank} of {seat.size} ({seat.why})"
        )
        self.serve_workers(seat)
        store = PrefixStore(f"torch.rendezvous.{self.get_run_id()}.{key}", self._store)
        meeting_point = RendezvousStoreInfo(seat.master_addr, seat.master_port)
        return RendezvousInfo(store, seat.rank, seat.size, meeting_point)

    def _too_late(self, standing: Standing, join_s: float) -> RendezvousTimeoutError:
        there = f"{standing.present} of at least {standing.needed} nodes are there"
        return RendezvousTimeoutError(
            f"there was no round of the job {self.get_run_id()!r} within {join_s:g} s: {there}",
            hint="join_timeout in --rdzv-conf sets the time",
        )

    def _is_over(self, standing: Standing) -> RendezvousError:
        text = f"the job {self.get_run_id()!r} is over"
        if standing.was_standby:
            return RendezvousGracefulExitError(f"{text}; this node was a standby")
        return RendezvousClosedError(
            f"{text} ({standing.why})", hint="start another one under another --rdzv-id"
        )


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Return a handler on a backend, with the settings of `--rdzv-conf`."""
    from holdfast.rendezvous import config

    conf = config.parse(params, shares_state=True)
    settings = RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        conf.timeouts(),
        timedelta(seconds=conf.keep_alive_interval),
        conf.keep_alive_max_attempt,
    )
    check_settings(settings)
    return DynamicRendezvousHandler(
        this_node(params.local_addr, node_id=conf.node_id, label=conf.label),
        settings,
        backend.name,
        store,
        SharedJob(backend, params.run_id),
        job_settings=job_settings_of(settings, spares=conf.spares, order=conf.rank_order),
        patience_s=conf.coordinator_timeout,
        endpoint=params.endpoint,
        worker_store=conf.worker_store,
    )


def _is_settled(standing: Standing) -> bool:
    return standing.seat is not None or standing.closed or bool(standing.refusal)


def _release(
    attendant: Attendant[Standing],
    connections: list[SharedConnection],
    worker_store: WorkerStore,
) -> None:
    attendant.stop(0.0)
    for connection in connections:
        connection.close()
    worker_store.close()
