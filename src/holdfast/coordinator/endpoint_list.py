"""An ordered list of endpoints: the coordinator runs at the first, or where an operator moved it.

A machine that is cut off looks like one that failed, so only an operator decides that another machine takes
over. A coordinator takes over at a later endpoint in the list, never at an earlier one
(`core.coordinator_machine`). So an agent tries only the endpoint of its last connection and later ones. A later
endpoint responds only if a coordinator took over there.

A coordinator probes the later endpoints before it starts and every `PROBE_S` after that. If another coordinator has
taken over, because this one was cut off and an operator considered it dead, this one stops.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.coordinator.connections import ConnectFailed
from holdfast.net.endpoints import format_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.coordinator.connect import CoordinatorConnector
    from holdfast.coordinator.connections import ClientConnection

STAGGER_S = 0.05  # A later endpoint is not tried if an earlier one responds immediately.
PROBE_S = 5.0
"""How often a coordinator checks whether it was replaced. With a higher value, a replaced coordinator that is
reachable again continues for longer with the nodes that it still has."""
FIRST_PROBE_S = 1.0
"""How long the first check may take. A running machine responds immediately; one that is down may never
respond."""


class EndpointList:
    """A `Connector` to the coordinator at one of several endpoints.

    `floor` returns the first endpoint that may be tried. If the first endpoint
    refuses connections and no other coordinator has taken over, `host` starts the coordinator in this process and
    connects to it. Without `host`, this process may not run the coordinator.
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
        self.endpoint_index = 0
        """The index of the last connection's endpoint; after a failed attempt, of the first endpoint tried."""

    @property
    def suspicion(self) -> str:
        """The suspected problem of the attempt in progress. Any thread may read it."""
        return self._connectors[self.endpoint_index].suspicion

    async def connect(self) -> ClientConnection:
        """Return a connection to the first endpoint that responds, or raise the problem of the first endpoint."""
        floor = self._floor()
        try:
            connection, self.endpoint_index = await first_of(self._connectors[floor:])
        except ConnectFailed as problem:
            self.endpoint_index = floor
            if floor or not problem.refused or self._host is None:
                raise
            connection = await self._host.connect()
        return connection

    async def replaced_at(self, endpoint_index: int, limit_s: float) -> str:
        """Return the later endpoint where a coordinator took over from `endpoint_index`; empty if none did."""
        try:
            async with asyncio.timeout(limit_s):
                connection, at = await first_of(self._connectors[endpoint_index + 1 :])
        except (ConnectFailed, OSError):  # `OSError` includes `TimeoutError`.
            return ""
        connection.abort()
        return format_endpoint(self._connectors[at].host, self._connectors[at].port)

    async def other_coordinator(self, endpoint_index: int) -> str:
        """Return another endpoint where a coordinator already runs; empty if there is none.

        At the first endpoint any listener counts: even if it does not respond or has a different token, it may be the
        coordinator that is about to be replaced.
        """
        others = [one for one in self._connectors if one.endpoint_index != endpoint_index]
        found = await asyncio.gather(*(one.connect() for one in others), return_exceptions=True)
        answers = ""
        for one, outcome in zip(others, found, strict=True):
            where = format_endpoint(one.host, one.port)
            if not isinstance(outcome, BaseException):
                outcome.abort()
                answers = where
            elif not isinstance(outcome, ConnectFailed):
                raise outcome
            elif outcome.reached and one.endpoint_index == 0:
                answers = f"{where} ({outcome.why})"
        return answers

    async def replaced(self, endpoint_index: int) -> str:
        """Wait until a coordinator has taken over from `endpoint_index`; return its endpoint."""
        while True:
            await asyncio.sleep(PROBE_S)
            by = await self.replaced_at(endpoint_index, PROBE_S)
            if by:
                return by


async def first_of(connectors: Sequence[CoordinatorConnector]) -> tuple[ClientConnection, int]:
    """Return the first connection that opens, and its index; if none does, raise the first endpoint's problem."""
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
                    return connection, connectors[at].endpoint_index
        return dials[0].result(), 0
    finally:
        for one in dials:
            one.cancel()
        if dials:
            await asyncio.wait(dials)
        for one in dials:
            if not one.cancelled() and one.exception() is None:
                one.result().abort()
