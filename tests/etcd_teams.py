"""Real jobs with several nodes on a real etcd.

Tests that share an etcd each have a prefix for their jobs, so all jobs may have the name "job". The keys below the
prefix are read without the client under test.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

from holdfast.core.etcd.keys import NodeRecord, read_leader, read_record
from real_etcd import b64
from real_jobs import PATIENCE_S
from real_teams import FOREVER, QUICK, Agent, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from real_etcd import Etcd

POLL_S = 0.01
LEASE_S = 2
SOON_LOST = "keep_alive_interval=0.4,keep_alive_max_attempt=5"
"""The shortest possible lease. Only for tests of losses, because a busy machine may be silent for long."""


class Leaf(NamedTuple):
    """A key of a job without its prefix, and the longest time for which it is kept."""

    name: str
    ttl_s: int
    value: bytes


class EtcdTeam(Cluster):
    """Agents of one job on one etcd. The tests read `etcd`; the agents connect to `endpoint`."""

    def __init__(
        self,
        folder: Path,
        script: str = FOREVER,
        *flags: str,
        etcd: Etcd,
        nnodes: str = "2:3",
        run_id: str = "job",
        endpoint: str = "",
        backend: str = "etcd",
        prefix: str = "",
        conf: str = QUICK,
    ) -> None:
        self.etcd = etcd
        self.prefix = prefix or f"/tests/{folder.name}"
        super().__init__(
            folder,
            script,
            *flags,
            nnodes=nnodes,
            run_id=run_id,
            backend=backend,
            endpoint=endpoint or etcd.endpoint,
            conf=",".join(filter(None, (conf, f"etcd_prefix={self.prefix}"))),
        )

    @property
    def root(self) -> str:
        """The prefix of all keys of the job."""
        return f"{self.prefix}/{quote(self.run_id, safe='')}/"

    def start_host(self, name: str, *flags: str, conf: str = "") -> Agent:
        """Start the agent that leads, and wait until it leads."""
        agent = self.start(name, *flags, conf=",".join(filter(None, (conf, f"node_id={name}"))))
        self.await_leader(name)
        return agent

    def leader(self) -> str:
        """Return the id of the current leader, or an empty text."""
        value = self.etcd.get(f"{self.root}shared/leader".encode())
        return read_leader(value)[0] if value else ""

    def await_leader(self, node: str = "", *, other_than: str = "") -> str:
        """Wait until a node leads, or this node if one is given; return its id."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            leader = self.leader()
            if leader and leader != other_than and node in ("", leader):
                return leader
            running = [one for one in self.agents.values() if one.process.poll() is None]
            assert running, f"no agent is running: {self.outputs()}"
            assert time.monotonic() < deadline, f"{leader!r} leads: {self.outputs()}"
            time.sleep(POLL_S)

    def await_unharmed(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds. Leases are renewed meanwhile, even if the machine is slow."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.etcd.keep_leases()
            if is_so():
                return
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(POLL_S)

    def left(self) -> dict[str, Leaf]:
        """Return all keys of the job, by name."""
        return {one.name: one for one in leaves(self.etcd, self.root)}

    def await_left(self, *names: str) -> dict[str, Leaf]:
        """Wait until exactly these keys exist."""
        deadline = time.monotonic() + PATIENCE_S
        while set(left := self.left()) != set(names):
            assert time.monotonic() < deadline, f"the keys are {left}: {self.outputs()}"
            time.sleep(POLL_S)
        return left


class MakeTeam(Protocol):
    """Creates the agents of a job, as `Cluster` does."""

    backend: str

    def __call__(
        self, folder: Path, script: str = FOREVER, *flags: str, conf: str = QUICK, **named: Any
    ) -> Cluster:
        """Return a team that has not been started."""


class AtCoordinator:
    """Creates teams with a coordinator in one of their agents."""

    backend = "c10d"

    def __call__(
        self, folder: Path, script: str = FOREVER, *flags: str, conf: str = QUICK, **named: Any
    ) -> Cluster:
        return Cluster(folder, script, *flags, conf=conf, **named)


class OnEtcd:
    """Creates teams on one etcd; killed nodes are lost soon."""

    backend = "etcd"

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    def __call__(
        self, folder: Path, script: str = FOREVER, *flags: str, conf: str = QUICK, **named: Any
    ) -> Cluster:
        conf = conf if "keep_alive" in conf or not conf else f"{conf},{SOON_LOST}"
        return EtcdTeam(folder, script, *flags, etcd=self._etcd, conf=conf, **named)


def leaves(etcd: Etcd, prefix: str) -> list[Leaf]:
    """Return the duration of all keys below a prefix; -1 for a key without a lease."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    wanted = {"key": b64(prefix.encode()), "range_end": b64(end.encode())}
    found = []
    for one in etcd.raw("/v3/kv/range", wanted).get("kvs", []):
        lease = int(one.get("lease", "0"))
        ttl = etcd.raw("/v3/lease/timetolive", {"ID": str(lease)}) if lease else {}
        key = base64.b64decode(one["key"]).decode()
        value = base64.b64decode(one.get("value", ""))
        found.append(Leaf(key.removeprefix(prefix), int(ttl.get("grantedTTL", -1)), value))
    return found


def presences(team: EtcdTeam) -> dict[str, int]:
    """Return the port at which each agent shows its presence, by node."""
    found = {}
    for one in team.left().values():
        if one.name.startswith("nodes/"):
            record = read_record(NodeRecord, one.value)
            if record.presence is not None:
                found[record.status.info.node] = record.presence.port
    return found
