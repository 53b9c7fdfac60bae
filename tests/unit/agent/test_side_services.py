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
from holdfast.agent.side_services import HEALTH_PORT_ENV, PREIMPORT_AFTER_S, SideServices
from holdfast.observe.health.loop_probe import FRESH_S
from observed_jobs import fetch
from real_jobs import News

if TYPE_CHECKING:
    import pytest

    from holdfast.agent.agent import SimpleElasticAgent


def services() -> SideServices:
    agent: SimpleElasticAgent = None  # type: ignore[assignment] # Nothing is reported here.
    return SideServices("job", LifecycleReporter(agent), None)


def test_a_probe_that_fails_is_named_once_and_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HEALTH_PORT_ENV, "0")
    made = services()
    made.begin()
    try:
        [descriptor] = made.descriptors()
        made.look(time.monotonic())
        nothing = os.open("/dev", os.O_RDONLY)  # To read it or write to it is an error.
        os.dup2(nothing, descriptor)
        os.close(nothing)
        time.sleep(FRESH_S)
        port = made._health.port  # type: ignore[union-attr]
        assert fetch(port, "/livez")[0] == 503
        caplog.clear()
        for _ in range(2):
            made.look(time.monotonic())
        assert len(caplog.messages) == 1
        assert made.descriptors() == []
        assert fetch(port, "/livez") == (200, "ok\n")
    finally:
        made.end()


def test_what_a_failure_needs_is_imported_once_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_services, "PREIMPORTED", ("holdfast", "holdfast.no_such_module"))
    made = services()
    made.begin()
    due = made.next_deadline(None)
    assert due is not None
    made.look(due - PREIMPORT_AFTER_S / 2)
    assert not caplog.messages
    made.look(due)
    [line] = caplog.messages
    assert "holdfast.no_such_module" in line
    assert made.next_deadline(None) is None


WORKER = """
import os, signal
with open(os.environ["NEWS"], "w") as news:
    news.write(f"worker {os.getpid()}\\n")
signal.pause()
"""


def test_an_agent_outlives_its_installation(tmp_path: Path) -> None:
    """It restarts its workers, and reports in the end why they failed."""
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
            _, errors = agent.communicate(timeout=60)
        finally:
            agent.kill()
            news.close()
    assert agent.returncode == 128 + signal.SIGKILL, errors
    assert "after 1 of 1 restarts" in errors
    assert "Traceback" not in errors
