"""One watch: a connection of its own, on which etcd tells of every change in a range of keys.

A watch ends with the connection or with the endpoint's fate, and tells so once. It does not open
itself again: only whoever uses it knows the last revision that was taken in.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.core.etcd_calls import Change, Problem, Trouble
from holdfast.etcd import gateway
from holdfast.etcd.http import ConnectionProblem, HttpConnection
from holdfast.etcd.refusals import OK, Refusal, refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable


class WatchHandle:
    """A watch, from `AsyncEtcd.watch` until it ends or `cancel` is called."""

    def __init__(
        self,
        body: bytes,
        on_changes: Callable[[int, tuple[Change, ...]], None],
        on_ended: Callable[[Problem], None],
    ) -> None:
        self.body = body
        self.is_created = False
        """Whether etcd has confirmed it."""
        self.task: asyncio.Task[None] | None = None
        self._on_changes, self._on_ended = on_changes, on_ended
        self._over = False
        self._connection: HttpConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refusal | None = None

    def cancel(self) -> None:
        """End it; nothing is told after this."""
        self._over = True
        if self.task is not None:
            self.task.cancel()

    def end(self, problem: Problem) -> None:
        """Tell that it has ended, unless that was told."""
        if not self._over:
            self._over = True
            self._on_ended(problem)

    def drop(self, why: str) -> None:
        """End its connection, because the endpoint is given up."""
        if self._connection is not None:
            self._connection.abort(why)

    async def follow(
        self, connection: HttpConnection, token: str, limit_s: float
    ) -> Problem | Refusal:
        """Pass on what comes in until it ends; return why it did.

        A `Refusal` came before etcd confirmed the watch: another endpoint, or another token, may
        help. Raises `ConnectionProblem` where there was no answer before that.
        """
        timer = self._begin(connection, limit_s)
        try:
            reply = await connection.stream(gateway.WATCH, self.body, token, self._take)
            if reply.status != OK:
                return refusal_of(reply.status, reply.body)
            return Problem(Trouble.UNREACHABLE, "it ended the watch")
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
        said = gateway.decode_line(line)
        if isinstance(said, Refusal):
            self._refusal = said
            assert self._connection is not None
            self._connection.abort(said.problem.why)
            return
        if not self.is_created:
            self.is_created = True
            assert self._timer is not None
            self._timer.cancel()
        if said.changes and not self._over:
            self._on_changes(said.revision, said.changes)
