"""An agent's connection to its coordinator, for code that blocks: `NodeConnection`.

One daemon thread runs everything that must go on whatever the agent does: the client that keeps the
node in touch and, if this process could bind the endpoint, the coordinator itself. The agent says
what its node does (`say`) and hears what is new: `fileno()` is readable while there is something to
`take`. Several views that came meanwhile are one, the newest; a view says all there is to know.

If the coordinator goes away and the endpoint is this machine's, the client's thread binds it and
coordinates from then on; the other nodes connect to it, and it learns from them where the job was.

Whatever goes wrong in the thread and was not expected comes out of `take` as a `GaveUp`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from holdfast import messages
from holdfast.coordinator import addresses, binding
from holdfast.coordinator.client import GaveUp, NodeClient
from holdfast.coordinator.dialing import Dialer
from holdfast.coordinator.key_values import DEFAULT_TIMEOUT_S, KeyValueStore
from holdfast.coordinator.loop_thread import LoopThread
from holdfast.coordinator.news_box import News, NewsBox
from holdfast.coordinator.server import CoordinatorServer
from holdfast.core.membership import Membership, Times
from holdfast.core.news import Failure, JobSettings, NodeInfo, Phase, Status, View
from holdfast.errors import HoldfastError, UsageError
from holdfast.wire.errors import BadMessage
from holdfast.wire.messages import StoreCall, StoreResult, check

if TYPE_CHECKING:
    import socket
    import ssl

    from holdfast.coordinator.addresses import Address
    from holdfast.coordinator.security import TlsFiles

INCARNATION_BITS = 63
START_S = 10.0
DRAIN_S = 5.0
"""How long a coordinator whose job is over waits for nodes to hear of it."""
SLACK_S = 5.0

_warned = threading.Event()


def draw_incarnation() -> int:
    """Return a number that no other agent has drawn."""
    return secrets.randbits(INCARNATION_BITS)


def warn_if_open(listener: socket.socket, token: bytes | None, host: str) -> None:
    """Say, once, that everybody who can reach a coordinator may take part."""
    here = addresses.plain(str(listener.getsockname()[0]))
    if token is not None or addresses.is_loopback(here) or _warned.is_set():
        return
    _warned.set()
    where = addresses.written(host, listener.getsockname()[1])
    messages.warning(
        f"the coordinator at {where} has no token: whoever reaches the port can join or disturb "
        "the job (set HOLDFAST_TOKEN or HOLDFAST_TOKEN_FILE to the same on all nodes)"
    )


class NodeConnection:
    """One node's connection, from `start` until `close`."""

    def __init__(
        self,
        endpoint_host: str,
        endpoint_port: int,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        times: Times,
        is_host: bool | None,
        token: bytes | None,
        tls: TlsFiles | None,
        reconnect_grace_s: float = 0.2,
    ) -> None:
        self.run_id = run_id
        self.hosting = False
        self.view: View | None = None
        self._host, self._port = endpoint_host, endpoint_port
        self._info, self._settings, self._times = info, settings, times
        self._is_host, self._token, self._tls = is_host, token, tls
        self._grace_s = reconnect_grace_s
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        self._incarnation = info.incarnation
        self._lock = threading.Lock()  # For the incarnation and its view.
        self._box = NewsBox()
        self._thread: LoopThread | None = None
        self._client: NodeClient | None = None
        self._server: CoordinatorServer | None = None
        self._closed = False
        self._ending = False

    # From start to end.

    def start(self) -> None:
        """Bind the endpoint if that is this process's matter, and connect.

        Raises `UsageError` or `EnvironmentProblem` for what cannot work; a coordinator that is not
        there (yet) is no such thing.
        """
        self._check()
        if self._tls is not None:
            self._client_tls = self._tls.for_client()
            if self._tls.can_serve or self._is_host:
                self._server_tls = self._tls.for_server()
        listener = None
        if self._may_host:
            listener = binding.try_bind(self._host, self._port, self._is_host)
        if listener is not None:
            self._port = listener.getsockname()[1]
        elif self._port == 0:
            where = addresses.written(self._host, 0)
            raise UsageError(
                f"{where} is no endpoint to connect to: only the node that coordinates can choose "
                "any free port",
                hint="give the port that it reports",
            )
        self._box.open()
        self._thread = LoopThread("holdfast-coordinator", self._broken)
        try:
            self._thread.start()
            self._thread.ask(self._begin(listener), START_S)
        except BaseException:
            if listener is not None:
                listener.close()
            self.close()
            raise

    def leave(self, limit_s: float) -> bool:
        """Say that this node goes; return whether the coordinator is known to have heard it.

        Waits for that no longer than `limit_s`, and not at all while there is no link.
        """
        self._ending = True
        if self._client is None or self._thread is None or not self._thread.runs:
            return False
        try:
            return self._thread.ask(self._client.leave(limit_s), limit_s + SLACK_S)
        except (TimeoutError, RuntimeError):
            return False

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Close the connection and end the thread; may be called more than once.

        A process that coordinates lets the nodes of a job that is over hear of that first, for
        `drain_s` at most.
        """
        if self._closed:
            return
        self._closed = self._ending = True
        try:
            if self._thread is not None:
                self._thread.ask(self._end(drain_s), drain_s + SLACK_S)
        except Exception as error:  # noqa: BLE001 (an end must come to an end)
            messages.debug(
                f"coordinator at {self.where}: the connection did not end well: {error!r}"
            )
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._box.close()

    # What the agent hears and says.

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator; the port that was really bound, if it is here."""
        return self._host, self._port

    @property
    def where(self) -> str:
        """The endpoint as a person writes it."""
        return addresses.written(self._host, self._port)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `take`."""
        return self._box.fileno()

    def take(self) -> list[News]:
        """Return what is new since the last call."""
        return self._box.take()

    def say(
        self,
        phase: Phase,
        generation: int,
        failure: Failure | None = None,
        report: bytes = b"",
    ) -> None:
        """Tell the coordinator what this node does now."""
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.say, phase, generation, failure, report)

    def rejoin(self) -> int:
        """Begin anew as another incarnation, after this one was fenced; return its number."""
        with self._lock:
            self._incarnation = draw_incarnation()
            self._box.forget_view()  # It was for the one before.
            self.view = None
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.rejoin, self._incarnation)
        return self._incarnation

    def problem(self) -> str:
        """Return why there is no link to the coordinator and since when, or nothing."""
        client = self._client
        if client is None:
            return f"not connected to the coordinator at {self.where}"
        if client.refused:
            return f"coordinator at {self.where}: {client.refused}"
        since = client.down_since
        if since is None:
            return ""
        why = client.membership.last_problem or "connecting"
        return f"no coordinator at {self.where} for {time.monotonic() - since:.1f} s: {why}"

    # The job's store.

    def store(self, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValueStore:
        """Return the store of this job's nodes; scopes know nothing of each other's keys."""
        return KeyValueStore(self, scope, timeout_s)

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        """Send a call to the store."""
        answer: Future[StoreResult] = Future()
        client, thread = self._client, self._thread
        if client is None or thread is None or not thread.post(client.store.begin, call, answer):
            answer.set_exception(ConnectionError("the connection is closed"))
        return answer

    def forget_call(self, answer: Future[StoreResult]) -> None:
        """Stop waiting for an answer of the store."""
        if self._client is not None and self._thread is not None:
            self._thread.post(self._client.store.forget, answer)

    # In the thread.

    async def _begin(self, listener: socket.socket | None) -> None:
        loop = asyncio.get_running_loop()
        if listener is not None:
            self._serve(listener)
        dialer = Dialer(
            self._host,
            self._port,
            token=self._token,
            tls=self._client_tls,
            server_name=self._tls.server_name if self._tls is not None else None,
            when_refused=self._take_over if self._may_host else None,
        )
        membership = Membership(
            loop.time(),
            run_id=self.run_id,
            info=self._info,
            settings=self._settings,
            times=self._times,
            draw=random.random,
        )
        self._client = NodeClient(
            membership,
            dialer,
            on_view=self._told,
            on_gave_up=self._box.put_fault,
            on_refused=self._box.put_fault,
            on_away=self._tell_away,
            on_back=lambda: messages.notice(f"the coordinator at {self.where} is back"),
        )
        self._client.start()

    def _serve(self, listener: socket.socket, *, follows_another: bool = False) -> None:
        warn_if_open(listener, self._token, self._host)
        self._server = CoordinatorServer(
            listener,
            silence_s=self._times.silence_s,
            grace_s=self._grace_s,
            token=self._token,
            tls=self._server_tls,
            follows_another=follows_another,
        )
        self.hosting = True

    def _take_over(self, found: list[Address]) -> bool:
        """Coordinate from now on, if the endpoint is this machine's and nobody was quicker."""
        client = self._client
        if self._ending or self._server is not None or (client is not None and client.is_over):
            return False
        try:
            listener = binding.bind_one_of(self._host, self._port, found, None)
        except HoldfastError as error:
            messages.warning(str(error))
            return False
        if listener is None:
            return False
        messages.info(f"nobody coordinates at {self.where} any more: this node does from now on")
        self._serve(listener, follows_another=True)
        return True

    def _tell_away(self, why: str) -> None:
        if not self._ending:
            messages.notice(
                f"lost the coordinator at {self.where} ({why}); workers go on without it for up "
                f"to {self._times.away_s:g} s"
            )

    async def _end(self, drain_s: float) -> None:
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.drain(drain_s)
            others = self._server.nodes_besides(self.run_id)
            if others:
                messages.notice(
                    f"the coordinator at {self.where} ends with this agent; {others} "
                    f"node{'s' * (others != 1)} of other jobs {'is' if others == 1 else 'are'} "
                    "connected: run `holdfast coordinator` for endpoints that several jobs share"
                )
            await self._server.stop()

    def _told(self, view: View) -> None:
        with self._lock:
            if view.incarnation == self._incarnation:
                self.view = view
                self._box.put_view(view)

    def _broken(self, what: str) -> None:
        self._box.put_fault(GaveUp(f"this side of the connection is broken: {what}"))

    # What may be.

    @property
    def _may_host(self) -> bool:
        """Whether this process may coordinate; with TLS it needs a certificate for that."""
        if self._is_host is False:
            return False
        return self._tls is None or self._tls.can_serve or bool(self._is_host)

    def _check(self) -> None:
        """Raise for values that no coordinator would take, before any is asked."""
        try:
            check(Status(seq=0, run_id=self.run_id, info=self._info, settings=self._settings))
        except BadMessage as error:
            raise UsageError(f"this node cannot join {self.run_id!r}: {error}") from None
