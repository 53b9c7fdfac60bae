from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import holdfast
from holdfast.agent import foresight
from holdfast.agent.foresight import QUIET_S, Foresight
from real_jobs import News

if TYPE_CHECKING:
    import pytest

WORKER = """
import os, signal
with open(os.environ["NEWS"], "w") as news:
    news.write(f"worker {os.getpid()}\\n")
signal.pause()
"""


def test_it_waits_for_a_quiet_moment_and_does_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foresight, "NEEDED", ("holdfast", "holdfast.no_such_module"))
    one = Foresight()
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
