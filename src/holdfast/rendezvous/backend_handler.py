"""A job over any compare-and-set backend: `RendezvousBackend`, and the handler that works on one.

Derive your own backend from `RendezvousBackend`. Its token is the fence: a write names the state that it
replaces, and the backend rejects it if another node has written since.
"""

from __future__ import annotations

import itertools
import os
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import console
from holdfast.core.job_settings import JobSettings
from holdfast.core.protocol import NodeInfo, NodePhase, View
from holdfast.core.shared_state import Timeouts
from holdfast.errors import UsageError
from holdfast.membership.backend import BackendFailed, BackendMembership
from holdfast.membership.interface import draw_incarnation
from holdfast.net.agent_port import OFF, ON, ControlCredentials, explicit_token
from holdfast.net.listening import address_of
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.polled_handler import PolledHandler
from holdfast.rendezvous.rdzv_conf import RendezvousSettings, RendezvousTimeout
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.membership.interface import Membership
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

AWAY_S = 60.0
"""How long a node continues while the backend does not respond."""
ABSENT_S = 60.0
"""How long a round waits for a live member that does not join. Workers have 30 s to stop."""

_local_ids = itertools.count()

Token = Any
"""Names one stored state; only the backend that returned it can read it."""


class RendezvousBackend(ABC):
    """Stores the state of one job where all of its nodes can reach it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the backend, as in `--rdzv-backend`."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without a token, store the first state.

        Returns the stored state after the call, its token, and whether it is the new state: if
        another node was faster, it is that node's. Returns None if nothing is stored, or if that is
        unknown; the caller then reads the state.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """


class CheckedBackend:
    """A backend for a `BackendMembership`: whatever it raises or returns becomes a `BackendFailed`."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self.name = backend.name
        self._backend = backend

    def read(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none."""
        found: tuple[bytes, Token] | None = self._call(2, self._backend.get_state)
        return found

    def write(self, state: bytes, token: Token | None) -> bool:
        """Replace the state that `token` names; return whether that succeeded."""
        answer = self._call(3, self._backend.set_state, state, token)
        return answer is not None and bool(answer[2])

    def _call(self, length: int, call: Callable[..., Any], *args: Any) -> Any:
        try:
            answer = call(*args)
        except RendezvousError as problem:
            invalid = isinstance(problem, RendezvousStateError)
            raise BackendFailed(problem.message, invalid=invalid) from problem
        except Exception as problem:
            what = " ".join(f"{type(problem).__name__}: {problem}".split())
            raise BackendFailed(f"the rendezvous backend {self.name!r} failed: {what}") from problem
        if answer is None:
            return None
        if isinstance(answer, tuple) and len(answer) == length and isinstance(answer[0], bytes):
            return answer
        raise BackendFailed(
            f"the rendezvous backend {self.name!r} returned {type(answer).__name__}; expected "
            f"None or a tuple of {length} that starts with bytes",
            invalid=True,
        )


