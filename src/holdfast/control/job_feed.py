"""Keeps a `LiveJob` up to date: polls the job, and reconnects after a loss of the connection.

    feed = JobFeed(connect, job, changed)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed.run())

`run` calls `changed` after every change. While it cannot reach the job, `job.problem` gives the reason
in one line, and `run` retries. It returns only when it is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from holdfast.control.job_client import (
    ControlProblem,
    JobNotFound,
    JobOver,
    JobUnreachable,
    check_same_job,
    end_shown_by,
)
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.control.job_client import JobClient
    from holdfast.control.live_job import LiveJob

EVERY_S = 1.0
EVERY_S_PER_NODE = 0.002
"""Nodes of large jobs report less often, so they are polled less often."""
COALESCE_S = 0.2
"""The delay of a poll after an event, so that it covers the events that follow at once."""
RETRY_S, RETRY_S_MAX = 0.5, 5.0
HISTORY_S = 5.0
"""The timeout of a request for a node's history."""
HISTORY_EVERY_S = 10.0
"""The interval of requests for histories while nothing changes."""


class JobFeed:
    """Drives one `LiveJob`. `client` is its connection, for other requests to the job."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[JobClient]],
        job: LiveJob,
        changed: Callable[[], object],
    ) -> None:
        self.client: JobClient | None = None
        self.job = job
        self._connect, self._changed = connect, changed
        self._soon = asyncio.Event()
        self._history_wanted = asyncio.Event()
        self._history_mark: object = None
        self._history_at = 0.0
        self._has_left = False
        """Whether a signal stopped the agent that this feed used last."""

    async def run(self) -> None:
        """Follow the job until cancelled."""
        pause_s = RETRY_S
        while True:
            try:
                watched = self.job.header.run_id
                async with check_same_job(await self._connect(), watched) as client:
                    self._history_mark = None
                    await self._follow(client)
            except* HoldfastError as problems:
                problem = _first(problems)
                if self.job.problem == "":
                    pause_s = RETRY_S
                self._has_left |= self.client is not None and self.client.has_left
                self.job.lost(problem.message)
                self._note_end(problem)
            finally:
                self.client = None
            self._changed()
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_S_MAX, 2 * pause_s)

    def _note_end(self, problem: HoldfastError) -> None:
        """Note the end of the job, if a problem shows it."""
        if isinstance(problem, JobNotFound) and self.job.updated_at is not None:
            hosts = [one.host for one in self.job.nodes]
            end = end_shown_by(problem, hosts, has_left=self._has_left)
            if end is not None:
                self.job.ended(*end, time.time())

    async def _follow(self, client: JobClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_events(client))
            tasks.create_task(self._follow_status(client))
            tasks.create_task(self._follow_history(client))

    async def _follow_events(self, client: JobClient) -> None:
        known = {*self.job.events}
        async for event in client.events(follow=True):
            if event in known:  # It arrived before the connection was lost.
                continue
            self.job.add_event(event)
            self._soon.set()
            self._changed()
        raise JobUnreachable("the job sends no more events")

    async def _follow_status(self, client: JobClient) -> None:
        now = asyncio.get_running_loop().time
        summary = await client.status(watch=True)
        while True:
            self.client, self._has_left = client, False
            self.job.connected()
            self.job.add_summary(now(), summary)
            self._changed()
            self._request_histories(now())
            pause_s = max(EVERY_S, EVERY_S_PER_NODE * len(summary.nodes))
            try:
                async with asyncio.timeout(pause_s):
                    await self._soon.wait()
                    await asyncio.sleep(COALESCE_S)
            except TimeoutError:
                pass
            self._soon.clear()
            # Lost nodes, and nodes that are unreachable from here, may never report.
            summary = await client.status(watch=True, wait_s=0.0)

    def _request_histories(self, now: float) -> None:
        """Request histories if they may have changed."""
        job = self.job
        states = [(one.node, one.state, one.step_min >= 0) for one in job.history_sources]
        mark = (job.header.state, job.header.generation, states)
        if mark != self._history_mark or now - self._history_at >= HISTORY_EVERY_S:
            self._history_mark, self._history_at = mark, now
            self._history_wanted.set()

    async def _follow_history(self, client: JobClient) -> None:
        now = asyncio.get_running_loop().time

        async def query(node: str) -> None:
            try:
                async with asyncio.timeout(HISTORY_S):
                    found = await client.history(node)
            except (ControlProblem, TimeoutError):
                return  # The node may have left; the status shows that.
            self.job.add_history(now(), node, found)

        while True:
            await self._history_wanted.wait()
            self._history_wanted.clear()
            await asyncio.gather(*(query(one.node) for one in self.job.history_sources))
            self._changed()


def _first(problems: BaseExceptionGroup[HoldfastError]) -> HoldfastError:
    """Return the first problem, or that the job is over if any of them says so."""
    over = problems.subgroup(JobOver)
    one: BaseException = problems if over is None else over
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    assert isinstance(one, HoldfastError)
    return one
