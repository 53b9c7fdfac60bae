from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.net import addresses, async_addresses


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True), ("LOCALHOST", True), ("a.localhost", True), ("127.3.2.1", True),
        ("::1", True), ("::ffff:127.0.0.1", True),
        ("node7", False), ("10.0.0.1", False), ("::", False), ("0.0.0.0", False),
        ("fe80::1%eth0", False), ("127.example", False), ("", False), ("a\0", False),
    ],
)  # fmt: skip
def test_loopback_names_are_recognized(host: str, is_loopback: bool) -> None:
    assert addresses.names_loopback(host) is is_loopback
    assert addresses.is_loopback(host) is (is_loopback and addresses.is_ip(host))
    assert addresses.is_unspecified(host) is (host in ("::", "0.0.0.0"))


def test_ipv4_mapped_address_is_returned_as_ipv4() -> None:
    given = ["::ffff:10.1.2.3", "10.1.2.3", "fd00::2"]
    assert [*map(addresses.as_ipv4_if_mapped, given)] == ["10.1.2.3", "10.1.2.3", "fd00::2"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_resolve_async_returns_the_same_addresses_ipv4_first(host: str) -> None:
    found = addresses.resolve(host, 80)
    assert (found[0].family, found[0].ip) == (socket.AF_INET, "127.0.0.1")
    assert asyncio.run(async_addresses.resolve_async(host, 80)) == found
    assert addresses.resolve_within(host, 80, 20.0) == found


def test_unknown_or_slow_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def look_up(host: str, *_: object, **__: object) -> Any:
        if host == "slow":
            over.wait(20)
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(OSError, match="resolved"):
        addresses.resolve_within("a" * 70 + ".example", 7, 20.0)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(socket.gaierror):
        asyncio.run(async_addresses.resolve_async("nowhere", 80))
    with pytest.raises(socket.gaierror):
        addresses.resolve_within("nowhere", 80, 20.0)
    with pytest.raises(TimeoutError):
        addresses.resolve_within("slow", 80, 0.02)
    over.set()


@pytest.mark.parametrize(
    ("own", "expected"),
    [("10.0.0.7", "name"), ("127.0.1.1", "name"), ("127.0.0.1", "127.0.0.1"), (None, "address")],
)
def test_own_address_is_the_name_or_the_outgoing_address(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        assert host == os.uname().nodename
        if own is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (own, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = addresses.own_address()
    if expected == "address":  # The outgoing address, or loopback without a route.
        assert addresses.is_ip(found)
    else:
        assert found == (os.uname().nodename if expected == "name" else expected)


@pytest.mark.parametrize("call", ["getfqdn(", "gethostbyaddr(", "getnameinfo("])
def test_no_reverse_lookup_is_made(call: str) -> None:
    source = Path(holdfast.__file__).parent
    found = [path for path in source.rglob("*.py") if call in path.read_text()]
    assert found == [], "a name server that does not answer would stop the node"


def test_connection_refused_is_reported_only_if_all_addresses_refuse() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    silent = OSError("no answer within 5 s")
    no_route = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    worst = async_addresses._most_useful_error
    assert worst([refused, silent]) is worst([silent, refused]) is silent
    assert worst([no_route, refused]) is refused
    assert worst([no_route]) is no_route
    assert isinstance(worst([]), OSError)


def test_connection_of_a_socket_to_itself_is_refused() -> None:
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())
        with pytest.raises(ConnectionRefusedError):
            addresses.check_not_itself(itself)
