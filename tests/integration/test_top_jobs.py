"""`holdfast top` on a real job: with textual's pilot in this process, and in a separate terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.control.discovery import local_jobs, open_job
from holdfast.control.history import RESTART_STAGES
from holdfast.control.job_client import Endpoint
from holdfast.control.job_feed import JobFeed
from holdfast.control.live_job import LiveJob
from holdfast.views.top.app import Top
from holdfast.views.top.screens import TextScreen
from holdfast.views.top.table import TextView
from in_loop import in_loop
from real_jobs import HOLDFAST, PATIENCE_S, Job, holdfast
from real_teams import OBEY, TOGETHER, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from textual.pilot import Pilot

STOPPED = 143
SCRIPT = f"""
    from holdfast import worker
    # Steps of the last two minutes, as if somebody had started to watch only now.
    now = worker.monotonic_ns()
    for at in range(13):
        worker.monotonic_ns = lambda: now - (12 - at) * 10 * 10**9
        worker.progress(100 * NUMBER + at, total=1000, loss=4.0 - 2 * float(RANK))
    print("\\x1b[31mgeneration", NUMBER, "of", RANK, flush=True)
    {OBEY}
"""


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await pilot.pause(0.02)


@in_loop
async def test_top_watches_and_steers_three_nodes(tmp_path: Path) -> None:
    flags = ("--log-dir", str(tmp_path / "logs"), "--max-restarts", "1")
    with Cluster(tmp_path, SCRIPT, *flags, nnodes="2:3", run_id="watched", conf=TOGETHER) as team:
        for name in "abc":
            team.start(name, conf=f"node_id={name}")
        starts = await asyncio.to_thread(team.generation, 3)
        place = Endpoint(host=team.host, port=team.port, run_id="watched")
        app = Top(lambda job, changed: JobFeed(lambda: open_job(place), job, changed))
        job = app.job
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await until(pilot, lambda: job.header.running == 3)
            starts["b"].fail()
            starts = await asyncio.to_thread(team.generation, 3)
            # The durations of the restart, and of the generation that it ended.
            await until(pilot, lambda: [*job.generations[0].stages] == [*RESTART_STAGES])
            await until(pilot, lambda: {row.step for row in job.ranks} == {112})
            await until(pilot, lambda: job.header.eta_s)
            assert (job.header.total, job.header.loss) == (1000, 2.0)
            await until(pilot, lambda: 0.1 in rounded(job.series.rates))
            assert 2.0 in rounded(job.series.losses)
            assert any(job.series.rss)
            assert (job.header.generation, job.header.restarts) == (1, 1)
            assert "b was told to fail" in job.generations[1].ended_by

            def is_open() -> TextScreen | None:
                return app.screen if isinstance(app.screen, TextScreen) else None

            # The logs of a rank, during a requested restart.
            rank = starts["c"].rank
            await pilot.press("slash", str(rank), "enter", "l")
            written = [f"generation {number} of {rank}" for number in (1, 2)]
            await until(pilot, lambda: is_open() and lines_of(app) == written[:1])
            await pilot.press("escape", "r", "y", "enter", "enter")
            starts = await asyncio.to_thread(team.generation, 3)
            await pilot.press("l")
            await until(pilot, lambda: is_open() and lines_of(app)[-1:] == written[1:])
            await pilot.press("escape")
            assert job.header.restarts == 1

            # All workers wait at one place.
            await pilot.press("T")
            await until(pilot, lambda: is_open() and lines_of(app)[:1] != [])
            assert lines_of(app)[0].startswith("3 ranks (0-2): ")
            await pilot.press("escape")

            await pilot.press("slash", "backspace", "enter", "2", "d", "enter", "enter")
            await until(pilot, lambda: job.header.ranks == 2)
            assert [node.state for node in job.nodes].count("drained") == 1
            await pilot.press("x", "enter", "enter")
            codes = await asyncio.to_thread(team.codes)
            assert set(codes.values()) == {STOPPED}
            await until(pilot, lambda: job.problem)
            assert job.end is not None
            assert (job.end.outcome, "stop requested by" in job.end.why) == ("stopped", True)
            await pilot.press("q")
        assert app.return_code == 0


@in_loop
async def test_top_reconnects_after_the_coordinator_was_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2", run_id="back") as team:
        coordinator = team.start_coordinator("first")
        team.start_all("a", "b")
        await asyncio.to_thread(team.generation, 2)
        place = Endpoint(host=team.host, port=team.port, run_id="back")
        job, changed = LiveJob(), asyncio.Event()
        feed = asyncio.create_task(JobFeed(lambda: open_job(place), job, changed.set).run())

        async def until_changed(condition: Callable[[], object]) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    changed.clear()
                    await changed.wait()

        await until_changed(lambda: job.header.running == 2)
        coordinator.kill()
        await until_changed(lambda: job.problem)
        assert len(job.ranks) == 2, "the last known ranks are still shown"
        await asyncio.to_thread(team.start_coordinator, "second")
        await until_changed(lambda: not job.problem and job.header.running == 2)
        assert job.header.generation == 0
        feed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await feed


def rounded(values: Sequence[float | None]) -> set[float]:
    return {round(value, 3) for value in values if value is not None}


def lines_of(app: Top) -> list[str]:
    return [text for text, _ in app.screen.query_one(TextView)._lines]


class Terminal:
    """A command in a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: str) -> None:
        self.screen, self.terminal = pty.openpty()
        termios.tcsetwinsize(self.terminal, (24, 80))
        self.before = termios.tcgetattr(self.terminal)
        self.written = b""
        ends = (self.terminal,) * 3
        self.process = subprocess.Popen(
            [*HOLDFAST, *words],
            stdin=ends[0],
            stdout=ends[1],
            stderr=ends[2],
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def until(self, text: bytes) -> None:
        """Wait until this text is on the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.written:
            assert self.process.poll() is None, self.written
            assert time.monotonic() < deadline, self.written[-2_000:]
            self._read(0.1)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.written[-2_000:]
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, wait_s: float) -> bool:
        if not select.select([self.screen], [], [], wait_s)[0]:
            return False
        self.written += os.read(self.screen, 1 << 16)
        return True

    def is_restored(self) -> bool:
        """Whether the terminal is restored: its modes, the normal screen, a cursor, no mouse."""
        last = {
            name: max((self.written.rfind(b"\x1b[?%d%c" % (name, way)), way) for way in b"hl")[1]
            for name in (1049, 25, 1000, 1003, 2004)
        }
        wanted = {1049: ord("l"), 25: ord("h"), 1000: ord("l"), 1003: ord("l"), 2004: ord("l")}
        return last == wanted and termios.tcgetattr(self.terminal) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)
        os.close(self.terminal)


async def found(pid: int) -> str:
    """Wait until an agent can be discovered; return the run id of its job."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            run_ids = {one.here.pid: one.here.run_id for one in await local_jobs()}
            if pid in run_ids:
                return run_ids[pid]
            await asyncio.sleep(0.05)


def test_top_restores_the_terminal(tmp_path: Path) -> None:
    with Job(tmp_path, "send('up')\nforever()") as job:
        job.messages.take(1)
        run_id = asyncio.run(found(job.agent.pid))
        for ends_by, code in ((b"q", 0), (b"\x03", 0), (signal.SIGTERM, 128 + signal.SIGTERM)):
            terminal = Terminal("top", run_id)
            try:
                terminal.until(b"running")
                if isinstance(ends_by, bytes):
                    os.write(terminal.screen, ends_by)
                else:
                    terminal.process.send_signal(ends_by)
                assert terminal.end() == code
                assert terminal.is_restored(), terminal.written[-300:]
            finally:
                terminal.close()
        # Watching does not affect the job.
        assert job.agent.poll() is None


def test_missing_terminal_or_textual_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "textual").mkdir()
    (tmp_path / "textual" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'textual'\", name='textual')"
    )
    for env in ({}, {"PYTHONPATH": str(tmp_path)}):
        done = holdfast("top", env=env)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
        assert ("holdfast-run[top]" in done.stderr) == bool(env)
