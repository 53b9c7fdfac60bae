from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import plugins
from holdfast.errors import PluginError, UsageError


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this module a plug-in; return its description."""
    monkeypatch.setattr(plugins, "_in_use", {})
    return plugins.note("events", SimpleNamespace(name="rows", value=f"{__name__}.handlers:Rows"))


class Rows:
    """A handler of the plug-in."""


def raised_by(call: Any) -> Exception:
    try:
        call()
    except Exception as problem:
        problem.__traceback__ = problem.__traceback__ and problem.__traceback__.tb_next
        return problem
    raise AssertionError


def fails() -> None:
    raise KeyError("row")


def wraps_a_failure() -> None:
    try:
        fails()
    except KeyError as problem:
        raise ValueError("no row") from problem


@pytest.mark.parametrize("call", [fails, wraps_a_failure])
def test_exception_that_passed_through_a_plug_in_is_its_own(call: Any, own: str) -> None:
    assert own == f"the events plug-in 'rows' ({__name__}.handlers:Rows)"
    assert plugins.culprit_of(raised_by(call)) == own


def test_exception_of_other_code_names_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_in_use", {})
    culprit = plugins.culprit_of(raised_by(fails))
    assert culprit.startswith(f"{__name__} (")
    assert f"{__file__}, line " in culprit


def test_missing_attribute_of_a_plug_ins_object_is_its_own(own: str) -> None:
    problem = AttributeError("no set", name="set", obj=SimpleNamespace())
    assert plugins.culprit_of(problem) == ""
    problem.obj = type("Store", (), {})()
    assert plugins.culprit_of(problem) == own


def test_exception_of_the_standard_library_or_of_holdfast_has_no_culprit() -> None:
    for call in (lambda: json.loads("{"), lambda: plugins.require(None, ("a",), "x", "y")):
        problem = raised_by(call)
        trace = problem.__traceback__
        problem.__traceback__ = trace and trace.tb_next  # Without the lambda.
        assert plugins.culprit_of(problem) == ""


def test_failing_call_is_an_error_that_names_the_plug_in(own: str) -> None:
    with (
        pytest.raises(PluginError, match="failed: KeyError: 'row'") as raised,
        plugins.calling(own),
    ):
        fails()
    assert str(raised.value).startswith(own)
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(UsageError), plugins.calling(own):
        raise UsageError("--flag: wrong")


def test_object_without_a_required_attribute_is_an_error(own: str) -> None:
    plugins.require("text", ("upper",), own, "a text")
    with pytest.raises(PluginError, match=r"returned 3, which is not a text: it has no upper$"):
        plugins.require(3, ("upper",), own, "a text")


def test_object_is_named_with_its_plug_in(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugins.named(Rows()) == f"Rows of {own}"
    monkeypatch.setattr(plugins, "_in_use", {})
    assert (plugins.named(Rows()), plugins.owner_of(Rows())) == ("Rows", f"{__name__}.Rows")
