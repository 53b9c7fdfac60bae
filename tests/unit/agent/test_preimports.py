from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import holdfast
from holdfast.agent import preimports
from holdfast.agent.preimports import BUSY_PAUSE_S, Preimports, next_due
from real_jobs import WorkerMessages, children


def test_modules_are_imported_one_at_a_time_and_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(preimports, "PREIMPORTED", ("first", "holdfast.no_such_module", "last"))
    monkeypatch.setattr(preimports, "PREIMPORTED_WITH", {})
    load = preimports.load

    def note(name: str) -> None:
        loaded.append(name)
        if "." in name:
            load(name)

    monkeypatch.setattr(preimports, "load", note)
    imports = Preimports()
    imports.poll(1.0)
    imports.begin(2.0)
    imports.begin(2.0)
    assert imports.due == 2.0
    counts = []
    while imports.due is not None:
        imports.poll(imports.due)
        counts.append(len(loaded))
    assert max(after - before for before, after in pairwise(counts)) == 1
    assert loaded == ["first", "holdfast.no_such_module", "last"]
    [line] = caplog.messages
    assert "holdfast.no_such_module" in line
    imports.begin(3.0)
    assert imports.due is None


def test_step_that_waited_for_a_cpu_is_followed_by_a_pause() -> None:
    assert next_due(5.0, took_s=0.020, computed_s=0.019) == 5.0
    assert next_due(5.0, took_s=0.200, computed_s=0.019) == 5.0 + BUSY_PAUSE_S


# Modules that may be imported late, but not because of a failure: the settings determine their use.
NOT_FOR_FAILURES = {
    "holdfast.agent.coordinated_job",
    "holdfast.control.node_server",  # For control clients.
    "holdfast.agent.blocked_workers",
    "holdfast.coordinator",  # Already imported if the rendezvous uses it.
    "holdfast.core",
    "holdfast.launcher",
    "holdfast.net.addresses",  # This and the next: already imported if there are other nodes.
    "holdfast.net.endpoints",
    "holdfast.numa.binding",
    "holdfast.observe.events.destinations",
    "holdfast.observe.health",
    "holdfast.observe.metrics",
    "holdfast.observe.standalone",
    "holdfast.processes.workers.function_workers",
    "holdfast.processes.zygote",
    "holdfast.rendezvous",
    "holdfast.store.tcp.forwarding",  # This, the next and the last: as above.
    "holdfast.store.tcp.attestation",
    "holdfast.timers.worker_timers",
    "holdfast.wire",
}
LOOKS = """
import ast, os, sys
from holdfast.agent.preimports import Preimports
from holdfast.cli.main import dispatch
assert dispatch(["run", "--no-python", "true"]) == 0
imports = Preimports()
imports.begin(0.0)
while imports.due is not None:
    imports.poll(imports.due)
rooms = ("agent", "console", "net", "observe", "processes", "rendezvous", "store")
for name in [name for name in sys.modules if name.startswith("holdfast.")]:
    if name.split(".")[1] not in rooms:
        continue
    with open(sys.modules[name].__file__) as source:
        functions = [
            one for one in ast.walk(ast.parse(source.read())) if isinstance(one, ast.FunctionDef)
        ]
    for one in [one for function in functions for one in ast.walk(function)]:
        if isinstance(one, ast.ImportFrom) and one.module.startswith("holdfast"):
            if one.module not in sys.modules:
                print(one.module)
"""


def test_late_imports_are_preimported_or_unrelated_to_failures() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    missing = {
        name
        for name in done.stdout.split()
        if not any(f"{name}.".startswith(f"{one}.") for one in NOT_FOR_FAILURES)
    }
    assert not missing


WORKER = """
import os, signal
with open(os.environ["MESSAGES"], "w") as messages:
    messages.write(f"worker {os.getpid()}\\n")
signal.pause()
"""


@pytest.mark.parametrize("fate", ["removed", "replaced"])
def test_agent_survives_the_removal_of_its_installation(tmp_path: Path, fate: str) -> None:
    """It restarts its workers, starts another keeper, and finally reports why they failed."""
    package = tmp_path / "lib" / "holdfast"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(holdfast.__file__).parent, package, ignore=ignored)
    (tmp_path / "train.py").write_text(WORKER)
    messages = WorkerMessages(tmp_path)
    paths = os.pathsep.join([str(package.parent), *sys.path])
    changed = {"PYTHONPATH": paths, "LOGLEVEL": "DEBUG", "MESSAGES": str(messages.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.run", "--max-restarts=2", str(tmp_path / "train.py")],
        env={**os.environ, **changed},
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            assert agent.stderr is not None
            worker = messages.take(1)["worker"]
            for line in agent.stderr:
                if "ready for failures" in line:
                    break
            package.rename(tmp_path / "gone")
            if fate == "replaced":
                shutil.copytree(tmp_path / "gone", package, ignore=ignored)
                for path in package.rglob("*.py"):
                    path.write_text("raise RuntimeError('another version')\n")
            os.kill(worker, signal.SIGKILL)
            messages.take(1)
            [keeper] = children(agent.pid)
            os.kill(keeper, signal.SIGKILL)
            os.kill(messages.take(1)["worker"], signal.SIGKILL)
            _, errors = agent.communicate(timeout=60)
        finally:
            agent.kill()
            messages.close()
    assert agent.returncode == 128 + signal.SIGKILL, errors
    assert "after 2 of 2 restarts" in errors
    assert "Traceback" not in errors
