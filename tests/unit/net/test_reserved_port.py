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

# Since Linux 6.3, a socket can choose the range of its free port.
IP_LOCAL_PORT_RANGE = 51


def addresses() -> list[Any]:
    """Return the addresses that a server can listen on here: loopback, and all."""
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
def test_kernel_does_not_assign_a_reserved_port(
    reserved: ReservedPort, family: int, address: str, reuse: int
) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        port = reserved.number
        try:  # Only this port may be chosen, so that the test need not request thousands.
            other.setsockopt(
                socket.SOL_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port)
            )
        except OSError:
            pytest.skip("an older kernel")
        with pytest.raises(OSError, match="in use"):
            other.bind((address, 0))


def test_next_worker_can_bind_the_port_right_after_the_previous_one(reserved: ReservedPort) -> None:
    """As after a restart: connections of the previous worker may still be in TIME_WAIT."""
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", reserved.number))
            server.listen()
            client = socket.create_connection(("127.0.0.1", reserved.number))
            server.accept()[0].close()  # The side that closes first keeps the port in TIME_WAIT.
            assert client.recv(1) == b""
            client.close()


def test_port_is_reserved_without_ipv6_and_lack_of_ports_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_free_port_can_be_reserved_by_number(reserved: ReservedPort) -> None:
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
def test_address_of_returns_the_address_of_numeric_hosts_only(host: str, expected: str) -> None:
    assert listening.address_of(host) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("192.0.2.1", "::"), ("2001:db8::1", "::")],
)
def test_port_is_reserved_on_its_address_or_on_all_if_this_host_lacks_it(
    address: str, expected: str
) -> None:
    with ReservedPort(listening=True, address=address) as reserved:
        held = reserved.listener()
        assert held.getsockname()[0] == expected
        held.close()
