"""Sending by OTLP so that a collector that is away costs the person one line, and it is ours.

OpenTelemetry's exporters log each try that fails, which a program without logging of its own shows
on its console, again and again. `OneLineExporter` keeps those lines to itself, takes the reason out
of them, and says it once, with the address: until something was taken and fails again.

The one thing to know: only what is logged by a thread that sends for us is kept. A program that
uses OpenTelemetry itself hears of its own troubles as ever.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any
from urllib.parse import urlsplit

from holdfast import console

EXPORT_S = 4.0
"""How long one attempt to reach the collector may last, tries again included.

Less than the end of a job waits for it, so that the person is told what is wrong with it."""
CAPTURED_MAX = 4
"""How many lines of the library's are kept for each attempt; the first says what is wrong."""
CAUSES_MAX = 10
"""How far the way from an exception to its first cause is followed."""

# Who else has something to say while an exporter sends.
ALSO_CAPTURED = ("opentelemetry.exporter.otlp.proto.common._internal", "urllib3.connectionpool")

SERVICE = "holdfast"
INT_MAX = 2**63 - 1

_sending = threading.local()


class OneLineExporter:
    """Sends with an exporter of OpenTelemetry's; `what` is what the person calls the things sent.

    To a batch processor it is an exporter itself. It never raises.
    """

    def __init__(self, exporter: Any, what: str) -> None:
        self._exporter = exporter
        self._what = what
        self._told = False
        for name in (type(exporter).__module__, *ALSO_CAPTURED):
            logger = logging.getLogger(name)
            if not any(isinstance(one, _CaptureFilter) for one in logger.filters):
                logger.addFilter(_CaptureFilter())

    def export(self, batch: Any, **options: Any) -> bool:
        """Send; return whether it was taken, and tell the person if it was not."""
        why = ""
        with _CaptureLogs() as heard:
            try:
                taken = bool(self._exporter.export(batch, **options).name == "SUCCESS")
            except Exception as problem:  # noqa: BLE001 (whatever it is, the job goes on)
                taken, why = False, console.describe(problem)
        if taken:
            self._told = False
        elif not self._told:
            self._told = True
            at = _address(self._exporter)
            where = f" at {at}" if at else ""
            console.warning(
                f"{self._what}: the OpenTelemetry collector{where} takes none: "
                f"{why or _reason(heard)}"
            )
        return taken

    def shutdown(self, **options: Any) -> None:
        """End; a try that still goes on is broken off."""
        with _CaptureLogs():
            self._exporter.shutdown(**options)


class _CaptureLogs:
    """A stretch of a thread's time in which the library's lines are for us."""

    def __enter__(self) -> list[logging.LogRecord]:
        heard: list[logging.LogRecord] = []
        _sending.heard = heard
        return heard

    def __exit__(self, *problem: object) -> None:
        _sending.heard = None


class _CaptureFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        heard = getattr(_sending, "heard", None)
        if heard is None:
            return True
        if len(heard) < CAPTURED_MAX:
            heard.append(record)
        return False


def _reason(heard: list[logging.LogRecord]) -> str:
    """Return why nothing was taken: the first cause of an exception, or what was logged first."""
    for record in heard:
        for one in record.args if isinstance(record.args, tuple) else ():
            if isinstance(one, BaseException):
                return console.describe(_first_cause(one))
    return " ".join(heard[0].getMessage().split()) if heard else "it did not say why"


def _first_cause(problem: BaseException) -> BaseException:
    for _ in range(CAUSES_MAX):
        before = problem.__cause__ or problem.__context__
        if before is None:
            break
        problem = before
    return problem


def _address(exporter: Any) -> str:
    """Return where an exporter sends to, without the password that may be in it."""
    address = str(getattr(exporter, "_endpoint", ""))
    try:
        secret, at, _ = urlsplit(address).netloc.rpartition("@")
    except ValueError:
        return address
    return address.replace(secret + at, "", 1) if at else address


def resource() -> Any:
    """Return who sends, as OpenTelemetry's variables say; or else by our name."""
    from opentelemetry.sdk.resources import Resource

    variables = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in variables
    return Resource.create({} if is_named else {"service.name": SERVICE})


def sendable(value: object) -> str | int | float | bool:
    """Return a value as it can be sent. One that cannot would take all that go with it along."""
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) <= INT_MAX):
        return value
    text = str.__str__(value) if isinstance(value, str) else str(value)
    return text.encode(errors="replace").decode()
