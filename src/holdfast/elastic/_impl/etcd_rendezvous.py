"""`EtcdRendezvousHandler` and `EtcdRendezvous`: the rendezvous on etcd under its legacy names.

TorchElastic implements a protocol of steps that all nodes take together. Here both names use the
handler of `--rdzv-backend etcd`: the leader decides the rounds and stores the job, and these classes
read it. The steps (`join_phase`, `confirm_membership`, ...), their directories and their leases have
no counterpart.

`num_nodes_waiting` reports a new node at once, and `next_rendezvous` admits it. Holdfast's agents do
not poll: they `enter`, and receive a new view after the settle time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast.core.etcd.calls import ProblemKind
from holdfast.core.etcd.keys import JobKeys, JobRecord, read_record
from holdfast.core.rounds import JobPhase
from holdfast.elastic._impl.etcd_v2_client import adapted
from holdfast.etcd.generation_stores import GenerationStores
from holdfast.etcd.sync_client import EtcdClient, EtcdError
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.etcd_handler import EtcdAccess, etcd_settings_of
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from holdfast.store.memory_store import as_seconds
from holdfast.store.store_errors import StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from holdfast.core.protocol import View
    from holdfast.core.rounds import Job
    from holdfast.etcd.etcd_store import EtcdStore
    from holdfast.rendezvous.handler import RendezvousInfo

BACKEND = "etcd"


class EtcdRendezvousRetryableFailure(Exception):
    """Never raised here; for code that catches it."""


class EtcdRendezvousRetryImmediately(Exception):
    """Never raised here; for code that catches it."""


def create_rdzv_handler(params: RendezvousParameters) -> EtcdRendezvousHandler:
    """Return a handler for these parameters, with its own client."""
    conf = rdzv_conf.parse(params)
    impl = EtcdRendezvous(
        EtcdClient(etcd_settings_of(params)),
        rdzv_conf.value_of(params, "etcd_prefix"),
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        conf.join_timeout,
        conf.job_settings().settle_s,
        settings=params.config,
        closes_client=True,
    )
    return EtcdRendezvousHandler(impl, params.local_addr)


class EtcdRendezvousHandler(MembershipHandler):
    """A node's rendezvous on etcd. Creating one makes it the handler of its `EtcdRendezvous`."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        super().__init__(EtcdAccess(rdzv_impl.parameters(local_addr), rdzv_impl.client.settings))
        self.last_view: View | None = None
        """The last round that was returned."""
        self._rdzv_impl = rdzv_impl
        rdzv_impl.node = self

    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view in TorchElastic's form of a round."""
        self.last_view = view
        return super().info_of(view)

    def is_closed(self) -> bool:
        """Return whether the job is over, even if this node was never in it."""
        return super().is_closed() or self._stored_state().get("status") == "closed"

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes for which the round has room; at least 1 if it is broken."""
        waiting: int = self._stored_state().get("num_workers_waiting", 0)
        return super().num_nodes_waiting() or waiting

    def shutdown(self) -> bool:
        """Leave the job, which continues without this node, and release the handler's resources."""
        done = super().shutdown()
        self._rdzv_impl.close()
        return done

    def _stored_state(self) -> dict[str, Any]:
        """Return the job's state; empty while etcd is unreachable.

        If etcd is unreachable for too long, the node's own connection reports it.
        """
        try:
            return self._rdzv_impl.get_rdzv_state()[1]
        except RendezvousConnectionError:
            return {}


