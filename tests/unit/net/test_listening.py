from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses
from holdfast.net.addresses import Address
from holdfast.net.listening import bind_one_of, is_local, try_bind

FOREIGN = "192.0.2.251"  # Set aside for documentation: nobody's.


@pytest.mark.parametrize(
    ("host", "there"), [("localhost", "127.0.0.1"), ("127.0.0.3", "127.0.0.3"), ("::1", "::1")]
)
def test_loopback_is_bound_on_loopback_alone(host: str, there: str) -> None:
    listener = try_bind(host, 0, None)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == there
        assert listener.getsockname()[1] > 0


def test_a_name_of_this_host_is_bound_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it resolves to an address of loopback, as Debian's `/etc/hosts` has it."""
    monkeypatch.setattr(
        addresses, "resolve", lambda _host, port: [Address(socket.AF_INET, ("127.0.1.1", port))]
    )
    listener = try_bind("my-own-name", 0, None)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
        for one in ("127.0.0.1", "127.0.1.1"):
            socket.create_connection((one, listener.getsockname()[1])).close()


def test_an_address_of_another_machine_is_not_ours() -> None:
    assert try_bind(FOREIGN, 0, None) is None
    assert not is_local(Address(socket.AF_INET, (FOREIGN, 0)))


def test_a_name_with_an_address_elsewhere_is_not_ours() -> None:
    both = [Address(socket.AF_INET, ("127.0.0.1", 0)), Address(socket.AF_INET, (FOREIGN, 0))]
    assert bind_one_of("service", 0, both, None) is None


def test_the_person_may_say_that_a_foreign_name_is_served_here() -> None:
    listener = try_bind(FOREIGN, 0, is_host=True)
    assert listener is not None
    with listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


def test_the_person_may_say_so_before_the_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_host: str, _port: int) -> list[Address]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses, "resolve", unknown)
    assert try_bind("service", 0, None) is None
    listener = try_bind("service", 0, is_host=True)
    assert listener is not None
    listener.close()


def test_a_coordinator_does_not_wait_for_a_name_server_to_listen_for_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(_host: str, _port: int) -> list[Address]:
        pytest.fail("it asks")

    monkeypatch.setattr(addresses, "resolve", never)
    listener = try_bind("service", 0, is_host=True)
    assert listener is not None
    listener.close()


def test_the_person_may_say_that_it_is_not_served_here() -> None:
    assert try_bind("localhost", 0, is_host=False) is None
    assert bind_one_of("localhost", 0, addresses.resolve("localhost", 0), is_host=False) is None


def test_only_the_first_of_a_machine_binds() -> None:
    first = try_bind("localhost", 0, None)
    assert first is not None
    with first:
        assert try_bind("localhost", first.getsockname()[1], None) is None


def test_a_busy_port_is_told_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem) as caught:
            try_bind("127.0.0.1", port, is_host=True)
    text = str(caught.value)
    assert text.startswith(f"cannot coordinate at 127.0.0.1:{port}: port {port} is in use by pid ")
    assert str(os.getpid()) in text
    assert "port 0" in text
    assert "\n" not in text


def test_a_port_can_be_bound_right_after_its_coordinator_was_killed() -> None:
    """Its connections linger in the kernel."""
    program = (
        "import socket, sys; from holdfast.net.listening import try_bind;"
        "s = try_bind('127.0.0.1', 0, True); print(s.getsockname()[1], flush=True);"
        "s.setblocking(True); c, _ = s.accept(); c.send(b'x'); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        port = int(killed.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.recv(1) == b"x"
            killed.kill()
            killed.wait()
            listener = try_bind("127.0.0.1", port, is_host=True)
            assert listener is not None
            listener.close()


def test_is_local_knows_this_machines_other_addresses() -> None:
    assert is_local(Address(socket.AF_INET, ("0.0.0.0", 0)))
    assert is_local(Address(socket.AF_INET6, ("::1", 0, 0, 0)))
    assert not is_local(Address(socket.AF_INET6, ("2001:db8::77", 0, 0, 0)))
