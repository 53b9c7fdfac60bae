"""Workers that set timers with torch's own client, under `holdfast run`."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launchers import Launchers

pytestmark = pytest.mark.torch

STUCK_ONCE = """
import os, signal, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit()
import torch.distributed.elastic.timer as timer
def be_stuck_here():
    while True:
        signal.pause()
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60, scope="in time"):
    pass
with timer.expires(after=0.3, scope="stuck"):
    be_stuck_here()
"""


def test_torch_worker_with_an_expired_timer_is_killed_and_restarted(launchers: Launchers) -> None:
    launchers.script("job.py", STUCK_ONCE)
    line = ["--max-restarts=1", "--log-dir=logs", "--redirects=2", "../job.py"]
    done = launchers.holdfast(line, {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert done.code == 0, done.err
    assert "timer expired: 'stuck' (pid " in done.err
    assert "failed: timer 'stuck' expired: killed the worker; restarting" in done.err
    [log] = done.folder.glob("logs/*/attempt_0/0/stderr.log")
    assert "be_stuck_here (" in log.read_text()
    [path] = done.folder.glob("logs/*/events-*.jsonl")
    events = [json.loads(one) for one in path.read_text().splitlines()]
    received = [
        (one["name"], inner["scope_id"], inner["signal"])
        for one in events
        if "scope_id" in (inner := json.loads(one["metadata"]["metadata"]))
    ]
    assert received == [
        ("timer expired", "stuck", signal.SIGKILL),
        ("kill worker process", "stuck", signal.SIGKILL),
    ]
    assert events[-2]["metadata"]["state"] == "SUCCEEDED"
    assert [*(launchers.base / "tmp").iterdir()] == []  # The pipe is removed.
