"""The job of a dashboard: its state for browsers, and other requests to it.

While a page is open, a `JobFeed` keeps a `LiveJob` up to date, and `Broadcast` sends it in sections. While
no page is open, the job receives no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import console
from holdfast.control.job_feed import JobFeed
from holdfast.control.job_logs import follow_logs, parse_ranks
from holdfast.control.live_job import LiveJob
from holdfast.control.series import Series, json_loss
from holdfast.control.stack_groups import grouped
from holdfast.errors import HoldfastError, UsageError
from holdfast.printable import visible
from holdfast.views.dashboard.broadcast import Broadcast
from holdfast.views.report import model, records
from holdfast.wire.messages import GREP_CHARS_MAX, LogLines, LogsQuery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from holdfast.control.job_client import JobClient
    from holdfast.control.live_job import GenerationRow, NodeRow, RankRow
    from holdfast.views.dashboard.web_server import ActionWanted
    from holdfast.views.report.model import FailureEntry
    from holdfast.wire.messages import EventRecord

LOG_DIR = "LOG_DIR"
"""Stands for the job's log directory, if the dashboard does not know it."""
GATHER_S = 0.1
"""Changes within this time are sent together."""
IDLE_S = 30.0
"""The state is kept up to date for this long after the last page was closed."""
LOG_LINES_MAX = 10_000
"""The limit for the old lines of each rank."""
FINISH_S = 0.5
"""How long a dashboard that exits with its agent waits for the end of the job."""
LOGS_WAITING_MAX = 8
"""Pieces of logs that wait for a browser; beyond this, reading waits too."""
LINE_CHARS_MAX = 4_000
SPANS_SHOWN = 2_000
FAILURES_S = 2.0
"""The minimum interval between two reads of the failures."""


class _NotedJob(LiveJob):
    """A `LiveJob` that notes which events were not published yet."""

    def __init__(self) -> None:
        super().__init__()
        self.unpublished: list[EventRecord] = []

    def add_event(self, event: EventRecord) -> None:
        super().add_event(event)
        self.unpublished.append(event)


class WatchedJob:
    """One job, for as long as the server runs."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[JobClient]],
        *,
        is_read_only: bool,
        log_dirs: Sequence[str] = (),
    ) -> None:
        self.is_read_only = is_read_only
        self.broadcast = Broadcast(self._refresh)
        self._connect = connect
        self._log_dirs = log_dirs
        self._model = _NotedJob()
        self._events: object = self._model.events
        self._publishing: asyncio.TimerHandle | None = None
        self._series: tuple[Series, dict[str, Any]] = (Series(), _series(Series()))
        self._failures: tuple[float, list[FailureEntry], str] | None = None
        self._reading = asyncio.Lock()
        self._updated = asyncio.Event()

    # The state.

    async def run(self) -> None:
        """Follow the job while a page is open, until cancelled."""
        while True:
            await self.broadcast.is_wanted.wait()
            feeding = asyncio.ensure_future(
                JobFeed(self._connect, self._model, self._changed).run()
            )
            idle = asyncio.ensure_future(self.broadcast.wait_until_idle(IDLE_S))
            try:
                await asyncio.wait((feeding, idle), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    feeding.result()  # Only a bug ends it.
            finally:
                feeding.cancel()
                idle.cancel()
                await asyncio.wait((feeding, idle))

    async def publish_end(self) -> None:
        """Publish the end of the job, if a page is open and the end is known soon."""
        model = self._model
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                while self.broadcast.is_wanted.is_set() and not (model.is_over or model.problem):
                    self._updated.clear()
                    await self._updated.wait()
        self.broadcast.refresh()

    def _changed(self) -> None:
        self._updated.set()
        if self._publishing is None:
            loop = asyncio.get_running_loop()
            self._publishing = loop.call_later(GATHER_S, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        self.broadcast.refresh()

    def _refresh(self) -> None:
        """Publish all sections."""
        model = self._model
        if model.events is not self._events:  # A new job with the same name.
            self._events = model.events
            self.broadcast.drop_all()
        events, model.unpublished = model.unpublished, []
        node_of = {node.node: at for at, node in enumerate(model.nodes)}
        self.broadcast.publish(
            {
                "job": {
                    **msgspec.structs.asdict(model.header),
                    "problem": model.problem,
                    "end": model.end,
                    "report": shlex.join(("holdfast", "report", *(self._log_dirs or [LOG_DIR]))),
                },
                "nodes": [_node(one) for one in model.nodes],
                "ranks": _columns(model.ranks, node_of),
                "generations": [_generation(one) for one in reversed(model.generations)],
                "spans": _spans(model),
                "series": self._shown_series(),
            },
            events,
        )

    def _shown_series(self) -> dict[str, Any]:
        """Return the history of the job, the same until it changes: conversions of times are not exact."""
        series = self._model.series
        if series is not self._series[0]:
            self._series = series, _series(series)
        return self._series[1]

    # Other requests.

    async def act(self, wanted: ActionWanted) -> str:
        """Request an action; return the result of `JobClient.request`."""
        async with await self._connect() as client:
            return await client.request(
                wanted.action,
                node=wanted.node,
                why=wanted.reason,
                grace_s=wanted.grace_s,
                request_id=wanted.id,
            )

    async def stacks(self) -> dict[str, Any]:
        """Return the stacks of all workers, equal ones grouped."""
        async with await self._connect() as client:
            job = await client.status()
            found = await asyncio.gather(
                *(client.stacks(node.node) for node in job.nodes if node.first_rank >= 0)
            )
        groups = grouped([(one.rank, one.text) for node in found for one in node.workers])
        return {
            "groups": [
                {"frame": one.frame, "ranks": one.ranks, "text": visible(one.text)}
                for one in groups
            ],
            "problems": [f"{node.node}: {node.problem}" for node in found if node.problem],
        }

    def parse_logs_query(self, parameters: Mapping[str, str]) -> LogsQuery:
        """Parse the parameters of a request for logs; raise `ValueError` if they are invalid."""
        try:
            ranks = parse_ranks(parameters.get("ranks", "").replace(" ", ""))
        except UsageError:
            raise ValueError("ranks must be a list such as 0,8-15") from None
        last = parameters.get("tail", "all")
        if last != "all" and not (last.isascii() and last.isdigit()):
            raise ValueError("tail must be a number of lines, or all")
        tail = -1 if last == "all" else min(LOG_LINES_MAX, int(last[:9]))
        return LogsQuery(
            ranks=ranks,
            tail=tail,
            follow=parameters.get("follow") == "1",
            grep=parameters.get("grep", "")[:GREP_CHARS_MAX],
        )

    async def logs(self, wanted: LogsQuery, node: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what workers wrote; reading stops while the browser does not receive."""
        pieces: asyncio.Queue[LogLines | Exception | None] = asyncio.Queue(LOGS_WAITING_MAX)

        async def read() -> None:
            end: Exception | None = None
            try:
                async with await self._connect() as client:
                    await follow_logs(client, wanted, node, pieces.put, console.debug)
            except Exception as problem:  # noqa: BLE001 (raised below)
                end = problem
            await pieces.put(end)  # Not reached after a cancellation: the queue has no reader then.

        reading = asyncio.ensure_future(read())
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield {
                    "rank": piece.rank,
                    "stream": piece.stream,
                    "generation": piece.generation,
                    "lines": [
                        visible(line.decode(errors="replace")[:LINE_CHARS_MAX])
                        for line in piece.text.removesuffix(b"\n").split(b"\n")
                    ],
                }
        finally:
            reading.cancel()
            await asyncio.wait((reading,))

    async def failures(self) -> dict[str, Any]:
        """Return the failures in the log directories, if there are any."""
        if not self._log_dirs:
            return {"failures": [], "problem": "", "folders": []}
        async with self._reading:
            now = time.monotonic()
            if self._failures is None or now - self._failures[0] > FAILURES_S:
                found, problem = await asyncio.to_thread(_read_failures, self._log_dirs)
                self._failures = time.monotonic(), found, problem
        return {
            "failures": self._failures[1],
            "problem": self._failures[2],
            "folders": self._log_dirs,
        }


