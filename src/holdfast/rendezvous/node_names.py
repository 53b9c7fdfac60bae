"""Default node ids: the name of the host, `host-2` for the second agent of a job on the host, and so on.

An agent reserves its id on its machine before it joins: it binds an abstract Unix socket, whose name consists of
the job and the id. The kernel lets one socket at a time have a name, and frees the name when the agent exits, however
it exits. So a restarted agent gets the id of its predecessor, and two agents that start at the same time get two ids,
without a coordinator. Nobody can connect to the socket.

The network namespace is the scope of abstract names, so here it counts as the machine. Two machines may have the
same host name. The job resolves that: see `NodeInfo.reserved_on`, and rule 9 of `core.rounds`.
"""

from __future__ import annotations

import errno
import os
import socket
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.protocol import UNRESERVED
from holdfast.rendezvous.handler import host_label

if TYPE_CHECKING:
    from collections.abc import Callable

TRIES_MAX = 1_000
"""How many ids an agent tries to reserve; other users' sockets may have any of them."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
NETWORK = "/proc/self/ns/net"
DIGEST_BYTES = 12
RANDOM_BYTES = 3


class NodeName(NamedTuple):
    """The id of a node, `NodeInfo.reserved_on`, and a function that frees the id for another agent."""

    id: str
    reserved_on: str = ""
    free: Callable[[], object] = lambda: None


def reserve_name(*scope: object) -> NodeName:
    """Return a generated id that no other agent in this scope on this machine has until it is freed.

    The scope names the job. With an empty scope, the id is not reserved.
    """
    label = host_label()
    machine = _machine() if scope else UNRESERVED
    if machine == UNRESERVED:
        return NodeName(label, UNRESERVED)
    for number in range(1, TRIES_MAX):
        name = label if number == 1 else f"{label}-{number}"
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        text = "\n".join(map(str, (*scope, name))).encode("utf-8", "surrogateescape")
        digest = blake2b(text, digest_size=DIGEST_BYTES)
        try:
            holder.bind(f"\0holdfast-{digest.hexdigest()}")
        except OSError as problem:
            holder.close()
            if problem.errno == errno.EADDRINUSE:
                continue
            return NodeName(label, UNRESERVED)
        return NodeName(name, machine, holder.close)
    return NodeName(f"{label}-{os.urandom(RANDOM_BYTES).hex()}", UNRESERVED)


def _machine() -> str:
    """Return the identity of this machine, or `UNRESERVED` if it is not known."""
    try:
        with open(BOOT_ID) as file:
            return f"{file.read().strip()}/{os.stat(NETWORK).st_ino}"
    except OSError:
        return UNRESERVED