class DynamicRendezvousHandler(PolledHandler):
    """A node's rendezvous over a backend; see `from_backend` and `create_handler`.

    Differences from TorchElastic's class of this name: `num_nodes_waiting` is positive on all other nodes
    if a round loses a member or a member requests a restart, and on a node that was removed while it was
    disconnected. Each generation has a new store and a new `MASTER_PORT`. `shutdown` leaves without ending
    the job for the others; only `set_closed` ends it.
    """

    def __init__(
        self,
        node: NodeInfo,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: RendezvousBackend,
        *,
        job_settings: JobSettings | None = None,
        away_s: float = AWAY_S,
        self_fencing: bool = False,
        endpoint: str = "",
        worker_store: bool = False,
        store_address: str = "",
        control: str = ON,
    ) -> None:
        check_settings(settings)
        timeout = settings.timeout
        super().__init__(
            backend=backend_name,
            run_id=settings.run_id,
            node_id=node.node,
            join_timeout_s=timeout.join.total_seconds(),
            worker_store=worker_store,
            store_address="" if worker_store else store_address,
            store_access=(job_settings or job_settings_of(settings)).store.value,
        )
        self.close_timeout_s = self.leave_timeout_s = timeout.close.total_seconds()
        self._node = node
        self._settings = settings
        self._backend = state_holder
        self._store = store
        self._job_settings = job_settings or job_settings_of(settings)
        self._away_s = away_s
        self._self_fencing = self_fencing
        self._control = control
        self._endpoint = endpoint or f"the rendezvous backend {backend_name!r}"
        self._has_joined = self._is_shut = False
        self._release: weakref.finalize[..., DynamicRendezvousHandler] | None = None

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
        """Return a handler on the caller's backend and store.

        Agents exchange their ranks through the store; the backend may use the same one.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        node, address = this_node(local_addr), address_of(local_addr or "")
        return cls(node, settings, backend.name, store, backend, store_address=address)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of the handler."""
        return self._settings

    @property
    def endpoint(self) -> str:
        """The endpoint, as a user writes it."""
        return self._endpoint

    def scope_of(self, view: View) -> str:
        """Return a scope that no round of another job with this id uses, in a store that outlives it."""
        return f"{view.generation}.{view.round}.{view.round_key:x}"

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> Membership:
        """Join the job as a node of this shape; later calls return the same membership."""
        connection = super().enter(
            role=role, local_world_size=local_world_size, max_restarts=max_restarts
        )
        if not self._has_joined:
            self._has_joined = True
            connection.report(NodePhase.READY, -1)
        return connection

    def is_closed(self) -> bool:
        """Read the state now; return whether the job has ended for all nodes."""
        limit_s = self._settings.timeout.heartbeat.total_seconds()
        connection = self._connection
        if isinstance(connection, BackendMembership):
            return self._refresh(connection, limit_s)
        # Reading does not join: only `enter` knows what kind of node this is.
        connection = self._connect(self._node, self._job_settings)
        try:
            return self._refresh(connection, limit_s)
        finally:
            connection.close()

    def _refresh(self, connection: BackendMembership, limit_s: float) -> bool:
        try:
            return connection.refresh(limit_s)
        except BackendFailed as failure:
            raise self._error_of(failure) from failure
        except TimeoutError:
            raise RendezvousTimeoutError(
                f"the rendezvous backend {self._backend.name!r} did not respond within {limit_s:g} s"
            ) from None

    def _error_of(self, failure: BackendFailed) -> RendezvousError:
        """Return what a caller of TorchElastic's interface expects."""
        if isinstance(failure.__cause__, RendezvousError):
            return failure.__cause__
        if not failure.invalid:
            return RendezvousConnectionError(failure.message)
        if not failure.hint:
            return RendezvousStateError(failure.message)
        where = f"{self._backend.name!r}, job {self._run_id!r}"
        return RendezvousStateError(f"{where}: {failure.message}", hint=failure.hint)

    def set_closed(self) -> None:
        """End the job for all nodes, including later ones; does nothing after `shutdown`."""
        if not self._is_shut:
            super().set_closed()

    def shutdown(self) -> bool:
        """Leave the job and release all resources; return whether the leave was stored."""
        self._is_shut = True
        super().shutdown()
        if self._release is not None:
            self._release.detach()
        return self._has_left

    def _make_connection(
        self,
        *,
        role: str,
        local_world_size: int,
        max_restarts: int,
        ports: tuple[int, ...],
        store_key: bytes,
    ) -> Membership:
        replace = msgspec.structs.replace
        connection = self._connect(
            replace(
                self._node,
                role=role,
                local_world_size=local_world_size,
                ports=ports,
                store_key=store_key,
            ),
            self._job_settings._replace(max_restarts=max_restarts),
            control=OFF if self._is_polled else self._control,
        )
        # A handler that is dropped without `shutdown` must not keep its node in the job.
        self._release = weakref.finalize(self, _close_all, connection, self._worker_store)
        return connection

    def _connect(
        self, info: NodeInfo, settings: JobSettings, *, control: str = OFF
    ) -> BackendMembership:
        """Return a started membership."""
        if self._is_shut:
            raise RendezvousClosedError("the rendezvous handler was shut down")
        interval_s = self._settings.keep_alive_interval.total_seconds()
        connection = BackendMembership(
            CheckedBackend(self._backend),
            where=self.endpoint,
            run_id=self.get_run_id(),
            info=msgspec.structs.replace(info, incarnation=draw_incarnation()),
            settings=settings,
            store=self._store,
            timeouts=Timeouts(
                interval_s=interval_s,
                lost_after_s=interval_s * self._settings.keep_alive_max_attempt,
                away_s=self._away_s,
                needs_answers=self._self_fencing and not self._is_polled,
                absent_s=min(ABSENT_S, self.join_timeout_s / 2) if self._is_polled else None,
            ),
            credentials=None
            if control == OFF
            else ControlCredentials(run_id=self.get_run_id(), token=explicit_token(os.environ)),
            control=control,
        )
        connection.start()
        return connection

    def _enter_polled(self) -> Membership:
        self._is_polled = self._has_joined = True  # The caller reports its own status.
        return self.enter()

    def _take(self, connection: Membership) -> None:
        super()._take(connection)
        # A backend that never responded fails at once: it does not exist, or is not of this kind.
        if isinstance(connection, BackendMembership) and connection.is_unreached:
            assert connection.failure is not None
            raise self._error_of(connection.failure) from connection.failure

    def _refusal(self, why: str) -> RendezvousError:
        connection = self._connection
        if isinstance(connection, BackendMembership) and connection.failure is not None:
            return self._error_of(connection.failure)
        return super()._refusal(why)

    @property
    def _authority_at(self) -> str:
        return self.endpoint


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Return a handler on a backend, with the settings of `--rdzv-conf`."""
    conf = rdzv_conf.parse(params, shares_state=True)
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
        this_node(
            params.local_addr, node_id=conf.node_id, label=conf.label, yields=bool(conf.replace)
        ),
        settings,
        backend.name,
        store,
        backend,
        job_settings=conf.job,
        away_s=conf.coordinator_timeout,
        self_fencing=conf.on_lost == "stop",
        endpoint=params.endpoint,
        worker_store=conf.worker_store,
        store_address=address_of(params.local_addr or ""),
        control=conf.control,
    )


def this_node(
    local_addr: str | None, *, node_id: str = "", label: str = "", yields: bool = False
) -> NodeInfo:
    """Describe this node. Without an address other nodes know it by its host name."""
    host = os.uname().nodename
    address = local_addr or host
    if not local_addr:
        console.info(f"other nodes know this one as {host}; --local-addr gives it an address")
    name = node_id or f"{address}_{os.getpid()}_{next(_local_ids)}"
    return NodeInfo(
        node=name, incarnation=0, host=host, label=label, address=address, yields=yields
    )


def job_settings_of(settings: RendezvousSettings) -> JobSettings:
    """Return what all nodes of the job must agree on. `enter` adds the number of restarts."""
    return JobSettings(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        settle_s=settings.timeout.last_call.total_seconds(),
    )


def check_settings(settings: RendezvousSettings) -> None:
    """Raise `UsageError` for settings that no job can run with."""
    if not settings.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    if settings.min_nodes < 1 or settings.max_nodes < settings.min_nodes:
        raise UsageError(
            f"--nnodes: {settings.min_nodes}:{settings.max_nodes} is not a range of nodes; "
            "accepted: MIN:MAX with MIN from 1 and MAX not below it"
        )
    if settings.keep_alive_interval <= timedelta(0) or settings.keep_alive_max_attempt < 1:
        raise UsageError(
            "--rdzv-conf: keep_alive_interval must be above 0 and keep_alive_max_attempt from 1"
        )


def _close_all(connection: BackendMembership, worker_store: Any) -> None:
    connection.close()
    if worker_store is not None:
        worker_store.close()
