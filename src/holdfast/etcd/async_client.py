"""A client of etcd for asyncio; it belongs to one running loop.

A client uses one endpoint at a time. If that endpoint does not respond, or has no leader, the client switches to
the next: it drops idle connections and ends all watches, which their owners then reopen at the new endpoint. So if
one call detects that etcd hangs, all watches end immediately.

Within its limit, a call tries one endpoint after another, provided that etcd has not performed the request, or that
performing it twice is harmless. Otherwise the result is `ProblemKind.UNREACHABLE`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, overload

from holdfast.core.etcd.calls import (
    Answer,
    Change,
    MemberRequest,
    Members,
    Problem,
    ProblemKind,
    Request,
)
from holdfast.errors import HoldfastError
from holdfast.etcd import json_gateway
from holdfast.etcd.diagnose import diagnose_silence
from holdfast.etcd.json_gateway import OK, GatewayRefusal, Reaction, decode_refusal
from holdfast.etcd.optional_h11 import require_h11
from holdfast.etcd.transport import (
    ConnectionFault,
    ConnectionProblem,
    HttpConnection,
    HttpReply,
    open_connection,
)
from holdfast.net.endpoints import format_endpoint

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from holdfast.etcd.etcd_settings import EtcdSettings


CONNECTIONS_MAX = 8
"""Concurrent calls of one client; others wait. Each watch has its own connection."""
CLOSE_S = 1.0

CLOSED = Problem(ProblemKind.CLOSED, "the client is closed")
CONNECT_S = 2.0
"""The limit for a connection to one endpoint, TLS included. TCP retransmits after a second, so one lost packet
is not a failure."""
LEADERLESS_PAUSE_S = 0.1
"""The pause before all endpoints are tried again if none has a leader; elections take about a second."""
TRY_S_MIN = 0.01
"""After the first attempt, no endpoint is tried with less time left than this: the attempt could only fail."""
SHARE_S_MIN = 0.001

NO_TIME = Problem(ProblemKind.UNREACHABLE, "there was no time for a request")


class WatchHandle:
    """A watch with its own connection, from `AsyncEtcdClient.watch` until it ends or is cancelled.

    It ends once and does not reopen: only its user knows the last revision it received.
    """

    def __init__(
        self,
        body: bytes,
        on_changes: Callable[[int, tuple[Change, ...]], None],
        on_ended: Callable[[Problem], None],
    ) -> None:
        self.body = body
        self.is_created = False
        """Whether etcd has confirmed the watch."""
        self.task: asyncio.Task[None] | None = None
        self._on_changes, self._on_ended = on_changes, on_ended
        self._over = False
        self._connection: HttpConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: GatewayRefusal | None = None

    def cancel(self) -> None:
        """End the watch; no callback is called after this."""
        self._over = True
        if self.task is not None:
            self.task.cancel()

    def end(self, problem: Problem) -> None:
        """Report once that the watch has ended."""
        if not self._over:
            self._over = True
            self._on_ended(problem)

    def drop(self, why: str) -> None:
        """Close the watch's connection, because the client leaves the endpoint."""
        if self._connection is not None:
            self._connection.abort(why)

    async def follow(
        self, connection: HttpConnection, token: str, limit_s: float
    ) -> Problem | GatewayRefusal:
        """Deliver changes until the watch ends; return why it ended.

        A `GatewayRefusal` means that etcd never confirmed the watch: another endpoint or token may help. Raises
        `ConnectionProblem` if the connection fails before etcd confirms the watch.
        """
        timer = self._begin(connection, limit_s)
        try:
            reply = await connection.stream(json_gateway.WATCH, self.body, token, self._take)
            if reply.status != OK:
                return decode_refusal(reply.status, reply.body)
            return Problem(ProblemKind.UNREACHABLE, "it ended the watch")
        except ConnectionProblem as problem:
            if self._refusal is not None:
                return self._refusal.problem if self.is_created else self._refusal
            if not self.is_created:
                raise
            return Problem(problem.kind, problem.why)
        finally:
            timer.cancel()
            self._connection = None

    def _begin(self, connection: HttpConnection, limit_s: float) -> asyncio.TimerHandle:
        self._connection, self._refusal = connection, None
        late = f"no watch within {limit_s:.3g} s"
        self._timer = asyncio.get_running_loop().call_later(limit_s, connection.abort, late)
        return self._timer

    def _take(self, line: bytes) -> None:
        events = json_gateway.decode_line(line)
        if isinstance(events, GatewayRefusal):
            self._refusal = events
            assert self._connection is not None
            self._connection.abort(events.problem.why)
            return
        if not self.is_created:
            self.is_created = True
            assert self._timer is not None
            self._timer.cancel()
        if events.changes and not self._over:
            self._on_changes(events.revision, events.changes)


