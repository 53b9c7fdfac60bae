"""What the other side speaks if it is not Holdfast's protocol, and what to do about it.

The first frame is short (`HANDSHAKE_FRAME_BYTES_MAX`), so a connection of ours begins with two zero
bytes. Whatever begins otherwise is not ours, and the few things that do turn up at a wrong port in
practice are named: TLS, HTTP, torch's store, SSH.
"""

from __future__ import annotations

from holdfast.wire.errors import NotOurProtocol
from holdfast.wire.limits import HANDSHAKE_FRAME_BYTES_MAX

# How much of the first bytes is looked at.
FIRST_BYTES = 8

_TLS_HELLO = b"\x16\x03"
_TLS_ALERT = b"\x15\x03"
# A client of torch's TCPStore begins with the number of a request and a magic number.
_TORCH_STORE = b"\x00\xce\xf7\x85\x3c"
_HTTP_METHODS = (
    b"GET ", b"POST ", b"HEAD ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ",
    b"TRACE ", b"PRI ",
)  # fmt: skip


def check_client_bytes(first: bytes) -> None:
    """Raise `NotOurProtocol` if a client's first bytes, as many as there are, are not ours."""
    if _may_be_ours(first):
        return
    if _begins(first, _TLS_HELLO):
        raise NotOurProtocol(
            "a TLS client; this coordinator is plain (set tls_cert and tls_key here, "
            "or remove tls_ca or tls=psk there)"
        )
    if any(_begins(first, method) for method in _HTTP_METHODS):
        raise NotOurProtocol("an HTTP client; this port speaks Holdfast's own protocol")
    if _begins(first, _TORCH_STORE):
        raise NotOurProtocol(
            "a client of torch's TCPStore, such as torchrun; start all nodes with Holdfast"
        )
    raise NotOurProtocol(f"not a Holdfast client; it began with {_shown(first)}")


def check_server_bytes(first: bytes) -> None:
    """Raise `NotOurProtocol` if a server's first bytes, as many as there are, are not ours."""
    if _may_be_ours(first):
        return
    if _begins(first, _TLS_ALERT) or _begins(first, _TLS_HELLO):
        raise NotOurProtocol(
            "the coordinator speaks TLS and this side does not (set tls_ca or tls=psk here, "
            "or remove tls_cert and tls_key there)"
        )
    if _begins(first, b"HTTP/"):
        raise NotOurProtocol(
            "an HTTP server is at this endpoint, not a coordinator; check the port"
        )
    if _begins(first, b"SSH-"):
        raise NotOurProtocol("an SSH server is at this endpoint, not a coordinator; check the port")
    raise NotOurProtocol(
        f"no coordinator is at this endpoint; what is there began with {_shown(first)}"
    )


def explain_silent_close(tls: bool, psk: bool = False) -> str:
    """Return the likely reason why a server closed the connection and never sent a byte.

    `tls` is whether this side, the client, speaks TLS, and `psk` whether by its token.
    """
    if psk:
        return (
            "it closed the connection without an answer: it is a coordinator with another token, or "
            "without tls=psk, or no coordinator"
        )
    if tls:
        return (
            "it closed the connection without an answer: it is a coordinator without TLS "
            "(set tls_cert and tls_key there, or remove tls_ca here), or no coordinator"
        )
    return (
        "it closed the connection without an answer: it is a coordinator with TLS "
        "(set tls_ca or tls=psk here), or no coordinator"
    )


def _may_be_ours(first: bytes) -> bool:
    head = first[:4]
    return int.from_bytes(head.ljust(4, b"\0"), "big") <= HANDSHAKE_FRAME_BYTES_MAX


def _begins(first: bytes, whole: bytes) -> bool:
    """Whether this can be the beginning of it, as far as it has come."""
    return first.startswith(whole) or (bool(first) and whole.startswith(first))


def _shown(first: bytes) -> str:
    return repr(first[:FIRST_BYTES])
