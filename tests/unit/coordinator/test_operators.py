"""Operators at a coordinator: replies, refusals, and that they cannot delay a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.control.discovery import open_job
from holdfast.control.job_client import Endpoint, RequestRefused
from holdfast.coordinator import connections, operators
from holdfast.core.protocol import Heartbeat, Request, View
from holdfast.core.requests import Action, RequestRefusal
from holdfast.wire import messages
from holdfast.wire.handshake import job_token, read_only_token
from holdfast.wire.messages import (
    Attach,
    EventRecord,
    NodeReport,
    Query,
    Reply,
    StoreCall,
    Watch,
)
from in_loop import in_loop
from serving import Client, Served, jobs_in, serving, soon, status

if TYPE_CHECKING:
    from holdfast.wire.messages import Message

TOKEN = b"t" * 32
INCARNATION = sum(b"a")


async def start_job(served: Served) -> Client:
    """Start a job with one node; return the node."""
    node = await served.client()
    node.send(status("a"))
    await node.until(lambda message: isinstance(message, View))
    return node


def act(number: int, request_id: str, action: str = "restart", *, why: str = "") -> Query:
    request = Request(id=request_id, action=action, why=why)
    return Query(id=number, what=messages.ACT, run_id="job", body=messages.pack(request))


async def reply_to(operator: Client, query: Query) -> Reply:
    operator.send(query)
    reply = await operator.until(lambda one: isinstance(one, Reply) and one.id == query.id)
    assert isinstance(reply, Reply)
    return reply


@in_loop
async def test_repeated_request_is_decided_once_and_gets_the_same_reply() -> None:
    async with serving() as served:
        node, operator = await start_job(served), await served.client("")
        for number in (1, 2):
            assert not (await reply_to(operator, act(number, "r"))).refusal
        received = await node.until(lambda one: isinstance(one, View) and one.generation == 1)
        assert received.request == "r"
        assert served.server.machine.jobs["job"].job.generation == 1
        for query, refusal in (
            (act(3, "s", "dance"), RequestRefusal.UNKNOWN),
            (Query(id=4, what="sing", run_id="job"), RequestRefusal.UNKNOWN),
            (Query(id=5, what="act", run_id="none"), RequestRefusal.NO_SUCH_JOB),
            (Query(id=6, what="logs", run_id="job", node="x"), RequestRefusal.NO_SUCH_NODE),
        ):
            assert (await reply_to(operator, query)).refusal == refusal.value


@pytest.mark.parametrize(
    "message",
    [
        Query(id=1, what=messages.ACT, run_id="job", body=b"\xc1"),
        Query(id=1, what=messages.EVENTS, run_id="other"),
        Attach(run_id="other", node="a", incarnation=INCARNATION),
        NodeReport(run_id="job", node="a", incarnation=INCARNATION),
        Watch(attach=True),
    ],
    ids=lambda message: type(message).__name__,
)
@in_loop
async def test_an_invalid_message_ends_the_connection(message: Message) -> None:
    async with serving() as served:
        await start_job(served)
        peer = await served.client()
        peer.send(message)
        assert isinstance(await peer.next(), str)


@pytest.mark.parametrize(
    "message",
    [
        status("b"),
        status("a", seq=2),
        Heartbeat(run_id="job", node="a", incarnation=INCARNATION, seq=9, term=0, revision=0),
        StoreCall(id=1, run_id="job", op="set", keys=("k",)),
        NodeReport(run_id="job", node="a", incarnation=INCARNATION),
        Attach(run_id="job", node="a", incarnation=INCARNATION),
        Reply(id=1),
    ],
    ids=lambda message: type(message).__name__,
)
@in_loop
async def test_a_read_only_client_cannot_be_a_node(message: Message) -> None:
    async with serving(token=TOKEN) as served:
        await start_job(served)
        reader_token = read_only_token(TOKEN, "job")
        reader = await served.client("job", token=reader_token)
        reader.send(Query(id=1, what=messages.STATUS))
        assert jobs_in(await reader.next())[0].nodes
        refused = await reply_to(reader, act(2, "r"))
        assert refused.refusal == RequestRefusal.READ_ONLY.value
        reader.send(message)
        assert isinstance(await reader.next(), str)
        job = served.server.machine.jobs["job"].job
        assert ([*job.nodes], job.generation) == (["a"], 0)


def test_read_only_token_differs_from_the_token_and_derives_no_other() -> None:
    of_job = read_only_token(TOKEN, "job")
    assert of_job == read_only_token(job_token(TOKEN, "job"), "")
    assert len({of_job, read_only_token(TOKEN, ""), read_only_token(TOKEN, "other"), TOKEN}) == 4
    assert read_only_token(of_job, "other") == of_job


@in_loop
async def test_query_is_relayed_to_its_node_and_the_reply_to_its_operator() -> None:
    async with serving() as served:
        node, operator = await start_job(served), await served.client("")
        query = Query(id=7, what=messages.STACKS, run_id="job", node="a")
        operator.send(query)
        assert await node.until(lambda one: isinstance(one, Watch)) == Watch(attach=True)
        attached = await served.client()
        attached.send(Attach(run_id="job", node="a", incarnation=INCARNATION))
        relayed = await attached.next()
        assert (relayed.what, relayed.node) == (messages.STACKS, "")
        attached.send(Reply(id=relayed.id, body=b"1", last=False), Reply(id=relayed.id, body=b"2"))
        assert await operator.next() == Reply(id=7, body=b"1", last=False)
        assert await operator.next() == Reply(id=7, body=b"2")
        # From now on queries are sent immediately; messages about a query take the same path.
        operator.send(query, Query(id=7, what=messages.MORE, run_id="job", body=b"more"))
        relayed, more = await attached.next(), await attached.next()
        assert (more.id, more.body) == (relayed.id, b"more")
        operator.connection.abort()
        cancelled = await attached.next()
        assert (cancelled.id, cancelled.what) == (relayed.id, messages.CANCEL)
        another = await served.client("")
        another.send(query)
        await attached.next()
        attached.connection.abort()
        assert (await another.next()).refusal == RequestRefusal.NO_ANSWER.value


@in_loop
async def test_a_node_may_reply_only_to_its_own_queries() -> None:
    async with serving() as served:
        node, operator, second = (
            await start_job(served),
            await served.client(""),
            await served.client(),
        )
        attached = await served.client()
        attached.send(Attach(run_id="job", node="a", incarnation=INCARNATION))
        operator.send(Query(id=7, what=messages.STACKS, run_id="job", node="a"))
        relayed = await attached.next()
        second.send(Reply(id=relayed.id, body=b"forged"))
        assert isinstance(await second.next(), str)
        attached.send(Reply(id=relayed.id, body=b"true"))
        assert (await operator.next()).body == b"true"
        assert node.connection.is_open


@in_loop
async def test_a_query_fails_if_its_node_does_not_attach_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "ATTACH_S", 0.01)
    async with serving() as served:
        await start_job(served)
        operator = await served.client("")
        refused = await reply_to(operator, Query(id=1, what="logs", run_id="job", node="a"))
        assert refused.refusal == RequestRefusal.NO_ANSWER.value


@in_loop
async def test_events_are_sent_once_and_in_order_of_time() -> None:
    async with serving() as served:
        node, operator = await start_job(served), await served.client("")
        follow = messages.pack(messages.EventsQuery(follow=True))
        await reply_to(operator, Query(id=9, what=messages.EVENTS, run_id="job", body=follow))
        await reply_to(operator, act(1, "r"))
        walls = (3.0, 1.0, 2.0)
        records = [EventRecord(wall=wall, source="a") for wall in walls]
        node.send(NodeReport(run_id="job", node="a", incarnation=INCARNATION, events=records))
        node.send(status("a", seq=2, clear=1))  # The requested generation may start.
        await node.until(lambda one: isinstance(one, View) and one.generation == 1 and one.start)
        reply = await reply_to(operator, Query(id=2, what=messages.EVENTS, run_id="job"))
        received = messages.unpack(messages.Events, reply.body).events
        assert [one.wall for one in received[:3]] == [1.0, 2.0, 3.0]
        texts = [one.text for one in received[3:]]
        assert len(texts) == len(set(texts)) == 2


@in_loop
async def test_a_subscriber_that_does_not_read_its_events_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "UNREAD_EVENTS_BYTES_MAX", 100_000)
    monkeypatch.setattr(operators, "GATHER_S", 0.0)
    # This limit must not apply first.
    monkeypatch.setattr(connections, "UNREAD_BYTES_MAX", 1 << 30)
    async with serving(silence_s=3_600.0) as served:
        node, slow, quick = (
            await start_job(served),
            await served.client(""),
            await served.client(""),
        )
        follow = messages.pack(messages.EventsQuery(follow=True))
        for one in (slow, quick):
            one.send(Query(id=1, what=messages.EVENTS, run_id="job", body=follow))
            await one.next()
        peer, _id = next(iter(served.server._operators._subscribers))
        slow.stop_reading(peer._transport)
        for number in range(30):  # 3 MB: more than the kernel holds in its smallest buffers.
            record = EventRecord(wall=float(number), source="a", text="y" * 1_000)
            node.send(
                NodeReport(run_id="job", node="a", incarnation=INCARNATION, events=[record] * 100)
            )
            assert messages.unpack(messages.Events, (await quick.next()).body).events
        assert peer.closed
        assert any("does not read the events" in one for one in served.warnings)
        assert node.connection.is_open
        slow.connection.abort()


@in_loop
async def test_subscriptions_are_limited() -> None:
    async with serving() as served:
        await start_job(served)
        operator = await served.client("")
        follow = messages.pack(messages.EventsQuery(follow=True))
        for number in range(operators.SUBSCRIPTIONS_EACH_MAX):
            operator.send(Query(id=number, what=messages.EVENTS, run_id="job", body=follow))
        last = Query(id=99, what=messages.EVENTS, run_id="job", body=follow)
        assert (await reply_to(operator, last)).refusal == RequestRefusal.TOO_MANY.value


@in_loop
async def test_client_of_a_coordinator_can_send_requests_and_follow_events() -> None:
    async with serving() as served:
        node = await start_job(served)
        place = Endpoint(host="127.0.0.1", port=served.port, run_id="job")
        async with await open_job(place) as client:
            await client.request(Action.RESTART, why="tired")
            received = await node.until(lambda one: isinstance(one, View) and one.generation == 1)
            assert received.why.endswith(": tired")
            assert (await client.status()).generation == 1
            assert [event.text async for event in client.events()][-1].endswith(": tired")
            with pytest.raises(RequestRefused) as refused:
                await client.request(Action.DRAIN, node="a")
            assert refused.value.refusal == RequestRefusal.TOO_FEW_NODES.value


@in_loop
async def test_status_is_one_reply_once_all_connected_nodes_have_reported() -> None:
    async with serving() as served:
        node, operator = await start_job(served), await served.client("")
        for number, wait_s, reports in ((1, 60.0, True), (2, 60.0, False), (3, 0.0, False)):
            body = messages.pack(messages.StatusQuery(watch=True, wait_s=wait_s))
            operator.send(Query(id=number, what=messages.STATUS, run_id="job", body=body))
            if reports:
                await node.until(lambda one: isinstance(one, Watch))
                node.send(NodeReport(run_id="job", node="a", incarnation=INCARNATION, state="here"))
            [job] = jobs_in(await operator.next())
            assert [one.report.state for one in job.nodes if one.report] == ["here"]


@in_loop
async def test_status_waits_for_reports_with_workers_while_another_client_follows_events() -> None:
    async with serving() as served:
        node, follower = await start_job(served), await served.client("")
        body = messages.pack(messages.EventsQuery(follow=True))
        follower.send(Query(id=1, what=messages.EVENTS, run_id="job", body=body))
        await node.until(lambda one: isinstance(one, Watch))
        node.send(NodeReport(run_id="job", node="a", incarnation=INCARNATION, state="then"))
        await soon(lambda: bool(served.server._operators._reports))
        operator = await served.client("")
        body = messages.pack(messages.StatusQuery(watch=True, wait_s=60.0))
        operator.send(Query(id=1, what=messages.STATUS, run_id="job", body=body))
        await node.until(lambda one: isinstance(one, Watch) and one.every_s > 0)
        node.send(NodeReport(run_id="job", node="a", incarnation=INCARNATION, state="now"))
        [job] = jobs_in(await operator.next())
        assert [one.report.state for one in job.nodes if one.report] == ["now"]


@in_loop
async def test_status_waits_no_longer_than_the_client_requests() -> None:
    async with serving() as served:
        _, operator = await start_job(served), await served.client("")
        body = messages.pack(messages.StatusQuery(watch=True, wait_s=0.01))
        operator.send(Query(id=1, what=messages.STATUS, run_id="job", body=body))
        [job] = jobs_in(await operator.next())
        assert [one.report for one in job.nodes] == [None]
        body = messages.pack(messages.StatusQuery(watch=True, wait_s=60.0))
        operator.send(Query(id=2, what=messages.STATUS, run_id="job", body=body))
        await soon(lambda: bool(served.server._operators._status_waits))
        operator.connection.abort()
        await soon(lambda: not served.server._operators._status_waits)