def _node(row: NodeRow) -> dict[str, Any]:
    shown = msgspec.structs.asdict(row)
    del shown["address"], shown["ranks"]  # The ranks have a section of their own.
    return shown


def _columns(rows: Sequence[RankRow], node_of: dict[str, int]) -> dict[str, list[Any]]:
    """Return ranks by column, which takes half the space; without columns that no rank reports."""
    more: dict[str, list[Any]] = {}
    if any(row.total > 0 for row in rows):
        more["eta"] = [round(row.eta_s) for row in rows]
    if any(row.loss is not None for row in rows):
        more["loss"] = [row.loss for row in rows]
    return {
        **more,
        "rank": [row.rank for row in rows],
        "node": [node_of.get(row.node, -1) for row in rows],
        "local": [row.local_rank for row in rows],
        "state": [row.state for row in rows],
        "step": [row.step for row in rows],
        "rate": [None if row.rate is None else round(row.rate, 3) for row in rows],
        "lag": [row.lag for row in rows],
        "age": [round(row.heartbeat_age_s, 1) for row in rows],
        "cpu": [None if row.cpu is None else round(row.cpu, 2) for row in rows],
        "rss": [row.rss_bytes for row in rows],
        "pid": [row.pid for row in rows],
        "mark": [row.mark for row in rows],
        "section": [row.section for row in rows],
    }


def _time_of_day(at: float) -> float:
    """Convert a time of this host's monotonic clock to the time of day."""
    return round(time.time() - time.monotonic() + at, 2)


def _series(series: Series) -> dict[str, Any]:
    """Return values over time, for plots."""
    return {
        "edges": [_time_of_day(at) for at in series.edges],
        "rates": [_rounded(value) for value in series.rates],
        "losses": [json_loss(_rounded(value)) for value in series.losses],
        "rss": series.rss,
        "gpu": [_rounded(value) for value in series.gpu],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _generation(row: GenerationRow) -> dict[str, Any]:
    shown = msgspec.structs.asdict(row)
    if not row.is_over:
        del shown["ran_s"]  # Pages compute it; otherwise the section would change every second.
    for name in ("started", "ended"):
        at = shown.pop(f"{name}_at")
        shown[name] = None if at is None else _time_of_day(at)
    return {**shown, "down_s": row.down_s}


def _spans(job: LiveJob) -> list[dict[str, Any]]:
    """Return the stages of the job over time; the last span has no end while the job runs."""
    return [
        {
            "stage": one.stage,
            "from": _time_of_day(one.begin),
            "to": None if one.end == job.updated_at and not job.is_over else _time_of_day(one.end),
            "generation": one.generation,
        }
        for one in job.spans[-SPANS_SHOWN:]
    ]


def _read_failures(folders: Sequence[str]) -> tuple[list[FailureEntry], str]:
    try:
        jobs = records.jobs_in(records.read(list(folders), lambda _text: None))
        for run in jobs[0]:
            records.read_other_files(run)
        return model.describe(jobs[0], len(jobs) - 1).failures, ""
    except HoldfastError as problem:
        return [], problem.message
    except OSError as problem:
        return [], f"cannot read {problem.filename}: {problem.strerror}"
