"""A section of `holdfast.worker` that was not left in time is an expired timer like any other."""

from __future__ import annotations

import signal

from holdfast.timers.requests import FileTimerRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.processes.worker_page import Section

SECTION_SIGNAL = signal.SIGKILL


def request_of(section: Section, pid: int, now: float, wall: float) -> FileTimerRequest:
    """Return the timer that a section with a timeout amounts to, for `Reaper.expire`."""
    assert section.deadline_ns is not None
    expires = wall + (section.deadline_ns / 1e9 - now)
    return FileTimerRequest(pid, f"section {section.name}", expires, SECTION_SIGNAL)
