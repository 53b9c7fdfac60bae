from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from holdfast.processes import poll

if TYPE_CHECKING:
    import pytest


def test_wait_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []

    class Poll:
        def poll(self, timeout_ms: float | None = None) -> None:
            waits.append(timeout_ms)

    monkeypatch.setattr(select, "poll", Poll)
    for deadline in (None, 0.0, time.monotonic() + 3600):
        poll.wait_for(deadline)
    assert waits[:2] == [None, 0]
    assert waits[2] is not None
    assert 0 < waits[2] <= 3600 * 1000 + 1
