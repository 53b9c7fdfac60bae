from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.timers.server import log_debug_info_for_expired_timers

if TYPE_CHECKING:
    import pytest


def test_the_timers_of_each_process_are_written_down(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    log_debug_info_for_expired_timers("bert", {})
    assert caplog.text == ""
    log_debug_info_for_expired_timers("bert", {7: ["{one}", "{two}"], 8: ["{three}"]})
    assert "run bert: expired timers of process 7: {one}, {two}" in caplog.text
    assert "process 8: {three}" in caplog.text
