"""A coordinator's service for control clients ("operators"): requests, status, events, and relayed queries.

::

    operator ── Query ──► coordinator ── Query ──► node        over a separate connection that the
    operator ◄── Reply ── coordinator ◄── Reply ── node        node opens for the first query

Nothing here delays a job. A log stream sends only as much as its reader has granted (`wire.messages.MORE`), so
nothing accumulates here. A subscriber that does not read its events is dropped. Nodes report only while a client
watches, and no more often than the coordinator can process.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.core.coordinator_machine import RequestReceived
from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.phases import JobOutcome
from holdfast.core.protocol import Request
from holdfast.core.requests import RequestRefusal
from holdfast.printable import one_line, quoted
from holdfast.wire import messages
from holdfast.wire.frames import encode_frame
from holdfast.wire.messages import (
    Attach,
    EventKind,
    EventRecord,
    Goodbye,
    NodeReport,
    Query,
    Reply,
    Watch,
    summary_of,
)
from holdfast.wire.wire_errors import BadMessage, FrameTooLarge
from holdfast.wire.wire_limits import STATUS_FRAME_BYTES_MAX

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.coordinator.connections import NodeKey, ServerConnection
    from holdfast.core.coordinator_machine import CoordinatorMachine
    from holdfast.core.protocol import Ack, View
    from holdfast.core.rounds import Change

    JobNode = tuple[str, str]
    """A run id and a node."""

EVENTS_KEPT_MAX = 256  # The limit of each job.
GATHER_S = 0.1  # Events within this time are sent to subscribers together.
SUBSCRIPTIONS_MAX = 4_096
SUBSCRIPTIONS_EACH_MAX = 16
"""The limit of one connection."""
UNREAD_EVENTS_BYTES_MAX = 1024 * 1024
"""The coordinator drops a subscriber with more unread bytes than this."""
WATCH_S = 10.0
"""How long nodes report after a status query; a client that watches repeats the query sooner."""
REPORT_EVERY_S = 1.0
REPORT_S_PER_NODE = 0.002
"""About twenty times the coordinator's work for one report."""
ATTACH_S = 5.0
"""How long a node may take to open its connection for queries."""
STATUS_WAITS_EACH_MAX = 16
"""Status queries of one connection that may wait for reports; further ones get a reply immediately."""
RELAYS_MAX = 1_024
"""The pending queries to nodes that one operator may have."""
ENDED = {
    JobOutcome.SUCCEEDED: "succeeded",
    JobOutcome.FAILED: "failed",
    JobOutcome.STOPPED: "was stopped",
}


class QueryServer(Protocol):
    """The server, as this module uses it."""

    machine: CoordinatorMachine

    def send(self, answers: Sequence[View | Ack]) -> None: ...

    def connection_of(self, key: NodeKey) -> ServerConnection | None:
        """Return the connection of a node."""

    def answer(self, peer: ServerConnection, frame: bytes, *, is_large: bool = False) -> None:
        """Send a reply; a large one may exceed the limit for unread data."""

    def may_query(self, peer: ServerConnection) -> bool:
        """Whether a peer may learn the details of a job."""


class RelayedQuery:
    """A query that was relayed to a node."""

    __slots__ = ("id", "job_node", "operator", "query")

    def __init__(self, operator: ServerConnection, query: Query, job_node: JobNode) -> None:
        self.operator, self.query, self.job_node = operator, query, job_node
        self.id = query.id


class StatusWait:
    """A status query whose reply waits for the reports of nodes."""

    __slots__ = ("id", "missing", "peer", "run_id", "timer")

    def __init__(
        self,
        peer: ServerConnection,
        query_id: int,
        run_id: str,
        missing: set[str],
        timer: asyncio.TimerHandle,
    ) -> None:
        self.peer, self.id, self.run_id = peer, query_id, run_id
        self.missing, self.timer = missing, timer


