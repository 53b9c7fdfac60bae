from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest
from serving import Served, Talk, run, serving, soon, status

from holdfast.coordinator.server import FailuresLast
from holdfast.core.protocol import JobSettings, NodePhase, NodeRole, Status, View

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = JobSettings(min_nodes=1, max_nodes=2, settle_s=0.0)
KEY = ("job", "a", 97)
PEER: Any = object()


async def both(served: Served) -> tuple[Talk, Talk, View]:
    """Return two nodes of one round, and what the first was told of it."""
    first, second = await served.link(), await served.link()
    first.say(status("a", settings=SETTINGS))
    await first.hear()
    second.say(status("b", settings=SETTINGS))
    while (view := await first.hear()).size != 2:
        pass
    return first, second, view


def cut(talk: Talk) -> None:
    transport = talk.link._transport
    assert transport is not None
    transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def failed(view: View) -> Status:
    said: dict[str, Any] = {
        "phase": NodePhase.FAILED,
        "generation": view.generation,
        "round": view.round,
    }
    said |= {"round_term": view.round_term, "round_key": view.round_key, "term": view.term}
    return status("a", seq=2, settings=SETTINGS, rank=view.rank, size=view.size, **said)


def test_a_failure_that_is_read_before_the_end_of_another_node_is_blamed_on_that() -> None:
    async def work() -> None:
        async with serving() as served:
            first, second, view = await both(served)
            first.say(failed(view))  # Both are there when the server reads again, in this order.
            cut(second)
            while not isinstance(heard := await first.hear(), View):
                pass
            assert (heard.role, heard.why) == (NodeRole.MEMBER, "b was lost: its connection closed")
            assert heard.restarts == 0

    run(work())


def test_a_failure_that_is_nobody_elses_ends_the_job() -> None:
    async def work() -> None:
        async with serving() as served:
            first, second, view = await both(served)
            first.say(failed(view))
            while not isinstance(heard := await second.hear(), View) or heard.outcome is None:
                pass
            assert heard.role is NodeRole.CLOSED

    run(work())


def test_the_last_word_of_a_node_that_has_gone_counts() -> None:
    async def work() -> None:
        async with serving() as served:
            first, second, view = await both(served)
            first.say(failed(view))
            cut(first)
            while not isinstance(heard := await second.hear(), View) or heard.outcome is None:
                pass
            assert heard.role is NodeRole.CLOSED

    run(work())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_the_newest_of_a_node_counts(loop: asyncio.AbstractEventLoop) -> None:
    told: list[Status] = []
    failures = FailuresLast(loop, lambda _peer, _key, one: told.append(one))

    async def work() -> None:
        older, newer = status("a"), status("a", seq=2)
        failures.hold(PEER, KEY, older)
        failures.hold(PEER, KEY, newer)
        failures.hold(PEER, ("job", "b", 98), older)
        failures.forget(("job", "b", 98))
        assert told == []
        await soon(lambda: bool(told))
        assert told == [newer]
        failures.release(KEY)
        assert told == [newer]

    loop.run_until_complete(work())
