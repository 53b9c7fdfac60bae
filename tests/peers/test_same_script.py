"""The same script with the same command line, under the real torchrun and under `holdfast run`.

Each test says what it compares. Values that must differ (ports, ids, paths of temporary files) are replaced first, and
nothing else is. Scripts that need no torch do not import it, and torchrun is started once for many jobs, so these
tests take seconds.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import pytest
from launchers import BIN, RUN_FOLDER, Launchers, Outcome, free_port
from packaging.version import Version

pytestmark = pytest.mark.torch

# The variables that only Holdfast sets for a worker, each with its reason.
MORE_VARIABLES = frozenset(
    {
        "HOLDFAST_FENCE",  # Distinguishes old writers from new ones.
        "HOLDFAST_GENERATION",  # Counts all starts; torchrun has no such common count.
        "HOLDFAST_LAST_END",  # For `worker.info()`, like the next one.
        "HOLDFAST_PREVIOUS_WORLD_SIZE",
        "HOLDFAST_WORKER_PAGE",  # The page that `holdfast.worker` writes.
    }
)

LOOPBACK = ("localhost", "127.0.0.1")
# torchrun's default for a job of one node is `none` or random, ours the script and the time.
DEFAULT_RUN_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}|none|\w+-\d{4}(-\d+)?"
)

PROBE = """\
import json, os, sys
name = "probe-{RANK}-{TORCHELASTIC_RESTART_COUNT}.json".format(**os.environ)
with open(name, "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "name": __name__}, file)
"""

NOISE = """\
import os, sys
rank = os.environ["RANK"]
for word in ("plain", "orange", "plum,x", "caf\\u00e9"):
    sys.stdout.write(f"out {word} {rank}\\n")  # One write a line: several workers share a stream.
    sys.stderr.write(f"err {word} {rank}\\n")
"""


# The environment of workers.


def comparable(env: dict[str, str], line: list[str]) -> dict[str, str]:
    """Replace values that must differ: paths, random ids, free ports, the name of this host."""
    run, attempt, rank, name = env["TORCHELASTIC_ERROR_FILE"].split("/")[-4:]
    found = RUN_FOLDER.fullmatch(run)
    assert found
    assert found["run_id"] == env["TORCHELASTIC_RUN_ID"]
    env["TORCHELASTIC_ERROR_FILE"] = f"{attempt}/{rank}/{name}"
    if DEFAULT_RUN_ID.fullmatch(env["TORCHELASTIC_RUN_ID"]):
        env["TORCHELASTIC_RUN_ID"] = "any"
    if "--master-port" not in line:
        assert 1024 <= int(env["MASTER_PORT"]) <= 65535
        env["MASTER_PORT"] = "any"
    if env["MASTER_ADDR"] in LOOPBACK:
        env["MASTER_ADDR"] = LOOPBACK[0]
    return env


ENVIRONMENTS: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("--standalone --nproc-per-node 2", {}),
    ("--nnodes 1 --nproc-per-node 2 --max-restarts 3 --role trainer", {}),
    ("--nproc-per-node 2 --master-port PORT", {}),
    ("--master-addr 127.0.0.1 --master-port PORT --rdzv-id job7 --node-rank 0", {}),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id job7", {}),
    ("--nproc-per-node 2 --local-addr 127.0.0.1", {"OMP_NUM_THREADS": "4"}),
    ("--nproc-per-node 2 --virtual-local-rank", {"CUDA_VISIBLE_DEVICES": "3, 5"}),
    ("--nproc-per-node 2 --virtual-local-rank", {}),
    ("--signals-to-handle SIGTERM,SIGUSR1", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    ("", {"PET_NPROC_PER_NODE": "2", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}),
]


@pytest.mark.parametrize(("flags", "env"), ENVIRONMENTS)
def test_workers_get_the_same_environment(
    flags: str, env: dict[str, str], launchers: Launchers
) -> None:
    launchers.script("probe.py", PROBE)
    line = [*flags.replace("PORT", str(free_port())).split(), "--log-dir", "logs", "../probe.py"]
    theirs, ours = launchers.both(line, env)
    assert_same_environment(theirs, ours, line)


def test_torchruns_command_gives_the_same_environment(launchers: Launchers) -> None:
    """The other tests call torchrun's `main`; this one runs its command."""
    launchers.script("probe.py", PROBE)
    line = ["--nproc-per-node", "2", "--log-dir", "logs", "../probe.py"]
    theirs = launchers.command([str(BIN / "torchrun"), *line], "torchrun")
    assert_same_environment(theirs, launchers.holdfast(line), line)


def assert_same_environment(theirs: Outcome, ours: Outcome, line: list[str]) -> None:
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    there, here = theirs.probes(), ours.probes()
    assert there
    assert here.keys() == there.keys()
    for name in there:
        wanted = comparable(there[name]["env"], line)
        given = comparable(here[name]["env"], line)
        more = {variable for variable in given if variable not in wanted}
        assert more <= MORE_VARIABLES
        assert {variable: given.get(variable) for variable in wanted} == wanted


# What workers run.

ARGUMENTS = ["--nproc-per-node", "7", "-r3", "", "two words", "$HOME", "--", "--rank=$local_rank"]


@pytest.mark.parametrize(
    "line",
    [
        ["../probe.py", *ARGUMENTS],
        ["../probe.py", "--", "a", "--", "b"],
        ["--", "../probe.py", "--", "a"],
        ["--role", "r", "--", "../probe.py", "a"],
        ["-m", "parts.probe", *ARGUMENTS, "${local_rank}x$local_rank"],
        ["--module", "--", "parts.probe", "-x"],
        ["--no-python", "../probe.py", *ARGUMENTS],
        ["--no_python", "../probe.py", "--", "x"],
        ["--run-path", "../probe.py", *ARGUMENTS],
        ["--run-path", "--start-method", "fork", "../probe.py", "x"],
    ],
    ids=lambda line: " ".join(line[:3]),
)
def test_workers_get_the_same_arguments(line: list[str], launchers: Launchers) -> None:
    launchers.script("probe.py", f"#!{sys.executable}\n{PROBE}")
    launchers.script("parts/probe.py", PROBE)
    path = os.pathsep.join(["..", *filter(None, [launchers.env.get("PYTHONPATH")])])
    theirs, ours = launchers.both(["--nproc-per-node", "2", *line], {"PYTHONPATH": path})
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    there = {name: (one["argv"], one["name"]) for name, one in theirs.probes().items()}
    here = {name: (one["argv"], one["name"]) for name, one in ours.probes().items()}
    assert len(there) == 2
    assert here == there


# Output and logs.


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "-r 3",
        "-t 3",
        "-r 1 -t 2",
        "-r 0:1,1:2 -t 1:1",
        "--redirects 1:3 --tee 0:2,2:1 --role trainer",
        "--local-ranks-filter 1",
        "--local-ranks-filter 0,2 -t 3",
        "--local-ranks-filter 0 -r 1 -t 2",
        "-t 3 --duplicate-stdout-filters orange,plum --duplicate-stderr-filters plum,,x",
        "--duplicate-stdout-filters plain",
    ],
)
def test_output_is_written_to_the_same_places(flags: str, launchers: Launchers) -> None:
    launchers.script("noise.py", NOISE)
    line = [*flags.split(), "--nproc-per-node", "3", "--log-dir", "logs", "../noise.py"]
    theirs, ours = launchers.both(line)
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    assert ours.logs() == theirs.logs()
    assert ours.shown() == theirs.shown()


