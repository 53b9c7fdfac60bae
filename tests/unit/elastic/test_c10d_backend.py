"""The behaviour of this backend only; tests/contract tests all backends."""

from __future__ import annotations

import tempfile
from base64 import b64encode
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.elastic._impl.c10d_backend import NO_STATE, C10dRendezvousBackend, create_backend
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.memory_store import MemoryStore
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    from pathlib import Path

KEY = "torch.rendezvous.job"


def test_key_and_no_state_value_are_torchs() -> None:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, "job")
    assert backend.name == "c10d"
    assert store.get(KEY) == NO_STATE
    backend.set_state(b"\x00state")
    assert store.get(KEY).partition(b".")[2] == b64encode(b"\x00state")


NUMBER = "0123456789abcdef."


@pytest.mark.parametrize("value", ["YQ==", "abc.YQ==", f"{NUMBER}x", f"{NUMBER}YQ==\n", "é", "."])
def test_foreign_value_is_reported(value: str) -> None:
    store = MemoryStore()
    store.set(KEY, value)
    backend = C10dRendezvousBackend(store, "job")
    with pytest.raises(RendezvousStateError, match=f"'{KEY}'"):
        backend.get_state()
    with pytest.raises(RendezvousStateError):
        backend.set_state(b"mine", b"b2xk")


class CountingStore(MemoryStore):
    calls = 0

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self.calls += 1
        return super().compare_set(key, expected, desired)


def test_vanished_key_is_detected_and_recreated() -> None:
    store = CountingStore()
    backend = C10dRendezvousBackend(store, "job")
    first = backend.set_state(b"one")
    assert first is not None
    store.delete_key(KEY)
    store.calls = 0
    assert backend.set_state(b"two", first[1]) is None
    assert store.calls == 2
    again = backend.set_state(b"two")
    assert again is not None
    assert again[0::2] == (b"two", True)


@pytest.mark.parametrize("token", [7, "text", (1, 2)])
def test_token_of_another_kind_is_rejected(token: object) -> None:
    backend = C10dRendezvousBackend(MemoryStore(), "job")
    assert backend.set_state(b"one", token) is None
    backend.set_state(b"one")
    assert backend.set_state(b"two", token) == (*(backend.get_state() or ()), False)


@pytest.mark.parametrize("kind", [RuntimeError, TimeoutError, ValueError, ConnectionResetError])
def test_failing_store_is_a_one_line_error(kind: type[Exception]) -> None:
    class Broken(MemoryStore):
        broken = False

        def compare_set(self, *args: Any) -> bytes:
            if self.broken:
                raise kind("no answer\nframe #0: some C++")
            return super().compare_set(*args)

    store = Broken()
    backend = C10dRendezvousBackend(store, "job")
    store.broken = True
    for call in (backend.get_state, lambda: backend.set_state(b"x")):
        with pytest.raises(RendezvousConnectionError, match=f"'{KEY}'"):
            call()


def tcp_params(port: int, **config: str) -> RendezvousParameters:
    return RendezvousParameters("c10d", f"localhost:{port}", "job", 1, 2, **config)


def test_first_node_serves_the_tcp_store(port: int) -> None:
    """The endpoint belongs to this machine, so each node could serve the store."""
    backend, server = create_backend(tcp_params(port))
    with server, create_backend(tcp_params(port, is_host="0", store_type=" TCP "))[1] as client:
        assert "serving" in repr(server)
        assert "client of" in repr(client)
        assert server.timeout == client.timeout == timedelta(seconds=60)
        backend.set_state(b"one")
        found = C10dRendezvousBackend(client, "job").get_state()
        assert found is not None
        assert found[0] == b"one"


def test_node_at_a_busy_port_becomes_a_client() -> None:
    with TCPStore("localhost", 0, is_master=True) as theirs:
        with create_backend(tcp_params(theirs.port))[1] as store:
            assert "client of" in repr(store)
            assert theirs.get(KEY) == NO_STATE
        with pytest.raises(RendezvousConnectionError, match=f"port {theirs.port} is in use"):
            create_backend(tcp_params(theirs.port, is_host="yes"))
        with pytest.raises(RendezvousConnectionError, match=r"nowhere\.invalid"):
            create_backend(
                RendezvousParameters("c10d", "nowhere.invalid:1", "job", 1, 2, is_host="yes")
            )


def test_store_type_file_keeps_the_state_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for endpoint in (tmp_path / "file", tmp_path / "folder", ""):
        params = RendezvousParameters("c10d", str(endpoint), "job", 1, 2, store_type="fIlE")
        backend, store = create_backend(params)
        backend.set_state(b"one")
        assert store.get(KEY) != NO_STATE
        assert store.timeout == timedelta(seconds=300)
        assert store.folder.startswith(str(endpoint or tmp_path))
        assert store.path == store.clone().path
        assert store.path == str(endpoint) or store.path.startswith(str(tmp_path / "holdfast-"))
        assert params.endpoint == str(endpoint)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(RendezvousConnectionError):
        create_backend(RendezvousParameters("c10d", "", "job", 1, 2, store_type="file"))
