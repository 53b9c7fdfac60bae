from __future__ import annotations

import os
import subprocess
import sys

# In a process of its own: a limit that was lowered cannot always be raised again.
MANY = """
import resource, socket
from holdfast.rendezvous.worker_store import WorkerStore
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
assert hard == resource.RLIM_INFINITY or hard >= 600, hard
store = WorkerStore()
port = store.open(0)
clients = [socket.socket() for _ in range(100)]
resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
for number, client in enumerate(clients):
    client.connect(("127.0.0.1", port))
    client.sendall(b"\\0\\xce\\xf7\\x85\\x3c\\x0d" + number.to_bytes(4, "little"))
    assert client.recv(4) == number.to_bytes(4, "little")
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 160
store.close()
"""
LIMITS = """
import resource
from holdfast.net.listening import DESCRIPTORS_MAX, descriptor_limit, raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
assert descriptor_limit() == 100
assert raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
assert descriptor_limit() == 200
assert not raise_descriptor_limit()
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    run(LIMITS)


def test_a_store_takes_more_clients_than_the_usual_limit_allows() -> None:
    run(MANY)
