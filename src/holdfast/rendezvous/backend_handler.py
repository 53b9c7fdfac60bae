"""A job on any compare-and-set backend: the interface `RendezvousBackend`, and its handler.

Derive your own backend from `RendezvousBackend`. A write carries the token of the state that it replaces. If another
node has written since, the backend rejects the write.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import console
from holdfast.core.job_settings import JobSettings
from holdfast.core.limits import check_node_range
from holdfast.core.phases import NodePhase
from holdfast.core.protocol import NodeInfo, View
from holdfast.core.shared_state import BACKOFF_S_MAX, Timeouts
from holdfast.errors import UsageError
from holdfast.membership.backend import BackendFailed, BackendMembership
from holdfast.membership.interface import random_incarnation
from holdfast.net.agent_port import OFF, ON, ControlCredentials, explicit_token
from holdfast.net.listening import address_of
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.job_access import JobAccess, JoinRequest
from holdfast.rendezvous.membership_handler import MembershipHandler
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

UNREACHABLE_S = 60.0
"""How long a node continues while the backend does not respond."""
ABSENT_S = 60.0
"""How long a round waits for a live member that does not join. The member's workers may need 30 s to stop."""

_local_ids = itertools.count()

Token = Any
"""Identifies one stored state; only the backend that returned it can interpret it."""


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

        Returns the stored state after the call, its token, and whether the call stored it. If another node wrote
        first, the stored state is that node's. Returns None if nothing is stored, or if the result is unknown;
        the caller then reads the state.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """


class CheckedBackend:
    """Adapts a backend for a `BackendMembership`: an exception or an invalid result becomes a `BackendFailed`."""

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


class BackendAccess(JobAccess):
    """A job whose state is in a backend; a node joins it with its first report."""

    def __init__(
        self,
        node: NodeInfo,
        settings: RendezvousSettings,
        store: Any,
        backend: RendezvousBackend,
        *,
        backend_name: str,
        name_scope: tuple[object, ...] = (),
        job_settings: Callable[[int], JobSettings] | None = None,
        unreachable_s: float = UNREACHABLE_S,
        self_fencing: bool = False,
        endpoint: str = "",
        workers_serve: bool = False,
        store_address: str = "",
        control: str = ON,
    ) -> None:
        check_settings(settings)
        timeout = settings.timeout
        super().__init__(
            backend=backend_name,
            run_id=settings.run_id,
            node_id=node.node,
            name_scope=name_scope,
            join_timeout_s=timeout.join.total_seconds(),
            workers_serve=workers_serve,
            store_address=store_address,
            job_settings=job_settings or partial(job_settings_of, settings),
        )
        self.close_timeout_s = self.leave_timeout_s = timeout.close.total_seconds()
        self.node = node
        self.settings = settings
        self.unreachable_s = unreachable_s
        self.is_closed = False
        self._backend = backend
        self._store = store
        self._self_fencing = self_fencing
        self._control = control
        self._endpoint = endpoint or f"the rendezvous backend {backend_name!r}"

    @property
    def endpoint(self) -> str:
        """The endpoint, as a user writes it."""
        return self._endpoint

    @property
    def authority_at(self) -> str:
        """The backend, in messages."""
        return self._endpoint

    def scope_of(self, view: View) -> str:
        """Return a scope that is unique even if the store outlives the job and another job has this id."""
        return f"{view.generation}.{view.round}.{view.round_key:x}"

    def connect(self, node: JoinRequest) -> BackendMembership:
        """Return a started membership."""
        info = msgspec.structs.replace(
            self.node,
            node=self.name.id,
            reserved_on=self.name.reserved_on,
            role=node.role,
            local_world_size=node.local_world_size,
            ports=node.ports,
            store_key=node.store_key,
        )
        membership = self.open(info, node.settings, OFF if self.is_polled else self._control)
        if not self.is_polled:  # A caller that polls reports its own status.
            membership.report(NodePhase.READY, -1)
        return membership

    def open(self, info: NodeInfo, settings: JobSettings, control: str = OFF) -> BackendMembership:
        """Return a membership that reads the state; it joins with its first report."""
        if self.is_closed:
            raise RendezvousClosedError("the rendezvous handler was shut down")
        interval_s = self.settings.keep_alive_interval.total_seconds()
        credentials = None
        if control != OFF:
            credentials = ControlCredentials(run_id=self.run_id, token=explicit_token(os.environ))
        membership = BackendMembership(
            CheckedBackend(self._backend),
            where=self.endpoint,
            run_id=self.run_id,
            info=msgspec.structs.replace(info, incarnation=random_incarnation()),
            settings=settings,
            store=self._store,
            timeouts=Timeouts(
                interval_s=interval_s,
                lost_after_s=interval_s * self.settings.keep_alive_max_attempt,
                unreachable_s=self.unreachable_s,
                needs_answers=self._self_fencing and not self.is_polled,
                absent_s=min(ABSENT_S, self.join_timeout_s / 2) if self.is_polled else None,
                backoff_s_max=self.settings.cas_backoff_max_seconds or BACKOFF_S_MAX,
            ),
            credentials=credentials,
            control=control,
        )
        membership.start()
        return membership

    def refresh(self, membership: BackendMembership) -> bool:
        """Read the state now; return whether the job has ended."""
        limit_s = self.settings.timeout.heartbeat.total_seconds()
        try:
            return membership.refresh(limit_s)
        except BackendFailed as failure:
            raise self.error_of_failure(failure) from failure
        except TimeoutError:
            raise RendezvousTimeoutError(
                f"the rendezvous backend {self._backend.name!r} did not respond within {limit_s:g} s"
            ) from None

    def check(self, membership: Membership) -> None:
        """Raise if the backend never responded: it probably does not exist."""
        assert isinstance(membership, BackendMembership)
        if membership.is_unreached:
            assert membership.failure is not None
            raise self.error_of_failure(membership.failure) from membership.failure

    def error_of(self, membership: Membership, why: str) -> RendezvousError:
        """Return the error of a node that could not join."""
        assert isinstance(membership, BackendMembership)
        if membership.failure is not None:
            return self.error_of_failure(membership.failure)
        return RendezvousConnectionError(why)

    def error_of_failure(self, failure: BackendFailed) -> RendezvousError:
        """Return the exception that a caller of TorchElastic's interface expects."""
        if isinstance(failure.__cause__, RendezvousError):
            return failure.__cause__
        if not failure.invalid:
            return RendezvousConnectionError(failure.message)
        if not failure.hint:
            return RendezvousStateError(failure.message)
        where = f"{self._backend.name!r}, job {self.run_id!r}"
        return RendezvousStateError(f"{where}: {failure.message}", hint=failure.hint)

    def close(self) -> None:
        """Refuse to open further memberships."""
        self.is_closed = True


