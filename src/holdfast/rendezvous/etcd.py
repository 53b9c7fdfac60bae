"""The rendezvous on etcd: `--rdzv-backend etcd`, and `etcd-v2` as another name for it.

To an agent it is a rendezvous at a coordinator, without one: the nodes' leases say who is there, one
of the nodes leads, and if it is lost another one does after the time of a lease. No other node
depends on this process, so it may end at any time.

In this order: the settings of the client, from `--rdzv-endpoint` and `--rdzv-conf`; the session of
`core.etcd.session`, performed; the agent's connection, with its stores; the handler; and a reader of
jobs for people.
"""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from typing import TYPE_CHECKING
from urllib.parse import unquote

from holdfast import console
from holdfast.coordinator.agent_connection import AgentConnection
from holdfast.coordinator.connect import ConnectFailed
from holdfast.coordinator.control_port import OFF, ControlAccess, explicit_token, open_control
from holdfast.core.etcd.calls import (
    Get,
    KeysChanged,
    ReportUnreadable,
    RequestAnswered,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    WatchEnded,
)
from holdfast.core.etcd.keys import (
    JobKeys,
    JobRecord,
    NodeRecord,
    Presence,
    get_prefix,
    read_leader,
    unpack,
)
from holdfast.core.etcd.session import (
    DeliverMessage,
    DropRequested,
    EtcdSession,
    LeaveRequested,
    MessageSubmitted,
    OpenRequested,
    ReportClosed,
    ReportLeft,
    ReportOpened,
    SessionEvent,
)
from holdfast.core.etcd.witness import (
    WATCHED_MAX,
    ConnectPresence,
    DropPresence,
    PresenceClosed,
    PresenceRefused,
    PresenceSeen,
    PresenceUnknown,
)
from holdfast.core.machine import TICK
from holdfast.core.session import SessionTimeouts
from holdfast.errors import HoldfastError, UsageError
from holdfast.etcd.settings import NAMES, EtcdSettings, parse_endpoints
from holdfast.etcd.store import EtcdStore
from holdfast.net import addresses, listening
from holdfast.net.endpoints import format_endpoint
from holdfast.net.presence import PresencePort, PresenceWatcher, Sight
from holdfast.rendezvous import config
from holdfast.rendezvous.config import value_of
from holdfast.rendezvous.coordinator import CoordinatorHandler
from holdfast.wire.messages import NodeReport, StoreCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Change, Problem
    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import (
        Ack,
        ControlPort,
        Heartbeat,
        NodeInfo,
        RefusalReason,
        Status,
        View,
    )
    from holdfast.etcd.async_client import AsyncEtcdClient, WatchHandle
    from holdfast.etcd.sync_client import EtcdClient
    from holdfast.rendezvous.config import RendezvousParameters
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary


USER_VARIABLE, PASSWORD_VARIABLE = "HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD"
LOCALHOST = "localhost"
DEFAULT_PREFIX = "/torchelastic/p2p"
CALLS_PER_LEASE = 2.5
"""A call that takes longer than this part of a lease is given up: another endpoint may be quicker."""
LEAVE_S = 2.0
STORE_TTL_S = 600
"""What agents write into their store outlasts them by no more than this."""
FIRST_CONTACT_S = 30.0
"""How long an etcd that was never reached is retried, unless `read_timeout` is set: unlike a
coordinator, it should be there before the job is."""
HEARTBEATS_PER_LEASE = 3
WATCHED_SHARE = 4
"""Connections to other agents take no more than one in so many of the descriptors there are."""


# Settings. Whatever contradicts is refused, in one line that names the key: certificates that would
# be neither shown nor checked, because etcd is reached without TLS, are a mistake that only an
# attacker would like. Certificate files are read right here, so that one that is missing or invalid
# is reported before anything else begins.


