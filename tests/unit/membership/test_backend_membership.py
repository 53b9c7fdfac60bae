"""The driver of a node over a backend; `tests/unit/rendezvous/test_backend.py` tests it with its threads."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from fake_node import RUN, a_job_of
from holdfast.core.phases import JobOutcome
from holdfast.core.protocol import NodeInfo
from holdfast.core.rounds import Job, JobPhase
from holdfast.core.shared_state import SharedStateSession, Timeouts, encode
from holdfast.membership.backend import BackendDriver
from holdfast.membership.loop_heartbeat import LoopMonitor
from holdfast.membership.threaded import Mailbox
from in_loop import in_loop
from serving import LIMIT_S, soon

if TYPE_CHECKING:
    from holdfast.membership.interface import MembershipEvent


class SlowStore:
    """A store whose reads return only when the test says so, with the state from when they began."""

    name = "slow"

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.reads = 0
        self.may_return = threading.Semaphore(0)

    def read(self) -> tuple[bytes, Any] | None:
        found = self.state
        self.reads += 1
        self.may_return.acquire(timeout=LIMIT_S)
        return None if found is None else (found, 1)

    def write(self, state: bytes, token: Any) -> bool:
        raise AssertionError("a node that has not joined writes nothing")


@in_loop
async def test_refresh_waits_for_a_read_that_began_after_it() -> None:
    loop, store = asyncio.get_running_loop(), SlowStore()
    delivered: list[MembershipEvent] = []
    timeouts = Timeouts(interval_s=LIMIT_S, lost_after_s=3 * LIMIT_S)
    session = SharedStateSession(
        loop.time(),
        run_id=RUN,
        info=NodeInfo(node="a", incarnation=1),
        settings=a_job_of(1, 1),
        timeouts=timeouts,
        draw=lambda: 0.5,
    )
    monitor = LoopMonitor(loop.time(), Mailbox(1), timeouts.lost_after_s)
    driver = BackendDriver(session, store, delivered.append, monitor)
    driver.start()
    await soon(lambda: store.reads == 1)
    over = Job(run_id=RUN, phase=JobPhase.CLOSED, outcome=JobOutcome.STOPPED, final=True)
    store.state = encode(over)
    refresh = loop.create_task(driver.refresh(LIMIT_S))
    await asyncio.sleep(0)  # It begins.
    store.may_return.release(2)
    assert await refresh
    await driver.close()
    driver.join()
