"""The store's only thread looks up the name of every client in DNS: a slow response stops all nodes.

Each side looks up the name of the other's address at each connection, for messages that are rarely printed. Here the
resolver takes a second to respond that the name does not exist, in a separate network and file tree (needs root).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .stage import Evidence, free_port, present

NORMAL_S = 0.5
SCRIPT = """
ip link set lo up && mount --bind "$1" /etc/resolv.conf || exit 99
"$0" -c "$2"
"""
NO_NETWORK = 99
# A resolver that responds "no such name" after a second, a server, a connected client, and a client that connects
# while the first one works.
PROGRAM = """
import os, socket, threading, time
resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
resolver.bind(("127.0.0.1", 53))
def answer(query, asker):
    time.sleep(1)
    resolver.sendto(query[:2] + bytes.fromhex("81830001000000000000") + query[12:], asker)
if os.fork() == 0:
    while True:
        threading.Thread(target=answer, args=resolver.recvfrom(512), daemon=True).start()
from torch.distributed import TCPStore
def connect():
    return TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False)
server = TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
server.set("key", "value")
connected = connect()
threading.Thread(target=connect, daemon=True).start()
longest, end = 0.0, time.monotonic() + 6
while time.monotonic() < end:
    begun = time.monotonic()
    connected.get("key")
    longest = max(longest, time.monotonic() - begun)
    time.sleep(0.01)
print(longest, flush=True)
"""


def show() -> Evidence:
    if os.geteuid() != 0:
        return Evidence(shown=False, text="needs root, for a separate network and resolv.conf")
    with tempfile.TemporaryDirectory() as folder:
        resolver = Path(folder) / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\n")
        program = PROGRAM.format(port=free_port())
        unshare = [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--kill-child",
            "--fork",
            "sh",
            "-c",
            SCRIPT,
        ]
        command = [*unshare, sys.executable, str(resolver), program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    if done.returncode == NO_NETWORK:
        return Evidence(
            shown=False, text=f"cannot create a separate network: {done.stderr.strip()}"
        )
    took_s = float(done.stdout)
    return Evidence(
        took_s > NORMAL_S,
        f"with a resolver that takes 1 s, reading a key took a connected client up to "
        f"{took_s:.1f} s while another one connected",
    )


if __name__ == "__main__":
    present(show)
