"""Serving a store from this process."""

from __future__ import annotations

import gc
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from holdfast.store.errors import DistNetworkError
from holdfast.store.tcp.client import TCPStore

LONG = timedelta(seconds=30)


def served(port: int = 0, host: str = "localhost", *, shared: bool = False) -> TCPStore:
    return TCPStore(host, port, is_master=True, timeout=LONG, multi_tenant=shared)


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 30).close()
    except ConnectionRefusedError:
        return False
    return True


def serving_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast-store")]


def test_a_server_at_any_free_port() -> None:
    with served() as store, TCPStore("localhost", store.port, timeout=LONG) as other:
        assert store.port > 0
        assert repr(store) == f"<TCPStore serving localhost:{store.port}>"
        other.set("key", "value")
        assert store.get("key") == b"value"


def test_a_server_ends_with_its_store() -> None:
    store = served()
    port = store.port
    assert accepts("127.0.0.1", port)
    store.close()
    assert not accepts("127.0.0.1", port)


def test_a_server_ends_when_its_store_is_forgotten() -> None:
    port = served().port
    gc.collect()
    assert not accepts("127.0.0.1", port)
    assert not serving_threads()


def test_a_server_lives_as_long_as_the_last_clone() -> None:
    store = served()
    other = store.clone()
    store.close()
    other.set("key", "value")
    assert other.get("key") == b"value"
    other.close()
    assert not serving_threads()


def test_stores_of_one_process_may_share_a_server() -> None:
    with served(shared=True) as one, served(one.port, shared=True) as other:
        one.set("key", "value")
        one.close()
        assert other.get("key") == b"value"
    assert not serving_threads()
    with served(other.port, shared=True) as again:  # A new one: the last ended with its stores.
        assert not again.check(["key"])


def test_only_those_that_said_so_share() -> None:
    with (
        served() as store,
        pytest.raises(DistNetworkError, match=f"port {store.port} is in use; free it, choose anot"),
    ):
        served(store.port, shared=True)


def test_a_port_that_is_taken_by_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("localhost", "127.0.0.1", "0.0.0.0"):
            with pytest.raises(
                DistNetworkError, match=f"no store can be served at {host}:{port}: .* is in use"
            ):
                served(port, host)


def test_a_port_that_is_the_agents_makes_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch: its `tcp://` groups ask for a server also where the agent has one."""
    with served() as agents:
        agents.set("key", "value")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(agents.port))
        with served(agents.port) as store:
            assert store.get("key") == b"value"
            assert "client of" in repr(store)
        # Who does not serve does not wait for the others.
        TCPStore("localhost", agents.port, 99, is_master=True, timeout=LONG).close()
        monkeypatch.setenv("MASTER_PORT", "1")
        with pytest.raises(DistNetworkError, match="is in use"):
            served(agents.port)


def test_loopback_is_not_for_others() -> None:
    with served() as store:
        assert not accepts("127.0.0.2", store.port)
    with served(host="0.0.0.0") as store:
        assert accepts("127.0.0.2", store.port)
        assert accepts("127.0.0.1", store.port)


def test_a_name_that_is_not_known_here_can_be_served() -> None:
    """A service's name may point to its host only when it serves."""
    with served(host="store.invalid") as store:
        assert store.host == "store.invalid"
        assert store.add("count", 1) == 1


def test_a_bound_socket_is_taken_over() -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    with TCPStore(
        "localhost", port, is_master=True, timeout=LONG, master_listen_fd=bound.detach()
    ) as store:
        assert store.port == port
        assert store.add("count", 1) == 1
    assert not accepts("127.0.0.1", port)


def test_a_socket_of_another_port_is_left_alone() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match=r"is bound to port .*, not to 7"):
            TCPStore("localhost", 7, is_master=True, master_listen_fd=bound.fileno())
        assert bound.getsockname()
    with pytest.raises(DistNetworkError, match="no store can be served at localhost:0: Bad file"):
        TCPStore("localhost", 0, is_master=True, master_listen_fd=2**20)


def test_the_master_waits_for_its_clients() -> None:
    with socket.socket() as bound, ThreadPoolExecutor(1) as pool:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        hosting = pool.submit(
            lambda fd: TCPStore(
                "localhost", port, 3, is_master=True, timeout=LONG, master_listen_fd=fd
            ),
            bound.detach(),
        )
        with (
            TCPStore("localhost", port, 3, timeout=LONG),
            TCPStore("localhost", port, 3, timeout=LONG),
            hosting.result() as store,
        ):
            assert store.add("init/", 0) == 3


def test_a_forked_child_is_a_client_of_its_parents_server() -> None:
    with served(shared=True) as store:
        store.set("key", "value")
        pid = os.fork()
        if pid == 0:
            try:
                assert store.get("key") == b"value"
                assert "client of" in repr(store)
                with served(shared=True) as own:  # Nothing of the parent's is in its way.
                    assert not own.check(["key"])
                store.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert store.get("key") == b"value"
