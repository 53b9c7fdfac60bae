"""The dashboard's web server: pages, the stream of the job's state, logs, stacks and requests.

One process and one loop serve all browsers, and one feed reads the state of the job. Logs, stacks and
requests use their own connections to the job, so a slow reader of logs does not delay others. `access` checks
every request first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs

import h11
import msgspec
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast import __version__
from holdfast.control.history import ENDING_STAGES, STARTING_STAGES
from holdfast.control.job_client import ControlProblem, JobUnreachable
from holdfast.core.limits import (
    GRACE_S_MAX,
    NODE_ID_CHARS_MAX,
    REQUEST_ID_CHARS_MAX,
    REQUEST_WHY_CHARS_MAX,
)
from holdfast.core.requests import Action
from holdfast.net.half_open import HalfOpen
from holdfast.net.peer_user import user_of
from holdfast.views import report
from holdfast.views.dashboard.broadcast import PING
from holdfast.views.stages import MEANINGS

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from holdfast.views.dashboard.access import DashboardAccess, LoginSession
    from holdfast.views.dashboard.watched_job import WatchedJob

BODY_BYTES_MAX = 16 * 1024
HEAD_BYTES_MAX = 16 * 1024
EXCHANGE_S = 5.0
"""Timeout for the head of each request, and again for its body."""
CONNECTIONS_MAX = 512
STRANGERS_MAX = 256
"""Connections that have not sent the secret of a session yet. Beyond this, a new connection closes an older one,
first one of the user or the address that has most, so that nobody can take all places."""
PING_S = 5.0
"""A stream without news sends a ping this often."""
LOG_STREAMS_MAX = 16
STACKS_AT_ONCE = 1

NDJSON = "application/x-ndjson"
PAGES = os.path.join(os.path.dirname(__file__), "pages")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
OPEN_PATHS = {
    "/", "/login", "/page.css",
    *(f"/{name}" for name in os.listdir(PAGES) if not name.endswith(".html")),
}  # fmt: skip
"""The pages, which need no session: they contain nothing of the job."""


class ActionWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to the job from the page."""

    id: Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
    action: Action
    node: Annotated[str, Meta(max_length=NODE_ID_CHARS_MAX)] = ""
    reason: Annotated[str, Meta(max_length=REQUEST_WHY_CHARS_MAX)] = ""
    grace_s: Annotated[float, Meta(ge=-1.0, le=GRACE_S_MAX)] = -1.0
    """Below 0: the grace with which the job was started."""


class Refused(Exception):
    """A request is rejected with this HTTP status."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status, self.problem = status, problem


class SecurityMiddleware:
    """Checks requests, and adds the same headers to every response."""

    def __init__(self, app: ASGIApp, access: DashboardAccess) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *ours]
            await send(message)

        response = self._refusal(scope)
        await (response or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        names = [name for name, _ in scope["headers"]]
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        changes = scope["method"] not in ("GET", "HEAD")
        if names.count(b"host") != 1 or not self._access.is_ours(headers, changes=changes):
            return problem_of(
                Refused(421, "this request did not come from a page of the dashboard")
            )
        session = self._access.session_of(time.monotonic(), headers)
        connection = scope["state"].get("connection")
        if session is not None and isinstance(connection, BrowserConnection):
            connection.admit()
        scope["state"] = {"session": session}
        if session is None and scope["path"] not in OPEN_PATHS:
            return problem_of(Refused(401, "log in first"))
        return None


class SessionStream(StreamingResponse):
    """A stream that ends with its session."""

    def __init__(
        self, session: LoginSession, chunks: AsyncGenerator[bytes, None], media_type: str
    ) -> None:
        super().__init__(chunks, media_type=media_type)
        self._session, self._chunks = session, chunks

    async def stream_response(self, send: Send) -> None:
        limit = None
        try:
            async with self._session.limit() as limit, contextlib.aclosing(self._chunks):
                await super().stream_response(send)
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            with contextlib.suppress(TimeoutError):  # A client that does not read gets no end.
                async with asyncio.timeout(EXCHANGE_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Dashboard:
    """The application of one job."""

    def __init__(self, access: DashboardAccess, job: WatchedJob) -> None:
        self._access, self._job = access, job
        self._log_streams = 0
        self._stacks = asyncio.Semaphore(STACKS_AT_ONCE)
        routes = [
            Route("/", self._page("index.html")),
            Route("/login", self._page("login.html"), methods=["GET"]),
            Route("/login", _checked(self._log_in), methods=["POST"]),
            Route("/logout", _checked(self._log_out), methods=["POST"]),
            Route("/session", _checked(self._session)),
            Route("/feed", _checked(self._feed)),
            Route("/logs", _checked(self._logs)),
            Route("/failures", _checked(self._failures)),
            Route("/stacks", _checked(self._dump_stacks), methods=["POST"]),
            Route("/action", _checked(self._act), methods=["POST"]),
            Route("/page.css", _file(os.path.join(os.path.dirname(report.__file__), "page.css"))),
            *(
                Route(f"/{name}", self._page(name))
                for name in sorted(os.listdir(PAGES))
                if not name.endswith(".html")
            ),
        ]
        self.app = SecurityMiddleware(Starlette(routes=routes), access)

    def _page(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        return _file(os.path.join(PAGES, name))

    # Logging in and out.

    async def _log_in(self, request: Request) -> Response:
        try:
            form = parse_qs((await body_of(request)).decode(errors="replace"), max_num_fields=4)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        secret = self._access.log_in(time.monotonic(), form.get("token", [""])[0].strip())
        if secret is None:
            raise Refused(401, "this is not the token of this dashboard")
        return as_json({"secret": secret})

    async def _log_out(self, request: Request) -> Response:
        self._access.log_out(request.state.session)
        return Response(status_code=204)

    async def _session(self, _request: Request) -> Response:
        return as_json(
            {
                "readOnly": self._job.is_read_only,
                "version": __version__,
                "stages": MEANINGS,
                "ending": ENDING_STAGES,
                "starting": STARTING_STAGES,
            }
        )

    # State.

    async def _feed(self, request: Request) -> Response:
        listener = self._job.broadcast.listen()
        if listener is None:
            raise Refused(503, "too many pages are open")

        async def updates() -> AsyncGenerator[bytes, None]:
            try:
                while (update := await listener.get(PING_S)) is not None:
                    yield update or PING
            finally:
                self._job.broadcast.leave(listener)

        return SessionStream(request.state.session, updates(), NDJSON)

    async def _logs(self, request: Request) -> Response:
        try:
            wanted = self._job.parse_logs_query(request.query_params)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        if self._log_streams >= LOG_STREAMS_MAX:
            raise Refused(503, "too many logs are being read")

        async def lines() -> AsyncGenerator[bytes, None]:
            self._log_streams += 1
            try:
                node = request.query_params.get("node", "")
                async with contextlib.aclosing(self._job.logs(wanted, node)) as found:
                    async for some in found:
                        yield msgspec.json.encode(some) + b"\n"
            except ControlProblem as problem:
                yield msgspec.json.encode({"problem": problem.message}) + b"\n"
            finally:
                self._log_streams -= 1

        return SessionStream(request.state.session, lines(), NDJSON)

    async def _failures(self, _request: Request) -> Response:
        return as_json(await self._job.failures())

    # Requests.

    async def _dump_stacks(self, _request: Request) -> Response:
        async with self._stacks:
            return as_json(await self._job.stacks())

    async def _act(self, request: Request) -> Response:
        if self._job.is_read_only:
            raise Refused(403, "this dashboard is read-only")
        try:
            wanted = msgspec.json.decode(await body_of(request), type=ActionWanted)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refused(400, f"unknown or invalid request: {error}") from None
        as_is = await self._job.act(wanted)
        return as_json({"granted": wanted.action.value, "why": as_is})


def _checked(
    handle: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Turn the exceptions of a handler into responses."""

    async def checked(request: Request) -> Response:
        try:
            return await handle(request)
        except Refused as refused:
            return problem_of(refused)
        except ControlProblem as problem:
            status = 502 if isinstance(problem, JobUnreachable) else 409
            return problem_of(Refused(status, problem.message))

    return checked


