from __future__ import annotations

import pytest

from holdfast.wire.handshake import ClientHandshake, ServerHandshake, refusal
from holdfast.wire.sniff import check_client_bytes, check_server_bytes
from holdfast.wire.wire_errors import NotOurProtocol
from holdfast.wire.wire_limits import HANDSHAKE_FRAME_BYTES_MAX

CLIENTS = [
    (b"\x16\x03\x01\x02\x00\x01\x00", "a TLS client; this coordinator does not use TLS"),
    (b"\x16", "a TLS client"),
    (b"GET / HTTP/1.1\r\n", "an HTTP client"),
    (b"GE", "an HTTP client"),
    (b"OPTIONS * HTTP/1.1", "an HTTP client"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "an HTTP client"),
    (b"\x00\xce\xf7\x85\x3c\r\x12\r\x00\x00", "a client of torch's TCPStore"),
    (b"\x00\xce", "a client of torch's TCPStore"),
    (b"hello?", r"not a Holdfast client; its first bytes are b'hello\?'"),
    (b"\x00\x00\x20\x01", "not a Holdfast client"),
    (b"\x00\x01", "not a Holdfast client"),
    (b"\xff" * 1000, r"its first bytes are b'(\\xff){8}'$"),
]


@pytest.mark.parametrize(("first", "why"), CLIENTS)
def test_protocol_of_a_client_is_named(first: bytes, why: str) -> None:
    with pytest.raises(NotOurProtocol, match=why) as raised:
        check_client_bytes(first)
    assert raised.value.why.isprintable()


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x46", "the coordinator uses TLS and this side does not"),
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH server"),
        (b"220 mail ESMTP", "no coordinator is at this endpoint; its first bytes are b'220 "),
    ],
)
def test_protocol_of_a_server_is_named(first: bytes, why: str) -> None:
    with pytest.raises(NotOurProtocol, match=why) as raised:
        check_server_bytes(first)
    assert raised.value.why.isprintable()


def test_any_prefix_of_our_own_first_bytes_is_accepted() -> None:
    hello = ClientHandshake(None).start()
    answer = ServerHandshake(b"token").receive(hello[4:])
    for length in range(len(hello) + 1):
        check_client_bytes(hello[:length])
    for length in range(len(answer) + 1):
        check_server_bytes(answer[:length])
    check_server_bytes(refusal("x" * 5000))
    check_client_bytes(HANDSHAKE_FRAME_BYTES_MAX.to_bytes(4, "big"))