class DynamicRendezvousHandler(MembershipHandler):
    """A node's rendezvous over a backend, under TorchElastic's name; see `from_backend` and `create_handler`.

    Differences from TorchElastic's class of this name: If a round loses a member or a member requests a restart,
    `num_nodes_waiting` is positive on all other nodes, and also on a node that was removed while it was
    disconnected. Each generation has a new store and a new `MASTER_PORT`. `shutdown` leaves the job without ending
    it for the other nodes; only `set_closed` ends it.
    """

    access: BackendAccess

    def __init__(
        self,
        node: NodeInfo,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: RendezvousBackend,
        **more: Any,
    ) -> None:
        """Create a handler; `more` are keyword arguments of `BackendAccess`."""
        super().__init__(
            BackendAccess(node, settings, store, state_holder, backend_name=backend_name, **more)
        )
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
        cas_backoff_max_seconds: float = 0.0,
    ) -> DynamicRendezvousHandler:
        """Return a handler on the caller's backend and store.

        Agents exchange their ranks through the store; the backend may use the same one. After a write that lost
        against another node's, a node pauses for a random time of up to `cas_backoff_max_seconds`; 0 is the default, 1 s.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
            cas_backoff_max_seconds,
        )
        node, address = this_node(local_addr), address_of(local_addr or "")
        return cls(node, settings, backend.name, store, backend, store_address=address)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of the handler."""
        return self.access.settings

    def enter(
        self, *, role: str = "default", local_world_size: int = 1, max_restarts: int = 0
    ) -> Membership:
        """Join the job with this role and size; later calls return the same membership."""
        is_new = self._membership is None
        membership = super().enter(
            role=role, local_world_size=local_world_size, max_restarts=max_restarts
        )
        # A handler that is dropped without `shutdown` must not keep its node in the job.
        if is_new:
            self._release = weakref.finalize(self, _close_all, membership, self._worker_store)
        return membership

    def is_closed(self) -> bool:
        """Read the state now; return whether the job has ended for all nodes."""
        access = self.access
        if isinstance(self._membership, BackendMembership):
            return access.refresh(self._membership)
        # Read without joining: only `enter` knows the node's role and size.
        reader = msgspec.structs.replace(access.node, node="reader")
        membership = access.open(reader, access.job_settings(0))
        try:
            return access.refresh(membership)
        finally:
            membership.close()

    def set_closed(self) -> None:
        """End the job for all nodes, including later ones; does nothing after `shutdown`."""
        if not self.access.is_closed:
            super().set_closed()

    def shutdown(self) -> bool:
        """Leave the job and release all resources; return whether the leave was stored."""
        super().shutdown()
        if self._release is not None:
            self._release.detach()
        return self._has_left


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
        conf.cas_backoff_max_seconds,
    )
    check_settings(settings)
    scope = (backend.name, params.endpoint, params.run_id)
    return DynamicRendezvousHandler(
        this_node(
            params.local_addr, node_id=conf.node_id, label=conf.label, yields=bool(conf.replace)
        ),
        settings,
        backend.name,
        store,
        backend,
        name_scope=scope,
        job_settings=conf.job_settings,
        unreachable_s=conf.coordinator_timeout,
        self_fencing=conf.on_lost == "stop",
        endpoint=params.endpoint,
        workers_serve=conf.worker_store,
        store_address=address_of(params.local_addr or ""),
        control=conf.control,
    )


