"""Several endpoints in order: the coordinator is at the first, or where a person had it taken over.

A machine that is cut off looks the same as one that is gone, so no agent ever decides by itself that
another one is to coordinate. It dials all endpoints, from the last one on at which it was connected: a
coordinator takes over at a later place, never back at an earlier one (`core.coordinator`). At a later
place only one that took over there answers.

Whoever coordinates looks at the later places before it begins and every `LOOK_S` from then on. If
it finds that it was replaced, which means that it was cut off and somebody thought it dead, it ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.coordinator.connect import ConnectFailed
from holdfast.net.endpoints import format_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.coordinator.connect import ClientConnection, CoordinatorConnector

STAGGER_S = 0.05  # Later places are not dialled if an earlier one answers at once.
LOOK_S = 5.0
"""How often a coordinator looks whether it was replaced. Raising it lets one that was, and is back, go
on for longer with the nodes that it still has."""
FIRST_LOOK_S = 1.0
"""How long that may take before it begins. Machines that are up answer at once; for one that is down
nobody can wait longer than this, since it may stay so."""


class Places:
    """A `Connector` to the coordinator at one of several endpoints.

    `floor` returns the first place that may be dialled. `host` connects to the first one where nobody
    listens any more, if this process may coordinate there; nobody must have taken over, then.
    """

    def __init__(
        self,
        connectors: Sequence[CoordinatorConnector],
        *,
        floor: Callable[[], int],
        host: CoordinatorConnector | None = None,
    ) -> None:
        self._connectors = connectors
        self._floor = floor
        self._host = host
        self.place = 0
        """Where the last connection was made, or tried first."""

    @property
    def suspicion(self) -> str:
        """What seems wrong with the attempt that is under way; any thread may look."""
        return self._connectors[self.place].suspicion

    async def connect(self) -> ClientConnection:
        """Return a connection to the first that answers; or raise what was wrong at the first place."""
        floor = self._floor()
        try:
            connection, self.place = await first_of(self._connectors[floor:])
        except ConnectFailed as problem:
            self.place = floor
            if floor or not problem.refused or self._host is None:
                raise
            connection = await self._host.connect()
        return connection

    async def replaced_at(self, place: int, limit_s: float) -> str:
        """Return the later endpoint at which a coordinator took over from a place, or nothing."""
        try:
            async with asyncio.timeout(limit_s):
                connection, at = await first_of(self._connectors[place + 1 :])
        except (ConnectFailed, OSError):  # A `TimeoutError` is one.
            return ""
        connection.abort()
        return format_endpoint(self._connectors[at].host, self._connectors[at].port)

    async def others(self, place: int) -> str:
        """Return the endpoint at which somebody coordinates already, besides a place, or nothing.

        At the first it is enough that anybody listens: what does not answer now, or wants another
        token, may all the same be the coordinator that is to be replaced.
        """
        others = [one for one in self._connectors if one.place != place]
        found = await asyncio.gather(*(one.connect() for one in others), return_exceptions=True)
        answers = ""
        for one, outcome in zip(others, found, strict=True):
            where = format_endpoint(one.host, one.port)
            if not isinstance(outcome, BaseException):
                outcome.abort()
                answers = where
            elif not isinstance(outcome, ConnectFailed):
                raise outcome
            elif outcome.reached and one.place == 0:
                answers = f"{where} ({outcome.why})"
        return answers

    async def replaced(self, place: int) -> str:
        """Wait until a coordinator has taken over from a place; return its endpoint."""
        while True:
            await asyncio.sleep(LOOK_S)
            by = await self.replaced_at(place, LOOK_S)
            if by:
                return by


async def first_of(connectors: Sequence[CoordinatorConnector]) -> tuple[ClientConnection, int]:
    """Return the first connection that is there, and its place; raise as the first connector does."""
    loop = asyncio.get_running_loop()

    async def dial(turn: int, one: CoordinatorConnector) -> ClientConnection:
        await asyncio.sleep(turn * STAGGER_S)
        return await one.connect()

    if not connectors:
        raise ConnectFailed("there is no later endpoint")
    dials = [loop.create_task(dial(turn, one)) for turn, one in enumerate(connectors)]
    try:
        waiting = set(dials)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for at, one in reversed([*enumerate(dials)]):
                if one in done and one.exception() is None:
                    connection = one.result()
                    dials.remove(one)
                    return connection, connectors[at].place
        return dials[0].result(), 0
    finally:
        for one in dials:
            one.cancel()
        if dials:
            await asyncio.wait(dials)
        for one in dials:
            if not one.cancelled() and one.exception() is None:
                one.result().abort()
