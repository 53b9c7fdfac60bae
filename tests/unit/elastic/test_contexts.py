"""Contexts of workers that a program derives from TorchElastic's classes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from holdfast.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from holdfast.elastic.multiprocessing.api import SubprocessContext

if TYPE_CHECKING:
    from pathlib import Path


class Closing(SubprocessContext):
    """Chooses its own signal, and notes the calls of `_close`; it may leave the stop to the base."""

    stops = True

    def __init__(self, folder: Path, *scripts: str) -> None:
        args = {rank: ("-c", script) for rank, script in enumerate(scripts)}
        super().__init__(
            "x", "/bin/sh", args, {rank: {} for rank in args}, DefaultLogsSpecs(str(folder))
        )
        self.calls: list[tuple[signal.Signals, float]] = []

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 20) -> None:
        super().close(death_sig or signal.SIGINT, timeout)

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        self.calls.append((death_sig, timeout))
        if self.stops:
            super()._close(death_sig, timeout)


@pytest.mark.parametrize("stops", [True, False])
def test_failure_closes_a_derived_context_by_its_own_methods(tmp_path: Path, stops: bool) -> None:
    context = Closing(
        tmp_path, "echo broken >&2; exit 7", "trap 'exit 3' INT; while :; do sleep 1; done"
    )
    context.stops = stops
    context.start()
    result = context.wait()
    assert result is not None
    assert {rank: one.exitcode for rank, one in result.failures.items()} == {0: 7, 1: 3}
    assert result.failures[0].stderr_tail == "broken\n"
    assert context.calls == [(signal.SIGINT, 20)]
    context.close(signal.SIGTERM, 5)  # As in TorchElastic, `_close` may be called again.
    assert context.calls[1:] == [(signal.SIGTERM, 5)]


def test_context_that_was_not_started_can_be_closed(tmp_path: Path) -> None:
    context = Closing(tmp_path, "true")
    context.close()
    assert context.calls == [(signal.SIGINT, 20)]


def test_workers_of_start_processes_are_a_context(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path))
    context = start_processes("x", "/bin/true", {0: ()}, {0: {}}, logs)
    assert isinstance(context, PContext)
    assert isinstance(context, SubprocessContext)
    assert context.wait() is not None
