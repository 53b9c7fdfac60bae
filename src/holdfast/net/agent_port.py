"""An agent's control port: where people reach it if no coordinator passes on what they ask.

An agent of a job on etcd, or over a shared state, listens at a port from its start; one socket is all
that this costs until somebody comes. Its number, and a key that the agent draws, are where the nodes of the
job find each other, so whoever can read that can ask (`wire.handshake.control_key`): with the job's token
besides, if it has one, and over TLS where the job's nodes have certificates.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from holdfast import console
from holdfast.core.limits import CONTROL_KEY_BYTES
from holdfast.core.protocol import ControlPort
from holdfast.net import addresses, listening
from holdfast.wire.handshake import READ_ONLY_ALL_PREFIX, READ_ONLY_PREFIX, control_key

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Mapping

    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import Hello

ON, READ_ONLY, OFF = "on", "read-only", "off"


class ControlCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """What besides the agents' keys it takes to ask the agents of one job."""

    run_id: str
    token: bytes | None = None
    pem: tuple[bytes, bytes, bytes] | None = None
    """With TLS: an authority, a certificate and its key."""

    def contacts(self, found: Iterable[tuple[str, str, ControlPort | None]]) -> Contacts:
        """Return how to reach agents, of which node, address and port are known."""
        from holdfast.wire.control import Contact, Contacts

        token = self.token
        read_only = (token or b"").startswith(READ_ONLY_PREFIX)
        is_for_all = (token or b"").startswith(READ_ONLY_ALL_PREFIX)
        contacts = []
        for node, address, port in found:
            contact = Contact(node=node, address=address)
            if port is not None and address:
                secret = control_key(port.key, token, self.run_id, read_only=read_only)
                contact = Contact(node=node, address=address, port=port.port, secret=secret)
            contacts.append(contact)
        return Contacts(
            contacts=contacts,
            pem=list(self.pem or ()),
            run_id="" if is_for_all else self.run_id,
            read_only=read_only,
        )

    def __repr__(self) -> str:
        return f"ControlCredentials({self.run_id!r})"


class ControlListener:
    """The control port of this agent, from now until `close`; raises `OSError`.

    It listens where other nodes reach this one, at `address` alone if that is loopback.
    """

    def __init__(
        self, address: str, access: ControlCredentials, *, read_only: bool = False
    ) -> None:
        is_alone = bool(address) and addresses.names_loopback(address)
        where = listening.candidates_of(address, 0) if is_alone else listening.everywhere(0)
        self._socket = listening.listen(where)
        self.port = ControlPort(int(self._socket.getsockname()[1]), os.urandom(CONTROL_KEY_BYTES))
        self.access = access
        self.read_only = read_only
        """Whether people may look and change nothing."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once somebody has come."""
        return self._socket.fileno()

    def listener(self) -> socket.socket:
        """Return a socket of its own that listens at this port."""
        return self._socket.dup()

    def key_for(self, hello: Hello) -> bytes:
        """Return the key that a client has to prove."""
        token, run_id = self.access.token, hello.run_id
        return control_key(self.port.key, token, run_id, read_only=hello.read_only)

    def close(self) -> None:
        self._socket.close()


def open_control(
    address: str, access: ControlCredentials, setting: str = ON
) -> ControlListener | None:
    """Return the control port of this agent, if there can and is to be one."""
    if setting == OFF:
        return None
    try:
        return ControlListener(address, access, read_only=setting == READ_ONLY)
    except OSError as problem:
        console.debug(f"this agent can be asked on its own machine alone: {problem}")
        return None


def explicit_token(environ: Mapping[str, str], *, read_only: bool = False) -> bytes | None:
    """Return the token that is set; where strangers are kept out otherwise none is made."""
    from holdfast.net.token import choose_token

    return choose_token(listening.LOOPBACK, environ, read_only=read_only)
