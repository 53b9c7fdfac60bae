"""What `holdfast status` prints about the progress of a job."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.views.tables import loss_text, status_text
from live_jobs import summary


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"total": 200, "eta_s": 75.0, "loss": 2.5},
            "step 50 of 200 (25.0 %), ETA 1m15s, loss 2.5",
        ),
        ({"total": 200}, "step 50 of 200 (25.0 %), ETA -"),
        ({"loss": "nan"}, "loss nan"),
        ({"total": 40, "step": 50, "eta_s": 0.0}, "step 50 of 40 (100 %), ETA 0ms"),
        ({"total": 40, "step": -1}, "step 0 of 40 (0.0 %), ETA -"),
    ],
)
def test_status_shows_the_progress_that_workers_report(more: dict[str, Any], line: str) -> None:
    assert f"\nprogress: {line}\n" in status_text(summary(5.0, more=more))


def test_status_has_no_line_about_progress_that_nobody_reports() -> None:
    assert "progress" not in status_text(summary(5.0))


def test_status_of_a_job_that_is_over_shows_nothing_as_running() -> None:
    more = {"total": 200, "eta_s": 75.0}
    lines = status_text(
        summary(5.0, nodes=1, more=more, outcome="stopped", why="enough")
    ).splitlines()
    assert lines[1:5] == [
        "nodes 1 of 1:1", "restarts 0 of 3", "progress: step 50 of 200 (25.0 %)", "reason: enough",
    ]  # fmt: skip
    assert lines[-1].split()[:7] == ["0", "node000", "host000", "-", "0-1", "-", "50"]


def test_loss_is_short() -> None:
    found = [loss_text(loss) for loss in (2.314159, 1.2e-05, 123456.0, -0.5, "inf", None)]
    assert found == ["2.314", "1.2e-05", "1.235e+05", "-0.5", "inf", "-"]
