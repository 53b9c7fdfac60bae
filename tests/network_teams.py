"""Agents on machines that each have their own network (`chaos.machine_network`), for tests."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from chaos.machine_network import address
from real_jobs import PATIENCE_S, Watched
from real_teams import POLL_S, QUICK, SOON_SILENT, Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from chaos.machine_network import MachineNetwork
    from real_teams import Agent

PORT = 29400
LISTENING = "0A"
CUTTING = f"{QUICK},{SOON_SILENT}"


class NetworkCluster(Cluster):
    """Agents on separate nodes: `a` on node 0, which coordinates, `b` on node 1, and so on."""

    def __init__(
        self,
        folder: Path,
        network: MachineNetwork,
        nnodes: str,
        *flags: str,
        host: str = "",
        script: str = "",
        shared: str = "",
    ) -> None:
        """Create a cluster; with the folder `shared` it uses `--rdzv-backend file` instead."""
        super().__init__(
            folder,
            script or MEET,
            *flags,
            nnodes=nnodes,
            host=host or address(0),
            port=PORT,
            conf=CUTTING,
            backend="file" if shared else "c10d",
            endpoint=shared,
        )
        self._network = network

    def start_on(
        self, name: str, *flags: str, conf: str = "", env: Mapping[str, str] | None = None
    ) -> Agent:
        inside = self._network.inside(ord(name) - ord("a"))
        return self.start(name, *flags, conf=conf, env=env, before=inside)

    def start_nodes(self, names: str, conf: str = "") -> None:
        """Start the first agent, and then the others."""
        self.await_coordinator(self.start_on(names[0], conf=conf))
        for name in names[1:]:
            self.start_on(name, conf=conf)

    def await_coordinator(self, agent: Agent) -> None:
        """Wait until the agent listens in its own network."""
        deadline = time.monotonic() + PATIENCE_S
        wanted = f":{PORT:04X}"
        while True:
            assert agent.process.poll() is None, agent.output()
            assert time.monotonic() < deadline, agent.output()
            for table in ("tcp", "tcp6"):
                with open(f"/proc/{agent.pid}/net/{table}") as sockets:
                    rows = [row.split() for row in sockets][1:]
                if any(row[1].endswith(wanted) and row[3] == LISTENING for row in rows):
                    return
            time.sleep(POLL_S)

    def check_port_is_free(self) -> None:
        """Do nothing: the port is in a network that ends with its node."""


# All workers of a generation wait for each other in the store that an agent serves, then for orders.
MEET = """
from holdfast.store.from_env import from_environment
store = from_environment()
store.set(f"here{RANK}", AGENT)
store.wait([f"here{rank}" for rank in range(int(E["WORLD_SIZE"]))])
send(f"connected {AGENT} {NUMBER}")
obey()
"""


def wait_for_group(cluster: NetworkCluster, *names: str) -> dict[str, int]:
    """Wait until these agents' workers have connected in one generation; return their processes."""
    groups: dict[str, dict[str, int]] = {}
    while True:
        words = cluster.messages.next()
        cluster.workers.append(Watched(int(words[-1])))
        if words[0] != "connected":
            continue
        _, agent, generation, pid = words
        group = groups.setdefault(generation, {})
        group[agent] = int(pid)
        if set(group) == set(names):
            return group


def finish(pids: dict[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
