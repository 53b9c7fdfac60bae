from __future__ import annotations

from holdfast.processes.worker_page import Section
from holdfast.timers.requests import FileTimerRequest
from holdfast.timers.sections import request_of


def test_a_section_is_a_timer_of_the_time_of_day() -> None:
    section = Section("checkpoint", 90_000_000_000, 100_000_000_000)
    request = request_of(section, 7, now=101.0, wall=1_700_000_000.0)
    assert request == FileTimerRequest(7, "section checkpoint", 1_699_999_999.0, 9)
