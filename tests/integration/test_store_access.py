"""Strangers, of this host and of others, attack the store of a job's workers, and get nothing."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest

from other_users import STRANGER, as_user
from real_teams import OBEY, Agent, Cluster

if TYPE_CHECKING:
    from pathlib import Path

LISTENING = "0A"


def listens_at(agent: Agent) -> list[tuple[str, int]]:
    """Return the addresses and ports at which a process listens."""
    own = {os.readlink(one.path) for one in os.scandir(f"/proc/{agent.pid}/fd")}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{agent.pid}/net/{table}") as rows:
            for row in [row.split() for row in rows][1:]:
                if row[3] == LISTENING and f"socket:[{row[9]}]" in own:
                    address, _, port = row[1].partition(":")
                    words = [int(one, 16) for one in re.findall(".{8}", address)]
                    packed = b"".join(word.to_bytes(4, "little") for word in words)
                    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                    found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


@pytest.mark.parametrize(
    ("backend", "host", "flags", "expected"),
    [
        ("c10d", "127.0.0.1", (), "127.0.0.1"),
        ("c10d", "::1", (), "::1"),
        ("static", "localhost", (), "127.0.0.1"),
        ("file", "", ("--local-addr", "127.0.0.1"), "127.0.0.1"),
        ("file", "", ("--local-addr", "localhost"), "127.0.0.1"),
        ("file", "", (), "::"),
    ],
)
def test_a_job_within_one_host_listens_on_loopback_alone(
    tmp_path: Path, backend: str, host: str, flags: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "shared").mkdir()
    where: dict[str, Any] = (
        {"endpoint": str(tmp_path / "shared")} if backend == "file" else {"host": host}
    )
    with Cluster(tmp_path, OBEY, *flags, nnodes="2", backend=backend, **where) as cluster:
        for number, name in enumerate("ab"):
            ranks = ("--node-rank", str(number)) if backend == "static" else ()
            cluster.start(name, *ranks)
        starts = cluster.generation(2)
        meeting = int(starts["a"].meeting.rpartition(":")[2])
        listening = {name: listens_at(agent) for name, agent in cluster.agents.items()}
        for start in starts.values():
            start.finish()
        assert cluster.codes() == {"a": 0, "b": 0}
    stores = {port: one for every in listening.values() for one, port in every}
    stores.pop(cluster.port, None)
    assert {*stores.values()} == {expected}
    assert meeting in stores


def test_nobody_can_take_a_port_that_is_held_for_a_generation_to_come(tmp_path: Path) -> None:
    """Another user of the host could otherwise be the store of the next one."""

    def listen(port: int) -> str:
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", port))
            thief.listen()
        return "listens"

    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_all("a", "b")
        starts = cluster.generation(2)
        ports = [port for agent in cluster.agents.values() for _, port in listens_at(agent)]
        said = {as_user(STRANGER, lambda port=port: listen(port)) for port in ports}  # type: ignore[misc]
        for start in starts.values():
            start.finish()
        assert cluster.codes() == {"a": 0, "b": 0}
    # Two of each, and those of the coordinator and of the generation that runs.
    assert len(ports) == 6
    assert all("Address already in use" in one for one in said), said
