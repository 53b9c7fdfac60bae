"""The server in this process; what needs processes is in tests/integration."""

from __future__ import annotations

import asyncio

import pytest
from serving import LIMIT_S, run, serving, soon, status

from holdfast.coordinator import server
from holdfast.coordinator.connect import ConnectFailed
from holdfast.core.protocol import (
    WHY_CHARS_MAX,
    Ack,
    Heartbeat,
    JobSettings,
    NodePhase,
    NodeRole,
    View,
)
from holdfast.wire.frames import encode_frame
from holdfast.wire.messages import StatusRequest, StoreCall, StoreResult, Welcome


def test_a_node_is_told_of_its_round() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            talk.say(status("a"))
            view = await talk.hear()
            assert isinstance(view, View)
            assert (view.role, view.master_addr) == (NodeRole.MEMBER, "127.0.0.1")
            talk.say(Heartbeat(run_id="job", node="a", incarnation=97, seq=1, term=1, revision=9))
            assert await talk.hear() == Ack(run_id="job", node="a", incarnation=97, seq=1)
            line = "active, round 0, generation 0: all nodes are here"
            assert served.changes == [("job", line)]

    run(work())


def test_a_lost_connection_is_a_lost_node() -> None:
    async def work() -> None:
        async with serving() as served:
            settings = JobSettings(min_nodes=1, max_nodes=2, settle_s=0.0)
            first, second = await served.link(), await served.link()
            first.say(status("a", settings=settings))
            await first.hear()
            second.say(status("b", settings=settings))
            while (await first.hear()).size != 2:
                pass
            second.link.abort()
            view = await first.hear()
            assert (view.size, view.why) == (1, "b was lost: its connection closed")

    run(work())


def test_a_reason_that_is_too_long_is_shortened() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            talk.say(status("a"))
            await talk.hear()
            (rounds,) = served.server.hosting.jobs.values()
            rounds.job.why = "w" * (WHY_CHARS_MAX + 1)
            talk.say(Heartbeat(run_id="job", node="a", incarnation=97, seq=1, term=0, revision=0))
            assert (await talk.hear()).why.endswith("w...")

    run(work())


def test_the_address_others_see_is_noted_when_one_of_them_comes() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            (peer,) = served.server._peers
            peer.address, peer.is_remote, peer.local_address = "10.0.0.7", True, "10.0.0.1"
            talk.say(status("a"))
            assert (await talk.hear()).master_addr == "10.0.0.7"
            assert served.server.hosting.jobs["job"].job.coordinator_address == "10.0.0.1"

    run(work())


def test_the_store_of_a_job_that_is_not_here_is_refused() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            talk.say(StoreCall(id=5, run_id="none", op="num_keys"))
            answer = await talk.hear()
            assert isinstance(answer, StoreResult)
            assert (answer.id, answer.ok) == (5, False)
            assert "'none'" in answer.why

    run(work())


def test_a_call_that_waits_is_answered_at_its_time() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            talk.say(status("a"))
            await talk.hear()
            talk.say(StoreCall(id=1, run_id="job", op="get", keys=("k",), timeout_s=0.02))
            assert "for: k" in (await talk.hear()).why

    run(work())


def test_a_flood_of_faults_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving() as served:
            for number in range(6):
                if number == 5:
                    monkeypatch.setattr(server, "WARNINGS_S", 0.0)
                talk = await served.link()
                talk.say(Welcome(version=1))
                await talk.hear()
            assert len(served.complaints) == 2
            assert served.complaints[1].endswith("(4 more like this were not shown)")

    run(work())


def test_there_is_a_limit_on_connections() -> None:
    async def work() -> None:
        async with serving(connections_max=2) as served:
            held = [await served.link() for _ in range(2)]
            with pytest.raises(ConnectFailed, match="has 2 connections already") as caught:
                await served.link()
            assert not caught.value.permanent
            held[0].link.close()
            await soon(lambda: served.server.connections < 2)
            await served.link()

    run(work())


def test_a_limit_that_comes_of_descriptors_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_descriptors_max", lambda: 4)

    async def work() -> None:
        async with serving() as served:
            for _ in range(3):
                await served.link()
            with pytest.raises(
                ConnectFailed, match=r"3 connections already.*`ulimit -n` on its host"
            ):
                await served.link()
            assert "`ulimit -n`" in served.complaints[0]

    run(work())


def test_who_asks_again_before_the_answer_loses_the_connection() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            for number in range(3):
                talk.say(StatusRequest(id=number))
                assert (await talk.hear()).id == number
            talk.link.send_bytes(encode_frame(StatusRequest(id=3)) * 2)
            assert isinstance(await talk.hear(), str)
            assert "asks again before it has taken the answer" in served.complaints[0]

    run(work())


def test_what_was_told_of_jobs_that_are_forgotten_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)

    async def work() -> None:
        async with serving() as served:
            served.server.hosting._keep_s = 0.0
            talk, other = await served.link(), await served.link()
            other.say(status("b", run_id="other"))
            talk.say(status("a"))
            await soon(lambda: len(served.server._last_line) == 2)
            talk.say(status("a", seq=2, phase=NodePhase.LEAVING))
            await soon(lambda: [*served.server._last_line] == ["other"])

    run(work())


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)

    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            monkeypatch.setattr(server, "IDLE_S", 0.05)  # A handshake may take longer.
            assert isinstance(await talk.hear(), str)
            assert "nothing came for 0.05 s" in served.complaints[0]

    run(work())


# The end.


def test_draining_waits_for_nodes_of_jobs_that_are_over_only() -> None:
    async def work() -> None:
        async with serving() as served:
            ended, running = await served.link(), await served.link()
            ended.say(status("a"))
            running.say(status("b", run_id="other"))
            for talk in (ended, running):
                await talk.hear()
            assert await served.server.drain(LIMIT_S)
            ended.say(status("a", seq=2, phase=NodePhase.SUCCEEDED, generation=0))
            assert (await ended.hear()).final
            assert not await served.server.drain(0.02)
            draining = asyncio.create_task(served.server.drain(LIMIT_S))
            ended.link.close()
            assert await draining

    run(work())


def test_a_node_that_has_not_heard_of_the_end_is_waited_for() -> None:
    async def work() -> None:
        async with serving(grace_s=60.0) as served:
            first, second = await served.link(), await served.link()
            for name, talk in (("a", first), ("b", second)):
                talk.say(status(name, nodes=2))
            while (await first.hear()).role is not NodeRole.MEMBER:
                pass
            second.say(status("b", nodes=2, seq=2, phase=NodePhase.SUCCEEDED, generation=0))
            await soon(lambda: second.said.qsize() >= 2)
            second.link.abort()
            await soon(lambda: served.server.connections == 1)
            first.say(status("a", nodes=2, seq=2, phase=NodePhase.SUCCEEDED, generation=0))
            assert (await first.hear()).final
            first.link.close()
            await soon(lambda: served.server.connections == 0)
            assert not await served.server.drain(0.02)
            again = await served.link()
            again.say(status("b", nodes=2, seq=3, phase=NodePhase.SUCCEEDED, generation=0))
            again.say(Heartbeat(run_id="job", node="b", incarnation=98, seq=3, term=0, revision=0))
            while not getattr(await again.hear(), "final", False):
                pass
            again.link.close()
            assert await served.server.drain(LIMIT_S)

    run(work())


def test_all_are_told_when_it_stops() -> None:
    async def work() -> None:
        async with serving() as served:
            talk = await served.link()
            with served.silent():
                await soon(lambda: served.server.connections == 2)
                await served.server.stop()
            assert await talk.hear() == "the coordinator is going away"

    run(work())
