"""The rendezvous through a coordinator: `--rdzv-backend c10d` and `static`."""

from __future__ import annotations

import hmac
import os
import shlex
from typing import TYPE_CHECKING

from holdfast.core.job_settings import JobSettings
from holdfast.core.limits import PLACES_MAX
from holdfast.core.protocol import NodeInfo
from holdfast.core.session import SessionTimeouts
from holdfast.errors import UsageError
from holdfast.membership.coordinator import CoordinatorMembership
from holdfast.membership.interface import draw_incarnation
from holdfast.net.addresses import names_loopback
from holdfast.net.endpoints import format_endpoint, parse_rendezvous_endpoints
from holdfast.net.listening import LOOPBACK, address_of
from holdfast.net.token import choose_token
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.polled_handler import ANNOUNCE_S, PolledHandler
from holdfast.wire.handshake import job_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.core.protocol import View
    from holdfast.membership.interface import Membership
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters
    from holdfast.store.store_interface import RoundStore

DEFAULT_PORT = 29400


def create_coordinator_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """Return the handler of `--rdzv-backend c10d`."""
    return CoordinatorHandler(params)


def create_static_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """Return the handler of `--rdzv-backend static`: the ranks and the number of nodes are fixed."""
    if not params.endpoint:
        raise UsageError("--rdzv-endpoint: static needs HOST:PORT of node 0, or --master-addr")
    rank = rdzv_conf.parse(params).rank
    if rank is None:
        raise UsageError("--node-rank: static needs the number of this node, from 0")
    if not 0 <= rank < params.max_nodes:
        raise UsageError(
            f"--node-rank: {rank} is not the number of one of {params.max_nodes} nodes; "
            f"accepted: 0 to {params.max_nodes - 1}"
        )
    return CoordinatorHandler(params, fixed_rank=rank)


class CoordinatorHandler(PolledHandler):
    """A node's rendezvous through a coordinator, which may run in this process."""

    on_lost = "run"
    """What a disconnected node does by default."""
    environ: Mapping[str, str] = os.environ
    """The environment that may contain a token."""
    _job_token = b""

    def __init__(self, params: RendezvousParameters, *, fixed_rank: int = -1) -> None:
        self._params = params
        self._config = conf = rdzv_conf.parse(params)
        self._fixed_rank = fixed_rank
        super().__init__(
            backend=params.backend,
            run_id=params.run_id,
            node_id=conf.node_id or self._make_node_id(),
            join_timeout_s=conf.join_timeout,
            worker_store=conf.worker_store,
            store_address=self._find_store_address(),
            store_access=conf.job.store.value,
        )
        if conf.node_id:
            self.given_id = f"node_id={conf.node_id}"
        elif fixed_rank >= 0:
            self.given_id = f"--node-rank {fixed_rank}"
        if len(self._endpoints()) > 1 and params.backend == "static":
            raise UsageError(
                f"--rdzv-endpoint: {params.endpoint!r} names several machines; static accepts one, "
                "c10d several"
            )

    @property
    def endpoint(self) -> str:
        """The coordinator's endpoint, as a user writes it."""
        return self._connection.where if self._connection else format_endpoint(*self._address())

    def _make_connection(
        self,
        *,
        role: str,
        local_world_size: int,
        max_restarts: int,
        ports: tuple[int, ...],
        store_key: bytes,
    ) -> Membership:
        params, conf = self._params, self._config
        info = NodeInfo(
            node=self.node_id,
            incarnation=draw_incarnation(),
            role=role,
            local_world_size=local_world_size,
            host=os.uname().nodename,
            label=conf.label,
            address=params.local_addr or self._store_address,
            ports=ports,
            store_key=store_key,
            fixed_rank=self._fixed_rank,
            self_fencing=self._self_fencing,
            yields=bool(conf.replace),
        )
        return self._connect(info, conf.job._replace(max_restarts=max_restarts))

    def _find_store_address(self) -> str:
        """Return the address of the workers' store; empty for all addresses of this host."""
        if self._config.worker_store:
            return ""
        if self._params.local_addr:
            return address_of(self._params.local_addr)
        return self._own_loopback()

    def _own_loopback(self) -> str:
        """Return the endpoint's loopback address if it implies that all nodes are on this host."""
        host = self._address()[0]
        return (address_of(host) or LOOPBACK) if names_loopback(host) else ""

    @property
    def _self_fencing(self) -> bool:
        """Whether a disconnected node stops its workers; agents of other launchers cannot."""
        return (self._config.on_lost or self.on_lost) == "stop" and not self._is_polled

    def _connect(self, info: NodeInfo, settings: JobSettings) -> Membership:
        """Return a started membership."""
        conf = self._config
        (host, port), *later = self._endpoints()
        token = choose_token(
            host,
            self.environ,
            token_file=conf.token_file,
            auth=conf.auth,
            certified=conf.certified,
        )
        self._job_token = job_token(token, self._params.run_id) if token is not None else b""
        timeouts = SessionTimeouts(
            heartbeat_s=conf.keep_alive_interval,
            silence_s=conf.lost_after_s,
            away_s=conf.coordinator_timeout,
            first_contact_s=conf.read_timeout or conf.join_timeout,
            needs_answers=self._self_fencing,
        )
        connection = CoordinatorMembership(
            host,
            port,
            run_id=self._params.run_id,
            info=info,
            settings=settings,
            timeouts=timeouts,
            is_host=conf.is_host,
            token=token,
            tls=conf.tls_with(token, self._params.run_id),
            reconnect_grace_s=conf.reconnect_grace,
            advertised_port=conf.advertised_port,
            recover_s=conf.recover_timeout,
            state_file=conf.state_file,
            # Workers of another launcher would inherit the higher limit.
            may_raise_limit=not self._is_polled,
            advice=self._advice(host),
            later=later,
        )
        connection.start()
        return connection

    def _advice(self, host: str) -> str:
        """Return advice for the case that the coordinator is lost."""
        survives = "a job with --ha HOST,HOST,HOST survives this"
        if len(self._endpoints()) > 1:
            words = ("--endpoint", self._params.endpoint, "--rdzv-id", self._params.run_id)
            take_over = f"holdfast coordinator --take-over {shlex.join(words)}"
            return f"if its machine failed, run `{take_over}` on the next one ({survives})"
        if self._config.is_host is False:
            return "restart `holdfast coordinator` there to continue the job"
        if self._is_polled or names_loopback(host):
            return ""  # Another launcher's job, or a job on one machine.
        return survives

    def _store_key(self, view: View) -> bytes:
        """Return the key of a view's store, combined with the job's token if there is one.

        Without TLS a third party may read a view, but does not know the token.
        """
        if not view.store_key or not self._job_token:
            return view.store_key
        return hmac.digest(self._job_token, view.store_key, "sha256")

    def _arrivals(self, connection: Membership, scope: str) -> RoundStore:
        if isinstance(connection, CoordinatorMembership):
            return connection.store(scope, ANNOUNCE_S)
        return super()._arrivals(connection, scope)

    def _endpoints(self) -> tuple[tuple[str, int], ...]:
        return parse_rendezvous_endpoints(self._params.endpoint, DEFAULT_PORT, PLACES_MAX)

    def _address(self) -> tuple[str, int]:
        """Return the endpoint of the coordinator at the start of the job."""
        return self._endpoints()[0]

    def _make_node_id(self) -> str:
        if self._fixed_rank >= 0:
            return f"rank-{self._fixed_rank}"  # Another node with this rank replaces it.
        return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(6).hex()}"
