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
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs

import msgspec
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.responses import RedirectResponse, Response, StreamingResponse
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
from holdfast.views import report
from holdfast.views.dashboard.access import DashboardAccess, LoginSession, has_csrf_token
from holdfast.views.stages import MEANINGS

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from holdfast.views.dashboard.watched_job import WatchedJob

BODY_BYTES_MAX = 16 * 1024
HEAD_BYTES_MAX = 16 * 1024
EXCHANGE_S = 5.0
"""Timeout for the head of a request, and again for its body."""
CONNECTIONS_MAX = 512
PING_S = 5.0
"""A stream without news sends a ping, and checks its session, this often."""
LOG_STREAMS_MAX = 16
STACKS_AT_ONCE = 1

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
OPEN_PATHS = ("/login", "/login.css", "/login.js", "/page.css", "/icon.svg")
"""Paths that need no session; they contain nothing of the job."""


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
        session_id = cookie_of(headers.get("cookie", ""), self._access.cookie)
        session = self._access.session(time.monotonic(), session_id) if session_id else None
        scope["state"] = {"session": session, "session_id": session_id}
        path = scope["path"]
        if path in OPEN_PATHS:
            return None
        if session is None:
            if path == "/" and not changes:
                return RedirectResponse("/login", 303)
            return problem_of(Refused(401, "log in first"))
        if changes and not has_csrf_token(session, headers):
            return problem_of(Refused(403, "the request lacks the secret of its session"))
        return None


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
        now = time.monotonic()
        address = request.client.host if request.client else ""
        if self._access.must_wait(now, address):
            raise Refused(429, "too many wrong tokens; wait a minute")
        form = parse_qs((await body_of(request)).decode(errors="replace"), max_num_fields=4)
        session_id = self._access.log_in(now, form.get("token", [""])[0].strip(), address)
        if session_id is None:
            raise Refused(401, "this is not the token of this dashboard")
        response = Response(status_code=204)
        # Not `secure`: it is plain HTTP on loopback, and some browsers would not send it there.
        response.set_cookie(
            self._access.cookie, session_id, httponly=True, samesite="strict", path="/"
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        self._access.log_out(request.state.session_id)
        response = Response(status_code=204)
        response.delete_cookie(self._access.cookie, httponly=True, samesite="strict", path="/")
        return response

    async def _session(self, request: Request) -> Response:
        session: LoginSession = request.state.session
        return as_json(
            {
                "secret": session.secret,
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
        session_id = request.state.session_id

        async def events() -> AsyncIterator[bytes]:
            try:
                while (update := await listener.get(PING_S)) is not None:
                    if self._access.session(time.monotonic(), session_id) is None:
                        return
                    yield update or b"event: ping\ndata:\n\n"
            finally:
                self._job.broadcast.leave(listener)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _logs(self, request: Request) -> Response:
        try:
            wanted = self._job.parse_logs_query(request.query_params)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        if self._log_streams >= LOG_STREAMS_MAX:
            raise Refused(503, "too many logs are being read")

        async def lines() -> AsyncIterator[bytes]:
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

        return StreamingResponse(lines(), media_type="application/x-ndjson")

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


def cookie_of(header: str, name: str) -> str:
    """Return the value of a cookie; empty if it is missing or ambiguous."""
    pairs = [part.strip().partition("=") for part in header.split(";")]
    values = [value for key, _, value in pairs if key == name]
    return values[0] if len(values) == 1 else ""


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


class PromptProtocol(H11Protocol):
    """A connection that closes unless its first request arrives in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(EXCHANGE_S, self._check)

    def _check(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


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
        http=PromptProtocol,
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
    if ended is not None:
        ended.add_done_callback(lambda _: setattr(server, "should_exit", True))
    feeding = asyncio.ensure_future(job.run())
    feeding.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
        if feeding.done():
            feeding.result()
    finally:
        feeding.cancel()
