"""Connects a node to its job: `JobAccess`, with one class for each kind of backend.

A `MembershipHandler` has one. `coordinator_handler`, `etcd_handler` and `backend_handler` implement it.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.protocol import UNRESERVED, NodeInfo
from holdfast.membership.interface import random_incarnation
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.node_names import NodeName, reserve_name
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import View
    from holdfast.membership.interface import Membership
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters
    from holdfast.rendezvous.rendezvous_errors import RendezvousError
    from holdfast.store.store_interface import RoundStore

LEAVE_S = 2.0
"""How long a leaving node waits until its report has arrived."""
ANNOUNCE_S = 5.0
"""How often a node that waits for the others announces its arrival again: a new coordinator does not know about the
earlier announcement."""


class JoinRequest(NamedTuple):
    """The node as it joins the job."""

    role: str
    local_world_size: int
    settings: JobSettings
    """The settings of the job, as they are configured on this node."""
    ports: tuple[int, ...]
    """The ports that the node has reserved for the workers' store."""
    store_key: bytes


class JobAccess(ABC):
    """Connects a node to its job."""

    authority = "the coordinator"
    """The name in messages for the side that runs the job's rounds."""
    close_timeout_s: float | None = None
    """How long `set_closed` waits until the job is closed; None if it does not wait."""
    leave_timeout_s = LEAVE_S
    given_id = ""
    """The setting with which the user named this node, if any; two nodes may share it by mistake."""
    job_token = b""
    """The part of the token that protects this job's store, after `connect`; empty without a token."""
    is_polled = False
    """Whether the agent polls, as agents of other launchers do; set before `connect`."""

    def __init__(
        self,
        *,
        backend: str,
        run_id: str,
        node_id: str,
        name_scope: tuple[object, ...] = (),
        join_timeout_s: float,
        workers_serve: bool,
        job_settings: Callable[[int], JobSettings],
        store_address: str = "",
    ) -> None:
        self.backend = backend
        """The name of the backend, as in `--rdzv-backend`."""
        self.run_id = run_id
        self._given_node_id, self._name_scope = node_id, name_scope
        self.join_timeout_s = join_timeout_s
        """How long a node waits for a round with enough nodes."""
        self.workers_serve = workers_serve
        """Whether the worker of rank 0 serves the workers' store."""
        self.store_address = "" if workers_serve else store_address
        """The address of the workers' store here; empty for all addresses of this host."""
        self.job_settings = job_settings
        """Returns the settings of the job for a number of restarts."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """The endpoint, as a user writes it."""

    @property
    def authority_at(self) -> str:
        """The name and endpoint, in messages, of the side that runs the job's rounds."""
        return f"{self.authority} at {self.endpoint}"

    @property
    def refused_by(self) -> str:
        """The name in messages for the side that refuses a node."""
        return self.endpoint

    @abstractmethod
    def connect(self, node: JoinRequest) -> Membership:
        """Return a started membership."""

    def scope_of(self, view: View) -> str:
        """Return the scope of a round's keys in the job's store."""
        return f"{view.round_term}/{view.round}/{view.generation}"

    def arrivals(self, membership: Membership, scope: str) -> RoundStore:
        """Return the store in which nodes announce their arrival. Its calls must not block for long."""
        return membership.store(scope)

    def error_of(self, membership: Membership, why: str) -> RendezvousError:
        """Return the error of a node that could not join, by the membership's reason."""
        del membership
        return RendezvousConnectionError(why)

    def check(self, membership: Membership) -> None:  # noqa: B027 (most backends need none)
        """Raise if waiting for events is useless."""

    @cached_property
    def name(self) -> NodeName:
        """This node's id as it joins: the given one, or one that this machine reserves in the scope."""
        if self._given_node_id:
            return NodeName(self._given_node_id)
        name = reserve_name(*self._name_scope)
        weakref.finalize(self, name.free)
        return name

    def free_name(self, node_id: str) -> None:
        """Let another agent on this machine have this node's generated id; from now on the id is `node_id`."""
        self.name.free()
        self.name = NodeName(node_id, self.name.reserved_on and UNRESERVED)

    def close(self) -> None:  # noqa: B027 (most backends need none)
        """Release the resources that outlive the membership."""


def node_info(
    access: JobAccess,
    params: RendezvousParameters,
    request: JoinRequest,
    *,
    self_fencing: bool,
    fixed_rank: int = -1,
) -> NodeInfo:
    """Describe this node as it joins."""
    conf = rdzv_conf.parse(params)
    return NodeInfo(
        node=access.name.id,
        incarnation=random_incarnation(),
        role=request.role,
        local_world_size=request.local_world_size,
        host=os.uname().nodename,
        label=conf.label,
        address=params.local_addr or access.store_address,
        ports=request.ports,
        store_key=request.store_key,
        fixed_rank=fixed_rank,
        self_fencing=self_fencing,
        yields=bool(conf.replace),
        reserved_on=access.name.reserved_on,
    )
