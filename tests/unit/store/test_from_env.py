"""Where a worker finds the store of its job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from scripted_tcp_store import Peer, ScriptedStore, blob, i64

from holdfast.errors import UsageError
from holdfast.store.errors import StoreTimeoutError
from holdfast.store.from_env import from_environment
from holdfast.store.tcp.client import TCPStore

LONG = timedelta(seconds=30)
NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def give(monkeypatch: pytest.MonkeyPatch, **variables: str | int) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_the_agent_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(peer: Peer) -> None:
        peer.exchange(b"\x07", i64(4))
        peer.expect_end()

    with ScriptedStore(script) as server:
        give(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=server.port)
        give(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="True")
        with from_environment(LONG) as store:
            assert store.timeout == LONG
            assert store.num_keys() == 4


def test_rank_0_serves_it_where_no_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is not of rank 0 is counted by the server, which waits for all."""

    def script(peer: Peer) -> None:
        peer.exchange(b"\x04" + blob(b"init/") + i64(1), i64(2))
        peer.expect_end()

    with ScriptedStore(script) as server:
        give(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=server.port, RANK=1, WORLD_SIZE=2)
        from_environment(LONG).close()


def test_rank_0_waits_for_all(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=0, WORLD_SIZE=2)
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(from_environment, LONG)
        with TCPStore("127.0.0.1", port, 2, timeout=LONG) as other, hosting.result() as store:
            other.set("key", "value")
            assert store.get("key") == b"value"
    with pytest.raises(StoreTimeoutError, match="1 of 2"):
        from_environment(timedelta(seconds=1))


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_a_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=7, RANK=0, WORLD_SIZE=1)
    monkeypatch.setenv(missing, "")
    with pytest.raises(UsageError, match=f"^{missing}: "):
        from_environment()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("MASTER_PORT", "http", "0 to 65535"),
        ("MASTER_PORT", "65536", "0 to 65535"),
        ("RANK", "2", "0 to 1"),
        ("RANK", "-1", "0 to 1"),
        ("WORLD_SIZE", "0", "from 1"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    name: str, value: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=7, RANK=0, WORLD_SIZE=2)
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"^{name}: '{value}' .*; accepted: {accepted}$"):
        from_environment()
