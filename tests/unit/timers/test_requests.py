from __future__ import annotations

import json
import signal

from holdfast.timers.protocol import FileTimerRequest, TimerRequest


def test_requests_are_compared_by_what_they_say() -> None:
    assert TimerRequest(1, "a", 2.0) == TimerRequest(1, "a", 2.0)
    assert TimerRequest(1, "a", 2.0) != TimerRequest(1, "a", 3.0)
    assert FileTimerRequest(1, "a", 2.0, 9) == FileTimerRequest(1, "a", 2.0, 9)
    assert FileTimerRequest(1, "a", 2.0, 9) != FileTimerRequest(1, "a", 2.0, 15)
    assert FileTimerRequest(1, "a", 2.0, 9) != TimerRequest(1, "a", 2.0)
    assert TimerRequest(1, "a", 2.0) != 1


def test_a_request_is_a_line_of_json() -> None:
    request = FileTimerRequest(7, "ä\n", 12.5, signal.SIGKILL)
    assert json.loads(request.to_json()) == {
        "version": 1, "pid": 7, "scope_id": "ä\n", "expiration_time": 12.5, "signal": 9,
    }  # fmt: skip
    assert "\n" not in request.to_json()
    assert (request.worker_pid, request.worker_id) == (7, 7)
    assert repr(request) == "FileTimerRequest(7, 'ä\\n', 12.5, <Signals.SIGKILL: 9>)"
