"""Recognizes other protocols by their first bytes, for an error message that names the setting to change.

The first frame is short (`HANDSHAKE_FRAME_BYTES_MAX`), so Holdfast's connections begin with two zero bytes.
The messages name the protocols that reach a wrong port in practice: TLS, HTTP, torch's store, SSH.
"""

from __future__ import annotations

from holdfast.wire.wire_errors import NotOurProtocol
from holdfast.wire.wire_limits import HANDSHAKE_FRAME_BYTES_MAX

# How many of the first bytes an error shows.
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
    """Raise `NotOurProtocol` if a client's first bytes, complete or not, belong to another protocol."""
    if _may_be_handshake(first):
        return
    if _begins(first, _TLS_HELLO):
        raise NotOurProtocol(
            "a TLS client; this coordinator does not use TLS (set tls_cert and tls_key here, "
            "or remove tls_ca or tls=psk there)"
        )
    if any(_begins(first, method) for method in _HTTP_METHODS):
        raise NotOurProtocol("an HTTP client; this port speaks Holdfast's own protocol")
    if _begins(first, _TORCH_STORE):
        raise NotOurProtocol(
            "a client of torch's TCPStore, such as torchrun; start all nodes with Holdfast"
        )
    raise NotOurProtocol(f"not a Holdfast client; its first bytes are {_shown(first)}")


def check_server_bytes(first: bytes) -> None:
    """Raise `NotOurProtocol` if a server's first bytes, complete or not, belong to another protocol."""
    if _may_be_handshake(first):
        return
    if _begins(first, _TLS_ALERT) or _begins(first, _TLS_HELLO):
        raise NotOurProtocol(
            "the coordinator uses TLS and this side does not (set tls_ca or tls=psk here, "
            "or remove tls_cert and tls_key there)"
        )
    if _begins(first, b"HTTP/"):
        raise NotOurProtocol(
            "an HTTP server is at this endpoint, not a coordinator; check the port"
        )
    if _begins(first, b"SSH-"):
        raise NotOurProtocol("an SSH server is at this endpoint, not a coordinator; check the port")
    raise NotOurProtocol(f"no coordinator is at this endpoint; its first bytes are {_shown(first)}")


def explain_silent_close(tls: bool, psk: bool = False) -> str:
    """Return the likely reason why a server closed the connection without sending a byte.

    `tls` says that this side, the client, uses TLS; `psk`, that it uses TLS with its token.
    """
    if psk:
        return (
            "it closed the connection without a response: it is a coordinator with a different token, or "
            "without tls=psk, or not a coordinator"
        )
    if tls:
        return (
            "it closed the connection without a response: it is a coordinator without TLS "
            "(set tls_cert and tls_key there, or remove tls_ca here), or not a coordinator"
        )
    return (
        "it closed the connection without a response: it uses TLS (set tls_ca or tls=psk here), "
        "it has just exited, or it is another program"
    )


def _may_be_handshake(first: bytes) -> bool:
    head = first[:4]
    return int.from_bytes(head.ljust(4, b"\0"), "big") <= HANDSHAKE_FRAME_BYTES_MAX


def _begins(first: bytes, whole: bytes) -> bool:
    """Whether the bytes received so far can be the beginning of `whole`."""
    return first.startswith(whole) or (bool(first) and whole.startswith(first))


def _shown(first: bytes) -> str:
    return repr(first[:FIRST_BYTES])
