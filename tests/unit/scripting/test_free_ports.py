from __future__ import annotations

import socket

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.scripting.free_ports import get_free_port, get_socket_with_port


def test_a_port_is_held_while_its_socket_is_open() -> None:
    with get_socket_with_port() as held:
        host, port = held.getsockname()[:2]
        with socket.create_connection((host, port), timeout=30):
            pass
        with socket.socket(held.family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind((host, port))


def test_a_free_port_can_be_bound() -> None:
    port = get_free_port()
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mine.bind(("127.0.0.1", port))
        assert mine.getsockname()[1] == port


def test_no_name_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> object:
        raise socket.gaierror("no names here")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert get_free_port() > 0


def test_the_other_address_family_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv4(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET:
            raise OSError("no IPv4")
        return real(socket.AF_INET6, kind)

    monkeypatch.setattr(socket, "socket", without_ipv4)
    with get_socket_with_port() as held:
        assert held.getsockname()[0] == "::1"


def test_no_address_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise OSError("none left")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(EnvironmentProblem, match=r"no TCP port .* could be bound: none left"):
        get_socket_with_port()
