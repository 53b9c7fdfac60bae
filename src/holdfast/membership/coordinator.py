"""The membership in a job with a coordinator: `--rdzv-backend c10d`, `holdfast` and `static`."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.endpoint_list import FIRST_PROBE_S, EndpointList
from holdfast.coordinator.round_records import RoundRecords
from holdfast.coordinator.server import CoordinatorServer, warn_if_open
from holdfast.coordinator.state_file import StateFile
from holdfast.errors import HoldfastError, UsageError
from holdfast.membership.coordinator_store import DEFAULT_TIMEOUT_S, CoordinatorStore
from holdfast.membership.interface import ControlAccess
from holdfast.membership.threaded import ThreadedMembership
from holdfast.net import listening
from holdfast.net.endpoints import format_endpoint

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence

    from holdfast.core.job_settings import JobSettings
    from holdfast.core.protocol import NodeInfo, Request
    from holdfast.core.session import SessionTimeouts
    from holdfast.membership.threaded import SessionDriver
    from holdfast.net.addresses import Address
    from holdfast.net.tls import TlsFiles, TlsToken
    from holdfast.wire.messages import NodeReport, StoreCall, StoreResult, Watch


class CoordinatorControl(ControlAccess):
    """Control of a job through its coordinator."""

    has_coordinator = True

    def __init__(self, membership: CoordinatorMembership) -> None:
        self._membership = membership

    def request(self, request: Request) -> None:
        """Submit an operator's request."""
        self._membership.request(request)

    def on_watch(self, watched: Callable[[Watch], None]) -> None:
        """Call `watched` when a client of the coordinator watches this node."""
        self._membership.on_watch(watched)

    def send_report(self, report: NodeReport) -> None:
        """Send a report to the clients that watch this node."""
        self._membership.send_report(report)

    def connector(self) -> CoordinatorConnector:
        """Return a connector to the coordinator for the running loop."""
        return self._membership.connector()


