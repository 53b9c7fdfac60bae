from __future__ import annotations

import logging

import pytest

from holdfast.scripting.loggers import get_log_level, get_logger


def test_the_level_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    assert get_log_level() == "WARNING"
    assert get_logger("some").level == logging.WARNING
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert get_logger("some").level == logging.DEBUG
    assert get_logger("some") is logging.getLogger("some")


def test_a_logger_without_a_name_is_that_of_the_calling_module() -> None:
    assert get_logger().name == __name__


def test_a_level_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "LOUD")
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("some")
