from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.net import addresses, listening
from holdfast.net.addresses import Address
from holdfast.net.listening import bind_one_of, is_local, owner_of, try_bind
from other_users import STRANGER, listening_as

if TYPE_CHECKING:
    from pathlib import Path

FOREIGN = "192.0.2.251"  # Reserved for documentation, so no host has it.


def bound_to(host: str, is_host: bool | None = None) -> tuple[str, int]:
    listener = try_bind(host, 0, is_host)
    assert listener is not None
    with listener:
        where: tuple[str, int] = listener.getsockname()[:2]
        place = "127.0.0.1" if where[0] in ("::", "0.0.0.0") else where[0]
        socket.create_connection((place, where[1])).close()
        return where


@pytest.mark.parametrize(
    ("host", "there"), [("localhost", "127.0.0.1"), ("127.0.0.3", "127.0.0.3"), ("::1", "::1")]
)
def test_loopback_endpoint_listens_on_loopback_only(host: str, there: str) -> None:
    assert bound_to(host)[0] == there
    assert bound_to(host, is_host=True)[0] == there


def test_host_name_listens_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it resolves to a loopback address, as in Debian's `/etc/hosts`."""
    monkeypatch.setattr(
        addresses, "resolve", lambda _host, port: [Address(socket.AF_INET, ("127.0.1.1", port))]
    )
    assert bound_to("my-own-name")[0] in ("::", "0.0.0.0")


def test_endpoint_is_bound_if_it_belongs_to_this_host_or_is_host_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert try_bind(FOREIGN, 0, None) is None
    assert not is_local(Address(socket.AF_INET, (FOREIGN, 0)))
    assert not is_local(Address(socket.AF_INET6, ("2001:db8::77", 0, 0, 0)))
    assert is_local(Address(socket.AF_INET, ("0.0.0.0", 0)))
    assert is_local(Address(socket.AF_INET6, ("::1", 0, 0, 0)))
    both = [Address(socket.AF_INET, ("127.0.0.1", 0)), Address(socket.AF_INET, (FOREIGN, 0))]
    assert bind_one_of("service", 0, both, None) is None
    assert try_bind("localhost", 0, is_host=False) is None
    assert bind_one_of("localhost", 0, both[:1], is_host=False) is None
    bound_to(FOREIGN, is_host=True)  # The user may set this for a foreign address ...

    def unknown(host: str, _port: int) -> list[Address]:
        if host == "never":
            pytest.fail("a name server was queried")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses, "resolve", unknown)
    assert try_bind("service", 0, None) is None
    bound_to("never", is_host=True)  # ... and before a name is known, without waiting for it.


def test_first_process_binds_and_the_owner_of_a_busy_port_is_named() -> None:
    first = try_bind("localhost", 0, None)
    assert first is not None
    with first:
        port = first.getsockname()[1]
        assert try_bind("localhost", port, None) is None
        with pytest.raises(EnvironmentProblem) as caught:
            try_bind("localhost", port, is_host=True)
    assert f"localhost:{port}" in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        assert owner_of(six.getsockname()[1]).startswith(f"pid {os.getpid()}, ")
    with socket.socket() as bound:  # Bound, but not listening.
        bound.bind(("127.0.0.1", 0))
        assert owner_of(bound.getsockname()[1]) == ""


@pytest.mark.parametrize("host", ["localhost", os.uname().nodename])
def test_port_held_by_another_user_is_not_joined(host: str) -> None:
    with listening_as(STRANGER, "127.0.0.1" if host == "localhost" else "::") as port:
        with pytest.raises(EnvironmentProblem) as caught:
            try_bind(host, port, None)
        assert str(port) in str(caught.value)
        assert str(STRANGER) in str(caught.value)
        assert try_bind(host, port, is_host=False) is None  # The user wants that coordinator.
    with listening_as(0, "127.0.0.1") as port:
        assert try_bind("localhost", port, None) is None


# In a separate process, because a lowered limit cannot always be raised again.
LIMITS = """
import resource
from holdfast.net.listening import descriptor_limit, raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
assert descriptor_limit() == 100
assert raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
assert not raise_descriptor_limit()
"""
MANY = """
import resource, socket
from holdfast.rendezvous.worker_store import WorkerStore
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
store = WorkerStore()
port = store.open(0)
clients = [socket.socket() for _ in range(100)]
resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
for number, client in enumerate(clients):
    client.connect(("127.0.0.1", port))
    client.sendall(b"\\0\\xce\\xf7\\x85\\x3c\\x0d" + number.to_bytes(4, "little"))
    assert client.recv(4) == number.to_bytes(4, "little")
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 160
store.close()
"""


# The workers of a polling agent, such as torchrun's, would inherit its limit.
OTHERS = """
import resource
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.coordinator_handler import create_coordinator_handler
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
params = RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, is_host=True)
handler = create_coordinator_handler(params)
assert handler.next_rendezvous().world_size == 1
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (160, hard)
handler.shutdown()
"""


@pytest.mark.parametrize(
    "program",
    [LIMITS, MANY, OTHERS],
    ids=["limits", "a store raises them", "not for others' workers"],
)
def test_descriptor_limit_is_raised_to_the_hard_limit(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("cookies", "is_deferred"), [("1\n", True), ("0\n", False), (None, False)])
def test_accept_is_deferred_only_with_syn_cookies(
    cookies: str | None, is_deferred: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cookies is not None:
        (tmp_path / "setting").write_text(cookies)
    monkeypatch.setattr(listening, "COOKIES", tmp_path / "setting")
    with listening.listen([Address(socket.AF_INET, ("127.0.0.1", 0))]) as listener:
        listening.defer_accept(listener, 10.0)
        deferred = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
        assert bool(deferred) is is_deferred
