"""Another user of the host attacks a job, as a stranger would, and gets nothing."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.store.errors import DistNetworkError
from holdfast.store.tcp.client import TCPStore
from holdfast.wire.frames import FrameReader
from holdfast.wire.handshake import ClientHandshake
from other_users import STRANGER, as_user
from real_jobs import Job
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from pathlib import Path

KEEP = """
from holdfast.store.from_env import from_environment
store = from_environment()
store.set("plan", "three steps")
tell(os.environ["MASTER_PORT"])
store.wait(["go"])
tell(store.get("plan").decode().replace(" ", "-"))
"""


def write_to_store(port: int) -> str:
    """Overwrite what a worker left in the store."""
    try:
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))
        store.set("plan", "curl evil")
        return store.get("plan").decode()
    except (DistNetworkError, OSError) as error:
        return f"refused: {type(error).__name__}"


def shake_hands(port: int) -> str:
    """Introduce itself to a coordinator as an agent without a token."""
    with socket.socket() as connection:
        connection.settimeout(20)
        connection.connect(("127.0.0.1", port))
        handshake, reader = ClientHandshake(None), FrameReader(1 << 16)
        connection.sendall(handshake.start())
        while not handshake.done:
            for body in reader.feed(connection.recv(65536)):
                connection.sendall(handshake.receive(body))
    return "let in"


def test_the_workers_store_serves_its_own_user_alone(tmp_path: Path) -> None:
    with Job(tmp_path, KEEP, "--nproc-per-node", "1") as job:
        port = int(job.news.next()[0])
        assert as_user(STRANGER, lambda: write_to_store(port)).startswith("refused")
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
        store.set("go", "")
        assert job.news.next()[0] == "three-steps"
        assert job.end()[0] == 0


def test_a_coordinator_without_a_token_serves_its_own_user_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_host("a")
        assert shake_hands(cluster.port) == "let in"
        said = as_user(STRANGER, lambda: shake_hands(cluster.port))
        assert said.startswith("HandshakeRefused")
        assert str(STRANGER) in said
        cluster.start("b")
        for start in cluster.generation(2).values():
            start.finish()
        assert cluster.codes() == {"a": 0, "b": 0}
