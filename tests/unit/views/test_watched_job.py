"""A dashboard's queries to its job, other than for its state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import pytest

from holdfast.control.job_client import ControlProblem
from holdfast.views.dashboard.watched_job import LOGS_WAITING_MAX, WatchedJob
from holdfast.wire.messages import LogLines, LogsQuery
from in_loop import in_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PIECES = 3 * LOGS_WAITING_MAX


class Connection:
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def job(monkeypatch: pytest.MonkeyPatch, problem: ControlProblem | None = None) -> WatchedJob:
    """Return a job with many lines of output, whose connection may break after the last line."""

    async def connect() -> Any:
        return Connection()

    async def follow_logs(
        client: Any,
        wanted: LogsQuery,
        node: str,
        show: Callable[[LogLines], Awaitable[None]],
        complain: Callable[[str], None],
    ) -> None:
        del client, wanted, node, complain
        for at in range(PIECES):
            await show(LogLines(rank=at, text=b"line\n"))
        if problem is not None:
            raise problem

    monkeypatch.setattr("holdfast.views.dashboard.watched_job.follow_logs", follow_logs)
    return WatchedJob(connect, is_read_only=False)


@in_loop
async def test_log_page_with_a_full_queue_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = job(monkeypatch).logs(LogsQuery(), "")
    await anext(logs)
    await asyncio.sleep(0)  # The reader fills the queue and waits for room.
    async with asyncio.timeout(5):
        await logs.aclose()


@in_loop
async def test_log_page_shows_all_lines_before_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [one["rank"] async for one in job(monkeypatch).logs(LogsQuery(), "")]
    assert shown == [*range(PIECES)]
    logs = job(monkeypatch, ControlProblem("connection closed")).logs(LogsQuery(), "")
    assert [(await anext(logs))["rank"] for _ in range(PIECES)] == [*range(PIECES)]
    with pytest.raises(ControlProblem, match="connection closed"):
        await anext(logs)
