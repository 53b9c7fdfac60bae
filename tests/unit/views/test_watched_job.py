"""What a dashboard asks of its job besides its state."""

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


class Commands:
    """A job whose workers have written a lot, and whose connection may break after it."""

    def __init__(self, problem: ControlProblem | None = None) -> None:
        self.problem = problem

    async def connect(self) -> Any:
        return Connection()

    async def follow_logs(
        self,
        client: Any,
        wanted: LogsQuery,
        node: str,
        show: Callable[[LogLines], Awaitable[None]],
    ) -> None:
        del client, wanted, node
        for at in range(PIECES):
            await show(LogLines(rank=at, text=b"line\n"))
        if self.problem is not None:
            raise self.problem

    def parse_ranks(self, text: str) -> list[int]:
        raise NotImplementedError(text)


@in_loop
async def test_log_page_with_a_full_queue_closes() -> None:
    logs = WatchedJob(Commands(), is_read_only=False).logs(LogsQuery(), "")
    await anext(logs)
    await asyncio.sleep(0)  # The reader fills the queue and waits for room.
    async with asyncio.timeout(5):
        await logs.aclose()


@in_loop
async def test_log_page_shows_all_lines_before_a_problem() -> None:
    job = WatchedJob(Commands(), is_read_only=False)
    assert [one["rank"] async for one in job.logs(LogsQuery(), "")] == [*range(PIECES)]
    job = WatchedJob(Commands(ControlProblem("connection closed")), is_read_only=False)
    logs = job.logs(LogsQuery(), "")
    assert [(await anext(logs))["rank"] for _ in range(PIECES)] == [*range(PIECES)]
    with pytest.raises(ControlProblem, match="connection closed"):
        await anext(logs)
