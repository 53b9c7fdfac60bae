"""The coordinator's server: it passes messages between the nodes and the machine in `core.coordinator_machine`.

The machine decides everything about jobs. The server determines which node sent a message, passes the message to
the machine, and sends each answer over the newest connection of its node. In each iteration of the loop, it
writes all data for one node at once.

Use: in a running loop, `CoordinatorServer(listener, ...)` serves immediately. `drain` waits until nodes have
received their job's outcome. `stop` closes everything. Nothing here blocks or raises because of a peer: a faulty
peer loses only its own connection.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.coordinator.admission import HALF_OPEN_MAX, HANDSHAKE_S, Acceptor
from holdfast.coordinator.connections import (
    READ_BYTES,
    NodeKey,
    ServerConnection,
    UnreadReplies,
)
from holdfast.coordinator.job_stores import JobStores
from holdfast.coordinator.operators import Operators
from holdfast.coordinator.state_file import WriteAhead
from holdfast.core.coordinator_machine import (
    ConnectionClosed,
    CoordinatorMachine,
    RecordFound,
    StatusReceived,
)
from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.machine import TICK
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import Ack, Heartbeat, Status, View
from holdfast.core.quotas import CONNECTIONS_MAX, UNREAD_REPLIES_BYTES_MAX, AddressShares
from holdfast.core.rounds import JobPhase
from holdfast.net import addresses
from holdfast.net.deadline_timer import DeadlineTimer
from holdfast.net.endpoints import format_endpoint
from holdfast.net.listening import descriptor_limit
from holdfast.net.peer_user import NOT_REPORTED, UNKNOWN, is_local_user, is_own_user
from holdfast.printable import one_line, quoted
from holdfast.wire.frames import encode_frame
from holdfast.wire.handshake import is_job_token
from holdfast.wire.messages import (
    ALL_LEFT,
    Attach,
    Goodbye,
    Message,
    NodeReport,
    Query,
    Reply,
    StoreCall,
    StoreResult,
)
from holdfast.wire.wire_errors import BadMessage, HandshakeRefused

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.coordinator.round_records import RoundRecords
    from holdfast.coordinator.state_file import StateFile
    from holdfast.core.rounds import Change
    from holdfast.net.tls import TlsFiles, TlsToken
    from holdfast.wire.messages import Hello

SPARE_DESCRIPTORS = 128  # The descriptors that this process needs besides connections.
IDLE_S = 300.0  # Nodes send a heartbeat every second, so a connection that is silent for this long is dead.
SWEEP_S = 30.0
WATCHED_SWEEP_S = 4.0
STOP_S = 1.0  # The time to send queued data when the server stops.
WARNINGS_S = 10.0  # At most one line about faulty peers in this time.
STOPPING = "the coordinator is shutting down"
READ_ONLY_MESSAGES = (Query, Goodbye)


class CoordinatorServer:
    """A coordinator behind one listening socket.

    With the token of one job it serves only that job: `run_id`, or if that is empty, the job of the first client
    that proves the token. Agents may also dial `advertised_port`, which is forwarded here. `on_node` receives job,
    node and address of each node that connects. A successor continues from the `state` file, or else waits for the
    nodes in the `records`.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        silence_s: float,
        grace_s: float,
        token: bytes | None = None,
        run_id: str = "",
        advertised_port: int | None = None,
        tls: ssl.SSLContext | None = None,
        connections_max: int = CONNECTIONS_MAX,
        half_open_max: int = HALF_OPEN_MAX,
        handshake_s: float = HANDSHAKE_S,
        follows_another: bool = False,
        endpoint_index: int = 0,
        only_job: str = "",
        host: str = "",
        recover_s: float | None = None,
        state: StateFile | None = None,
        records: RoundRecords | None = None,
        on_change: Callable[[str, str], None] | None = None,
        on_node: Callable[[str, str, str], None] | None = None,
        warn: Callable[[str], None] = console.warning,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        descriptors = _descriptors_max()
        half_open_max = max(1, min(half_open_max, descriptors // 4))
        self._connections_max = min(connections_max, descriptors - half_open_max)
        self._no_more = f"the coordinator already has {self._connections_max} connections"
        if self._connections_max < connections_max:
            self._no_more += ", the limit of `ulimit -n` on its host: raise it there"
        self.machine = CoordinatorMachine(
            self._loop.time(),
            silence_s=silence_s,
            grace_s=grace_s,
            nodes_max=self._connections_max,
            follows_another=follows_another,
            endpoint_index=endpoint_index,
            saved_jobs=state.saved_jobs if state is not None else None,
            recover_s=recover_s,
            fence_floor=int(time.time() * 1000),  # Above the fences of all previous coordinators.
            host=host,
            name=f"{os.uname().nodename}-{os.getpid()}",
        )
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._write_ahead: WriteAhead | None = None
        if state is not None:
            self._write_ahead = WriteAhead(state, self.machine, self._send_now, self._warn_rarely)
        self._records = records if state is None else None
        self._stores = JobStores()
        self._operators = Operators(self, self._loop)
        self._operators_swept_at = self._loop.time()
        self._token = token
        self._endpoint_index = endpoint_index
        self._token_job = run_id  # The job that the token is for; empty until a client proves it.
        self._only_job = only_job
        self._port: int = listener.getsockname()[1]
        self._advertised_port = advertised_port
        self._tls = tls
        self._on_change, self._on_node = on_change, on_node
        self._warn = warn
        self._shares = AddressShares(self._connections_max)
        self._unread = UnreadReplies(UNREAD_REPLIES_BYTES_MAX)
        self._handshake_s = handshake_s
        self._peers: set[ServerConnection] = set()
        self._by_key: dict[NodeKey, ServerConnection] = {}
        # Nodes that know their job's end and have disconnected.
        self._knows_end: set[NodeKey] = set()
        self._to_flush: list[ServerConnection] = []
        self._changed: set[str] = set()
        self._last_change: dict[str, Change] = {}
        self._batch: asyncio.Handle | None = None
        self._timer = DeadlineTimer(self._loop, self._tick)
        self._swept_at = self._loop.time()
        self._warned_at = -WARNINGS_S
        self._not_shown = 0
        self._peers_changed = asyncio.Event()
        addresses.use_small_segments(listener)
        self._acceptor = Acceptor(
            listener,
            self._make_peer,
            lambda why: self._warn_rarely(f"cannot accept a connection: {why}"),
            half_open_max=half_open_max,
            handshake_s=handshake_s,
            checks_user=token is None,  # Otherwise the token authenticates clients.
        )

    @property
    def connections(self) -> int:
        """The number of connections, including unfinished ones."""
        return len(self._peers)

    # For connections.

    def connected(self, peer: ServerConnection) -> None:
        peer.received_at = self._loop.time()
        self._peers.add(peer)
        if self._tls is not None:
            self._acceptor.spawn(peer.begin_tls(self._tls, self._handshake_s))
        else:
            peer.use()
        self._batch_soon()

    def check_hello(self, peer: ServerConnection, hello: Hello) -> None:
        """Count an authenticated connection, or refuse it."""
        self._acceptor.finished(peer)
        if hello.run_id and hello.endpoint_index != self._endpoint_index:
            if self._endpoint_index:  # The first endpoint also receives probes, which are harmless.
                self._warn_rarely(
                    f"an agent of the job {quoted(repr(hello.run_id))} at {peer.address} lists this "
                    f"machine as entry {hello.endpoint_index + 1} of --rdzv-endpoint, but here it is entry "
                    f"{self._endpoint_index + 1}: set the same list in the same order"
                )
            why = f"it runs at entry {self._endpoint_index + 1} of the list of endpoints, not at {hello.endpoint_index + 1}"
            # This may be a regular probe by a coordinator at an earlier endpoint.
            raise HandshakeRefused(why, permanent=False, is_probe=True)
        if self._only_job and hello.run_id not in ("", self._only_job):
            raise HandshakeRefused(
                f"the coordinator took over only the job {quoted(repr(self._only_job))}, not "
                f"{quoted(repr(hello.run_id))}",
                permanent=False,
            )
        if self._token is None:
            if not is_own_user(peer.user):
                why = NOT_REPORTED if peer.user == UNKNOWN else f"not uid {peer.user}"
                raise HandshakeRefused(
                    f"without a token the coordinator serves only its own user (uid {os.geteuid()}), "
                    f"{why}: set HOLDFAST_TOKEN or HOLDFAST_TOKEN_FILE to the same value on both sides"
                )
        else:
            self._check_endpoint_and_job(self._token, hello)
        if len(self._peers) - len(self._acceptor) > self._connections_max:
            raise HandshakeRefused(self._no_more, permanent=False)
        if self._shares.is_over(peer.network):
            raise HandshakeRefused(
                f"the coordinator has few connections left, and {peer.network} has "
                f"{self._shares.taken_by(peer.network)} already",
                permanent=False,
            )
        self._shares.take(peer.network)
        peer.has_share = True

    def _check_endpoint_and_job(self, token: bytes, hello: Hello) -> None:
        """Refuse an authenticated client that connects to another port, or whose job this coordinator does not serve."""
        if hello.port not in (self._port, self._advertised_port):
            # Another program may relay the connection. Host names may legitimately differ; ports may not.
            raise HandshakeRefused(
                f"the client connects to port {hello.port}, but the coordinator listens on {self._port}: "
                f"if that port is forwarded, start the coordinator with --rdzv-conf "
                f"advertised_port={hello.port}"
            )
        if is_job_token(token):
            self._token_job = self._token_job or hello.run_id
            if hello.run_id != self._token_job or not hello.run_id:
                raise HandshakeRefused(
                    f"the coordinator has the token of {quoted(repr(self._token_job))} and serves no "
                    "other job"
                )

    def received(self, peer: ServerConnection, message: Message) -> None:
        now = peer.received_at = self._loop.time()
        kind = type(message)
        if peer.read_only and kind not in READ_ONLY_MESSAGES:
            raise BadMessage(f"a {kind.__name__} from a client with a read-only token")
        if kind is Heartbeat or kind is Status:
            self._received_from_node(now, peer, message)  # type: ignore[arg-type]
        elif kind is StoreCall:
            self._store_call(now, peer, message)  # type: ignore[arg-type]
        elif kind is Query:
            self._operators.query(peer, message)  # type: ignore[arg-type]
            self._batch_soon()
        elif kind is Reply:
            self._operators.reply(peer, message)  # type: ignore[arg-type]
        elif kind is NodeReport:
            self._operators.report(peer, message)  # type: ignore[arg-type]
        elif kind is Attach:
            self._operators.attach(peer, message)  # type: ignore[arg-type]
        elif kind is Goodbye:
            peer.close()
        else:
            raise BadMessage(f"a {kind.__name__}, which a coordinator does not accept")

    def wants_flush(self, peer: ServerConnection) -> None:
        self._to_flush.append(peer)
        self._batch_soon()

    def report_fault(self, peer: ServerConnection, why: str) -> None:
        self._warn_rarely(
            f"closed a connection from {peer.address}: {one_line(why, WHY_CHARS_MAX)}"
        )

    def disconnected(self, peer: ServerConnection) -> None:
        """Forget a connection; unless its node reconnects soon, the node is lost."""
        self._peers.discard(peer)
        self._acceptor.finished(peer)
        if peer.has_share:
            peer.has_share = False
            self._shares.release(peer.network)
        self._unread.forget(peer)
        self._stores.forget_caller(peer)
        self._operators.disconnected(peer)
        key = peer.key
        if key is not None and self._by_key.get(key) is peer:
            del self._by_key[key]
            if peer.knows_end:
                self._knows_end.add(key)
            self._send(self.machine.handle(self._loop.time(), ConnectionClosed(*key)))
        self._peers_changed.set()
        self._batch_soon()

    # Nodes.

    def _received_from_node(
        self, now: float, peer: ServerConnection, message: Status | Heartbeat
    ) -> None:
        if type(message) is Heartbeat:
            key = (message.run_id, message.node, message.incarnation)
        else:
            assert type(message) is Status
            key = (message.run_id, message.info.node, message.info.incarnation)
        if peer.key != key or key not in self._by_key:
            self._bind_node(now, peer, key)  # A bound connection needs no further check.
        if isinstance(message, Status):
            if self._records is not None and message.run_id not in self.machine.jobs:
                self._recall(now, self._records, message.run_id)
            reached = peer.local_address if peer.is_remote else ""
            answers = self.machine.handle(now, StatusReceived(message, peer.address, reached))
        else:
            answers = self.machine.handle(now, message)
        self._send(answers)
        self._batch_soon()

    def _recall(self, now: float, records: RoundRecords, run_id: str) -> None:
        saved = records.read(run_id)
        if saved is not None:
            self.machine.handle(now, RecordFound(saved))

    def _bind_node(self, now: float, peer: ServerConnection, key: NodeKey) -> None:
        """Use this connection for a node from now on, and close an older one."""
        if key[0] != peer.run_id:
            raise BadMessage(
                f"a message of the job {quoted(repr(key[0]))} on the connection of another job"
            )
        if peer.node not in ("", key[1]):
            raise BadMessage(f"a message of {quoted(key[1])} on the connection of {peer.node}")
        peer.node = key[1]
        if peer.key is not None and self._by_key.get(peer.key) is peer:
            # It rejoined, so its previous incarnation has no connection.
            del self._by_key[peer.key]
            self._send(self.machine.handle(now, ConnectionClosed(*peer.key)))
        older = self._by_key.get(key)
        self._by_key[key] = peer
        peer.key = key
        self._knows_end.discard(key)
        if self._on_node is not None:
            self._on_node(key[0], key[1], peer.address)
        if older is not None:
            older.key = None
            older.close(encode_frame(Goodbye(why="the node has a newer connection")))

    def _send(self, answers: Sequence[View | Ack]) -> None:
        if self._records is not None:
            self._records.update(self.machine, answers)
        if self._write_ahead is not None:
            self._write_ahead.send(answers)
        else:
            self._send_now(answers)

    def _send_now(self, answers: Sequence[View | Ack]) -> None:
        by_key = self._by_key
        for answer in answers:
            peer = by_key.get((answer.run_id, answer.node, answer.incarnation))
            if type(answer) is View:
                self._changed.add(answer.run_id)
                if peer is None:
                    continue
                if answer.role is NodeRole.CLOSED and answer.final:
                    peer.knows_end = True
                peer.post(encode_frame(answer), "view")
            elif peer is not None:
                peer.post(encode_frame(answer))

    def _is_member(self, peer: ServerConnection) -> bool:
        """Whether the node of a connection is in its job."""
        rounds = self.machine.jobs.get(peer.run_id)
        key = peer.key
        if rounds is None or key is None:
            return False
        return rounds.knows_incarnation(*key[1:])

    # Calls and queries.

    def _store_call(self, now: float, peer: ServerConnection, call: StoreCall) -> None:
        if call.run_id != peer.run_id:
            raise BadMessage(
                f"a call to the store of {quoted(repr(call.run_id))} on the connection of another job"
            )
        if not self._is_member(peer):
            why = f"only nodes of the job {quoted(repr(call.run_id))} may use its store"
            self._answer_store_call(peer, encode_frame(StoreResult(id=call.id, ok=False, why=why)))
            return
        self._answer_store_calls(self._stores.call(now, peer, call))
        self._batch_soon()

    def _answer_store_calls(self, answers: Iterable[tuple[object, StoreResult]]) -> None:
        for peer, result in answers:
            assert isinstance(peer, ServerConnection)
            self._answer_store_call(peer, encode_frame(result))

    # For operators.

    def may_query(self, peer: ServerConnection) -> bool:
        """Whether a peer has proven a token, belongs to this user, or is a node of the job."""
        return self._token is not None or is_local_user(peer.user) or self._is_member(peer)

    def send(self, answers: Sequence[View | Ack]) -> None:
        self._send(answers)

    def connection_of(self, key: NodeKey) -> ServerConnection | None:
        return self._by_key.get(key)

    def answer(self, peer: ServerConnection, frame: bytes, *, is_large: bool = False) -> None:
        """Send a reply in one piece: this connection has no heartbeats to delay."""
        if is_large:
            peer.post_reply(frame)
        else:
            peer.post_whole(frame)
        self._drop_slow_readers(peer)

    def _answer_store_call(self, peer: ServerConnection, frame: bytes) -> None:
        peer.post(frame)
        self._drop_slow_readers(peer)

    def _drop_slow_readers(self, peer: ServerConnection) -> None:
        """Close the slowest readers if all connections together leave too much unread."""
        for one in self._unread.note(peer):
            one.reject("it does not read the replies to its requests")

    # Batches and timers.

    def _batch_soon(self) -> None:
        """Schedule the end of this batch, after everything that is ready now has been read."""
        if self._batch is None:
            self._batch = self._loop.call_soon(self._end_batch)

    def _end_batch(self) -> None:
        self._batch = None
        peers, self._to_flush = self._to_flush, []
        for peer in peers:
            peer.flush()
        if self._changed:
            self._operators.changed(self._changed)
        if self._on_change is not None:
            self._report_changes(self._on_change)
        self._changed.clear()
        self._schedule()

    def _schedule(self) -> None:
        now = self._loop.time()
        deadlines = [
            self.machine.next_deadline(now),
            self._stores.next_deadline(),
            self._acceptor.next_deadline(),
            self._swept_at + SWEEP_S if self._peers else None,
            self._operators_swept_at + WATCHED_SWEEP_S if self._operators.is_busy else None,
        ]
        self._timer.set(min((one for one in deadlines if one is not None), default=None))

    def _tick(self) -> None:
        now = self._loop.time()
        self._acceptor.sweep(now)
        self._send(self.machine.handle(now, TICK))
        self._answer_store_calls(self._stores.tick(now))
        self._answer_store_calls(self._stores.drop_others(self.machine.jobs))
        if now - self._operators_swept_at >= WATCHED_SWEEP_S:
            self._operators_swept_at = now
            self._operators.sweep(now)
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._close_idle(now)
            if self._records is not None:
                self._records.refresh()
            jobs = self.machine.jobs
            self._knows_end = {key for key in self._knows_end if key[0] in jobs}
            self._last_change = {
                one: last for one, last in self._last_change.items() if one in jobs
            }
        self._peers_changed.set()
        self._batch_soon()

    def _close_idle(self, now: float) -> None:
        for peer in [one for one in self._peers if now - one.received_at >= IDLE_S]:
            if peer.closed:
                peer.abort()  # It was closed with unsent data that the peer never read.
            else:
                peer.reject(f"no message for {IDLE_S:g} s")

    def _report_changes(self, report: Callable[[str, str], None]) -> None:
        for run_id in self._changed:
            rounds = self.machine.jobs.get(run_id)
            if rounds is None or not rounds.history:
                self._last_change.pop(run_id, None)
                continue
            change = rounds.history[-1]
            if self._last_change.get(run_id) is not change:
                self._last_change[run_id] = change
                report(run_id, change.text)

    def _warn_rarely(self, what: str) -> None:
        now = self._loop.time()
        if now - self._warned_at < WARNINGS_S:
            self._not_shown += 1
            return
        more = f" ({self._not_shown} more like this were not shown)" if self._not_shown else ""
        self._warned_at, self._not_shown = now, 0
        self._warn(f"coordinator: {what}{more}")

    # The end.

    def nodes_of_other_jobs(self, run_id: str) -> int:
        """Return how many nodes of other unfinished jobs are connected."""
        unfinished = {
            one
            for one, rounds in self.machine.jobs.items()
            if one != run_id and rounds.job.phase is not JobPhase.CLOSED
        }
        return sum(key[0] in unfinished for key in self._by_key)

    async def drain(self, limit_s: float) -> bool:
        """Wait until all nodes of finished jobs know the outcome and have disconnected; return whether they have.

        While the machine holds a failure, its job may be about to finish, so this waits for that too.
        """
        deadline = self._loop.time() + limit_s
        while not self._drained():
            self._peers_changed.clear()
            rest = deadline - self._loop.time()
            if rest <= 0:
                return False
            try:
                await asyncio.wait_for(self._peers_changed.wait(), rest)
            except TimeoutError:
                return False
        return True

    def _drained(self) -> bool:
        if self.machine.is_holding_failure:
            return False
        for run_id, rounds in self.machine.jobs.items():
            job = rounds.job
            if job.phase is not JobPhase.CLOSED:
                continue
            for node in job.nodes.values():
                key = (run_id, node.info.node, node.info.incarnation)
                if key not in self._knows_end:
                    return False
        return True

    async def stop(self, why: str = STOPPING) -> None:
        """Send a goodbye to every peer, and close everything."""
        self._acceptor.close()
        self._operators.changed(self._changed)
        self._operators.publish()
        for peer in tuple(self._peers):
            ended = self._end_of(peer.run_id) if why == STOPPING else None
            peer.close(encode_frame(ended or Goodbye(why=why)))
        deadline = self._loop.time() + STOP_S
        while self._peers and self._loop.time() < deadline:
            self._peers_changed.clear()
            try:
                await asyncio.wait_for(self._peers_changed.wait(), deadline - self._loop.time())
            except TimeoutError:
                break
        for peer in tuple(self._peers):
            peer.abort()
        await asyncio.sleep(0)  # Aborted connections close in the next iteration.
        self._timer.cancel()
        if self._batch is not None:
            self._batch.cancel()
        if self._write_ahead is not None:
            self._write_ahead.close()
        if self._records is not None:
            self._records.close(self.machine)

    def _end_of(self, run_id: str) -> Goodbye | None:
        """Return the end of a job; None if it may continue. Without a run id, it is that of the only job."""
        jobs = [one.job for name, one in self.machine.jobs.items() if run_id in ("", name)]
        if len(jobs) != 1:
            return None
        [job] = jobs
        if job.outcome is not None:
            return Goodbye(why=one_line(job.why, WHY_CHARS_MAX), outcome=job.outcome.value)
        if all(node.phase is NodePhase.LEAVING for node in job.nodes.values()):
            return Goodbye(why=ALL_LEFT, outcome=JobOutcome.STOPPED.value)
        return None

    def _make_peer(self, address: str, local_address: str) -> ServerConnection:
        return ServerConnection(self, self._token, address, local_address)


def _descriptors_max() -> int:
    """Return how many connections this process may have, including unfinished handshakes."""
    return max(16, descriptor_limit() - SPARE_DESCRIPTORS)


_warned = threading.Event()


def warn_if_open(
    listener: socket.socket, token: bytes | None, tls: TlsFiles | TlsToken | None, host: str
) -> None:
    """Warn once that a coordinator without a token accepts every client that can reach it."""
    address, port = listener.getsockname()[:2]
    if token is not None or addresses.is_loopback(str(address)) or _warned.is_set():
        return
    if tls is not None and tls.ca is not None:
        return  # It requires a certificate.
    _warned.set()
    console.warning(
        f"the coordinator at {format_endpoint(host, port)} requires no token (auth=none): anyone "
        "who can reach the port can join or disrupt the job"
    )
