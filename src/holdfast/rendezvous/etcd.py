"""What `--rdzv-endpoint` and `--rdzv-conf` say about etcd, as the settings of its client.

The one thing to know: whatever contradicts is refused, in one line that names the key. Certificates
that nobody would show or check, because etcd is spoken to in plain text, are a mistake that only an
attacker would like. Files of certificates are read once right here: one that is missing or no
certificate is told before anything else begins.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import weakref

import msgspec

from holdfast import console
from holdfast.coordinator.agent_connection import AgentConnection
from holdfast.coordinator.connect import ConnectFailed
from holdfast.coordinator.job_status import summary_of
from holdfast.core.etcd.calls import (
    Get,
    KeysChanged,
    RequestAnswered,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    WatchEnded,
)
from holdfast.core.etcd.keys import JobKeys, JobRecord, NodeRecord, get_prefix, unpack
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
from holdfast.core.machine import TICK
from holdfast.core.protocol import NodeRole
from holdfast.core.rounds import Rounds
from holdfast.core.session import SessionTimeouts
from holdfast.errors import HoldfastError, UsageError
from holdfast.etcd.settings import NAMES, EtcdSettings, parse_endpoints
from holdfast.etcd.store import EtcdStore
from holdfast.rendezvous import config
from holdfast.rendezvous.config import value_of
from holdfast.rendezvous.coordinator import CoordinatorHandler
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.wire.messages import StoreCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Change, Problem
    from holdfast.core.protocol import Ack, Heartbeat, JobSettings, NodeInfo, Status, View
    from holdfast.etcd.async_client import AsyncEtcdClient, WatchHandle
    from holdfast.etcd.sync_client import EtcdClient
    from holdfast.rendezvous.config import RendezvousParameters
    from holdfast.wire.messages import JobSummary


USER_VARIABLE, PASSWORD_VARIABLE = "HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD"
LOCALHOST = "localhost"


def etcd_settings_of(params: RendezvousParameters) -> EtcdSettings:
    """Return how to talk to etcd: to the one on this host, if there is no endpoint."""
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
            "give one of them"
        )
    return endpoints, protocol == "https"


def _user(params: RendezvousParameters) -> tuple[str, str]:
    """Return user and password; what `--rdzv-conf` says goes before the environment."""
    user, password = value_of(params, "user"), value_of(params, "password")
    environs_user = os.environ.get(USER_VARIABLE, "")
    # The password in the environment is that of the user in the environment, if there is one.
    if password is None and (not environs_user or user in (None, environs_user)):
        password = os.environ.get(PASSWORD_VARIABLE, "")
    if user is None:
        user = environs_user
    if bool(user) == bool(password):
        return user or "", password or ""
    there, lacking, variable = (
        ("user", "password", PASSWORD_VARIABLE) if user else ("password", "user", USER_VARIABLE)
    )
    raise UsageError(f"--rdzv-conf: {there} needs {lacking} beside it, or {variable} to be set")


def _check_certificates(params: RendezvousParameters, *, tls: bool) -> None:
    cert, key = _names(params, "cert", "ssl_cert"), _names(params, "key", "ssl_cert_key")
    every = [*cert, *key, *_names(params, "cacert", "ca_cert", "tls_server_name")]
    if every and not tls:
        raise UsageError(
            f"--rdzv-conf: {every[0]} has no effect without TLS; "
            "give protocol=https beside it, or https:// in --rdzv-endpoint"
        )
    if bool(cert) != bool(key):
        there, lacking = (cert[0], "key") if cert else (key[0], "cert")
        if there.startswith("ssl_"):
            lacking = {"key": "ssl_cert_key", "cert": "ssl_cert"}[lacking]
        raise UsageError(f"--rdzv-conf: {there} needs {lacking} beside it")


def _check_files(params: RendezvousParameters, settings: EtcdSettings) -> None:
    others = ("ssl_cert", "ssl_cert_key", "ca_cert")  # Only what was given can be complained of.
    cert, key, ca = ((_names(params, *both) or both)[0] for both in zip(NAMES, others, strict=True))
    try:
        settings.tls_context((cert, key, ca))
    except HoldfastError as error:
        raise UsageError(f"--rdzv-conf: {error.message}", hint=error.hint) from None


def _names(params: RendezvousParameters, *names: str) -> list[str]:
    """Return those of some keys that were given."""
    return [name for name in names if params.get(name) is not None]


# The stores of one node in a job on etcd: one for each generation, and parts of it.
#
# The one thing to know: only those of the newest generation are held here. An older one stays for
# as
# long as somebody else has it, and with it the lease and the thread that keep what it wrote.


STORE_TTL_S = 600
"""What agents put into their store outlasts them by no more than this."""


class GenerationStores:
    """Stores below one place in etcd, until `close`. The client is the caller's to close."""

    def __init__(self, client: EtcdClient, root: bytes) -> None:
        self._client = client
        self._root = root.decode()
        self._scope = ""
        self._newest: dict[str, EtcdStore] = {}
        self._every: weakref.WeakSet[EtcdStore] = weakref.WeakSet()

    def store(self, scope: str, *below: str) -> EtcdStore:
        """Return the store of a generation, or of a part of it: the same as long as it is in use.

        Scopes know nothing of each other's keys.
        """
        if scope != self._scope:
            self._scope, self._newest = scope, {}
        prefix = "/".join([self._root + scope, *below])
        store = self._newest.get(prefix)
        if store is None:
            store = self._newest[prefix] = EtcdStore(self._client, prefix, ttl_s=STORE_TTL_S)
            self._every.add(store)
        return store

    def close(self) -> None:
        """Close all that somebody still has."""
        for store in tuple(self._every):
            store.close()
        self._newest = {}


