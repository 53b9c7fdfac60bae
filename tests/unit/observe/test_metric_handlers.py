"""What a handler is given, and what those that are here make of it."""

from __future__ import annotations

import pytest

from holdfast.observe.metrics.handlers import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    NullMetricHandler,
)

ONE = MetricData(12.5, "mine", "loss", 3)


def test_a_metric_is_a_tuple_with_names() -> None:
    assert ONE == (12.5, "mine", "loss", 3)
    assert (ONE.timestamp, ONE.group_name, ONE.name, ONE.value) == ONE
    assert ONE._fields == ("timestamp", "group_name", "name", "value")


def test_the_console_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleMetricHandler().emit(ONE)
    assert capsys.readouterr().out == "[12.5][mine]: loss=3\n"


def test_nothing_comes_of_the_null_handler(capsys: pytest.CaptureFixture[str]) -> None:
    NullMetricHandler().emit(ONE)
    assert capsys.readouterr() == ("", "")


def test_a_handler_must_say_what_it_does() -> None:
    with pytest.raises(TypeError, match="emit"):
        MetricHandler()  # type: ignore[abstract]