class AuthenticationRefused(Exception):
    """etcd rejects this user and password."""

    def __init__(self, refusal: GatewayRefusal) -> None:
        super().__init__(refusal.problem.why)
        self.refusal = refusal


class AsyncEtcdClient:
    """Calls and watches, until `close`."""

    def __init__(self, settings: EtcdSettings) -> None:
        require_h11()
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        self.local_address = ""
        """The local address of the newest connection."""
        self.tried: dict[str, str] = {}
        """The last problem of each endpoint that does not respond."""
        self._current = 0
        self._tls: ssl.SSLContext | None = None
        self._token: str | None = None
        self._renewing = asyncio.Lock()
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._responded: set[int] = set()  # Endpoints that have ever responded.
        self._idle: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()
        self._watches: set[WatchHandle] = set()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The endpoint in use now, as text."""
        return self._name(self._current)

    def describe(self, why: str) -> str:
        """Return the problems of all endpoints if none of several can be reached; otherwise `why`."""
        tried = self.tried
        if not len(tried) == len(self.settings.endpoints) > 1:
            return why
        order = map(self._name, range(len(tried)))
        return "; ".join(f"{endpoint}: {tried[endpoint]}" for endpoint in order)

    # Calls.

    @overload
    async def call(self, request: Request, *, limit_s: float | None = None) -> Answer: ...

    @overload
    async def call(
        self, request: MemberRequest, *, limit_s: float | None = None
    ) -> Members | Problem: ...

    async def call(
        self, request: Request | MemberRequest, *, limit_s: float | None = None
    ) -> Answer | Members:
        """Return etcd's response, or a `Problem`; raises nothing but `CancelledError`.

        The limit, by default `settings.call_s`, covers all endpoints together. If an endpoint exceeds it, the client
        switches to another one, and all watches end. So the limit must be long enough for a slow etcd.
        """
        limit_s = self.settings.call_s if limit_s is None else limit_s
        deadline = self._loop.time() + limit_s
        if self._slots.locked():
            try:
                async with asyncio.timeout(limit_s):
                    await self._slots.acquire()
            except TimeoutError:
                why = f"{CONNECTIONS_MAX} other calls were under way for {limit_s:.3g} s"
                return Problem(ProblemKind.UNREACHABLE, why)
        else:
            await self._slots.acquire()
        try:
            return await self._call(request, deadline)
        finally:
            self._slots.release()

    async def _call(self, request: Request | MemberRequest, deadline: float) -> Answer | Members:
        path, body = json_gateway.encode(request)
        attempts = self._attempts(deadline, may_repeat=json_gateway.may_repeat(request))
        while (at := await self._next(attempts)) is not None:
            try:
                token = await self._token_at(at, attempts)
                reply = await self._request(at, attempts, path, body, token)
            except ConnectionProblem as problem:
                self._failed(at, attempts, await self._explained(at, attempts, problem))
                continue
            except AuthenticationRefused as error:  # The refusal of one endpoint applies to all.
                self._refused(at, attempts, error.refusal, "")
                continue
            answer = json_gateway.decode(request, reply.status, reply.body)
            if not isinstance(answer, GatewayRefusal):
                self._note_response(at)
                return answer
            self._refused(at, attempts, answer, token)
        return attempts.problem

    async def _request(
        self, at: int, attempts: Attempts, path: str, body: bytes, token: str
    ) -> HttpReply:
        connection = self._take_idle(at) or await self._connect(at, attempts)
        try:
            limit_s = attempts.answer_s(self._loop.time())
            reply = await connection.request(path, body, token, limit_s=limit_s)
            self._responded.add(at)
            return reply
        finally:
            self._give_back(at, connection)

    def _take_idle(self, at: int) -> HttpConnection | None:
        while at == self._current and self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
        return None

    def _give_back(self, at: int, connection: HttpConnection) -> None:
        if at == self._current and connection.is_idle and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort("it is no longer used")

    async def _connect(self, at: int, attempts: Attempts) -> HttpConnection:
        if self._closed:
            raise ConnectionProblem(CLOSED.why, CLOSED.kind)
        host, port = self.settings.endpoints[at]
        if self.settings.tls and self._tls is None:
            try:
                self._tls = self.settings.tls_context()
            except HoldfastError as error:
                raise ConnectionProblem(str(error), ProblemKind.DENIED) from None
        connection = await open_connection(
            host,
            port,
            tls=self._tls,
            server_name=self.settings.server_name,
            limit_s=attempts.connect_s(self._loop.time()),
        )
        self._keep(connection)
        if self._closed:
            connection.abort(CLOSED.why, CLOSED.kind)
            await connection.ended
            raise ConnectionProblem(CLOSED.why, CLOSED.kind)
        self.local_address = connection.local_address
        return connection

    def _keep(self, connection: HttpConnection) -> None:
        """Register a connection for `close`."""
        self._open.add(connection)
        connection.on_ended = self._open.discard

    # Users.

    async def _token_at(self, at: int, attempts: Attempts) -> str:
        """Return the token for a request; raise `ConnectionProblem` if there is none."""
        if not self.settings.user:
            return ""
        if self._token is not None:
            return self._token
        limit_s = attempts.answer_s(self._loop.time())
        try:
            async with asyncio.timeout(limit_s), self._renewing:
                if self._token is None:
                    self._token = await self._authenticate(at, attempts)
                return self._token
        except TimeoutError:
            raise ConnectionProblem(f"no token within {limit_s:.3g} s") from None

    async def _authenticate(self, at: int, attempts: Attempts) -> str:
        body = json_gateway.encode_user(self.settings.user, self.settings.password)
        try:
            reply = await self._request(at, attempts, json_gateway.AUTHENTICATE, body, "")
        except ConnectionProblem as problem:
            # The request itself has not been sent yet.
            raise ConnectionProblem(problem.why, problem.kind, problem.fault) from None
        token = json_gateway.decode_token(reply.status, reply.body)
        if isinstance(token, GatewayRefusal):
            raise AuthenticationRefused(token)
        return token

    # Watches.

    def watch(
        self,
        key: bytes,
        end: bytes,
        start_revision: int,
        on_changes: Callable[[int, tuple[Change, ...]], None],
        on_ended: Callable[[Problem], None],
    ) -> WatchHandle:
        """Watch a key, or all keys from `key` up to `end`, starting at a revision.

        `on_changes` gets the revision of the last change and all changes of one or more
        transactions, in order; `on_ended` gets the reason, once, and not after `cancel` or `close`.
        Neither may block. To watch again, start at the last revision + 1 and after a pause,
        because an endpoint that is down refuses the connection immediately.
        """
        handle = WatchHandle(
            json_gateway.encode_watch(key, end, start_revision), on_changes, on_ended
        )
        self._watches.add(handle)
        handle.task = asyncio.get_running_loop().create_task(self._follow(handle))
        handle.task.add_done_callback(lambda _: self._watches.discard(handle))
        return handle

    async def _follow(self, handle: WatchHandle) -> None:
        attempts = self._attempts(self._loop.time() + self.settings.call_s, may_repeat=True)
        while (at := await self._next(attempts)) is not None:
            connection = None
            try:
                token = await self._token_at(at, attempts)
                connection = await self._connect(at, attempts)
                if attempts.next_endpoint(self._loop.time(), self._current) != at:
                    continue  # The client has moved to another endpoint meanwhile.
                self._note_working_endpoint(at)
                reason = await handle.follow(
                    connection, token, attempts.answer_s(self._loop.time())
                )
            except ConnectionProblem as problem:
                self._failed(at, attempts, await self._explained(at, attempts, problem))
                continue
            except AuthenticationRefused as error:
                self._refused(at, attempts, error.refusal, "")
                continue
            finally:
                if connection is not None:
                    connection.abort("the watch has ended")
            if isinstance(reason, Problem):
                handle.end(reason)
                return
            self._refused(at, attempts, reason, token)
        handle.end(attempts.problem)

    # Endpoints.

    def _attempts(self, deadline: float, *, may_repeat: bool) -> Attempts:
        return Attempts(len(self.settings.endpoints), deadline, may_repeat=may_repeat)

    async def _next(self, attempts: Attempts) -> int | None:
        at = attempts.next_endpoint(self._loop.time(), self._current)
        if attempts.pause_s:
            await asyncio.sleep(attempts.pause_s)
            if attempts.is_late(self._loop.time()):
                return None
        return at

    async def _explained(
        self, at: int, attempts: Attempts, problem: ConnectionProblem
    ) -> ConnectionProblem:
        """Return the problem. If the endpoint has never responded, look for a better explanation first."""
        if problem.fault is not ConnectionFault.SILENT or at in self._responded or self._closed:
            return problem
        host, port = self.settings.endpoints[at]
        better = await diagnose_silence(
            host,
            port,
            tls=self._tls,
            server_name=self.settings.server_name,
            limit_s=attempts.connect_s(self._loop.time()),
            on_opened=self._keep,
        )
        why = f"{problem.why} (it is not etcd, or it is a proxy that cannot reach etcd)"
        return better or ConnectionProblem(why, problem.kind, written=problem.written)

    def _failed(self, at: int, attempts: Attempts, problem: ConnectionProblem) -> None:
        attempts.failed(at, Problem(problem.kind, problem.why), written=problem.written)
        self._leave(at, problem.why)

    def _refused(self, at: int, attempts: Attempts, refusal: GatewayRefusal, token: str) -> None:
        if attempts.refused(at, refusal, can_renew=bool(self.settings.user)):
            if self._token == token:  # Otherwise another call has renewed it already.
                self._token = None
        elif refusal.handling in (Reaction.ELSEWHERE, Reaction.UNSURE):
            self._leave(at, refusal.problem.why)

    def _name(self, at: int) -> str:
        return format_endpoint(*self.settings.endpoints[at])

    def _note_response(self, at: int) -> None:
        """Use the endpoint that responded, if the current one did not.

        A late response does not make the client return to an endpoint that it has left.
        """
        if at == self._current or self.endpoint in self.tried:
            self._note_working_endpoint(at)
        else:
            self.tried.pop(self._name(at), None)

    def _note_working_endpoint(self, at: int) -> None:
        if self.tried:
            self.tried.pop(self._name(at), None)
        if at != self._current:
            self._switch(at, "another endpoint is in use")

    def _leave(self, at: int, why: str) -> None:
        self.tried[self._name(at)] = why
        if at == self._current:  # Otherwise another call was faster.
            self._switch((at + 1) % len(self.settings.endpoints), why)

    def _switch(self, to: int, why: str) -> None:
        """Switch to another endpoint; idle connections and all watches at the previous one end."""
        self._current = to
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort(why)
        for handle in tuple(self._watches):
            handle.drop(why)

    async def close(self) -> None:
        """End everything; calls under way get a `Problem`."""
        self._closed = True
        tasks = [handle.task for handle in self._watches if handle.task is not None]
        for handle in tuple(self._watches):
            handle.cancel()
        if tasks:
            await asyncio.wait(tasks)
        left = tuple(self._open)
        for connection in left:
            connection.abort(CLOSED.why, CLOSED.kind)
        if left:
            await asyncio.wait([one.ended for one in left], timeout=CLOSE_S)


# Which endpoint a call tries next, and when it gives up. Pure: times are arguments. A request that may have
# been performed is not sent again unless doing it twice is harmless. If an endpoint reports that there is no
# leader now, all are tried again after a pause, until the limit. If none responds at all, the call ends after
# one round: its caller decides whether to retry.


class Attempts:
    """The endpoints that one call has tried, and the outcomes."""

    def __init__(self, endpoints: int, deadline: float, *, may_repeat: bool) -> None:
        self.over = False
        self.pause_s = 0.0
        """How long to wait before the next endpoint."""
        self._endpoints = endpoints
        self._deadline = deadline
        self._may_repeat = may_repeat
        self._tried: set[int] = set()
        self._leaderless: Problem | None = None
        self._retry_leaderless = False
        self._renewed = False
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        """Why there is no response."""
        return self._leaderless or self._problem or NO_TIME

    def next_endpoint(self, now: float, current: int) -> int | None:
        """Return the endpoint to try: the current one, or the next untried one; None at the end."""
        self.pause_s = 0.0
        if self.over or self.is_late(now):
            return None
        if len(self._tried) == self._endpoints:
            if not self._retry_leaderless or self.is_late(now + LEADERLESS_PAUSE_S):
                return None
            self._tried.clear()
            self._retry_leaderless = False
            self.pause_s = LEADERLESS_PAUSE_S
        return next(
            at
            for at in ((current + i) % self._endpoints for i in range(self._endpoints))
            if at not in self._tried
        )

    def is_late(self, now: float) -> bool:
        """Whether there is no time left for another attempt."""
        return self._deadline - now <= (0 if self._problem is None else TRY_S_MIN)

    def connect_s(self, now: float) -> float:
        """Return how long to wait for a connection, so that the other endpoints get their share."""
        share_s = (self._deadline - now) / (self._endpoints - len(self._tried))
        return max(min(share_s, CONNECT_S), SHARE_S_MIN)

    def answer_s(self, now: float) -> float:
        """Return how long to wait for a response: all the time left, unless other endpoints may be tried next."""
        left_s = self._deadline - now
        if self._may_repeat:
            left_s /= self._endpoints - len(self._tried)
        return max(left_s, SHARE_S_MIN)

    def failed(self, at: int, problem: Problem, *, written: bool) -> None:
        """Note that an endpoint did not respond."""
        self._tried.add(at)
        self._note(problem)
        if written and not self._may_repeat:
            self._leaderless, self.over = None, True

    def refused(self, at: int, refusal: GatewayRefusal, *, can_renew: bool) -> bool:
        """Note a refusal; return whether to renew the token."""
        handling = refusal.handling
        if handling is Reaction.RENEW_TOKEN and can_renew and not self._renewed:
            self._renewed = True
            return True
        self._tried.add(at)
        self._note(refusal.problem)
        if handling is Reaction.ELSEWHERE or (handling is Reaction.UNSURE and self._may_repeat):
            if refusal.problem.kind is ProblemKind.UNREACHABLE:
                self._leaderless, self._retry_leaderless = refusal.problem, True
        else:
            self._leaderless, self._problem = None, refusal.problem
            self.over = True
        return False

    def _note(self, problem: Problem) -> None:
        """Keep the newest problem, but do not replace a temporary one by a permanent one."""
        if (
            self._problem is None
            or self._problem.kind is not ProblemKind.UNREACHABLE
            or problem.kind is ProblemKind.UNREACHABLE
        ):
            self._problem = problem
