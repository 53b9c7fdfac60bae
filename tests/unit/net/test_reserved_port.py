from __future__ import annotations

import errno
import socket
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.net import listening
from holdfast.net.listening import ReservedPort

if TYPE_CHECKING:
    from collections.abc import Iterator

# Linux 6.3 and newer let a socket say from which range it wants its free port.
IP_LOCAL_PORT_RANGE = 51


def addresses() -> list[Any]:
    """Return the addresses a server can have on this host: its loopback, and all of them."""
    found = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")]
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            found += [(socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
    except OSError:
        pass  # A host without IPv6.
    return [pytest.param(*one, id=one[1]) for one in found]


ADDRESSES = addresses()


@pytest.fixture
def reserved() -> Iterator[ReservedPort]:
    with ReservedPort() as port:
        yield port


@pytest.mark.parametrize(("family", "address"), ADDRESSES)
@pytest.mark.parametrize("reuse", [0, 1])
def test_the_kernel_gives_the_port_to_nobody_else(
    reserved: ReservedPort, family: int, address: str, reuse: int
) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        port = reserved.number
        try:  # Only this one may be chosen, so that not thousands have to be asked for.
            other.setsockopt(
                socket.SOL_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port)
            )
        except OSError:
            pytest.skip("an older kernel")
        with pytest.raises(OSError, match="in use"):
            other.bind((address, 0))


def test_the_next_worker_can_serve_there_right_after_the_last(reserved: ReservedPort) -> None:
    """As after a restart: the connections of the last worker may not be forgotten yet."""
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", reserved.number))
            server.listen()
            client = socket.create_connection(("127.0.0.1", reserved.number))
            server.accept()[0].close()  # Who closes first keeps the port in TIME_WAIT.
            assert client.recv(1) == b""
            client.close()


def test_a_host_without_ipv6_or_without_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4Only(socket.socket):
        def __init__(self, family: int = -1, kind: int = -1, *more: Any, **given: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "no IPv6 here")
            super().__init__(family, kind, *more, **given)

    class Full(socket.socket):
        def bind(self, address: object, /) -> None:
            raise OSError(errno.EADDRINUSE, "all taken")

    def with_sockets(kind: type[socket.socket]) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(socket), "socket": kind})

    monkeypatch.setattr(listening, "socket", with_sockets(Ipv4Only))
    with (
        ReservedPort() as reserved,
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", reserved.number))
    monkeypatch.setattr(listening, "socket", with_sockets(Full))
    with pytest.raises(EnvironmentProblem, match="--master-port"):
        ReservedPort()


def test_a_port_by_its_number_if_it_is_free(reserved: ReservedPort) -> None:
    number = reserved.number
    reserved.release()
    with ReservedPort(number) as again:
        assert again.number == number
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(EnvironmentProblem, match=str(taken.getsockname()[1])),
    ):
        ReservedPort(taken.getsockname()[1], listening=True)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::1", "fd00::1"),
        ("node0", ""),
        ("fe80::1%eth0", ""),
        ("a\0b", ""),
        ("", ""),
    ],
)
def test_which_texts_mean_one_address(host: str, expected: str) -> None:
    assert listening.address_of(host) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("192.0.2.1", "::"), ("2001:db8::1", "::")],
)
def test_a_port_is_held_at_its_address_and_at_all_if_that_is_not_here(
    address: str, expected: str
) -> None:
    with ReservedPort(listening=True, address=address) as reserved:
        held = reserved.listener()
        assert held.getsockname()[0] == expected
        held.close()
