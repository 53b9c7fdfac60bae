"""The side services of an agent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import holdfast
from holdfast.agent import side_services
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.side_services import (
    HEALTH_PORT_ENV,
    QUIET_S,
    PreImport,
    SideServices,
)
from holdfast.observe.health.loop_probe import FRESH_S
from observed_jobs import fetch
from real_jobs import News

if TYPE_CHECKING:
    import pytest

    from holdfast.agent.agent import SimpleElasticAgent


def test_a_pulse_that_fails_is_named_once_and_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HEALTH_PORT_ENV, "0")
    agent: SimpleElasticAgent = None  # type: ignore[assignment] # Nothing is told here.
    companions = SideServices("job", LifecycleReporter(agent), None)
    companions.begin()
    try:
        [descriptor] = companions.descriptors()
        companions.look(time.monotonic())
        nothing = os.open("/dev", os.O_RDONLY)  # To read it or write to it is an error.
        os.dup2(nothing, descriptor)
        os.close(nothing)
        time.sleep(FRESH_S)
        assert fetch(companions._health.port, "/livez")[0] == 503
        caplog.clear()
        for _ in range(2):
            companions.look(time.monotonic())
        [line] = caplog.messages
        assert line.startswith("health checks do not ask this agent any more: [Errno ")
        assert companions.descriptors() == []
        assert fetch(companions._health.port, "/livez") == (200, "ok\n")
    finally:
        companions.end()


WORKER = """
import os, signal
with open(os.environ["NEWS"], "w") as news:
    news.write(f"worker {os.getpid()}\\n")
signal.pause()
"""


def test_it_waits_for_a_quiet_moment_and_does_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_services, "NEEDED", ("holdfast", "holdfast.no_such_module"))
    one = PreImport()
    one.look(1000.0)
    assert one.next_deadline() is None
    one.begin(1000.0)
    assert one.next_deadline() == 1000.0 + QUIET_S
    one.look(1000.0)
    assert not caplog.messages
    one.look(1000.0 + QUIET_S)
    assert one.next_deadline() is None
    [line] = caplog.messages
    assert line == (
        "what a failure would need cannot be imported: holdfast.no_such_module: "
        "ModuleNotFoundError: No module named 'holdfast.no_such_module'"
    )


def test_an_agent_outlives_its_installation(tmp_path: Path) -> None:
    """It restarts its workers, and tells in the end why they failed."""
    package = tmp_path / "lib" / "holdfast"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(holdfast.__file__).parent, package, ignore=ignored)
    (tmp_path / "train.py").write_text(WORKER)
    news = News(tmp_path)
    paths = os.pathsep.join([str(package.parent), *sys.path])
    changed = {"PYTHONPATH": paths, "LOGLEVEL": "DEBUG", "NEWS": str(news.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.run", "--max-restarts=1", str(tmp_path / "train.py")],
        env={**os.environ, **changed},
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            assert agent.stderr is not None
            worker = news.take(1)["worker"]
            for line in agent.stderr:
                if "ready for failures" in line:
                    break
            package.rename(tmp_path / "gone")
            os.kill(worker, signal.SIGKILL)
            os.kill(news.take(1)["worker"], signal.SIGKILL)
            _, told = agent.communicate(timeout=60)
        finally:
            agent.kill()
            news.close()
    assert agent.returncode == 128 + signal.SIGKILL, told
    assert "restart 1 of 1" in told
    assert "train.py FAILED after 1 of 1 restarts" in told
    assert "Traceback" not in told
