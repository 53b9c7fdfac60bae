"""A collector that is away is one warning, and only for what is sent for us."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from holdfast.observe.otlp import OneLineExporter, sendable

LIBRARY = "a_library_for_tests"


class Result(Enum):
    SUCCESS = 0
    FAILURE = 1


class Exporter:
    """Logs, and returns what it is told to, as OpenTelemetry's do."""

    def __init__(self, endpoint: str = "http://collector:4318/v1/logs") -> None:
        self._endpoint = endpoint
        self.answers: list[Result | Exception] = []
        self.options: dict[str, Any] = {}

    def export(self, batch: object, **options: Any) -> Result:
        self.options = options
        answer = self.answers.pop(0)
        logger = logging.getLogger(LIBRARY)
        if isinstance(answer, Exception):
            raise answer
        if answer is Result.FAILURE:
            try:
                raise ConnectionError from OSError(111, "Connection refused")
            except ConnectionError as problem:
                logger.warning("Transient error %s, retrying in %.2fs", problem, 1.0)
            logger.error("Failed for good")
        return answer

    def shutdown(self) -> None:
        logging.getLogger(LIBRARY).warning("already shutdown")


Exporter.__module__ = LIBRARY
sys.modules.setdefault(LIBRARY, ModuleType(LIBRARY))


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.name, one.getMessage()) for one in caplog.records]


def test_a_failure_is_reported_once_until_something_was_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = Exporter()
    one_line = OneLineExporter(exporter, "events")
    bad, good = Result.FAILURE, Result.SUCCESS
    exporter.answers = [bad, bad, bad, good, good, bad]
    assert [one_line.export([]) for _ in range(4)] == [False, False, False, True]
    [(logger, line)] = said(caplog)
    assert logger == "holdfast"
    assert "http://collector:4318/v1/logs" in line
    assert "ConnectionRefusedError" in line
    assert [one_line.export([]) for _ in range(2)] == [True, False]
    one_line.shutdown()
    assert said(caplog)[1:] == [("holdfast", line)]


def test_what_the_program_itself_sends_is_logged_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    OneLineExporter(exporter, "events")
    exporter.answers = [Result.FAILURE]
    exporter.export([])
    assert [name for name, _ in said(caplog)] == [LIBRARY, LIBRARY]


def test_an_exporter_that_raises_has_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = Exporter("http://me:secret@collector/")
    exporter.answers = [ValueError("two\nlines")]
    assert OneLineExporter(exporter, "metrics").export([], timeout_millis=5) is False
    assert exporter.options == {"timeout_millis": 5}
    [(_, line)] = said(caplog)
    assert "http://collector/" in line
    assert "secret" not in line
    assert "ValueError: two lines" in line


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (1, 1),
        (True, True),
        (0.5, 0.5),
        ("a", "a"),
        ("\udce9", "?"),
        (2**63, str(2**63)),
        ([1], "[1]"),
    ],
)
def test_every_value_can_be_sent(value: object, sent: object) -> None:
    assert sendable(value) == sent
