"""A control client: what its readers get when connections end."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.control.job_client import (
    REPLIES_MAX,
    ControlConnection,
    ControlProblem,
    JobClient,
    JobNotFound,
    JobOver,
    JobUnreachable,
    MergedEvents,
    NoLocalAgent,
    RequestRefused,
    check_same_job,
    end_shown_by,
)
from holdfast.control.job_logs import follow_logs
from holdfast.wire import messages
from holdfast.wire.messages import (
    EventKind,
    EventRecord,
    Goodbye,
    JobSummary,
    LogLines,
    LogsQuery,
    NodeSummary,
    Query,
    Reply,
)
from in_loop import in_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT_S = 10.0
HERE = os.uname().nodename


@in_loop
async def test_reader_with_a_full_queue_is_notified_of_the_closed_connection() -> None:
    sent: list[object] = []
    closed: list[bool] = []
    connection = ControlConnection("job")
    connection.send = sent.append
    connection.close = lambda: closed.append(True)
    replies = connection.stream("events")
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    [query] = sent
    assert isinstance(query, Query)
    for _ in range(REPLIES_MAX + 1):
        connection.received(Reply(id=query.id, body=b"x", last=False))
    assert (closed, bool(connection.problem)) == ([True], True)
    await first
    async with asyncio.timeout(LIMIT_S):
        for _ in range(REPLIES_MAX - 1):
            await anext(replies)
        with pytest.raises(ControlProblem, match=connection.problem):
            await anext(replies)


class Exited:
    """The agents of a job, all of which have exited."""

    is_lost = True

    def __init__(self, problem: ControlProblem) -> None:
        self.problem = problem

    async def nodes(self) -> list[str]:
        return []

    async def any_connection(self) -> ControlConnection:
        raise self.problem


@pytest.mark.parametrize(
    ("problem", "kind", "shown"),
    [
        (JobNotFound("the job is over"), JobNotFound, "the job is over"),
        (JobUnreachable("no etcd"), JobUnreachable, "all agents have exited"),
        # Its exit code is that of a job that is over.
        (RequestRefused("try later", "busy"), JobUnreachable, "all agents have exited"),
    ],
)
@in_loop
async def test_following_events_ends_with_the_reason_once_all_agents_have_exited(
    problem: ControlProblem, kind: type[ControlProblem], shown: str
) -> None:
    merged = MergedEvents(Exited(problem))  # type: ignore[arg-type]
    with pytest.raises(kind, match=shown):
        await merged.next()
    merged.close()


class OneAgent:
    """The only agent of a job, as a connection whose queries the test answers."""

    def __init__(self) -> None:
        self.sent: list[Query] = []
        self.own = ControlConnection("job")
        self.own.send = self.sent.append

    async def at(self, _: str) -> ControlConnection:
        return self.own


@in_loop
async def test_reader_of_logs_makes_room_for_more_once_half_is_read() -> None:
    agent = OneAgent()
    logs = JobClient(agent).logs("a", LogsQuery(), streams=messages.WINDOW_BYTES)  # type: ignore[arg-type]
    first = asyncio.ensure_future(anext(logs))
    await asyncio.sleep(0)
    [query] = agent.sent
    room = messages.unpack(LogsQuery, query.body).room
    body = messages.pack(LogLines(rank=0, text=b"x" * (room // 4)))
    for _ in range(3):
        agent.own.received(Reply(id=query.id, body=body, last=False))
    await first
    await anext(logs)
    assert agent.sent == [query]
    await anext(logs)
    [_, more] = agent.sent
    assert (more.id, more.what) == (query.id, messages.MORE)
    assert messages.unpack(messages.StreamCredit, more.body).size == room // 2
    await logs.aclose()  # type: ignore[attr-defined]


class Followed:
    """A client of a job whose nodes change once. After that, a query of the job's state raises an exception."""

    node = "a"

    def __init__(self) -> None:
        self.asked = 0

    async def status(self) -> JobSummary:
        self.asked += 1
        if self.asked > 1:
            raise BrokenPipeError
        return JobSummary(run_id="job", nodes=[NodeSummary(node="a", first_rank=0, size=1)])

    async def events(self, **_: Any) -> AsyncIterator[EventRecord]:
        yield EventRecord(wall=0.0, kind=EventKind.GENERATION_STARTED)
        await asyncio.Event().wait()

    async def logs(self, *_: Any, **__: Any) -> AsyncIterator[LogLines]:
        await asyncio.Event().wait()
        yield LogLines(rank=0)


@in_loop
async def test_following_logs_ends_if_new_nodes_can_no_longer_be_followed() -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(BrokenPipeError):
            await follow_logs(
                Followed(),  # type: ignore[arg-type]
                LogsQuery(follow=True),
                "",
                lambda _lines: None,
                lambda _problem: None,
            )


@pytest.mark.parametrize(
    ("problem", "hosts", "has_left", "end"),
    [
        (JobOver("over", "failed", "rank 0 failed"), ["far"], True, ("failed", "rank 0 failed")),
        (NoLocalAgent("none"), [HERE], True, ("stopped", messages.ALL_LEFT)),
        (NoLocalAgent("none"), [HERE], False, ("lost", "all its agents have exited")),
        (NoLocalAgent("none"), [HERE, "far"], True, None),
        (JobNotFound("there is no agent"), [HERE, "far"], True, ("stopped", messages.ALL_LEFT)),
    ],
)
def test_watched_job_is_over_once_no_agent_can_be_left(
    problem: JobNotFound, hosts: list[str], has_left: bool, end: tuple[str, str] | None
) -> None:
    assert end_shown_by(problem, hosts, has_left=has_left) == end


@in_loop
async def test_last_message_of_the_peer_tells_the_end_to_every_pending_query() -> None:
    connection = ControlConnection("job")
    connection.send = lambda _: None
    pending = asyncio.ensure_future(connection.query("status"))
    await asyncio.sleep(0)
    connection.received(Goodbye(why="rank 0 failed", outcome="failed"))
    for query in (pending, connection.query("status")):
        with pytest.raises(JobOver) as over:
            await query
        assert (over.value.outcome, over.value.why) == ("failed", "rank 0 failed")


@in_loop
async def test_another_job_whose_name_begins_alike_does_not_replace_a_watched_one() -> None:
    agent = OneAgent()
    agent.own.run_id, agent.own.close = "job-2", lambda: None
    agent.close = agent.own.close  # type: ignore[attr-defined]
    with pytest.raises(NoLocalAgent):
        check_same_job(JobClient(agent), "job")  # type: ignore[arg-type]
