"""Launching from Python: the same calls as with torch, and extensions written for torch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from launchers import Launchers

pytestmark = pytest.mark.torch

LAUNCHING = """\
import json, os, sys

def work(number, word):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID")
    return [number + int(os.environ["RANK"]), word, __name__, [os.environ[name] for name in names]]

def main(api):
    def launch(entrypoint, *args, **settings):
        config = api.LaunchConfig(
            1, 1, 2, run_id="same", role="trainer", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, **settings)
        return api.elastic_launch(config, entrypoint)(*args)

    results = {}
    for method in ("spawn", "fork", "forkserver"):
        results[method] = launch(work, 10, "x", start_method=method)
    results["command"] = launch(sys.executable, "-c", "import os; os.environ['RANK']")
    try:
        launch(sys.executable, "-c", "import os; os._exit(int(os.environ['RANK']) * 3)")
    except Exception as error:
        rank, failure = error.get_first_failure()
        results["failed"] = [type(error).__name__, error.name, rank, failure.local_rank]
        results["how"] = [failure.exitcode, failure.signal_name(), failure.error_file]
    print(json.dumps(results))

if __name__ == "__main__":
    if sys.argv[1] == "torch":
        import torch.distributed.launcher.api as api
    else:
        import holdfast.launcher.api as api
    main(api)
"""


# The name is short because torch binds a Unix socket below the test's folder, whose path has its name.
def test_same_results_as_torch(launchers: Launchers) -> None:
    launchers.script("launching.py", LAUNCHING)
    received = {}
    for peer in ("torch", "holdfast"):
        outcome = launchers.command([sys.executable, "../launching.py", peer], peer)
        assert outcome.code == 0, outcome.err
        received[peer] = json.loads(outcome.out)
    assert received["torch"]["spawn"]["1"][0] == 11
    assert received["holdfast"] == received["torch"]


def test_logs_specs_written_for_torch_are_accepted(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    from holdfast.launcher.api import LaunchConfig, elastic_launch

    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects={0: Std.ALL, 1: Std.ERR})
    config = LaunchConfig(1, 1, 2, logs_specs=specs, run_id="job", max_restarts=0)
    shell = 'echo "out $RANK" >"$TORCHELASTIC_ERROR_FILE.out"; echo "err $RANK" >&2; echo out'
    assert elastic_launch(config, "/bin/sh")("-c", shell) == {0: None, 1: None}
    (attempt,) = tmp_path.glob("logs/job_*/attempt_0")
    written = {str(one.relative_to(attempt)): one.read_text() for one in attempt.rglob("*.*")}
    assert written == {
        "0/error.json.out": "out 0\n",
        "0/stderr.log": "err 0\n",
        "0/stdout.log": "out\n",
        "1/error.json.out": "out 1\n",
        "1/stderr.log": "err 1\n",
    }


STOPPING = """\
import importlib, os, signal, sys, tempfile, time

def work(folder):
    try:
        open(os.path.join(folder, "began"), "w").close()
        while True:
            time.sleep(0.1)
    except Exception as error:
        with open(os.path.join(folder, "raised"), "w") as stream:
            stream.write(type(error).__name__)
        raise
    finally:
        open(os.path.join(folder, "tidy"), "w").close()

if __name__ == "__main__":
    package = "torch.distributed.elastic" if sys.argv[1] == "torch" else "holdfast.elastic"
    api = importlib.import_module(f"{package}.multiprocessing")
    with tempfile.TemporaryDirectory() as folder:
        logs = api.DefaultLogsSpecs(log_dir=tempfile.mkdtemp(dir=folder))
        workers = api.start_processes(
            "stopped", work, {0: (folder,)}, {0: {}}, logs, start_method="fork")
        while not os.path.exists(os.path.join(folder, "began")):
            time.sleep(0.01)
        workers.close(signal.SIGTERM)
        raised = os.path.join(folder, "raised")
        print(open(raised).read(), os.path.exists(os.path.join(folder, "tidy")))
"""


def test_signal_raises_in_a_forked_function(launchers: Launchers) -> None:
    launchers.script("stopping.py", STOPPING)
    for peer in ("torch", "holdfast"):
        outcome = launchers.command([sys.executable, "../stopping.py", peer], peer)
        assert outcome.code == 0, outcome.err
        assert outcome.out.split() == ["SignalException", "True"]
