from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

import holdfast
from holdfast.net import addresses


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "a.localhost", "127.0.0.1", "127.3.2.1"]
)
def test_names_of_loopback(host: str) -> None:
    assert addresses.names_loopback(host)


@pytest.mark.parametrize("host", ["::1", "::ffff:127.0.0.1"])
def test_addresses_of_loopback(host: str) -> None:
    assert addresses.names_loopback(host)
    assert addresses.is_loopback(host)


@pytest.mark.parametrize(
    "host", ["node7", "10.0.0.1", "::", "0.0.0.0", "fe80::1%eth0", "127.example"]
)
def test_everything_else_is_for_others_too(host: str) -> None:
    assert not addresses.names_loopback(host)
    assert not addresses.is_loopback(host)


def test_ipv4_that_came_in_as_ipv6_is_ipv4_again() -> None:
    assert addresses.unmapped("::ffff:10.1.2.3") == "10.1.2.3"
    assert addresses.unmapped("10.1.2.3") == "10.1.2.3"
    assert addresses.unmapped("fd00::2") == "fd00::2"


def test_loopback_is_found_with_ipv4_first() -> None:
    found = addresses.resolve("localhost", 80)
    assert found[0].family == socket.AF_INET
    assert found[0].ip == "127.0.0.1"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_loop_is_not_kept_waiting(host: str) -> None:
    assert asyncio.run(addresses.resolve_async(host, 80)) == addresses.resolve(host, 80)


def test_a_name_that_is_unknown_is_an_error_of_whoever_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(socket.gaierror, match="not known"):
        asyncio.run(addresses.resolve_async("nowhere", 80))


@pytest.mark.parametrize("call", ["getfqdn(", "gethostbyaddr(", "getnameinfo("])
def test_no_address_is_looked_up_backwards_anywhere(call: str) -> None:
    source = Path(holdfast.__file__).parent
    found = [path for path in source.rglob("*.py") if call in path.read_text()]
    assert found == [], "a name server that does not answer would stop the node"


def test_that_nobody_listens_is_said_only_if_it_is_so_everywhere() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    silent = OSError("no answer within 5 s")
    no_way = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    assert addresses._worst([refused, silent]) is silent
    assert addresses._worst([silent, refused]) is silent
    assert addresses._worst([no_way, refused]) is refused
    assert addresses._worst([no_way]) is no_way
    assert "no address" in str(addresses._worst([]))
