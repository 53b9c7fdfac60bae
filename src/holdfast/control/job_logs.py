"""Following the log output of the chosen nodes of a job, through restarts and regroups."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.control.job_client import ControlProblem, JobNotFound
from holdfast.errors import UsageError
from holdfast.numa.affinity import format_ranges

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.control.job_client import JobClient
    from holdfast.wire.messages import JobSummary, LogLines, LogsQuery, NodeSummary

BEGIN_EVERY_S = 0.5
"""The minimum time between two checks for nodes that the client does not follow yet."""
NODES_SHOWN = 10
RANKS_MAX = 65_536


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in a list like `0,8-15`."""
    ranks: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--rank: {part!r} is not a rank; accepted: a list like 0,8-15")
        # A number with more than nine digits exceeds `RANKS_MAX` anyway.
        span = range(int(first[:9]), int((last if dash else first)[:9]) + 1)
        if not span:
            raise UsageError(
                f"--rank: {part!r} ends before it starts; accepted: a list like 0,8-15"
            )
        if len(ranks) + len(span) > RANKS_MAX:
            raise UsageError(f"--rank: more than {RANKS_MAX} ranks")
        ranks += span
    return ranks


async def follow_logs(
    client: JobClient,
    wanted: LogsQuery,
    node: str,
    show: Callable[[LogLines], Awaitable[None] | None],
    complain: Callable[[str], None],
) -> None:
    """Show the output of workers on all chosen nodes; with `wanted.follow`, also on later nodes.

    `complain` gets a line about each node whose logs are not available. An exception that `show`
    raises ends the call.
    """
    following = _Following(client, wanted, node, show, complain)
    try:
        await following.run()
    finally:
        following.cancel()


class _Following:
    def __init__(
        self,
        client: JobClient,
        wanted: LogsQuery,
        node: str,
        show: Callable[[LogLines], Awaitable[None] | None],
        complain: Callable[[str], None],
    ) -> None:
        self._client, self._wanted, self._node = client, wanted, node
        self._show, self._complain = show, complain
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the first exception of a reader, except for problems of its node."""
        self._problems: dict[str, ControlProblem] = {}
        self._known: set[str] = set()
        """Nodes whose output was shown."""
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        self._failed.cancel()
        for task in (*self._watchers, *self._readers.values()):
            task.cancel()

    async def run(self) -> None:
        await self._begin()
        if self._wanted.follow:
            await self._follow()
            return
        await asyncio.gather(*self._readers.values())
        if self._problems and not self._known:
            raise next(iter(self._problems.values()))
        for name in self._problems:
            self._complain(self._about(name))

    async def _follow(self) -> None:
        events, again = self._watch(self._note_events()), self._watch(self._begin_again())
        await asyncio.wait((events, again, self._failed), return_when=asyncio.FIRST_COMPLETED)
        for one in (self._failed, again):
            if one.done():
                one.result()
        try:
            events.result()
        except ControlProblem as end:
            if not self._known:
                raise (*self._problems.values(), end)[0] from None
            self._complain(end.message)

    def _watch(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._watchers.append(task)
        return task

    async def _note_events(self) -> None:
        async for _event in self._client.events(follow=True):
            self._changed.set()

    async def _begin_again(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._begin()
            except ControlProblem:
                self._changed.set()  # Readers continue until there are no more events.
            await asyncio.sleep(BEGIN_EVERY_S)  # One start causes many events.

    async def _begin(self) -> None:
        names = await self._chosen()
        for name in names:
            if name not in self._readers or self._readers[name].done():
                reader = asyncio.ensure_future(self._read(name, len(names)))
                if self._wanted.follow:
                    reader.add_done_callback(self._note_failure)
                self._readers[name] = reader

    def _note_failure(self, reader: asyncio.Task[None]) -> None:
        error = None if reader.cancelled() else reader.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _read(self, name: str, streams: int) -> None:
        try:
            async for lines in self._client.logs(name, self._wanted, streams=streams):
                self._known.add(name)
                waits = self._show(lines)
                if waits is not None:  # Read no more until the caller has taken these lines.
                    await waits
        except ControlProblem as problem:
            if name in self._known:
                return  # The node left; if it rejoins, there will be an event.
            known = self._problems.get(name)
            self._problems[name] = problem
            if self._wanted.follow and (known is None or known.message != problem.message):
                self._complain(self._about(name))

    def _about(self, name: str) -> str:
        return f"{name}: {self._problems[name].message}"

    async def _chosen(self) -> list[str]:
        client, node, ranks = self._client, self._node, self._wanted.ranks
        try:
            job = await client.status()
        except ControlProblem as problem:
            is_elsewhere = client.agents.passes_on or node not in ("", client.node)
            if self._readers or is_elsewhere or client.is_over:
                raise
            # For example, etcd is unreachable: show this node's logs.
            self._complain(problem.message)
            return [client.node]
        names = [one.node for one in job.nodes if is_chosen(one, node, ranks)]
        if not names and not self._readers:
            raise JobNotFound(_no_matching_worker(job, node, ranks))
        return names


def is_chosen(node: NodeSummary, name: str, ranks: list[int]) -> bool:
    """Whether a node or host of this name (or any) has one of these ranks (or any)."""
    if name and name not in (node.node, node.host):
        return False
    if node.first_rank < 0:  # Other nodes have its former ranks now.
        return bool(name) and not ranks
    return not ranks or any(node.first_rank <= rank < node.first_rank + node.size for rank in ranks)


def _no_matching_worker(job: JobSummary, node: str, ranks: list[int]) -> str:
    present = {one.node: range(one.first_rank, one.first_rank + one.size) for one in job.nodes}
    present = {name: own for name, own in present.items() if own.start >= 0}
    if not present:
        return "the job has no workers now"
    wanted = f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}" if ranks else "workers"
    on = f" on {node!r}" if node else ""
    have = ", ".join(
        f"{name} ({format_ranges(own)})" for name, own in [*present.items()][:NODES_SHOWN]
    )
    more = ", ..." if len(present) > NODES_SHOWN else ""
    return f"the job has no {wanted}{on}; nodes and their ranks: {have}{more}"
