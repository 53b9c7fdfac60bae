"""A control connection: what its readers get when it ends."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.control.job_client import REPLIES_MAX, ControlConnection, ControlProblem
from holdfast.wire.messages import Query, Reply
from in_loop import in_loop

LIMIT_S = 10.0


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