@pytest.mark.parametrize(
    "flags",
    [
        "-r 3 --duplicate-stdout-filters plain",
        "-t 3 --duplicate-stdout-filters plain --local-ranks-filter 1",
    ],
)
def test_filters_see_every_stream_that_goes_to_a_file(flags: str, launchers: Launchers) -> None:
    """With torchrun, filters see only streams that are also shown, so some files stay empty."""
    launchers.script("noise.py", NOISE)
    line = [*flags.split(), "--nproc-per-node", "3", "--log-dir", "logs", "../noise.py"]
    ours = launchers.holdfast(line)
    assert ours.code == 0, ours.err
    filtered = ours.logs()["attempt_0/filtered_stdout.log"]
    assert filtered == "".join(f"[default{rank}]:out plain {rank}\n" for rank in range(3))


@pytest.mark.parametrize("template", ["[${role_name}|${rank}|$local_rank|${pid}]>", "plain "])
def test_lines_get_the_same_prefix(template: str, launchers: Launchers) -> None:
    import torch

    launchers.script("noise.py", NOISE)
    line = ["--nproc-per-node", "2", "--role", "trainer", "-t", "3", "../noise.py"]
    if Version(torch.__version__) >= Version("2.14"):  # It has the flag, and knows the host's name.
        line = ["--log-line-prefix-template", "${hostname}" + template, *line]
        template = "unused "
    theirs, ours = launchers.both(line, {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template})
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    assert ours.shown() == theirs.shown()