class Operators:
    """The operators of one coordinator, and the nodes that answer their queries."""

    def __init__(self, host: QueryServer, loop: asyncio.AbstractEventLoop) -> None:
        self._host, self._loop = host, loop
        self._relays: dict[int, RelayedQuery] = {}  # By the id of the query to the node.
        self._by_operator: dict[tuple[ServerConnection, int], int] = {}
        self._relays_made = 0
        self._attached: dict[JobNode, ServerConnection] = {}
        self._awaiting: dict[JobNode, list[int]] = {}  # Relays whose node is not attached yet.
        self._subscribers: dict[tuple[ServerConnection, int], str] = {}  # The job of each.
        self._kept: dict[str, deque[EventRecord]] = {}
        self._fresh: dict[str, list[EventRecord]] = {}
        self._gathering: asyncio.TimerHandle | None = None
        self._seen: dict[str, int] = {}  # How many changes of each job have become events.
        # By job: the end of the watch, the time of the last `Watch` message, and whether it covers workers.
        self._watched: dict[str, tuple[float, float, bool]] = {}
        self._reports: dict[JobNode, NodeReport] = {}
        self._outdated: set[JobNode] = set()
        """Nodes whose report is from before a client began to watch, or lacks their workers."""
        self._status_waits: dict[tuple[ServerConnection, int], StatusWait] = {}

    # Messages.

    def query(self, peer: ServerConnection, query: Query) -> None:
        """Answer, relay or refuse a query."""
        run_id = query.run_id or peer.run_id
        if peer.run_id and run_id != peer.run_id:
            raise BadMessage(
                f"a query about {quoted(repr(run_id))} on the connection of another job"
            )
        if query.what in (messages.MORE, messages.CANCEL):
            self._follow_up(peer, query)
            return
        if query.what == messages.STATUS and not query.node:
            self._status(peer, query, run_id)
        elif peer.read_only and query.what not in messages.READS:
            why = "the token is read-only"
            self._refuse(peer, query.id, RequestRefusal.READ_ONLY, why)
        elif not self._host.may_query(peer):
            why = "without a token, only this coordinator's user may query jobs"
            self._refuse(peer, query.id, RequestRefusal.READ_ONLY, why)
        elif run_id not in self._host.machine.jobs:
            why = f"this coordinator has no job {run_id!r}"
            self._refuse(peer, query.id, RequestRefusal.NO_SUCH_JOB, why)
        elif query.node:
            self._relay(peer, query, (run_id, query.node))
        elif query.what == messages.ACT:
            self._act(peer, query, run_id)
        elif query.what == messages.EVENTS:
            self._subscribe(peer, query, run_id)
        else:
            why = f"this version of Holdfast does not know {query.what!r}"
            self._refuse(peer, query.id, RequestRefusal.UNKNOWN, why)

    def reply(self, peer: ServerConnection, reply: Reply) -> None:
        """Pass a node's reply to its operator."""
        relay = self._relays.get(reply.id)
        if relay is None:
            return  # The operator has disconnected or cancelled.
        if self._attached.get(relay.job_node) is not peer:
            raise BadMessage("a reply to a query for another node")
        self._answer(relay, reply)

    def attach(self, peer: ServerConnection, attach: Attach) -> None:
        """Use this connection for queries to a node from now on."""
        job_node = (attach.run_id, attach.node)
        if attach.run_id != peer.run_id or peer.read_only:
            raise BadMessage(f"an attach of {quoted(attach.node)} on the connection of another job")
        rounds = self._host.machine.jobs.get(attach.run_id)
        if rounds is None or not rounds.knows_incarnation(attach.node, attach.incarnation):
            peer.close(encode_frame(Goodbye(why="the node is not in the job")))
            return
        older = self._attached.get(job_node)
        if older is not None and older is not peer:
            older.close(encode_frame(Goodbye(why="the node has a newer connection")))
            self._detach(older, job_node)
        self._attached[job_node] = peer
        peer.attached = job_node
        for number in self._awaiting.pop(job_node, ()):
            relay = self._relays.get(number)
            if relay is not None:
                self._send_query(peer, number, relay.query)

    def report(self, peer: ServerConnection, report: NodeReport) -> None:
        """Keep the report of a node, while a client watches."""
        key = peer.key
        if key is None or key != (report.run_id, report.node, report.incarnation):
            raise BadMessage(f"a report of {quoted(report.node)} on the connection of another node")
        if report.run_id not in self._watched:
            return
        self._reports[report.run_id, report.node] = report
        self._outdated.discard((report.run_id, report.node))
        for wait in [one for one in self._status_waits.values() if one.run_id == report.run_id]:
            wait.missing.discard(report.node)
            if not wait.missing:
                self._end_status_wait(wait)
        self._note(report.run_id, report.events)

    def disconnected(self, peer: ServerConnection) -> None:
        """Forget a connection, of an operator or of a node."""
        if peer.attached is not None:
            self._detach(peer, peer.attached)
        for key in [key for key in self._subscribers if key[0] is peer]:
            del self._subscribers[key]
        for key in [key for key in self._status_waits if key[0] is peer]:
            self._status_waits.pop(key).timer.cancel()
        for operator, number in [key for key in self._by_operator if key[0] is peer]:
            self._cancel(operator, number)

    # Status.

    def _status(self, peer: ServerConnection, query: Query, run_id: str) -> None:
        if peer.has_unsent_reply:  # A short query can cause a long reply.
            raise BadMessage("it sent another query before it read the reply")
        wanted = messages.unpack(messages.StatusQuery, query.body)
        if wanted.watch and run_id and self._host.may_query(peer):
            self.watch(run_id)
            missing = self._unreported(run_id) if wanted.wait_s else set()
            own = sum(one is peer for one, _ in self._status_waits)
            if missing and own < STATUS_WAITS_EACH_MAX:
                self._await_reports(peer, query.id, run_id, missing, wanted.wait_s)
                return
        self._answer_status(peer, query.id, run_id)

    def _await_reports(
        self, peer: ServerConnection, query_id: int, run_id: str, missing: set[str], wait_s: float
    ) -> None:
        key = (peer, query_id)
        if key in self._status_waits:
            raise BadMessage("a query with the id of a pending query")

        def end() -> None:
            self._end_status_wait(self._status_waits[key])

        timer = self._loop.call_later(wait_s, end)
        self._status_waits[key] = StatusWait(peer, query_id, run_id, missing, timer)

    def _end_status_wait(self, wait: StatusWait) -> None:
        wait.timer.cancel()
        del self._status_waits[wait.peer, wait.id]
        self._answer_status(wait.peer, wait.id, wait.run_id)

    def _unreported(self, run_id: str) -> set[str]:
        """Return the connected nodes of a job that have not reported since a client started to watch it."""
        rounds = self._host.machine.jobs.get(run_id)
        nodes = rounds.job.nodes if rounds is not None else {}
        return {
            name
            for name, node in nodes.items()
            if ((run_id, name) not in self._reports or (run_id, name) in self._outdated)
            and self._host.connection_of((run_id, name, node.info.incarnation)) is not None
        }

    def _answer_status(self, peer: ServerConnection, query_id: int, run_id: str) -> None:
        frame = status_frame(
            self._host.machine,
            query_id,
            run_id,
            self._reports,
            brief=not self._host.may_query(peer),
        )
        self._host.answer(peer, frame, is_large=True)

    def watch(self, run_id: str, *, workers: bool = True) -> None:
        """Have the nodes of a job report for a while."""
        rounds = self._host.machine.jobs.get(run_id)
        if rounds is None:
            return
        now = self._loop.time()
        until, since, with_workers = self._watched.get(run_id, (0.0, -WATCH_S, False))
        workers = workers or (with_workers and now < until)
        if workers and (now - since >= WATCH_S or not with_workers):
            # Until now, the nodes reported only with their events, or not at all.
            self._outdated.update(one for one in self._reports if one[0] == run_id)
        if now - since >= WATCH_S / 2 or workers != with_workers:
            since = now
            every_s = max(REPORT_EVERY_S, REPORT_S_PER_NODE * len(rounds.job.nodes))
            frame = encode_frame(Watch(for_s=WATCH_S, every_s=every_s if workers else 0.0))
            for name, node in rounds.job.nodes.items():
                peer = self._host.connection_of((run_id, name, node.info.incarnation))
                if peer is not None:
                    peer.post(frame)
        self._watched[run_id] = (now + WATCH_S, since, workers)

    def sweep(self, now: float) -> None:
        """Forget reports that no client watches any more, and those of lost jobs and nodes."""
        jobs = self._host.machine.jobs
        for run_id in [*{run_id for run_id in self._subscribers.values() if run_id in jobs}]:
            self.watch(run_id, workers=False)
        self._watched = {
            one: watched
            for one, watched in self._watched.items()
            if one in jobs and now < watched[0]
        }
        self._reports = {
            job_node: report
            for job_node, report in self._reports.items()
            if job_node[0] in self._watched and job_node[1] in jobs[job_node[0]].job.nodes
        }
        self._outdated &= self._reports.keys()
        for run_id in [one for one in self._seen if one not in jobs]:
            del self._seen[run_id]
            self._kept.pop(run_id, None)
            self._fresh.pop(run_id, None)

    @property
    def is_busy(self) -> bool:
        """Whether `sweep` must run more often than the sweep of connections."""
        return bool(self._watched or self._subscribers)

    # Requests.

    def _act(self, peer: ServerConnection, query: Query, run_id: str) -> None:
        request = messages.unpack(Request, query.body)
        machine = self._host.machine
        self._host.send(machine.handle(self._loop.time(), RequestReceived(run_id, request)))
        self.changed([run_id])
        answer = machine.answer_to(run_id, request.id)
        self._post(peer, Reply(id=query.id, refusal=answer.refusal, why=answer.why))

    # Events.

    def changed(self, run_ids: Iterable[str]) -> None:
        """Record the changes of these jobs as events."""
        for run_id in run_ids:
            rounds = self._host.machine.jobs.get(run_id)
            if rounds is None:
                continue
            new = min(rounds.changes - self._seen.get(run_id, 0), len(rounds.history))
            self._seen[run_id] = rounds.changes
            if new <= 0:
                continue
            wall = time.time()
            self._note(run_id, [_event_of(wall, one) for one in [*rounds.history][-new:]])
            if rounds.job.outcome is not None:
                self.publish()  # Immediately: the agents that relay it may exit at any moment.

    def _note(self, run_id: str, events: Sequence[EventRecord]) -> None:
        if not events:
            return
        self._kept.setdefault(run_id, deque(maxlen=EVENTS_KEPT_MAX)).extend(events)
        if run_id in self._subscribers.values():
            self._fresh.setdefault(run_id, []).extend(events)
            if self._gathering is None:
                self._gathering = self._loop.call_later(GATHER_S, self.publish)

    def _subscribe(self, peer: ServerConnection, query: Query, run_id: str) -> None:
        follow = messages.unpack(messages.EventsQuery, query.body).follow
        own = sum(one is peer for one, _ in self._subscribers) if follow else 0
        if follow and (
            len(self._subscribers) >= SUBSCRIPTIONS_MAX or own >= SUBSCRIPTIONS_EACH_MAX
        ):
            why = f"the coordinator has {len(self._subscribers)} subscribers, {own} on this connection"
            self._refuse(peer, query.id, RequestRefusal.TOO_MANY, why)
            return
        for body in _reply_bodies([*self._kept.get(run_id, ())]):
            self._post(peer, Reply(id=query.id, body=body, last=False))
        if not follow:
            self._post(peer, Reply(id=query.id))
        else:
            self._subscribers[peer, query.id] = run_id
            self.watch(run_id, workers=False)

    def publish(self) -> None:
        """Send new events to subscribers."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        fresh, self._fresh = self._fresh, {}
        for run_id, events in fresh.items():
            bodies = _reply_bodies(events)
            for (peer, number), job in [*self._subscribers.items()]:
                if job != run_id:
                    continue
                if peer.unread_replies_bytes > UNREAD_EVENTS_BYTES_MAX:
                    why = "it does not read the events that it subscribed to"
                    peer.reject(why, encode_frame(Goodbye(why=why)))
                    continue
                for body in bodies:
                    self._post(peer, Reply(id=number, body=body, last=False))

    # Queries to nodes.

    def _relay(self, peer: ServerConnection, query: Query, job_node: JobNode) -> None:
        rounds = self._host.machine.jobs[job_node[0]]
        node = rounds.job.nodes.get(job_node[1])
        agent = None
        if node is not None:
            agent = self._host.connection_of((*job_node, node.info.incarnation))
        pending = sum(operator is peer for operator, _ in self._by_operator)
        if node is None:
            why = f"{job_node[1]!r} is not a node of the job"
            self._refuse(peer, query.id, RequestRefusal.NO_SUCH_NODE, why)
        elif agent is None:
            why = f"{job_node[1]} is not connected"
            self._refuse(peer, query.id, RequestRefusal.NO_ANSWER, why)
        elif pending >= RELAYS_MAX or (peer, query.id) in self._by_operator:
            why = f"{pending} queries are pending already"
            self._refuse(peer, query.id, RequestRefusal.TOO_MANY, why)
        else:
            self._relays_made += 1
            number = self._relays_made
            self._relays[number] = RelayedQuery(peer, query, job_node)
            self._by_operator[peer, query.id] = number
            attached = self._attached.get(job_node)
            if attached is not None:
                self._send_query(attached, number, query)
                return
            if job_node not in self._awaiting:
                agent.post(encode_frame(Watch(attach=True)))
                self._loop.call_later(ATTACH_S, self._give_up, job_node)
            self._awaiting.setdefault(job_node, []).append(number)

    def _give_up(self, job_node: JobNode) -> None:
        why = f"{job_node[1]} did not respond within {ATTACH_S:g} s"
        self._fail(self._awaiting.pop(job_node, []), why)

    def _detach(self, peer: ServerConnection, job_node: JobNode) -> None:
        peer.attached = None
        if self._attached.get(job_node) is peer:
            del self._attached[job_node]
            pending = [number for number, one in self._relays.items() if one.job_node == job_node]
            self._fail(pending, f"the connection to {job_node[1]} was lost")

    def _fail(self, numbers: Iterable[int], why: str) -> None:
        for number in numbers:
            relay = self._relays.get(number)
            if relay is not None:
                refusal = RequestRefusal.NO_ANSWER.value
                self._answer(relay, Reply(id=number, refusal=refusal, why=why))

    def _answer(self, relay: RelayedQuery, reply: Reply) -> None:
        peer, number = relay.operator, reply.id
        if reply.last:
            del self._relays[number]
            del self._by_operator[peer, relay.id]
        self._post(peer, msgspec.structs.replace(reply, id=relay.id))

    def _follow_up(self, peer: ServerConnection, query: Query) -> None:
        """Relay a message about a pending query."""
        if query.what == messages.CANCEL:
            self._subscribers.pop((peer, query.id), None)
            if (peer, query.id) in self._by_operator:
                self._cancel(peer, query.id)
            return
        number = self._by_operator.get((peer, query.id))
        attached = self._attached.get(self._relays[number].job_node) if number is not None else None
        if attached is not None and number is not None:
            self._send_query(attached, number, query)

    def _cancel(self, peer: ServerConnection, query_id: int) -> None:
        number = self._by_operator.pop((peer, query_id))
        relay = self._relays.pop(number)
        attached = self._attached.get(relay.job_node)
        if attached is not None:
            self._send_query(attached, number, Query(id=query_id, what=messages.CANCEL))

    def _send_query(self, node: ServerConnection, number: int, query: Query) -> None:
        relayed = Query(id=number, what=query.what, body=query.body)
        self._host.answer(node, encode_frame(relayed))

    # Replies.

    def _refuse(
        self, peer: ServerConnection, query_id: int, refusal: RequestRefusal, why: str
    ) -> None:
        why = one_line(why, WHY_CHARS_MAX)
        self._post(peer, Reply(id=query_id, refusal=refusal.value, why=why))

    def _post(self, peer: ServerConnection, reply: Reply) -> None:
        self._host.answer(peer, encode_frame(reply))


def status_frame(
    machine: CoordinatorMachine,
    query_id: int,
    run_id: str,
    reports: Mapping[JobNode, NodeReport],
    *,
    brief: bool,
) -> bytes:
    """Return the frame of a reply with the state of one job, or of all jobs for an empty run id.

    The state is brief if `brief` is set, or if the frame would be too large.
    """
    chosen = [rounds for one, rounds in machine.jobs.items() if run_id in ("", one)]
    jobs = messages.JobSummaries(jobs=[summary_of(one, reports, brief=brief) for one in chosen])
    reply = Reply(id=query_id, body=messages.pack(jobs))
    try:
        return encode_frame(reply, STATUS_FRAME_BYTES_MAX)
    except FrameTooLarge:
        if brief:
            raise
        return status_frame(machine, query_id, run_id, reports, brief=True)


def _event_of(wall: float, change: Change) -> EventRecord:
    text, kind, outcome = change.text, EventKind.JOB_CHANGED, ""
    if change.outcome is not None:
        kind, outcome = EventKind.JOB_ENDED, change.outcome.value
        text = f"the job {ENDED[change.outcome]}: {change.why}"
    return EventRecord(
        wall=wall,
        kind=kind,
        generation=change.generation,
        is_problem=change.is_problem,
        outcome=outcome,
        text=one_line(text, WHY_CHARS_MAX),
    )


def _reply_bodies(events: list[EventRecord]) -> list[bytes]:
    """Return events as the bodies of replies, ordered by their nodes' time of day."""
    events = sorted(events, key=lambda one: one.wall)
    size = messages.EVENTS_AT_ONCE
    return [
        messages.pack(messages.Events(events=events[at : at + size]))
        for at in range(0, len(events), size)
    ]