def etcd_settings_of(params: RendezvousParameters) -> EtcdSettings:
    """Return how to reach etcd: the one on this host, if there is no endpoint."""
    endpoints, tls = _endpoints(params)
    user, password = _user(params)
    chosen = {
        "ca": value_of(params, "cacert"),
        "cert": value_of(params, "cert"),
        "key": value_of(params, "key"),
        "server_name": value_of(params, "tls_server_name"),
        "call_s": value_of(params, "read_timeout"),
    }
    _check_certificates(params, tls=tls)
    settings = EtcdSettings(
        endpoints=endpoints,
        user=user,
        password=password,
        tls=tls,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    _check_files(params, settings)
    return settings


def _endpoints(params: RendezvousParameters) -> tuple[tuple[tuple[str, int], ...], bool]:
    endpoints, tls = parse_endpoints(params.endpoint.strip() or LOCALHOST)
    if params.get("protocol") is None:
        return endpoints, tls
    protocol = value_of(params, "protocol")
    other = "https" if protocol == "http" else "http"
    if f"{other}://" in params.endpoint.lower():
        raise UsageError(
            f"--rdzv-conf: protocol={protocol} contradicts --rdzv-endpoint {params.endpoint!r}; "
            "set one of them"
        )
    return endpoints, protocol == "https"


def _user(params: RendezvousParameters) -> tuple[str, str]:
    """Return user and password; `--rdzv-conf` takes precedence over the environment."""
    user, password = value_of(params, "user"), value_of(params, "password")
    default_user = os.environ.get(USER_VARIABLE, "")
    # The password in the environment is that of the user in the environment, if there is one.
    if password is None and (not default_user or user in (None, default_user)):
        password = os.environ.get(PASSWORD_VARIABLE, "")
    if user is None:
        user = default_user
    if bool(user) == bool(password):
        return user or "", password or ""
    present, missing, variable = (
        ("user", "password", PASSWORD_VARIABLE) if user else ("password", "user", USER_VARIABLE)
    )
    raise UsageError(f"--rdzv-conf: {present} requires {missing}", hint=f"or set {variable}")


def _check_certificates(params: RendezvousParameters, *, tls: bool) -> None:
    cert, key = _names(params, "cert", "ssl_cert"), _names(params, "key", "ssl_cert_key")
    every = [*cert, *key, *_names(params, "cacert", "ca_cert", "tls_server_name")]
    if every and not tls:
        raise UsageError(
            f"--rdzv-conf: {every[0]} has no effect without TLS; "
            "set protocol=https too, or write https:// in --rdzv-endpoint"
        )
    if bool(cert) != bool(key):
        present, missing = (cert[0], "key") if cert else (key[0], "cert")
        if present.startswith("ssl_"):
            missing = {"key": "ssl_cert_key", "cert": "ssl_cert"}[missing]
        raise UsageError(f"--rdzv-conf: {present} requires {missing}")


def _check_files(params: RendezvousParameters, settings: EtcdSettings) -> None:
    others = (
        "ssl_cert",
        "ssl_cert_key",
        "ca_cert",
    )  # Only a name that was given may be in a message.
    cert, key, ca = ((_names(params, *both) or both)[0] for both in zip(NAMES, others, strict=True))
    try:
        settings.tls_context((cert, key, ca))
    except HoldfastError as error:
        raise UsageError(f"--rdzv-conf: {error.message}", hint=error.hint) from None


def _names(params: RendezvousParameters, *names: str) -> list[str]:
    """Return those of the keys that were given."""
    return [name for name in names if params.get(name) is not None]


# Stores.


class GenerationStores:
    """The stores of one node: one for each generation, and parts of it, until `close`.

    Only those of the newest generation are held here. An older one stays for as long as it is used
    elsewhere, and with it the lease and the thread that keep what it wrote. The client is the
    caller's to close.
    """

    def __init__(self, client: EtcdClient, root: bytes) -> None:
        self._client = client
        self._root = root.decode()
        self._scope = ""
        self._newest: dict[str, EtcdStore] = {}
        self._every: weakref.WeakSet[EtcdStore] = weakref.WeakSet()

    def store(self, scope: str, *below: str) -> EtcdStore:
        """Return the store of a generation, or of a part of it; scopes have separate keys."""
        if scope != self._scope:
            self._scope, self._newest = scope, {}
        prefix = "/".join([self._root + scope, *below])
        store = self._newest.get(prefix)
        if store is None:
            store = self._newest[prefix] = EtcdStore(self._client, prefix, ttl_s=STORE_TTL_S)
            self._every.add(store)
        return store

    def close(self) -> None:
        """Close all that are still in use."""
        for store in tuple(self._every):
            store.close()
        self._newest = {}


# The session, performed on a real etcd.

_SIGHTS: dict[Sight, type[PresenceSeen | PresenceClosed | PresenceRefused | PresenceUnknown]] = {
    Sight.SEEN: PresenceSeen,
    Sight.CLOSED: PresenceClosed,
    Sight.REFUSED: PresenceRefused,
    Sight.UNKNOWN: PresenceUnknown,
}


class EtcdTransport:
    """One session at etcd, as a `coordinator.agent_connection.Transport`."""

    def __init__(self, connector: EtcdConnector) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_message: Callable[[Ack | View], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.problem: ConnectFailed | None = None
        self.heard_at: float | None = None
        self._connector = connector

    def send(self, message: Status | Heartbeat | StoreCall | NodeReport) -> None:
        """Store the node's status, or renew its lease."""
        # The agents' store is in etcd itself, and nobody asks for reports there.
        assert not isinstance(message, StoreCall | NodeReport)
        self._connector.send(self, message)

    def close(self, why: str = "") -> None:
        """End the session; what was sent is stored already."""
        del why
        self.abort()

    def abort(self) -> bool:
        """End the session now."""
        self._connector.drop(self)
        if not self.ended.done():
            self.ended.set_result(None)
        return True


class EtcdConnector:
    """Opens sessions of one node and performs their effects; belongs to one loop.

    The lease and the leadership outlive a session, so there is one connector for as long as the node
    is in the job, and one transport at a time.
    """

    place = 0

    def __init__(self, etcd: AsyncEtcdClient, session: EtcdSession, lease_s: float) -> None:
        self._etcd = etcd
        self._session = session
        self.suspicion = ""
        self._limit_s = lease_s / CALLS_PER_LEASE
        self._loop = asyncio.get_running_loop()
        self._transport: EtcdTransport | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._watches: dict[int, WatchHandle] = {}
        self._watcher = PresenceWatcher()
        self._presences: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._early: list[Ack | View] = []

    async def connect(self) -> EtcdTransport:
        """Return the transport of a session that is up, or raise `ConnectFailed`."""
        transport = self._transport = EtcdTransport(self)
        self._early = []
        self._handle(OpenRequested())
        try:
            await transport.ready
        except asyncio.CancelledError:
            self.drop(transport)
            raise
        if transport.problem is not None:  # It ended before it could be returned.
            raise transport.problem
        self._loop.call_soon(self._deliver_early, transport)
        return transport

    def send(self, transport: EtcdTransport, message: Status | Heartbeat) -> None:
        """Pass on a message of the current transport."""
        if transport is self._transport:
            self._handle(MessageSubmitted(message))

    def drop(self, transport: EtcdTransport) -> None:
        """End the session of the current transport."""
        if transport is self._transport:
            self._transport = None
            self._handle(DropRequested())

    async def leave(self, limit_s: float) -> None:
        """Hand over the leadership and remove this node's keys, as far as there is time."""
        self._handle(LeaveRequested())
        try:
            async with asyncio.timeout(limit_s):
                await self._left.wait()
        except TimeoutError:
            pass  # Its lease ends all the same, a little later.

    async def close(self) -> None:
        """Stop whatever is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        under_way = [*self._calls, *self._presences.values()]
        for one in under_way:
            one.cancel()
        if under_way:
            await asyncio.wait(under_way)

    # Performing.

    def _handle(self, event: SessionEvent, cause: str = "") -> None:
        session = self._session
        session.address = self._etcd.local_address
        for effect in session.handle(self._loop.time(), event, cause):
            match effect:
                case SendRequest():
                    task = self._loop.create_task(self._call(effect, session.story.last))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case StartWatch():
                    self._watch(effect)
                case StopWatch(number):
                    watch = self._watches.pop(number, None)
                    if watch is not None:
                        watch.cancel()
                case DeliverMessage(message):
                    self._deliver(message)
                case ConnectPresence(number, presence):
                    self._see(number, presence, session.witness.story.last)
                case DropPresence(number):
                    seeing = self._presences.pop(number, None)
                    if seeing is not None:
                        seeing.cancel()
                case ReportOpened(heard_at):
                    if self._transport is not None and not self._transport.ready.done():
                        self._transport.heard_at = heard_at
                        self._transport.ready.set_result(None)
                case ReportClosed(why, permanent):
                    self._closed(why, permanent=permanent)
                case ReportLeft():
                    self._left.set()
                case ReportUnreadable(key, node, why):
                    whose = f"of the node {node!r} " if node else ""
                    console.warning(
                        f"the record {whose}in etcd is ignored: {why} ({key.decode(errors='replace')})"
                    )
        self._schedule()

    async def _call(self, sent: SendRequest, cause: str) -> None:
        answer = await self._etcd.call(sent.request, limit_s=self._limit_s)
        self._handle(RequestAnswered(sent.number, answer), cause)

    def _watch(self, watch: StartWatch) -> None:
        number = watch.number

        def changed(_revision: int, changes: tuple[Change, ...]) -> None:
            self._handle(KeysChanged(number, changes))

        def ended(problem: Problem) -> None:
            self._watches.pop(number, None)
            self._handle(WatchEnded(number, problem))

        self._watches[number] = self._etcd.watch(
            watch.key, watch.end, watch.start_revision, changed, ended
        )

    def _see(self, number: int, presence: Presence, cause: str) -> None:
        """Watch another agent's presence until that ends, or is not wanted any more."""
        where = format_endpoint(presence.address, presence.port)

        def report(sight: Sight) -> None:
            console.debug(f"the agent at {where}: {sight.value}")
            if sight is not Sight.SEEN:
                self._presences.pop(number, None)
            self._handle(_SIGHTS[sight](number), cause)

        work = self._watcher.watch(presence.address, presence.port, presence.id, report)
        self._presences[number] = self._loop.create_task(work)

    def _deliver(self, message: Ack | View) -> None:
        transport = self._transport
        if transport is None:
            return
        if transport.on_message is not None:
            transport.on_message(message)
        else:
            self._early.append(message)  # It was there when the session opened.

    def _deliver_early(self, transport: EtcdTransport) -> None:
        early, self._early = self._early, []
        for message in early:
            if transport is self._transport and transport.on_message is not None:
                transport.on_message(message)

    def _closed(self, why: str, *, permanent: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        why = why if permanent else self._etcd.describe(why)
        console.debug(f"the session at etcd ended: {why}")
        transport.problem = ConnectFailed(why, permanent=permanent)
        if not transport.ready.done():
            transport.ready.set_exception(transport.problem)
        elif transport.on_closed is not None:
            transport.on_closed(why)

    def _schedule(self) -> None:
        at = self._session.next_deadline(self._loop.time())
        if self._timer is not None:
            # A timer that fires too early does no harm and costs less than a new one every time.
            if at is None or self._timer.when() <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(TICK)


# The agent's connection.


class EtcdConnection(AgentConnection):
    """One node's connection to a job on etcd, from `start` until `close`."""

    decider = "etcd"

    def __init__(
        self,
        etcd: EtcdSettings,
        *,
        prefix: str,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: SessionTimeouts,
        lease_s: float,
        shows_presence: bool = True,
        access: ControlAccess | None = None,
        control: str = OFF,
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings, timeouts=timeouts)
        self._access = access or ControlAccess(run_id=run_id)
        self._control_setting = control
        self._shows_presence = shows_presence
        self._presence: PresencePort | None = None
        self._etcd_settings = etcd
        self._prefix = prefix
        self._lease_s = lease_s
        self._etcd: AsyncEtcdClient | None = None
        self._connector: EtcdConnector | None = None
        self._session: EtcdSession | None = None
        self._store_client: EtcdClient | None = None
        self._stores: GenerationStores | None = None

    @property
    def where(self) -> str:
        """The endpoints of etcd, as text."""
        return self._etcd_settings.where

    @property
    def presence_fd(self) -> int:
        """The socket that must not close before the workers are gone."""
        return self._presence.fileno() if self._presence is not None else -1

    def store(self, scope: str) -> EtcdStore:
        """Return the store of this job's nodes; scopes have separate keys."""
        from holdfast.etcd.sync_client import EtcdClient

        assert self._session is not None
        if self._store_client is None or self._stores is None:
            self._store_client = EtcdClient(self._etcd_settings)
            self._stores = GenerationStores(self._store_client, self._session.keys.store)
        return self._stores.store(scope)

    def summary(self) -> JobSummary | None:
        """Return the job as the leader stored it, and its nodes as they did."""
        from holdfast.etcd.sync_client import EtcdClient

        client = EtcdClient(self._etcd_settings)
        try:
            return read_job(client, self.run_id, self._prefix)[0]
        finally:
            client.close()

    def contacts(self) -> Contacts:
        """Return how people reach the agents, as these have stored it."""
        from holdfast.etcd.sync_client import EtcdClient

        with EtcdClient(self._etcd_settings) as client:
            return self._access.contacts(read_ports(client, self.run_id, self._prefix))

    def close(self, drain_s: float = LEAVE_S) -> None:
        """Close the connection and its stores."""
        super().close(drain_s)
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        if self._store_client is not None:
            self._store_client.close()
            self._store_client = None

    # In the thread.

    async def _begin(self) -> EtcdConnector:
        from holdfast.etcd.async_client import AsyncEtcdClient

        self._etcd = etcd = AsyncEtcdClient(self._etcd_settings)
        self.control = open_control(self._info.address, self._access, self._control_setting)
        self._session = EtcdSession(
            run_id=self.run_id,
            info=self._info,
            prefix=self._prefix,
            lease_s=self._lease_s,
            presence=self._show_presence() if self._shows_presence else None,
            control=self.control.port if self.control is not None else None,
        )
        at_most = listening.descriptor_limit() // WATCHED_SHARE
        self._session.witness.watched_max = min(WATCHED_MAX, at_most)
        self._connector = self._make_connector(etcd, self._session)
        return self._connector

    def _show_presence(self) -> Presence | None:
        address = self._info.address
        is_alone = bool(address) and addresses.names_loopback(address)
        try:
            where = listening.candidates_of(address, 0) if is_alone else listening.everywhere(0)
            self._presence = shown = PresencePort(where)
        except OSError as problem:
            console.debug(f"no port for this agent's presence: {problem}")
            return None
        shown.open()
        return Presence("", shown.port, shown.id)

    def _make_connector(self, etcd: AsyncEtcdClient, session: EtcdSession) -> EtcdConnector:
        return EtcdConnector(etcd, session, self._lease_s)

    async def _end(self, drain_s: float) -> None:
        if self._connector is not None:
            await self._connector.leave(drain_s)
        if self._driver is not None:
            await self._driver.close()
        if self._connector is not None:
            await self._connector.close()
        if self._etcd is not None:
            await self._etcd.close()
        if self.control is not None:
            self.control.close()
        if self._presence is not None:
            self._presence.close()  # Last: who sees that it is gone finds nothing of this node.


# The handler.


def create_etcd_handler(params: RendezvousParameters) -> EtcdHandler:
    """Return the handler of `--rdzv-backend etcd`, or `etcd-v2`."""
    if params.backend == "etcd-v2":
        console.notice(
            "--rdzv-backend etcd-v2 is the same as etcd here: etcd 3.6 has no API v2 any more"
        )
    return EtcdHandler(params)


class EtcdHandler(CoordinatorHandler):
    """A node's rendezvous with the others on etcd."""

    decider = "etcd"
    on_lost = "stop"
    connection_type = EtcdConnection

    def __init__(self, params: RendezvousParameters, *, etcd: EtcdSettings | None = None) -> None:
        self._etcd = etcd or etcd_settings_of(params)
        super().__init__(params)
        # There may be no leader just now, and the next one reads only a node's last status.
        self.close_timeout_s = self._config.close_timeout

    @property
    def endpoint(self) -> str:
        """The endpoints of etcd, as text."""
        return self._etcd.where

    def describe_refusal(self, why: str, reason: RefusalReason | None = None) -> str:
        """Return why this node cannot be in the job, in one line."""
        return f"{self.decider} at {super().describe_refusal(why, reason)}"

    @property
    def lease_s(self) -> float:
        """How long a node may be silent before it is lost; etcd counts whole seconds."""
        return float(max(2, math.ceil(self._config.lost_after_s)))

    def _connect(self, info: NodeInfo, settings: JobSettings) -> EtcdConnection:
        conf, lease_s = self._config, self.lease_s
        timeouts = SessionTimeouts(
            heartbeat_s=lease_s / HEARTBEATS_PER_LEASE,
            silence_s=lease_s,
            away_s=conf.coordinator_timeout,
            first_contact_s=conf.read_timeout or self._first_contact_s(),
            needs_answers=self._stops_alone,
        )
        connection = self.connection_type(
            self._etcd,
            prefix=config.value_of(self._params, "etcd_prefix"),
            run_id=self._params.run_id,
            info=info,
            settings=settings,
            timeouts=timeouts,
            lease_s=lease_s,
            shows_presence=conf.presence == "on",
            access=None if self._is_polled else self._control_access(),
            control=OFF if self._is_polled else conf.control,
        )
        if not self._is_polled:
            listening.raise_descriptor_limit()  # A leader has a connection to each node.
        connection.start()
        return connection

    def _control_access(self) -> ControlAccess:
        """Return what it takes to ask the job's agents, besides reading their records."""
        return ControlAccess(run_id=self._params.run_id, token=explicit_token(self.environ))

    def _first_contact_s(self) -> float:
        return FIRST_CONTACT_S

    def _endpoints(self) -> tuple[tuple[str, int], ...]:
        return self._etcd.endpoints[:1]  # Whichever answers: they are no list of places.

    def _own_loopback(self) -> str:
        return ""  # Each host of a job may have a member, or a proxy, of etcd on it.


# Reading jobs.


def read_job(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> tuple[JobSummary | None, str]:
    """Return the summary of a job and its leader; None if there is no such job.

    One read, of what the leader stored last and of the nodes' own status, which is newer. Raises
    `EtcdError`.
    """
    import msgspec

    from holdfast.coordinator.job_status import summary_of
    from holdfast.core.rounds import Rounds

    keys = JobKeys(prefix, run_id)
    read = Txn((), (Get(keys.job), Get(keys.leader), get_prefix(keys.nodes)))
    stored, leader, nodes = client.txn(read).results
    record = unpack(JobRecord, stored[0].value) if stored else None
    if record is None:
        return None, ""
    job = record.job
    for one in nodes:
        node = unpack(NodeRecord, one.value)
        known = job.nodes.get(node.status.info.node) if node is not None else None
        if node is None or known is None or known.info.incarnation != node.status.info.incarnation:
            continue
        known.phase, known.generation = node.status.phase, node.status.generation
    summary = summary_of(Rounds(job))
    who = read_leader(leader[0].value)[0] if leader else ""
    return msgspec.structs.replace(summary, history=[job.why] if job.why else []), who


def read_ports(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> list[tuple[str, str, ControlPort | None]]:
    """Return node, address and control port of each agent of a job, that of the leader first.

    Raises `EtcdError`.
    """
    keys = JobKeys(prefix, run_id)
    leader, nodes = client.txn(Txn((), (Get(keys.leader), get_prefix(keys.nodes)))).results
    who = read_leader(leader[0].value)[0] if leader else ""
    found = [record for one in nodes if (record := unpack(NodeRecord, one.value)) is not None]
    found.sort(key=lambda record: record.status.info.node != who)
    return [(one.status.info.node, one.status.info.address, one.control) for one in found]


def read_run_ids(
    client: EtcdClient, prefix: str = DEFAULT_PREFIX, *, running: bool = False
) -> list[str]:
    """Return the run ids of all jobs below a prefix, or of those that have a node. Raises `EtcdError`."""
    kind = b"nodes" if running else b"job"
    root = f"{prefix.rstrip('/')}/".encode()
    [found] = client.txn(Txn((), (get_prefix(root, keys_only=True),))).results
    names = {
        unquote(name.decode(errors="replace"))
        for one in found
        for name, _, rest in [one.key[len(root) :].partition(b"/")]
        if rest.partition(b"/")[0] == kind
    }
    return sorted(names)