def test_output_is_unchanged_without_a_log_directory(launchers: Launchers) -> None:
    launchers.script("noise.py", NOISE)
    theirs, ours = launchers.both(["--log-dir", "/dev/null", "../noise.py"])
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    assert ours.shown() == theirs.shown()


def test_restart_leaves_the_same_logs(launchers: Launchers) -> None:
    failing = "if (rank, os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0'): sys.exit(5)\n"
    launchers.script("noise.py", NOISE + failing)
    flags = ["--nproc-per-node", "2", "--max-restarts", "2", "-r", "3", "--log-dir", "logs"]
    theirs, ours = launchers.both([*flags, "../noise.py"])
    assert (theirs.code, ours.code) == (0, 0), theirs.err + ours.err
    there, here = theirs.logs(), ours.logs()
    assert "attempt_1/1/stdout.log" in there
    # Worker 0 may be stopped at any moment of its first attempt, by either launcher.
    for logs in (there, here):
        logs.pop("attempt_0/0/stdout.log", None)
        logs.pop("attempt_0/0/stderr.log", None)
    assert here == there


# Errors.

RAISING = """\
import os, signal
if os.environ["RANK"] == "0":
    signal.pause()
from {module} import record
@record
def main(step):
    raise ValueError(f"no\\nluck in step {{step}} at caf\\u00e9")
main(3)
"""


@pytest.mark.parametrize("module", ["torch.distributed.elastic.multiprocessing.errors", "holdfast"])
def test_recorded_exception_is_in_the_same_files(module: str, launchers: Launchers) -> None:
    """Holdfast also reads the files of torch's `@record`, and torchrun those of ours."""
    launchers.script("raising.py", RAISING.format(module=module))
    line = ["--nproc-per-node", "2", "--log-dir", "logs", "../raising.py"]
    theirs, ours = launchers.both(line, {"TORCHELASTIC_ERROR_FILE": "job.json"})
    assert (theirs.code, ours.code) == (1, 1)
    there, here = error_files(theirs), error_files(ours)
    assert there["worker"]["message"] == "ValueError: no\nluck in step 3 at caf\u00e9"
    assert there["job"] == there["worker"] | {"errorCode": 1}
    assert here == there
    report = ours.err.partition("raising.py FAILED")[2]
    for line_of_traceback in here["worker"]["extraInfo"]["py_callstack"].splitlines():
        assert line_of_traceback.strip().replace("HERE", str(ours.folder)) in report
    assert f"{ours.folder}/logs/" in report


def error_files(outcome: Outcome) -> dict[str, Any]:
    """Return the error files of worker 1 and of the launcher, without their times, which are checked."""
    texts = {
        "worker": outcome.logs()["attempt_0/1/error.json"],
        "job": (outcome.folder / "job.json").read_text(),
    }
    messages = {}
    for name, text in texts.items():
        (key, message), *more = json.loads(text).items()
        assert (key, more) == ("message", [])
        extra = message["extraInfo"]
        seconds = extra.pop("timestamp")
        assert re.fullmatch("[0-9]{10}", seconds)
        assert extra.pop("timestamp_ns", seconds).startswith(seconds)
        extra["py_callstack"] = extra["py_callstack"].replace(str(outcome.folder), "HERE")
        messages[name] = message
    return messages
