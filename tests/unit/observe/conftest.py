"""What all tests of events share: nothing that one of them configured stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast import console
from holdfast.observe.events import destinations

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    yield
    tables = (destinations._configured, destinations._found)
    added = [guarded for _, guarded in destinations._added.values()]
    for guarded in [one for table in tables for one in table.values()] + added:
        guarded.close(5.0)
    for table in (*tables, destinations._added):
        table.clear()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return what was said to the person, as `said.messages`."""
    caplog.set_level(console.NOTICE, "holdfast")
    return caplog
