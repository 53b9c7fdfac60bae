from __future__ import annotations

from holdfast.processes.workers.pages import Section
from holdfast.timers.protocol import FileTimerRequest
from holdfast.timers.reaper import section_timer


def test_a_section_is_a_timer_of_the_time_of_day() -> None:
    section = Section("checkpoint", 90_000_000_000, 100_000_000_000)
    request = section_timer(section, 7, now=101.0, wall=1_700_000_000.0)
    assert request == FileTimerRequest(7, "section checkpoint", 1_699_999_999.0, 9)
