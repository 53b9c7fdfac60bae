"""The launchers that the tests of this folder compare."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from launchers import Launchers, Torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def torchrun() -> Iterator[Torchrun]:
    running = Torchrun()
    yield running
    running.close()


@pytest.fixture
def launchers(tmp_path: Path, torchrun: Torchrun) -> Launchers:
    return Launchers(tmp_path, torchrun)


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """Restore signal handlers, which torch's worker groups install and do not remove."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
