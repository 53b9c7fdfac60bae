"""An agent's connection to its coordinator, for code that blocks: `NodeConnection`.

The thread that keeps the node in touch (`node_line`) also runs the coordinator itself, if this
process could bind the endpoint.

If the coordinator goes away and the endpoint is this machine's, the client's thread binds it and
coordinates from then on; the other nodes connect to it, and it learns from them where the job was.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from holdfast import messages
from holdfast.coordinator import addresses, binding
from holdfast.coordinator.dialing import Dialer
from holdfast.coordinator.key_values import DEFAULT_TIMEOUT_S, KeyValueStore
from holdfast.coordinator.node_line import NodeLine
from holdfast.coordinator.server import CoordinatorServer
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    import socket
    import ssl

    from holdfast.coordinator.addresses import Address
    from holdfast.coordinator.security import TlsFiles
    from holdfast.core.membership import Times
    from holdfast.core.news import JobSettings, NodeInfo
    from holdfast.wire.messages import StoreCall, StoreResult

_warned = threading.Event()


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


class NodeConnection(NodeLine):
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
        super().__init__(run_id=run_id, info=info, settings=settings, times=times)
        self._host, self._port = endpoint_host, endpoint_port
        self._is_host, self._token, self._tls = is_host, token, tls
        self._grace_s = reconnect_grace_s
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        self._server: CoordinatorServer | None = None

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
        try:
            self._launch(self._begin(listener))
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    # Where it is.

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator; the port that was really bound, if it is here."""
        return self._host, self._port

    @property
    def where(self) -> str:
        """The endpoint as a person writes it."""
        return addresses.written(self._host, self._port)

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
        self._connect(loop.time(), dialer, lambda: dialer.doubt)

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

    # What may be.

    @property
    def _may_host(self) -> bool:
        """Whether this process may coordinate; with TLS it needs a certificate for that."""
        if self._is_host is False:
            return False
        return self._tls is None or self._tls.can_serve or bool(self._is_host)