def _file(path: str) -> Callable[[Request], Awaitable[Response]]:
    with open(path, "rb") as file:
        content = file.read()
    media_type = TYPES[os.path.splitext(path)[1]]

    async def serve(_request: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve


def problem_of(refused: Refused) -> Response:
    """Return the response to a rejected request; the page shows it."""
    return as_json({"problem": refused.problem}, refused.status)


def as_json(value: Any, status: int = 200) -> Response:
    """Return a value as a response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def body_of(request: Request) -> bytes:
    """Return the body of a request; reject it if it is too large or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(EXCHANGE_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    raise Refused(413, f"more than {BODY_BYTES_MAX} bytes")
    except TimeoutError:
        raise Refused(408, "the request did not arrive in time") from None
    return bytes(body)


class BrowserConnection(H11Protocol):
    """A browser's connection. It closes unless each request's head arrives in time."""

    def __init__(self, strangers: HalfOpen, *, app_state: dict[str, Any], **others: Any) -> None:
        super().__init__(app_state={**app_state, "connection": self}, **others)
        self._strangers = strangers
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._strangers.is_full:
            oldest, _ = self._strangers.next_to_close()
            oldest.close()
        user = user_of(transport.get_extra_info("socket"))
        address = self.client[0] if self.client else ""
        self._strangers.add(self, address, self.loop.time(), user=user)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self)
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()  # A response has begun, so there cannot be another one.

    def admit(self) -> None:
        """Note that this connection belongs to a session."""
        self._strangers.remove(self)

    def close(self) -> None:
        """Close the connection to make room."""
        self._strangers.remove(self)
        self.transport.abort()

    def _await_head(self) -> None:
        """Limit the time until the next head is complete. More data does not extend it."""
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(EXCHANGE_S, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """Ends the endless streams of browsers before it shuts down."""

    def __init__(self, config: uvicorn.Config, job: WatchedJob) -> None:
        super().__init__(config)
        self._job = job

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._job.broadcast.close()
        await super().shutdown(sockets)


async def serve(
    listener: socket.socket,
    access: DashboardAccess,
    job: WatchedJob,
    ended: asyncio.Future[None] | None = None,
) -> None:
    """Serve the dashboard of a job until a signal ends it, or `ended` is done."""
    config = uvicorn.Config(
        Dashboard(access, job).app,
        http=partial(BrowserConnection, HalfOpen(STRANGERS_MAX)),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    server = Server(config, job)

    async def end() -> None:
        assert ended is not None
        await ended
        await job.publish_end()
        server.should_exit = True

    ending = asyncio.ensure_future(end()) if ended is not None else None
    feeding = asyncio.ensure_future(job.run())
    feeding.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
        if feeding.done():
            feeding.result()
    finally:
        feeding.cancel()
        if ending is not None:
            ending.cancel()
