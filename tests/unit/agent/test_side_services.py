from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.agent import side_services
from holdfast.agent.lifecycle_reporter import LifecycleReporter
from holdfast.agent.side_services import HEALTH_PORT_ENV, PREIMPORT_AFTER_S, SideServices
from holdfast.observe import lifecycle
from holdfast.observe.health.loop_probe import FRESH_S
from holdfast.processes.failures.failure import ProcessFailure
from observed_jobs import fetch
from real_jobs import WorkerMessages, children

if TYPE_CHECKING:
    from holdfast.agent.spec import WorkerGroup


def services() -> SideServices:
    group: WorkerGroup = None  # type: ignore[assignment] # Nothing is reported here.
    return SideServices("job", LifecycleReporter(group))


def test_failing_probe_is_reported_once_and_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HEALTH_PORT_ENV, "0")
    made = services()
    made.begin(lambda: None)
    try:
        [descriptor] = made.descriptors()
        made.poll(time.monotonic())
        nothing = os.open("/dev", os.O_RDONLY)  # Reading or writing it fails.
        os.dup2(nothing, descriptor)
        os.close(nothing)
        time.sleep(FRESH_S)
        port = made._health.port  # type: ignore[union-attr]
        assert fetch(port, "/livez")[0] == 503
        caplog.clear()
        for _ in range(2):
            made.poll(time.monotonic())
        assert len(caplog.messages) == 1
        assert made.descriptors() == []
        assert fetch(port, "/livez") == (200, "ok\n")
    finally:
        made.end()


def test_failure_modules_are_imported_once_after_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_services, "PREIMPORTED", ("holdfast", "holdfast.no_such_module"))
    made = services()
    made.begin(lambda: None)
    due = made.next_deadline(None)
    assert due is not None
    made.poll(due - PREIMPORT_AFTER_S / 2)
    assert not caplog.messages
    made.poll(due)
    [line] = caplog.messages
    assert "holdfast.no_such_module" in line
    assert made.next_deadline(None) is None


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
from holdfast.agent.side_services import preimport
from holdfast.cli.main import dispatch
assert dispatch(["run", "--no-python", "true"]) == 0
preimport()
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


def test_sampling_interval_grows_and_needs_reported_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = services()
    reporter = made._reporter
    samples: list[tuple[tuple[int, int, float], ...]] = []
    monkeypatch.setattr(reporter, "progress_sampled", samples.append)
    steps: list[tuple[int, int, float]] = []
    monkeypatch.setattr(made.watchdogs, "steps", lambda: [*steps])
    made._first_heartbeat(0)
    assert made.next_deadline(None) is None, "no observer needs samples"
    reporter.observers.sampled = True
    assert made.next_deadline(None) is None, "no worker has reported anything"
    made._first_heartbeat(0)
    begun = now = time.monotonic()
    pauses = []
    while now < begun + 3600.0:
        before, now = now, made.next_deadline(None) or 0.0
        pauses.append(now - before)
        steps[:] = [(0, len(pauses), now), (1, 7, begun)]
        made.poll(now)
    assert max(pauses) == pytest.approx(side_services.SAMPLE_S_MAX)
    assert pauses[0] == pytest.approx(side_services.SAMPLE_S_MIN, abs=0.05)
    assert len(pauses) < 300
    assert {len(sample) for sample in samples[1:]} == {1}, "samples contain only changes"
    made.workers_stopped()
    assert made.next_deadline(None) is None


def test_failures_are_reported_in_time_without_a_next_generation() -> None:
    made = services()
    reporter = made._reporter
    received: list[object] = []
    reporter.observers.add(received.append)
    reporter.generation_stopped(3, {7: ProcessFailure(1, 4711, 9, "")})
    due = made.next_deadline(None)
    assert due is not None
    made.poll(due - 0.001)
    assert [type(event) for event in received] == [lifecycle.GenerationStopped]
    made.poll(due)
    failed = received[-1]
    assert isinstance(failed, lifecycle.WorkersFailed)
    assert [(one.global_rank, one.exit_code) for one in failed.failures] == [(7, 9)]
    assert made.next_deadline(None) is None
