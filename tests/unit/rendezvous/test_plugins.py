from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest
from rendezvous_fakes_for_registry import FakeEntryPoint

from holdfast.rendezvous import registry

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, entry_points: str, module: str, code: str) -> None:
    """Make a package as installers leave it."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / f"{module}.py").write_text(code)


def test_an_installed_plugin_is_found_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "[torchrun.handlers]\nsome = some_plugin:get\n",
        "some_plugin",
        "def get():\n    return create\ndef create(params):\n    return params.run_id\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = registry.installed()["some"]
    assert "some_plugin" not in sys.modules
    try:
        creator = registry.load(found)
        assert creator is sys.modules["some_plugin"].create
    finally:
        sys.modules.pop("some_plugin", None)


def test_nothing_is_found_where_nothing_is_installed() -> None:
    assert "some" not in registry.installed()


def test_what_holdfast_brings_for_torchrun_is_not_for_itself() -> None:
    assert "holdfast" in entry_points(group=registry.GROUP).names
    assert "holdfast" not in registry.installed()


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (lambda: None, "it returned None"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda needed: needed, "TypeError: "),
    ],
)
def test_a_faulty_one_is_told_of_in_one_line(
    thing: object, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert registry.load(FakeEntryPoint("some", thing)) is None  # type: ignore[arg-type]
    (line,) = caplog.messages
    assert "plug-in 'some' (package:thing) cannot be used: " in line
    assert told in line