class CoordinatorMembership(ThreadedMembership):
    """One node's membership in a job with a coordinator.

    This process runs the coordinator if it can bind the endpoint. If the coordinator exits and the endpoint
    belongs to this machine, the membership's thread binds it and runs the coordinator from then on. The other
    nodes connect to it and report the job's state. With `later` endpoints, the membership follows a coordinator
    that took over at one of them; such a coordinator replaces the one here (`coordinator.endpoint_list`).
    """

    _driver: SessionDriver | None

    def __init__(
        self,
        endpoint_host: str,
        endpoint_port: int,
        *,
        run_id: str,
        info: NodeInfo,
        settings: JobSettings,
        timeouts: SessionTimeouts,
        is_host: bool | None,
        token: bytes | None,
        tls: TlsFiles | TlsToken | None,
        reconnect_grace_s: float = 0.2,
        advertised_port: int | None = None,
        recover_s: float | None = None,
        state_file: str | None = None,
        may_raise_limit: bool = False,
        advice: str = "",
        later: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(run_id=run_id, info=info, settings=settings)
        self._timeouts, self._advice = timeouts, advice
        self.control = CoordinatorControl(self)
        self._host, self._port = endpoint_host, endpoint_port
        self._later = later
        self._endpoints: EndpointList | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_host, self._token, self._tls = is_host, token, tls
        self._grace_s, self._advertised_port = reconnect_grace_s, advertised_port
        self._recover_s, self._state_file = recover_s, state_file
        self._may_raise_limit = may_raise_limit
        # With TLS a coordinator needs a certificate.
        self._may_host = is_host is not False and (tls is None or tls.can_serve or bool(is_host))
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._server: CoordinatorServer | None = None

    def start(self) -> None:
        """Bind the endpoint if this process may run the coordinator, and connect."""
        if self._tls is not None:
            self._client_tls = self._tls.for_client()
            if self._may_host:
                self._server_tls = self._tls.for_server()
        if self._may_host:
            self._listener = listening.try_bind(self._host, self._port, self._is_host)
        if self._listener is not None:
            self._port = self._listener.getsockname()[1]
        elif self._port == 0:
            raise UsageError(
                f"{self.where} is not an endpoint to connect to: only the node that runs the "
                "coordinator can choose a free port",
                hint="set the port that this node reports",
            )
        try:
            super().start()
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            raise

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the coordinator; if it runs here, the bound port."""
        return self._host, self._port

    @property
    def where(self) -> str:
        return format_endpoint(*self._current()[1])

    def _current(self) -> tuple[int, tuple[str, int]]:
        """Return the index of the current coordinator's endpoint in the list, and that endpoint."""
        endpoint_index = self._endpoints.endpoint_index if self._endpoints is not None else 0
        return endpoint_index, [(self._host, self._port), *self._later][endpoint_index]

    def store(self, scope: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> CoordinatorStore:
        return CoordinatorStore(self, scope, timeout_s)

    # For `CoordinatorControl`.

    def on_watch(self, watched: Callable[[Watch], None]) -> None:
        """Call `watched` when a client of the coordinator watches this node."""
        if self._driver is not None:
            self._post(self._driver.on_watch, watched)

    def send_report(self, report: NodeReport) -> None:
        """Send a report to the coordinator, if there is a connection."""
        if self._driver is not None:
            self._post(self._driver.send_report, report)

    def connector(self) -> CoordinatorConnector:
        """Return a connector to the current coordinator for the running loop."""
        endpoint_index, (host, port) = self._current()
        return self._connector(host, port, endpoint_index=endpoint_index)

    # For `CoordinatorStore`.

    def begin_call(self, call: StoreCall) -> Future[StoreResult]:
        answer: Future[StoreResult] = Future()
        driver = self._driver
        if driver is None or not self._post(driver.store.begin, call, answer):
            answer.set_exception(ConnectionError("the connection is closed"))
        return answer

    def forget_call(self, answer: Future[StoreResult]) -> None:
        if self._driver is not None:
            self._post(self._driver.store.forget, answer)

    # In the thread.

    async def _open_driver(self) -> SessionDriver:
        on_refused = self._take_over if self._may_host else None
        connector = self._connector(self._host, self._port, on_refused=on_refused)
        if self._later:
            ends = [(self._host, self._port), *self._later]
            self._endpoints = EndpointList(
                [
                    self._connector(*one, endpoint_index=endpoint_index)
                    for endpoint_index, one in enumerate(ends)
                ],
                floor=lambda: (
                    self._driver.session.endpoint_index if self._driver is not None else 0
                ),
                host=connector if self._may_host else None,
            )
            if self._listener is not None:
                by = await self._endpoints.replaced_at(0, FIRST_PROBE_S)
                if by:
                    self._listener.close()
                    self._listener = None
                    console.notice(f"a coordinator took over at {by}: this node does not run one")
        if self._listener is not None:
            self._serve(self._listener, self._open_state())
        return self._drive(self._endpoints or connector, self._timeouts, self._advice)

    async def _close_driver(self, drain_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._driver is not None:
            await self._driver.close()
        if self._server is None:
            return
        await self._server.drain(drain_s)
        others = self._server.nodes_of_other_jobs(self.run_id)
        if others:
            console.notice(
                f"the coordinator at {self.where} exits with this agent; {others} "
                f"node{'s' * (others != 1)} of other jobs {'is' if others == 1 else 'are'} "
                "connected: run `holdfast coordinator` for an endpoint that several jobs share"
            )
        await self._server.stop()

    def _connector(
        self,
        host: str,
        port: int,
        *,
        endpoint_index: int = 0,
        on_refused: Callable[[list[Address]], bool] | None = None,
    ) -> CoordinatorConnector:
        return CoordinatorConnector(
            host,
            port,
            run_id=self.run_id,
            token=self._token,
            tls=self._client_tls,
            has_psk=self._tls is not None and self._tls.is_psk,
            server_name=self._tls.server_name if self._tls is not None else None,
            # A token authenticates the coordinator; is_host=0 accepts the coordinator of any user.
            own_users_only=self._token is None and self._is_host is not False,
            endpoint_index=endpoint_index,
            on_refused=on_refused,
        )

    def _open_state(self) -> StateFile | None:
        if self._state_file is None:
            return None
        return StateFile(self._state_file)

    def _serve(
        self, listener: socket.socket, state: StateFile | None, *, follows_another: bool = False
    ) -> None:
        if self._may_raise_limit:
            listening.raise_descriptor_limit()
        warn_if_open(listener, self._token, self._tls, self._host)
        self._server = CoordinatorServer(
            listener,
            silence_s=self._timeouts.silence_s,
            grace_s=self._grace_s,
            token=self._token,
            run_id=self.run_id,
            advertised_port=self._advertised_port,
            tls=self._server_tls,
            follows_another=follows_another,
            host=self._info.node,
            recover_s=self._recover_s,
            state=state,
            records=RoundRecords(listener, console.warning, keep_s=self._timeouts.unreachable_s),
        )
        self.hosting = True
        if self._endpoints is not None:
            self._watch = asyncio.get_running_loop().create_task(
                self._until_replaced(self._endpoints)
            )

    async def _until_replaced(self, endpoints: EndpointList) -> None:
        """Stop this node's coordinator once another one has taken over at a later endpoint."""
        by = await endpoints.replaced(0)
        why = f"a coordinator took over at {by}"
        console.warning(f"{why}: stopping the coordinator at {self.where} and joining the new one")
        server, self._server = self._server, None
        self._may_host = self.hosting = False
        if server is not None:
            await server.stop(why)

    def _take_over(self, found: list[Address]) -> bool:
        """Run the coordinator from now on, if this node can bind the endpoint before another process."""
        is_over = self._driver is not None and self._driver.is_over
        if self._ending or not self._may_host or self._server is not None or is_over:
            return False
        try:
            listener = listening.bind_one_of(self._host, self._port, found, None)
        except HoldfastError as error:
            console.warning(str(error))
            return False
        if listener is None:
            return False
        console.info(f"the coordinator at {self.where} has exited: this node runs it from now on")
        try:
            state = self._open_state()
        except UsageError as error:
            console.warning(f"{error}; running the coordinator without it")
            state = None
        self._serve(listener, state, follows_another=True)
        return True
