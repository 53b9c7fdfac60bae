"""Where a worker finds the store of its job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from scripted_tcp_store import Peer, ScriptedStore, blob, i64

from holdfast.errors import UsageError
from holdfast.store.from_env import from_environment
from holdfast.store.store_errors import StoreTimeoutError
from holdfast.store.tcp.store_client import TCPStore

LONG = timedelta(seconds=30)
NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: str | int) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_rank_0_serves_the_store_without_an_agent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with another rank registers at the server, which waits for all."""

    def script(peer: Peer) -> None:
        peer.exchange(b"\x04" + blob(b"init/") + i64(1), i64(2))
        peer.expect_end()

    with ScriptedStore(script) as server:
        set_environment(
            monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=server.port, RANK=1, WORLD_SIZE=2
        )
        from_environment(LONG).close()


def test_rank_0_waits_for_all_workers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=0, WORLD_SIZE=2)
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(from_environment, LONG)
        with TCPStore("127.0.0.1", port, 2, timeout=LONG) as other, hosting.result() as store:
            other.set("key", "value")
            assert store.get("key") == b"value"
    with pytest.raises(StoreTimeoutError, match="1 of 2"):
        from_environment(timedelta(seconds=1))


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=7, RANK=0, WORLD_SIZE=1)
    monkeypatch.setenv(missing, "")
    with pytest.raises(UsageError, match=f"^{missing}: "):
        from_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "65536"),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
    ],
)
def test_invalid_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=7, RANK=0, WORLD_SIZE=2)
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"^{name}: '{value}' "):
        from_environment()