def this_node(
    local_addr: str | None, *, node_id: str | None = None, label: str = "", yields: bool = False
) -> NodeInfo:
    """Describe this node. Without `local_addr`, other nodes use its host name."""
    host = os.uname().nodename
    address = local_addr or host
    if not local_addr:
        console.info(f"other nodes reach this node as {host}; set --local-addr to change that")
    name = f"{address}_{os.getpid()}_{next(_local_ids)}" if node_id is None else node_id
    return NodeInfo(
        node=name, incarnation=0, host=host, label=label, address=address, yields=yields
    )


def job_settings_of(settings: RendezvousSettings, max_restarts: int) -> JobSettings:
    """Return the settings that all nodes of the job share."""
    return JobSettings(
        max_restarts=max_restarts,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        settle_s=settings.timeout.last_call.total_seconds(),
    )


def check_settings(settings: RendezvousSettings) -> None:
    """Raise `UsageError` for settings that no job can run with."""
    if not settings.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    try:
        check_node_range(settings.min_nodes, settings.max_nodes)
    except ValueError as problem:
        raise UsageError(f"--nnodes: {problem}") from None
    if settings.keep_alive_interval <= timedelta(0) or settings.keep_alive_max_attempt < 1:
        raise UsageError(
            "--rdzv-conf: keep_alive_interval must be above 0 and keep_alive_max_attempt at least 1"
        )
    if not 0 <= settings.cas_backoff_max_seconds < math.inf:
        raise UsageError(
            f"--rdzv-conf: cas_backoff_max_seconds: {settings.cas_backoff_max_seconds!r} is not a time; "
            "accepted: seconds from 0"
        )


def _close_all(membership: Membership, worker_store: Any) -> None:
    membership.close()
    if worker_store is not None:
        worker_store.close()
