"""Runs `holdfast top` in this terminal, and restores it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from holdfast.control.job_feed import JobFeed
from holdfast.views.top.app import Top

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.control.job_client import JobClient

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run(client: JobClient, connect: Callable[[], Awaitable[JobClient]]) -> None:
    """Show a job until the user quits; `connect` reconnects after a loss.

    A signal ends the process after the terminal is restored.
    """
    first: list[JobClient] = [client]

    async def connection() -> JobClient:
        return first.pop() if first else await connect()

    app = Top(lambda job, changed: JobFeed(connection, job, changed))
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def end(signum: int) -> None:
        received.append(signum)
        app.exit()

    for one in SIGNALS:
        loop.add_signal_handler(one, end, one)
    await app.run_async()
    if app.return_code:
        raise SystemExit(app.return_code)
    if received:
        raise SystemExit(128 + received[0])
