"""The registry of handlers with its plug-ins, the interface, and the errors of a rendezvous."""

from __future__ import annotations

import sys
from copy import copy
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import plugins
from holdfast.errors import PluginError, UsageError
from holdfast.rendezvous import handler_registry, rendezvous_errors
from holdfast.rendezvous.coordinator_handler import CoordinatorAccess
from holdfast.rendezvous.etcd_handler import EtcdAccess
from holdfast.rendezvous.handler_registry import (
    RendezvousHandlerRegistry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)
from holdfast.rendezvous.membership_handler import MembershipHandler
from holdfast.rendezvous.rdzv_conf import RendezvousParameters

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def params(backend: str = "mine", **more: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "", "job", 1, 1, **more)


def create(asked: Any, name: str = "") -> Any:
    methods = dict.fromkeys(handler_registry.METHODS)
    handler: Any = type("Named", (), {**methods, "get_backend": lambda _: name or asked.backend})
    return handler()


def create_another(asked: Any) -> Any:
    return create(asked, "another")


class FakeEntryPoint:
    """Stands in for an entry point of `importlib.metadata`; it loads `thing`."""

    value = "package:thing"

    def __init__(self, name: str, thing: Callable[..., object]) -> None:
        self.name = name
        self.thing = thing
        self.loads = 0

    def load(self) -> Callable[..., object]:
        self.loads += 1
        return self.thing


def test_name_can_be_registered_once() -> None:
    ours = RendezvousHandlerRegistry()
    for _ in range(2):
        ours.register("mine", create)
    assert ours.create_handler(params()).get_backend() == "mine"
    for name, creator in (("mine", create_another), ("", create)):
        with pytest.raises(ValueError, match=name or "empty"):
            ours.register(name, creator)
    with pytest.raises(UsageError, match=r"accepted: mine$"):
        ours.create_handler(params("other"))
    ours.register("wrong", create_another)
    with pytest.raises(RuntimeError, match="another"):
        ours.create_handler(params("wrong"))


@pytest.mark.parametrize("name", ["c10d", "holdfast", "static", "file", "etcd", "etcd-v2"])
def test_built_in_backend_names_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        rendezvous_handler_registry.register(name, create)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("etcd", EtcdAccess), ("etcd-v2", EtcdAccess), ("holdfast", CoordinatorAccess)],
)
def test_every_coordinator_backend_creates_its_handler(name: str, kind: type) -> None:
    handler = get_rendezvous_handler(params(name, join_timeout=7))
    assert isinstance(handler, MembershipHandler)
    assert type(handler.access) is kind
    assert (handler.get_backend(), handler.join_timeout_s) == (name, 7.0)


@pytest.mark.parametrize(("name", "more"), [("file", {}), ("c10d", {"store_type": " File"})])
def test_store_type_file_is_the_file_backend(
    tmp_path: Any, name: str, more: dict[str, str]
) -> None:
    asked = RendezvousParameters(name, str(tmp_path), "job", 1, 1, "127.0.0.1", **more)
    handler = get_rendezvous_handler(asked)
    try:
        assert handler.get_backend() == name
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
    finally:
        assert handler.shutdown()


# Plug-ins.


@pytest.fixture(autouse=True)
def _no_plugins_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_in_use", {})


def with_plugins(
    monkeypatch: pytest.MonkeyPatch, *found: FakeEntryPoint
) -> RendezvousHandlerRegistry:
    monkeypatch.setattr(handler_registry, "installed", lambda: {one.name: one for one in found})
    return RendezvousHandlerRegistry(plugins=True)


def test_only_the_requested_plugin_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = FakeEntryPoint("mine", lambda: create)
    shadowed = FakeEntryPoint("there", lambda: create_another)
    ours = with_plugins(monkeypatch, mine, shadowed)
    ours.register("there", create)
    assert ours.create_handler(params("there")).get_backend() == "there"
    assert (mine.loads, caplog.messages) == (0, [])
    for _ in range(2):
        assert ours.create_handler(params()).get_backend() == "mine"
    assert (mine.loads, shadowed.loads) == (1, 0)
    assert "'there'" in caplog.text
    caplog.clear()
    with pytest.raises(UsageError):
        ours.create_handler(params("unknown"))
    assert "'mine'" not in caplog.text  # This name is the plug-in itself.


@pytest.mark.parametrize("thing", [lambda: None, lambda: 1 / 0, lambda needed: needed, sys.exit])
def test_faulty_plugin_causes_a_warning_and_an_unknown_name(
    thing: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = with_plugins(monkeypatch, FakeEntryPoint("mine", thing))
    with pytest.raises(UsageError):
        ours.create_handler(params())
    (line,) = caplog.messages
    assert "'mine'" in line
    assert "\n" not in line


@pytest.mark.parametrize("creator", [lambda _: None, lambda asked: asked, create_another])
def test_handler_that_is_not_valid_is_the_fault_of_the_plugin(
    creator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = with_plugins(monkeypatch, FakeEntryPoint("mine", lambda: creator))
    with pytest.raises(PluginError, match=r"^the rendezvous plug-in 'mine' \(package:thing\)"):
        ours.create_handler(params())


@pytest.mark.torch
def test_plugin_gets_torchs_parameters_and_may_raise_torchs_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The creator may be the first to import torch."""

    def refuse(given: Any) -> Any:
        from torch.distributed.elastic import rendezvous

        assert isinstance(given, rendezvous.RendezvousParameters)
        assert isinstance(given, RendezvousParameters)
        assert copy(given).get("key") == "value"
        problem = rendezvous.RendezvousConnectionError("cannot start")
        raise problem from KeyError("licence")

    ours = with_plugins(monkeypatch, FakeEntryPoint("mine", lambda: refuse))
    with pytest.raises(rendezvous_errors.RendezvousConnectionError) as raised:
        ours.create_handler(params(key="value"))
    assert str(raised.value) == (
        "the rendezvous plug-in 'mine' (package:thing): cannot start: KeyError: 'licence'"
    )
    assert raised.value.exit_code == 78
    assert "torch" in {kind.__module__.partition(".")[0] for kind in type(raised.value).__mro__}


def test_an_installed_plugin_is_found_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "some_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some_plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nsome = some_plugin:get\n")
    (tmp_path / "some_plugin.py").write_text("def get():\n    return print\n")
    assert "some" not in handler_registry.installed()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = handler_registry.installed()["some"]
    assert "some_plugin" not in sys.modules
    try:
        assert handler_registry.load(found) is print  # type: ignore[comparison-overlap]
    finally:
        sys.modules.pop("some_plugin", None)


def test_own_torchrun_plugin_is_not_loaded() -> None:
    assert "holdfast" in entry_points(group=handler_registry.GROUP).names
    assert "holdfast" not in handler_registry.installed()


# The interface.


def test_errors_have_a_message_and_an_exit_code() -> None:
    kinds: list[Any] = [
        rendezvous_errors.RendezvousError,
        *rendezvous_errors.RendezvousError.__subclasses__(),
    ]
    assert all(str(kind()) for kind in kinds)
    codes = {kind().exit_code for kind in kinds} - {
        rendezvous_errors.RendezvousGracefulExitError().exit_code
    }
    assert codes == {78}
    assert rendezvous_errors.RendezvousGracefulExitError().exit_code == 0