# A node's session at etcd, performed: what `core.etcd.session` asks for, on a real etcd.
#
# `EtcdDialer` is to `coordinator.agent_connection` what the dialer of a coordinator is: `dial`
# opens a session
# and returns a link that carries what the node says and brings what it is told. The session's
# lease
# and the leadership outlive a link, so there is one dialer for as long as the node is in the job,
# and
# one link at a time.


CALLS_PER_LEASE = 2.5
"""A call that takes longer than the lease by this is given up: another endpoint may be quicker."""


class EtcdLink:
    """One session, as long as it lasts."""

    def __init__(self, dialer: EtcdDialer) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.on_message: Callable[[Ack | View], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.problem: ConnectFailed | None = None
        self._dialer = dialer

    def send(self, message: Status | Heartbeat | StoreCall) -> None:
        """Store the node's status, or renew its lease."""
        assert not isinstance(message, StoreCall)  # The agents' store is in etcd itself.
        self._dialer.send(self, message)

    def close(self, why: str = "") -> None:
        """End the session; what was said is stored already."""
        del why
        self.abort()

    def abort(self) -> bool:
        """End the session now."""
        self._dialer.drop(self)
        if not self.ended.done():
            self.ended.set_result(None)
        return True


class EtcdDialer:
    """Opens sessions of one node, and performs what they ask for; belongs to one loop."""

    def __init__(self, etcd: AsyncEtcdClient, session: EtcdSession, lease_s: float) -> None:
        self._etcd = etcd
        self._session = session
        self.suspicion = ""
        self._limit_s = lease_s / CALLS_PER_LEASE
        self._loop = asyncio.get_running_loop()
        self._link: EtcdLink | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._watches: dict[int, WatchHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._early: list[Ack | View] = []

    async def connect(self) -> EtcdLink:
        """Return the link of a session that is open, or raise `ConnectFailed`."""
        link = self._link = EtcdLink(self)
        self._early = []
        self._happened(OpenRequested())
        try:
            await link.ready
        except asyncio.CancelledError:
            self.drop(link)
            raise
        if link.problem is not None:  # It was over before anybody could look at it.
            raise link.problem
        self._loop.call_soon(self._deliver_early, link)
        return link

    def send(self, link: EtcdLink, message: Status | Heartbeat) -> None:
        """Pass on what the node says over its current link."""
        if link is self._link:
            self._happened(MessageSubmitted(message))

    def drop(self, link: EtcdLink) -> None:
        """End the session of a link, if it is the current one."""
        if link is self._link:
            self._link = None
            self._happened(DropRequested())

    async def leave(self, limit_s: float) -> None:
        """Hand over what this node leads and remove what is its own, as far as there is time."""
        self._happened(LeaveRequested())
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
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    # Performing.

    def _happened(self, event: SessionEvent) -> None:
        for effect in self._session.handle(self._loop.time(), event):
            match effect:
                case SendRequest():
                    task = self._loop.create_task(self._call(effect))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case StartWatch():
                    self._watch(effect)
                case StopWatch(number):
                    watch = self._watches.pop(number, None)
                    if watch is not None:
                        watch.cancel()
                case DeliverMessage(message):
                    self._hear(message)
                case ReportOpened():
                    self._session.address = self._etcd.local_address
                    if self._link is not None and not self._link.ready.done():
                        self._link.ready.set_result(None)
                case ReportClosed(why, permanent):
                    self._close_link(why, permanent=permanent)
                case ReportLeft():
                    self._left.set()
        self._schedule()

    async def _call(self, ask: SendRequest) -> None:
        answer = await self._etcd.call(ask.request, limit_s=self._limit_s)
        self._happened(RequestAnswered(ask.number, answer))

    def _watch(self, watch: StartWatch) -> None:
        number = watch.number

        def changed(_revision: int, changes: tuple[Change, ...]) -> None:
            self._happened(KeysChanged(number, changes))

        def ended(problem: Problem) -> None:
            self._watches.pop(number, None)
            self._happened(WatchEnded(number, problem))

        self._watches[number] = self._etcd.watch(
            watch.key, watch.end, watch.start_revision, changed, ended
        )

    def _hear(self, message: Ack | View) -> None:
        link = self._link
        if link is None:
            return
        if link.on_message is not None:
            link.on_message(message)
        else:
            self._early.append(message)  # What lay there when the session was opened.

    def _deliver_early(self, link: EtcdLink) -> None:
        early, self._early = self._early, []
        for message in early:
            if link is self._link and link.on_message is not None:
                link.on_message(message)

    def _close_link(self, why: str, *, permanent: bool) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        why = why if permanent else self._of_each_endpoint(why)
        console.debug(f"the session at etcd ended: {why}")
        link.problem = ConnectFailed(why, permanent=permanent)
        if not link.ready.done():
            link.ready.set_exception(link.problem)
        elif link.on_closed is not None:
            link.on_closed(why)

    def _of_each_endpoint(self, why: str) -> str:
        """Return what is wrong with each of several endpoints, if none of them can be reached."""
        tried = self._etcd.tried
        if not len(tried) == len(self._etcd.settings.endpoints) > 1:
            return why
        return "; ".join(f"{endpoint}: {what}" for endpoint, what in sorted(tried.items()))

    def _schedule(self) -> None:
        at = self._session.next_deadline(self._loop.time())
        if self._timer is not None:
            # A timer that comes too early does no harm and costs less than a new one every time.
            if at is None or self._timer.when() <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._happened(TICK)


# An agent's connection to a job that lies on etcd: `EtcdConnection`.
#
# Nobody coordinates here but the nodes themselves: one of them leads, any may, and etcd says
# which.
# So no other node depends on this process, and it may go at any time.


LEAVE_S = 2.0


class EtcdConnection(AgentConnection):
    """One node's connection, from `start` until `close`."""

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
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings, timeouts=timeouts)
        self._etcd_settings = etcd
        self._prefix = prefix
        self._lease_s = lease_s
        self._etcd: AsyncEtcdClient | None = None
        self._dialer: EtcdDialer | None = None
        self._session: EtcdSession | None = None
        self._store_client: EtcdClient | None = None
        self._stores: GenerationStores | None = None

    @property
    def where(self) -> str:
        """The endpoints as a person writes them."""
        return self._etcd_settings.where

    def store(self, scope: str) -> EtcdStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        from holdfast.etcd.sync_client import EtcdClient

        assert self._session is not None
        if self._store_client is None or self._stores is None:
            self._store_client = EtcdClient(self._etcd_settings)
            self._stores = GenerationStores(self._store_client, self._session.keys.store)
        return self._stores.store(scope)

    def close(self, drain_s: float = LEAVE_S) -> None:
        """Close the connection and what was made of it."""
        super().close(drain_s)
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        if self._store_client is not None:
            self._store_client.close()
            self._store_client = None

    # In the thread.

    async def _begin(self) -> EtcdDialer:
        from holdfast.etcd.async_client import AsyncEtcdClient

        self._etcd = etcd = AsyncEtcdClient(self._etcd_settings)
        self._session = EtcdSession(
            run_id=self.run_id, info=self._info, prefix=self._prefix, lease_s=self._lease_s
        )
        self._dialer = EtcdDialer(etcd, self._session, self._lease_s)
        return self._dialer

    async def _end(self, drain_s: float) -> None:
        if self._dialer is not None:
            await self._dialer.leave(drain_s)
        if self._driver is not None:
            await self._driver.close()
        if self._dialer is not None:
            await self._dialer.close()
        if self._etcd is not None:
            await self._etcd.close()


# The rendezvous on etcd: `--rdzv-backend etcd`, and `etcd-v2` as another name for it.
#
# To an agent it is the rendezvous at a coordinator, without one: the nodes' leases say who is
# there,
# one of the nodes leads, and if it is lost another does after one lease.


FIRST_CONTACT_S = 30.0
"""How long an etcd that was never reached is waited for, where `read_timeout` does not say: unlike
a coordinator, it is there before the job is."""
BEATS_PER_LEASE = 3


def create_etcd_handler(params: RendezvousParameters) -> EtcdHandler:
    """Return the handler of `--rdzv-backend etcd`, or `etcd-v2`."""
    if params.backend == "etcd-v2":
        console.notice(
            "--rdzv-backend etcd-v2 is the same as etcd here: etcd's API v2 is gone since etcd 3.6"
        )
    return EtcdHandler(params)


class EtcdHandler(CoordinatorHandler):
    """A node's rendezvous with the others on etcd."""

    decider = "etcd"

    def __init__(self, params: RendezvousParameters, *, etcd: EtcdSettings | None = None) -> None:
        self._etcd = etcd or etcd_settings_of(params)
        super().__init__(params)

    @property
    def endpoint(self) -> str:
        """The endpoints of etcd as text."""
        return self._etcd.where

    def describe_refusal(self, why: str) -> str:
        """Return that this node cannot be in the job, and why, in one line."""
        return f"etcd at {self.endpoint}: {why}"

    @property
    def lease_s(self) -> float:
        """How long a node is silent before it is lost. etcd counts whole seconds."""
        return float(max(2, math.ceil(self._config.lost_after_s)))

    def set_closed(self) -> None:
        """End the job for all nodes, and wait until that is decided; there need not be a job.

        A leader may be missing just now, and whoever leads next reads only what a node said last.
        """
        super().set_closed()
        connection = self.enter()
        deadline = time.monotonic() + self._config.close_timeout
        while (view := connection.view) is None or view.role is not NodeRole.CLOSED:
            if view is not None and view.role is NodeRole.REFUSED:
                raise RendezvousConnectionError(self.describe_refusal(view.why))
            try:
                self._await_news(connection, deadline)
            except RendezvousTimeoutError:
                raise RendezvousTimeoutError(
                    f"the end of the job {self.get_run_id()!r} was not decided in "
                    f"{self._config.close_timeout:g} s: {connection.problem() or 'nobody leads'}"
                ) from None

    def _connect(self, info: NodeInfo, settings: JobSettings) -> EtcdConnection:
        conf, lease_s = self._config, self.lease_s
        timeouts = SessionTimeouts(
            beat_s=lease_s / BEATS_PER_LEASE,
            silence_s=lease_s,
            away_s=conf.coordinator_timeout,
            first_contact_s=conf.read_timeout or FIRST_CONTACT_S,
        )
        connection = EtcdConnection(
            self._etcd,
            prefix=config.value_of(self._params, "etcd_prefix"),
            run_id=self._params.run_id,
            info=info,
            settings=settings,
            timeouts=timeouts,
            lease_s=lease_s,
        )
        connection.start()
        return connection

    def _address(self) -> tuple[str, int]:
        return self._etcd.endpoints[0]


# How jobs on etcd are: what a coordinator answers when it is asked, read from what is stored.
#
# It asks nobody and disturbs nobody: one read, of what the leader stored last and of what each
# node
# says of itself, which is newer.


DEFAULT_PREFIX = "/torchelastic/p2p"


def read_job(
    client: EtcdClient, run_id: str, prefix: str = DEFAULT_PREFIX
) -> tuple[JobSummary | None, str]:
    """Return a job as a person wants to see it, and the node that leads it.

    None if there is no such job. Raises `EtcdError` if etcd cannot be asked.
    """
    keys = JobKeys(prefix, run_id)
    read = Txn((), (Get(keys.job), Get(keys.leader), get_prefix(keys.nodes)))
    stored, leader, nodes = client.txn(read).results
    record = unpack(JobRecord, stored[0].value) if stored else None
    if record is None:
        return None, ""
    job = record.job
    for one in nodes:
        said = unpack(NodeRecord, one.value)
        known = job.nodes.get(said.status.info.node) if said is not None else None
        if said is None or known is None or known.info.incarnation != said.status.info.incarnation:
            continue
        known.phase, known.generation = said.status.phase, said.status.generation
    summary = summary_of(Rounds(job))
    who = leader[0].value.decode(errors="replace").rpartition(" ")[0] if leader else ""
    return msgspec.structs.replace(summary, history=[job.why] if job.why else []), who
