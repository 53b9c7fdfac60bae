"""Real jobs of several nodes that meet on a real etcd.

Jobs of tests that share an etcd have a prefix each, so that all of them may be called "job". What
lies below it is read without the client that is tested.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

from holdfast.core.etcd.keys import NodeRecord, read_record
from real_etcd import b64
from real_jobs import PATIENCE_S
from real_teams import FOREVER, QUICK, Agent, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from real_etcd import Etcd

LOOK_AGAIN_S = 0.01
LEASE_S = 2
SOON_LOST = "keep_alive_interval=0.4,keep_alive_max_attempt=5"
"""The shortest lease there is. For tests of losses alone: a busy machine may be silent for long."""


class Leaf(NamedTuple):
    """A key of a job, named without what is before it, and for how long it is kept at most."""

    name: str
    ttl_s: int
    value: bytes


class EtcdTeam(Cluster):
    """Agents of one job on one etcd; `etcd` is what is looked at, `endpoint` what agents get."""

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
        """What all keys of the job begin with."""
        return f"{self.prefix}/{quote(self.run_id, safe='')}/"

    def start_host(self, name: str, *flags: str, conf: str = "") -> Agent:
        """Start the agent that leads, and wait until it does."""
        agent = self.start(name, *flags, conf=",".join(filter(None, (conf, f"node_id={name}"))))
        self.await_leader(name)
        return agent

    def leader(self) -> str:
        """Return the id of the node that leads now, or nothing."""
        value = self.etcd.get(f"{self.root}shared/leader".encode())
        return value.decode().split()[0] if value else ""

    def await_leader(self, node: str = "", *, other_than: str = "") -> str:
        """Wait until somebody leads, this node if one is given; return who."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            leader = self.leader()
            if leader and leader != other_than and node in ("", leader):
                return leader
            running = [one for one in self.agents.values() if one.process.poll() is None]
            assert running, f"nobody is left: {self.said_by_all()}"
            assert time.monotonic() < deadline, f"{leader!r} leads: {self.said_by_all()}"
            time.sleep(LOOK_AGAIN_S)

    def await_unharmed(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; leases are kept meanwhile, however slow the machine is."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.etcd.keep_leases()
            if is_so():
                return
            assert time.monotonic() < deadline, self.said_by_all()
            time.sleep(LOOK_AGAIN_S)

    def left(self) -> dict[str, Leaf]:
        """Return all that lies below the job's keys, by name."""
        return {one.name: one for one in leaves(self.etcd, self.root)}

    def await_left(self, *names: str) -> dict[str, Leaf]:
        """Wait until these keys, and no others, are there."""
        deadline = time.monotonic() + PATIENCE_S
        while set(left := self.left()) != set(names):
            assert time.monotonic() < deadline, f"there is {left}: {self.said_by_all()}"
            time.sleep(LOOK_AGAIN_S)
        return left

    def said_by_all(self) -> dict[str, str]:
        """Return what each agent has said so far."""
        return {name: agent.said() for name, agent in self.agents.items()}

    def finish(self, starts: dict[str, Any]) -> dict[str, int]:
        """Let these workers end well; return the exit codes of all agents."""
        for start in starts.values():
            start.finish()
        return self.codes()


class MakeTeam(Protocol):
    """Makes the agents of a job, as `Cluster` does."""

    backend: str

    def __call__(
        self, folder: Path, script: str = FOREVER, *flags: str, conf: str = QUICK, **named: Any
    ) -> Cluster:
        """Return a team that is not started."""


class AtCoordinator:
    """Makes teams that meet at a coordinator, in one of their agents."""

    backend = "c10d"

    def __call__(
        self, folder: Path, script: str = FOREVER, *flags: str, conf: str = QUICK, **named: Any
    ) -> Cluster:
        return Cluster(folder, script, *flags, conf=conf, **named)


class OnEtcd:
    """Makes teams that meet on one etcd; nodes that are killed are lost soon."""

    backend = "etcd"

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    def __call__(
        self, folder: Path, script: str = FOREVER, *flags: str, conf: str = QUICK, **named: Any
    ) -> Cluster:
        conf = conf if "keep_alive" in conf or not conf else f"{conf},{SOON_LOST}"
        return EtcdTeam(folder, script, *flags, etcd=self._etcd, conf=conf, **named)


def leaves(etcd: Etcd, prefix: str) -> list[Leaf]:
    """Return all keys below a prefix; what has no lease lasts for ever, which is -1."""
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
    """Return the port at which each agent says that it is there, by node."""
    found = {}
    for one in team.left().values():
        if one.name.startswith("nodes/"):
            record = read_record(NodeRecord, one.value)
            if record.presence is not None:
                found[record.status.info.node] = record.presence.port
    return found
