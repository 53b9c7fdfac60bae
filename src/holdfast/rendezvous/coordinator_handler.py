"""The rendezvous through a coordinator: `--rdzv-backend c10d` and `static`."""

from __future__ import annotations

import os
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.core.limits import COORDINATORS_MAX
from holdfast.core.session import SessionTimeouts
from holdfast.errors import UsageError
from holdfast.membership.coordinator import CoordinatorMembership
from holdfast.net.addresses import LOOPBACK, names_loopback
from holdfast.net.endpoints import format_endpoint, parse_rendezvous_endpoints
from holdfast.net.listening import address_of
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.handler import RendezvousInfo, RendezvousStoreInfo
from holdfast.rendezvous.job_access import (
    ANNOUNCE_S,
    JobAccess,
    JoinRequest,
    node_info,
)
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError
from holdfast.store.store_errors import DistError
from holdfast.wire.handshake import job_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.membership.interface import Membership
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters
    from holdfast.store.store_interface import RoundStore
    from holdfast.store.tcp.store_client import TCPStore

DEFAULT_PORT = 29400


def create_coordinator_handler(params: RendezvousParameters) -> MembershipHandler:
    """Return the handler of `--rdzv-backend c10d`."""
    return MembershipHandler(CoordinatorAccess(params))


def create_static_handler(params: RendezvousParameters) -> MembershipHandler:
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
    return StaticHandler(params, rank)


class StaticHandler(MembershipHandler):
    """The rendezvous of nodes with fixed ranks.

    Holdfast's agents join the coordinator at the endpoint. For other agents, which call `next_rendezvous`, the
    handler does what TorchElastic's does: node 0 serves one store at the endpoint for the nodes and for their
    workers, and no node notices the loss of another.
    """

    def __init__(self, params: RendezvousParameters, rank: int) -> None:
        access = CoordinatorAccess(params, fixed_rank=rank)
        super().__init__(access)
        self._place = rank, params.max_nodes
        self._where = access.first_endpoint
        self._local_addr = params.local_addr
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the only round, once every node is connected to the store."""
        from holdfast.store.prefix_store import PrefixStore  # Only other agents need these two.
        from holdfast.store.tcp.store_client import TCPStore

        rank, size = self._place
        host, port = self._where
        if self._store is None:
            timeout = timedelta(seconds=self.join_timeout_s)
            try:
                self._store = TCPStore(host, port, size, rank == 0, timeout, multi_tenant=True)
            except (DistError, OSError) as problem:
                raise RendezvousConnectionError(str(problem)) from problem
        store = PrefixStore(self.get_run_id(), self._store)
        address = RendezvousStoreInfo(host, port)
        if not self.use_agent_store:  # The agent's store has the port of the endpoint.
            address = RendezvousStoreInfo.build(rank, store, self._local_addr)
        return RendezvousInfo(store, rank, size, address)

    def set_closed(self) -> None:
        """Do nothing: without a coordinator, each node ends by itself."""

    def shutdown(self) -> bool:
        """Leave the job, and release all resources."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        return super().shutdown()