class EtcdRendezvous:
    """One node's part in a job on etcd. Times are in seconds.

    `settings` are further keys of `--rdzv-conf`. If `closes_client` is false, the caller closes the
    client. If `client` is python-etcd's, this class uses only its endpoint and certificates.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
        *,
        settings: Mapping[str, Any] | None = None,
        closes_client: bool = False,
    ) -> None:
        run_id = str(run_id)  # Some callers pass a number.
        self.client = adapted(client)
        self.node: EtcdRendezvousHandler | None = None
        """This node's handler; created when it is first needed."""
        self._places = JobKeys(prefix, run_id)
        self._timeout_s = timeout
        self._stores = GenerationStores(self.client, self._places.store)
        self._closes_client = closes_client or self.client is not client
        self._run_id, self._nodes = run_id, (num_min_workers, num_max_workers)
        self._settings = {
            **(settings or {}),
            "etcd_prefix": prefix,
            "join_timeout": timeout,
            "last_call_timeout": last_call_timeout,
        }
        self.parameters(None)  # Rejects invalid settings now.

    def parameters(self, local_addr: str | None) -> RendezvousParameters:
        """Return the parameters for a handler of this job."""
        where, settings = self.client.settings.where, self._settings
        return RendezvousParameters(
            BACKEND, where, self._run_id, *self._nodes, local_addr, **settings
        )

    def rendezvous_barrier(self) -> tuple[str, int, int]:
        """Wait until this node is in a round that it was not in before.

        Returns the version (which is unique among all starts of the run id), the node's rank, and the
        number of nodes.
        """
        node = self._own_handler()
        info = node.next_rendezvous()
        assert node.last_view is not None
        version = _version(
            node.last_view.round_term, node.last_view.round, node.last_view.generation
        )
        return version, info.rank, info.world_size

    def set_closed(self) -> None:
        """End the job for all nodes, and wait until this is decided. The job need not exist."""
        self._own_handler().set_closed()

    def close(self) -> None:
        """Release the created stores and, with `closes_client`, the client. Does not leave the job."""
        self._stores.close()
        if self._closes_client:
            self.client.close()

    # The job as it is stored.

    def get_path(self, path: str) -> str:
        """Return the key in etcd of a path of this job."""
        return self._places.root.decode() + path.removeprefix("/")

    def get_rdzv_state(self) -> tuple[int, dict[str, Any]]:
        """Return the revision that stored the state, and the state; `setup` if there is none.

        The states are TorchElastic's: `joinable` without a round, `final` with one, `closed`.
        """
        try:
            found = self.client.get(self._places.job)
        except EtcdError as problem:
            raise RendezvousConnectionError(str(problem)) from None
        if found is None:
            return 0, {"status": "setup"}
        try:
            record = read_record(JobRecord, found.value)
        except ValueError as problem:
            raise RendezvousStateError(
                f"{self._places.job.decode()} in etcd is not the record of a job: {problem}",
                hint="a new job needs another --rdzv-id",
            ) from None
        return found.mod_revision, _state(record.job)

    def try_wait_for_state_change(
        self, etcd_index: int, timeout: float | timedelta | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Return the state after a change at this revision or later, or when the time is up."""
        limit_s = self._timeout_s if timeout is None else as_seconds(timeout)
        revision, state = self.get_rdzv_state()
        if revision >= etcd_index:
            return revision, state
        try:
            with self.client.watch(self._places.job, b"", etcd_index) as watch:
                watch.next(limit_s)
        except TimeoutError:
            pass
        except EtcdError as problem:
            # If etcd has compacted that revision, there was a change.
            if problem.kind is not ProblemKind.COMPACTED:
                raise RendezvousConnectionError(str(problem)) from None
        return self.get_rdzv_state()

    # Data that the nodes of a version share.

    def setup_kv_store(self, rdzv_version: str) -> EtcdStore:
        """Return the store of a version. It is the store of its `RendezvousInfo`, on all nodes."""
        return self._store(rdzv_version)

    def store_extra_data(self, rdzv_version: str, key: str, value: object) -> None:
        """Store a JSON value that the nodes of a version can read."""
        self._store(rdzv_version, "extra_data").set(key, json.dumps(value))

    def load_extra_data(
        self, rdzv_version: str, key: str, timeout: float | timedelta | None = None
    ) -> Any:
        """Wait for the value of a key, by default as long as for a round, and return it."""
        store = self._store(rdzv_version, "extra_data")
        limit_s = self._timeout_s if timeout is None else as_seconds(timeout)
        try:
            store.wait([key], limit_s)
        except StoreTimeoutError:
            raise RendezvousTimeoutError(
                f"no value for {key!r} of version {rdzv_version} of {self._run_id!r} within "
                f"{limit_s:g} s"
            ) from None
        return json.loads(store.get(key))

    def _store(self, version: str, *below: str) -> EtcdStore:
        return self._stores.store(version.replace(".", "/"), *below)

    def _own_handler(self) -> EtcdRendezvousHandler:
        return self.node or EtcdRendezvousHandler(self, None)


def _version(round_term: int, number: int, generation: int) -> str:
    return f"{round_term}.{number}.{generation}"


def _state(job: Job) -> dict[str, Any]:
    state: dict[str, Any] = {"status": "joinable", "participants": []}
    if job.phase is JobPhase.CLOSED:
        state["status"] = "closed"
    if job.phase is JobPhase.ACTIVE and job.settings is not None:
        members = {info.node for info in job.members}
        # Standbys and spares wait too, but no agent should make room for them.
        room = min(job.settings.max_nodes, len(job.nodes) - job.settings.spares) - len(members)
        outside = sum(node not in members for node in job.nodes)
        state["status"] = "final"
        state["version"] = _version(job.round_term, job.round, job.generation)
        state["participants"] = list(range(len(job.members)))
        state["num_workers_waiting"] = max(0, min(room, outside))
    return state
