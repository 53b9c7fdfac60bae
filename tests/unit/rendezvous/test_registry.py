from __future__ import annotations

from typing import Any

import pytest
from rendezvous_fakes_for_registry import AnyHandler, FakeEntryPoint

from holdfast import console
from holdfast.errors import UsageError
from holdfast.rendezvous import registry as plugins
from holdfast.rendezvous.config import RendezvousParameters
from holdfast.rendezvous.coordinator import CoordinatorHandler
from holdfast.rendezvous.etcd import EtcdHandler
from holdfast.rendezvous.registry import (
    RegistryWithPlugins,
    RendezvousHandlerRegistry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)


def params(backend: str = "mine", **more: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "", "job", 1, 1, **more)


def create(params: RendezvousParameters) -> AnyHandler:
    return AnyHandler(params.backend)


def create_another(params: RendezvousParameters) -> AnyHandler:
    return AnyHandler("another")


def test_a_registered_creator_gets_the_parameters() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create)
    assert registry.create_handler(params()).get_backend() == "mine"


def test_registering_the_same_again_changes_nothing_and_another_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create)
    registry.register("mine", create)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        registry.register("mine", create_another)
    assert registry.create_handler(params()).get_backend() == "mine"


def test_a_name_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="empty"):
        RendezvousHandlerRegistry().register("", create)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("b", create)
    registry.register("a", create)
    with pytest.raises(UsageError, match=r"^--rdzv-backend: 'mine' is unknown; accepted: a, b$"):
        registry.create_handler(params())


def test_a_handler_of_another_name_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create_another)
    with pytest.raises(RuntimeError, match="'mine' says it is 'another'"):
        registry.create_handler(params())


@pytest.mark.parametrize("name", ["c10d", "holdfast", "static", "file", "etcd", "etcd-v2"])
def test_names_that_are_there_from_the_start_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match="registered already"):
        rendezvous_handler_registry.register(name, create)


@pytest.mark.parametrize("name", ["etcd", "etcd-v2"])
def test_both_names_of_etcd_are_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(console.NOTICE, "holdfast")
    handler = get_rendezvous_handler(params(name, etcd_prefix="/jobs", timeout=7, cert=None))
    assert type(handler) is EtcdHandler
    assert (handler.get_backend(), handler.join_timeout_s) == (name, 7.0)
    assert handler.endpoint == "localhost:2379"
    said = ["etcd-v2 is the same as etcd here" in message for message in caplog.messages]
    assert said == ([True] if name == "etcd-v2" else [])


def test_torchruns_name_for_our_rendezvous_is_c10d_here(caplog: pytest.LogCaptureFixture) -> None:
    """It is not looked up as the plug-in that torchrun finds by the same name."""
    handler = get_rendezvous_handler(params("holdfast", reconnect_grace="0.5", join_timeout="7"))
    assert type(handler) is CoordinatorHandler
    assert (handler.get_backend(), handler.join_timeout_s) == ("holdfast", 7.0)
    assert not caplog.messages


@pytest.mark.parametrize(("name", "more"), [("file", {}), ("c10d", {"store_type": " File"})])
def test_a_folder_to_meet_in(tmp_path: Any, name: str, more: dict[str, str]) -> None:
    asked = RendezvousParameters(name, str(tmp_path), "job", 1, 1, "127.0.0.1", **more)
    handler = get_rendezvous_handler(asked)
    try:
        assert handler.get_backend() == name
        assert handler.get_run_id() == "job"
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    finally:
        assert handler.shutdown()


def with_plugins(monkeypatch: pytest.MonkeyPatch, *found: FakeEntryPoint) -> RegistryWithPlugins:
    monkeypatch.setattr(plugins, "installed", lambda: {one.name: one for one in found})
    return RegistryWithPlugins()


def test_a_plugin_is_loaded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = FakeEntryPoint("mine", lambda: create), FakeEntryPoint("other", lambda: create)
    registry = with_plugins(monkeypatch, mine, other)
    registry.register("there", create)
    registry.create_handler(params("there"))
    assert (mine.loads, other.loads) == (0, 0)
    for _ in range(2):
        assert registry.create_handler(params()).get_backend() == "mine"
    assert (mine.loads, other.loads) == (1, 0)


def test_a_plugin_does_not_take_a_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shadowed = FakeEntryPoint("there", lambda: create_another)
    registry = with_plugins(monkeypatch, shadowed, FakeEntryPoint("mine", lambda: create))
    registry.register("there", create)
    registry.create_handler(params())
    assert "plug-in 'there' (package:thing) is not used" in caplog.text
    assert registry.create_handler(params("there")).get_backend() == "there"
    assert shadowed.loads == 0
    caplog.clear()
    with pytest.raises(UsageError):
        registry.create_handler(params("unknown"))
    assert "'mine'" not in caplog.text  # That one is the plug-in itself.


def test_a_faulty_plugin_is_warned_of_and_its_name_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> object:
        raise ImportError("no such library")

    registry = with_plugins(monkeypatch, FakeEntryPoint("mine", fail))
    registry.register("there", create)
    with pytest.raises(UsageError, match="'mine' is unknown; accepted: there"):
        registry.create_handler(params())
    assert "ImportError: no such library" in caplog.text