class CoordinatorAccess(JobAccess):
    """A job with a coordinator, which may run in this process."""

    environ: Mapping[str, str] = os.environ
    """The environment that may contain a token."""

    def __init__(self, params: RendezvousParameters, *, fixed_rank: int = -1) -> None:
        self._params = params
        self._config = conf = rdzv_conf.parse(params)
        self._fixed_rank = fixed_rank
        self._endpoints = parse_rendezvous_endpoints(
            params.endpoint, DEFAULT_PORT, COORDINATORS_MAX
        )
        # The id contains the fixed rank, so that a later node with this rank can replace a lost one.
        given = conf.node_id or (f"rank-{fixed_rank}" if fixed_rank >= 0 else "")
        # Other agents here may write another host name in the endpoint, but not another port.
        ports = [port for _, port in self._endpoints]
        scope = (params.run_id, *ports) if all(ports) else ()
        local_addr = params.local_addr
        super().__init__(
            backend=params.backend,
            run_id=params.run_id,
            node_id=given,
            name_scope=scope,
            join_timeout_s=conf.join_timeout,
            workers_serve=conf.worker_store,
            store_address=address_of(local_addr) if local_addr else self._own_loopback(),
            job_settings=conf.job_settings,
        )
        if conf.node_id:
            self.given_id = f"node_id={conf.node_id}"
        elif fixed_rank >= 0:
            self.given_id = f"--node-rank {fixed_rank}"
        self._membership: CoordinatorMembership | None = None
        if len(self._endpoints) > 1 and params.kind is Backend.STATIC:
            raise UsageError(
                f"--rdzv-endpoint: {params.endpoint!r} names several machines; static accepts one, "
                "c10d several"
            )

    @property
    def first_endpoint(self) -> tuple[str, int]:
        """The host and port of the only endpoint, or of the first."""
        return self._endpoints[0]

    @property
    def endpoint(self) -> str:
        """The coordinator's endpoint, as a user writes it."""
        if self._membership is not None:
            return self._membership.where
        return format_endpoint(*self._endpoints[0])

    def connect(self, node: JoinRequest) -> CoordinatorMembership:
        """Return a started membership."""
        conf, params = self._config, self._params
        (host, port), *later = self._endpoints
        token = conf.token_for(host, self.environ)
        self.job_token = job_token(token, self.run_id) if token is not None else b""
        # If a node is disconnected, Holdfast's agent can stop its workers; agents of other launchers cannot.
        self_fencing = conf.on_lost == "stop" and not self.is_polled
        self._membership = CoordinatorMembership(
            host,
            port,
            run_id=self.run_id,
            info=node_info(
                self, params, node, self_fencing=self_fencing, fixed_rank=self._fixed_rank
            ),
            settings=node.settings,
            timeouts=SessionTimeouts(
                heartbeat_s=conf.keep_alive_interval,
                silence_s=conf.lost_after_s,
                unreachable_s=conf.coordinator_timeout,
                first_contact_s=conf.read_timeout or conf.join_timeout,
                needs_answers=self_fencing,
            ),
            is_host=conf.is_host,
            token=token,
            tls=conf.tls_with(token, self.run_id),
            reconnect_grace_s=conf.reconnect_grace,
            advertised_port=conf.advertised_port,
            recover_s=conf.recover_timeout,
            state_file=conf.state_file,
            # Workers of another launcher would inherit the higher limit.
            may_raise_limit=not self.is_polled,
            advice=self.advice(host),
            later=later,
        )
        self._membership.start()
        return self._membership

    def advice(self, host: str) -> str:
        """Return advice for a node that has lost the coordinator."""
        survives = "a job with --ha HOST,HOST,HOST survives this"
        if len(self._endpoints) > 1:
            words = ("--endpoint", self._params.endpoint, "--rdzv-id", self.run_id)
            take_over = f"holdfast coordinator --take-over {shlex.join(words)}"
            return f"if its machine failed, run `{take_over}` on the next one ({survives})"
        if self._config.is_host is False:
            return "start `holdfast coordinator` there again, and the job continues"
        if self.is_polled or names_loopback(host):
            return ""  # Another launcher's job, or a job on one machine.
        return survives

    def arrivals(self, membership: Membership, scope: str) -> RoundStore:
        """Return the store in which nodes announce their arrival."""
        assert isinstance(membership, CoordinatorMembership)
        return membership.store(scope, ANNOUNCE_S)

    def close(self) -> None:
        """Drop the membership, which its owner has closed."""
        self._membership = None

    def _own_loopback(self) -> str:
        """Return the endpoint's loopback address if it implies that all nodes are on this host."""
        host = self._endpoints[0][0]
        return (address_of(host) or LOOPBACK) if names_loopback(host) else ""
