"""The user of a connection, from the real kernel, with real users."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from holdfast.net import peer_user
from holdfast.net.addresses import own_address
from holdfast.net.peer_user import (
    NO_OWNER,
    UNKNOWN,
    is_local_user,
    is_own_address,
    is_own_user,
    listener_at,
    listener_of,
    user_of,
)
from other_users import STRANGER, as_user, hide_owners, listening_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAMILIES = {
    "IPv4": (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
    "IPv6": (socket.AF_INET6, "::1", "::1"),
    "mapped": (socket.AF_INET6, "::", "127.0.0.1"),
}
WAYS: dict[str, Callable[[socket.socket], int | None]] = {
    "netlink": user_of,
    "tables": lambda one: peer_user._search_tables(one.getpeername(), one.getsockname()),
}


@pytest.fixture(params=FAMILIES)
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    family, here, there = FAMILIES[request.param]
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(here != "::"))
        listening.bind((here, 0))
        listening.listen()
        listening.settimeout(20)
        yield listening, there


def connected(listener: tuple[socket.socket, str]) -> socket.socket:
    listening, there = listener
    client = socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET)
    client.connect((there, listening.getsockname()[1]))
    return client


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("user", [0, STRANGER])
def test_kernel_reports_the_user_of_a_connection(
    listener: tuple[socket.socket, str], user: int, way: str
) -> None:
    def connect_and_wait() -> str:
        with connected(listener) as client:
            return client.recv(1).decode()

    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(as_user, user, connect_and_wait)
        peer, _ = listener[0].accept()
        with peer:
            found = WAYS[way](peer)
            peer.sendall(b"x")
        assert output.result() == "x"
    assert found == user
    assert is_own_user(found) == (user == 0)


@pytest.mark.parametrize("way", WAYS)
def test_closed_socket_has_no_owner_instead_of_root(
    listener: tuple[socket.socket, str], way: str
) -> None:
    def connect_and_close() -> str:
        connected(listener).close()
        return "closed"

    assert as_user(STRANGER, connect_and_close) == "closed"
    peer, _ = listener[0].accept()
    with peer:
        assert WAYS[way](peer) == NO_OWNER
    assert not is_own_user(NO_OWNER)


def test_closed_socket_at_another_address_of_this_host_is_not_on_another_host() -> None:
    """Otherwise another user of this host could send data to a store that serves every other host."""
    own = own_address()
    with socket.create_server(("0.0.0.0", 0)) as listening:
        listening.settimeout(20)
        port = listening.getsockname()[1]
        socket.create_connection((own, port), 20, ("127.0.0.2", 0)).close()
        peer, _ = listening.accept()
        with peer:
            assert user_of(peer) == NO_OWNER
    assert is_own_address(own)
    assert is_own_address("127.0.0.2")
    assert not is_own_address("203.0.113.1")


def test_connection_of_another_family_has_no_user() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        assert user_of(ours) is None


@pytest.mark.parametrize("way", ["netlink", "tables"])
@pytest.mark.parametrize("user", [0, STRANGER])
@pytest.mark.parametrize(("here", "there"), [pair[1:] for pair in FAMILIES.values()])
def test_kernel_reports_the_user_of_a_listener(
    here: str, there: str, user: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_netlink(*_: object) -> int:
        raise OSError

    if way == "tables":
        monkeypatch.setattr(peer_user, "_query_kernel", no_netlink)
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with listening_as(user, here) as port, socket.socket(family) as client:
        client.connect((there, port))  # It is never accepted, so its other end has no owner.
        assert listener_of(client) == user
        other = client.getsockname()[1]  # A port without a listener.
        assert listener_at(family, (there, other)) == NO_OWNER


def test_owner_that_the_kernel_does_not_report_is_not_this_user(
    listener: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_owners(monkeypatch)
    with connected(listener) as client:
        peer, _ = listener[0].accept()
        with peer:
            assert user_of(peer) == listener_of(client) == UNKNOWN
    assert not is_own_user(UNKNOWN)
    assert not is_local_user(UNKNOWN)
