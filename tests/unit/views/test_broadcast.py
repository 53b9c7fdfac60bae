"""Browsers receive the whole state of a job first, then its changes; slow ones are disconnected."""

from __future__ import annotations

import asyncio
import json

from holdfast.views.dashboard.broadcast import LISTENERS_MAX, QUEUE_MAX, Broadcast, Listener
from in_loop import in_loop


def parsed(update: bytes | None) -> tuple[str, dict[str, object]]:
    assert update is not None
    assert update.endswith(b"}\n")
    sections = json.loads(update)
    return sections.pop("kind"), sections


@in_loop
async def test_browser_receives_snapshot_and_then_changes() -> None:
    state: dict[str, object] = {"job": 1, "nodes": ['a\n{"kind": "forged"}']}
    news: list[object] = ["begun"]
    broadcast = Broadcast(lambda: broadcast.publish(state, news))
    early = listening(broadcast)
    news.clear()
    assert parsed(await early.get(1.0)) == ("snapshot", {**state, "news": ["begun"]})
    state["job"] = 2
    broadcast.refresh()
    news.append("failed")
    broadcast.refresh()
    news.clear()
    broadcast.refresh()
    assert parsed(await early.get(1.0)) == ("update", {"job": 2})
    assert parsed(await early.get(1.0)) == ("update", {"news": ["failed"]})
    assert await early.get(0.0) == b"", "nothing changed"
    late = listening(broadcast)
    assert parsed(await late.get(1.0))[1] == {**state, "news": ["begun", "failed"]}
    state["job"] = 3
    broadcast.refresh()
    broadcast.close()
    assert parsed(await late.get(1.0)) == ("update", {"job": 3}), "the end of a job is not lost"
    assert await late.get(1.0) is None
    assert broadcast.listen() is None


@in_loop
async def test_only_a_slow_browser_is_disconnected() -> None:
    count = 0
    broadcast = Broadcast(lambda: broadcast.publish({"job": count}, ()))
    slow, quick = listening(broadcast), listening(broadcast)
    for _ in range(QUEUE_MAX + 1):
        assert await quick.get(1.0)
        count += 1
        broadcast.refresh()
    assert await slow.get(1.0) is None
    assert parsed(await quick.get(1.0)) == ("update", {"job": count})


@in_loop
async def test_number_of_browsers_is_limited() -> None:
    broadcast = Broadcast(lambda: None)
    listeners = [listening(broadcast) for _ in range(LISTENERS_MAX)]
    assert broadcast.listen() is None
    broadcast.leave(listeners[0])
    assert broadcast.listen() is not None


@in_loop
async def test_job_is_followed_only_while_a_browser_listens() -> None:
    broadcast = Broadcast(lambda: None)
    assert not broadcast.is_wanted.is_set()
    listener = listening(broadcast)
    idle = asyncio.ensure_future(broadcast.wait_until_idle(0.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert broadcast.is_wanted.is_set()
    assert not idle.done()
    broadcast.leave(listener)
    await idle
    assert not broadcast.is_wanted.is_set()


def listening(broadcast: Broadcast) -> Listener:
    listener = broadcast.listen()
    assert listener is not None
    return listener
