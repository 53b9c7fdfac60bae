"""Sends over OTLP, with a single warning while the collector is unreachable.

OpenTelemetry's exporters log each failed attempt, so a program without its own logging prints the same lines again
and again. `OneLineExporter` captures those lines, extracts the reason, and prints it once, with the address. After a
success it reports the next failure again. It captures only the log of threads that send for Holdfast: a program that
uses OpenTelemetry itself sees its own errors as usual.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any
from urllib.parse import urlsplit

from holdfast import console

EXPORT_S = 4.0
"""How long one attempt to reach the collector may last, retries included.

This is shorter than the wait at the end of a job, so that there is time to report the failure."""
CAPTURED_MAX = 4
"""How many of the library's lines are kept for each attempt; the first contains the reason."""
CAUSES_MAX = 10
"""How many causes of an exception are followed to find the first."""

# Other loggers that are active while an exporter sends.
ALSO_CAPTURED = ("opentelemetry.exporter.otlp.proto.common._internal", "urllib3.connectionpool")

SERVICE = "holdfast"
INT_MAX = 2**63 - 1

_sending = threading.local()


class OneLineExporter:
    """Sends with one of OpenTelemetry's exporters; `what` is `events` or `metrics`.

    A batch processor can use it as an exporter. It never raises.
    """

    def __init__(self, exporter: Any, what: str) -> None:
        self._exporter = exporter
        self._what = what
        self._warned = False
        for name in (type(exporter).__module__, *ALSO_CAPTURED):
            logger = logging.getLogger(name)
            if not any(isinstance(one, _CaptureFilter) for one in logger.filters):
                logger.addFilter(_CaptureFilter())

    def export(self, batch: Any, **options: Any) -> bool:
        """Send; return whether the collector accepted it, and warn if it did not."""
        why = ""
        with _CaptureLogs() as captured:
            try:
                taken = bool(self._exporter.export(batch, **options).name == "SUCCESS")
            except Exception as problem:  # noqa: BLE001 (the job continues)
                taken, why = False, console.describe(problem)
        if taken:
            self._warned = False
        elif not self._warned:
            self._warned = True
            at = _address(self._exporter)
            where = f" at {at}" if at else ""
            console.warning(
                f"{self._what}: cannot send to the OpenTelemetry collector{where}: "
                f"{why or _reason(captured)}"
            )
        return taken

    def shutdown(self, **options: Any) -> None:
        """Stop; an attempt in progress is aborted."""
        with _CaptureLogs():
            self._exporter.shutdown(**options)


class _CaptureLogs:
    """Captures the library's log records in this thread inside the context."""

    def __enter__(self) -> list[logging.LogRecord]:
        captured: list[logging.LogRecord] = []
        _sending.captured = captured
        return captured

    def __exit__(self, *problem: object) -> None:
        _sending.captured = None


class _CaptureFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        captured = getattr(_sending, "captured", None)
        if captured is None:
            return True
        if len(captured) < CAPTURED_MAX:
            captured.append(record)
        return False


def _reason(captured: list[logging.LogRecord]) -> str:
    """Return why the export failed: the first cause of an exception, or the first message."""
    for record in captured:
        for one in record.args if isinstance(record.args, tuple) else ():
            if isinstance(one, BaseException):
                return console.describe(_first_cause(one))
    return " ".join(captured[0].getMessage().split()) if captured else "no reason given"


def _first_cause(problem: BaseException) -> BaseException:
    for _ in range(CAUSES_MAX):
        before = problem.__cause__ or problem.__context__
        if before is None:
            break
        problem = before
    return problem


def _address(exporter: Any) -> str:
    """Return the address that an exporter sends to, without its password."""
    address = str(getattr(exporter, "_endpoint", ""))
    try:
        secret, at, _ = urlsplit(address).netloc.rpartition("@")
    except ValueError:
        return address
    return address.replace(secret + at, "", 1) if at else address


def resource() -> Any:
    """Return the resource that OpenTelemetry's variables name, by default `holdfast`."""
    from opentelemetry.sdk.resources import Resource

    variables = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in variables
    return Resource.create({} if is_named else {"service.name": SERVICE})


def sendable(value: object) -> str | int | float | bool:
    """Return a value that can be sent; an invalid one would make its whole batch fail."""
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) <= INT_MAX):
        return value
    text = str.__str__(value) if isinstance(value, str) else str(value)
    return text.encode(errors="replace").decode()
