"""Measures how long a status request takes, and how much of the coordinator's CPU subscribers use.

    watching.py AGENTS SUBSCRIBERS SECONDS [REST_S]

REST_S is the time before the coordinator's CPU is measured: by default, until there is no subscriber.
The fleet is that of `fleet.py`; each agent reports eight workers. The subscribers are in their own
process, and have subscribed to events and to the state of the job. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import statistics
import sys
import time
from typing import TYPE_CHECKING

from fleet import RUN_ID, Fleet, FleetAgent, cpu_s_of, serve  # type: ignore[import-not-found]

from holdfast.control.discovery import open_job
from holdfast.control.job_client import Endpoint
from holdfast.net.listening import try_bind
from holdfast.wire.frames import encode_frame
from holdfast.wire.messages import NodeReport, Watch, WorkerReport, decode

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 8
STATUSES = 20
FORM_S_MAX = 60.0
REST_S = 12.0


class WatchedFleet(Fleet):  # type: ignore[misc]
    """Agents that report while they are watched."""

    def __init__(self, port: int, count: int, deadline: float) -> None:
        super().__init__(port, count, deadline, None)
        self._every_s = 0.0
        self._until = 0.0
        self._due: list[tuple[float, FleetAgent]] = []
        workers = [
            WorkerReport(rank=rank, pid=1000 + rank, state="running", step=rank, section="forward")
            for rank in range(WORKERS)
        ]
        self._reports = {
            agent: encode_frame(
                NodeReport(
                    run_id=RUN_ID,
                    node=agent.membership.status.info.node,
                    incarnation=1,
                    state="running",
                    workers=workers,
                )
            )
            for agent in self.agents
        }
        for agent in self.agents:
            agent.on_other = self._watched

    def _watched(self, agent: FleetAgent, body: bytes) -> None:
        message = decode(body)
        if not isinstance(message, Watch):
            return
        now = time.monotonic()
        if now >= self._until:
            self._due = []
        self._until = now + message.for_s
        self._every_s = message.every_s
        if all(one is not agent for _, one in self._due) and message.every_s:
            self._due.append((now, agent))

    def _step(self, wait_s: float) -> None:
        now = time.monotonic()
        due = [one for one in self._due if one[0] <= now]
        if due:
            self._due = [one for one in self._due if one[0] > now]
            for at, agent in due:
                agent.send(self._reports[agent])
                if now < self._until:
                    self._due.append((max(now, at + self._every_s), agent))
        super()._step(min(wait_s, 0.01))


async def measure_statuses(port: int) -> list[float]:
    """Return the durations of status requests, in seconds."""
    place = Endpoint(host="127.0.0.1", port=port, run_id=RUN_ID)
    took = []
    async with await open_job(place) as client:
        await client.status(watch=True)
        for _ in range(STATUSES):
            began = time.monotonic()
            await client.status()
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.05)
    return took


async def subscribe(port: int, count: int) -> None:
    """Subscribe many times to the events of a job, and request its workers from time to time."""
    place = Endpoint(host="127.0.0.1", port=port, run_id=RUN_ID)

    async def follow() -> None:
        async with await open_job(place) as client:
            async for _ in client.events(follow=True):
                pass

    async with await open_job(place) as client:
        for _ in range(count):
            asyncio.ensure_future(follow())  # noqa: RUF006 (they end with the process)
        while True:
            await client.status(watch=True)
            await asyncio.sleep(1.0)


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count, subscribers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rest_s = float(sys.argv[4]) if len(sys.argv) > 4 else REST_S
    listener = try_bind("127.0.0.1", 0, is_host=True)
    assert listener is not None
    port = listener.getsockname()[1]
    server = os.fork()
    if server == 0:
        try:
            serve(listener, None)
        finally:
            os._exit(1)
    listener.close()
    children = [server]
    try:
        fleet = WatchedFleet(port, count, time.monotonic() + FORM_S_MAX + 4 * seconds + 30)
        fleet.form()
        results_read, results_write = os.pipe()
        client = forked(
            lambda: os.write(
                results_write, json.dumps(asyncio.run(measure_statuses(port))).encode()
            )
        )
        children.append(client)
        while not os.waitpid(client, os.WNOHANG)[0]:
            fleet.idle_for(0.05)
        children.remove(client)
        statuses = json.loads(os.read(results_read, 1 << 16))
        fleet.idle_for(rest_s)
        cpu_s = cpu_s_of(server)
        fleet.idle_for(seconds)
        alone = (cpu_s_of(server) - cpu_s) / seconds
        children.append(forked(lambda: asyncio.run(subscribe(port, subscribers))))
        fleet.idle_for(3.0)
        cpu_s = cpu_s_of(server)
        fleet.idle_for(seconds)
        watched = (cpu_s_of(server) - cpu_s) / seconds
    finally:
        for child in reversed(children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    found = {
        "status_s": statistics.median(statuses),
        "status_max_s": max(statuses),
        "core_alone": alone,
        "core_watched": watched,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
