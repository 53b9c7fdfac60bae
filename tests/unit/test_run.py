from __future__ import annotations

import dataclasses
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

import holdfast.launch
import holdfast.run
from holdfast.errors import CannotStart, UsageError
from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import is_single_node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
LAUNCH_VARIABLES = (
    "OMP_NUM_THREADS",
    "PYTHON_EXEC",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "LOGLEVEL",
)

Launched = list[tuple[LaunchConfig, Any, tuple[Any, ...]]]


@pytest.fixture(autouse=True)
def _plain_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Collect what is launched instead of launching it."""
    calls: Launched = []

    class Recorder:
        def __init__(self, config: LaunchConfig, entrypoint: Any) -> None:
            self.config, self.entrypoint = config, entrypoint

        def __call__(self, *args: Any) -> None:
            calls.append((self.config, self.entrypoint, args))

    monkeypatch.setattr("holdfast.cli.run_command.elastic_launch", Recorder)
    return calls


def config_of(*words: str) -> LaunchConfig:
    return holdfast.run.config_from_args(holdfast.run.parse_args(words))[0]


COMMANDS = [
    "train.py",
    "train.py --lr 1 -- x",
    "-m pkg.mod --lr 1",
    "--no-python ./prog a",
    "--nproc-per-node 2 --max-restarts 3 --monitor-interval 1 train.py",
    "--nproc_per_node cpu --role trainer --start_method fork train.py",
    "--nproc-per-node auto train.py",
    "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint host:1234 --rdzv-id job train.py",
    "--nnodes 2 --node-rank 1 --master-addr a --master-port 1 train.py",
    "--rdzv-backend etcd --rdzv-endpoint e:2379 --rdzv-conf timeout=5,a=b train.py",
    "--rdzv-conf rank=7,x=1 --master-port 29600 train.py",
    "--rdzv-endpoint h:7 --master-port 29600 train.py",
    "--master-port 0 train.py",
    "-r 3 -t 0:1,1:2 --local-ranks-filter 0,1 train.py",
    "--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters x train.py",
    "--local-addr 10.0.0.1 --virtual-local-rank --shutdown-timeout 7 train.py",
    "--signals-to-handle SIGTERM,SIGUSR1 --event-log-handler console train.py",
    "--logs-specs default train.py",
]


def comparable(config: Any) -> dict[str, Any]:
    """Return the fields that both configs have, with the logs specs reduced to their settings."""
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(LaunchConfig)
        if not field.kw_only
    }
    specs = fields.pop("logs_specs")
    fields["streams"] = (specs._redirects, specs._tee, specs._local_ranks_filter)
    return fields


@pytest.mark.torch
@pytest.mark.parametrize("command", COMMANDS)
def test_config_equals_that_of_torchrun(command: str, tmp_path: Path) -> None:
    from torch.distributed import run as torchrun

    words = ["--log-dir", str(tmp_path), *command.split()]
    theirs, their_program, their_args = torchrun.config_from_args(torchrun.parse_args(words))
    ours, our_program, our_args = holdfast.run.config_from_args(holdfast.run.parse_args(words))
    if theirs.rdzv_endpoint == "127.0.0.1:None":
        theirs.rdzv_endpoint = "127.0.0.1:29500"
    assert comparable(ours) == comparable(theirs)
    assert (our_program, our_args) == (their_program, their_args)


@pytest.mark.torch
@pytest.mark.parametrize(
    "command",
    [
        "train.py",
        "--standalone train.py",
        "--standalone --rdzv-backend etcd --rdzv-id x --rdzv-endpoint h:1 train.py",
        "--master-port 29600 train.py a",
        "--master-addr ::1 --master-port 29600 --rdzv-id job train.py",
        "--master-addr h train.py",
        "--rdzv-endpoint h:7 train.py",
        "--rdzv-backend c10d train.py",
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id job train.py",
        "--rdzv-backend etcd-v2 --rdzv-endpoint e:1 train.py",
        "--nnodes 1 --node-rank 0 train.py",
        "--run-path train.py a",
    ],
)
def test_run_chooses_the_rendezvous_that_torchrun_chooses(
    command: str, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import run as torchrun

    theirs: Launched = []

    def record(config: Any, entrypoint: Any) -> Callable[..., None]:
        return lambda *args: theirs.append((config, entrypoint, args))

    monkeypatch.setattr(torchrun, "elastic_launch", record)
    words = ["--log-dir", str(tmp_path), *command.split()]
    torchrun.run(torchrun.parse_args(words))
    holdfast.run.run(holdfast.run.parse_args(words))
    (their_config, their_program, their_args), (our_config, our_program, our_args) = (
        theirs[0],
        launched[0],
    )
    if "--rdzv-id" in words and UUID4.fullmatch(their_config.run_id):
        assert our_config.run_id == "x"  # torchrun replaces it if --standalone is given.
        their_config.run_id = "x"
    elif "--rdzv-id" not in words and is_single_node(our_config):
        assert our_config.run_id == ""  # The launch chooses a name.
        their_config.run_id = ""
    assert comparable(our_config) == comparable(their_config)
    assert our_args == their_args
    if isinstance(their_program, str):
        assert our_program == their_program
    else:
        assert our_program is holdfast.run.run_script_path


def test_main_launches_the_given_script_with_its_flags(launched: Launched) -> None:
    holdfast.run.main(["--nproc-per-node", "2", "--max-restarts=1", "train.py", "--lr", "1"])
    [(config, program, args)] = launched
    assert (config.nproc_per_node, config.max_restarts) == (2, 1)
    assert (program, args) == (sys.executable, ("-u", "train.py", "--lr", "1"))


def test_older_launcher_passes_the_local_rank_as_an_argument(launched: Launched) -> None:
    holdfast.launch.main(["--nproc-per-node", "2", "train.py", "--lr", "1"])
    holdfast.launch.main(["--use-env", "train.py", "--lr", "1"])
    holdfast.launch.main(["--use-env", "--no-python", "true"])
    assert [args for _, _, args in launched] == [
        ("-u", "train.py", "--local-rank=${local_rank}", "--lr", "1"),
        ("-u", "train.py", "--lr", "1"),
        (),
    ]
    with pytest.raises(UsageError, match=r"^--no-python: requires --use-env"):
        holdfast.launch.main(["--no-python", "true"])


def test_run_does_not_change_arguments_or_environment(launched: Launched) -> None:
    args = holdfast.run.parse_args(["--nproc-per-node", "2", "train.py"])
    before, environment = dict(vars(args)), dict(os.environ)
    holdfast.run.run(args)
    assert len(launched) == 1
    assert vars(args) == before
    assert dict(os.environ) == environment


@pytest.mark.parametrize(
    ("variable", "nproc", "expected"), [(None, "2", 1), (None, "1", None), ("4", "2", None)]
)
def test_omp_num_threads_is_1_for_several_workers(
    variable: str | None, nproc: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert config_of("--nproc-per-node", nproc, "train.py").omp_num_threads == expected


def test_own_flags_reach_the_config() -> None:
    made = config_of(
        *("--stop-signal", "USR1", "--no-capture-stderr"),
        *("--preload", "auto,torch", "--worker-store"),
        *("--exit-barrier-timeout", "2.5", "train.py"),
    )
    assert (made.stop_signal, made.capture_stderr) == ("SIGUSR1", False)
    assert made.exit_barrier_timeout == 2.5
    assert (made.preload, made.worker_store) == (("auto", "torch"), True)
    plain = config_of("train.py")
    assert (plain.stop_signal, plain.capture_stderr) == ("SIGTERM", True)
    assert plain.exit_barrier_timeout == 300
    assert (plain.preload, plain.worker_store) == ((), False)


@pytest.mark.torch
def test_config_can_be_made_from_a_namespace_of_torch() -> None:
    from torch.distributed.run import parse_args

    made, _, args = holdfast.run.config_from_args(parse_args(["train.py", "x"]))
    assert (made.stop_signal, made.capture_stderr) == ("SIGTERM", True)
    assert (made.preload, made.worker_store) == ((), False)
    assert args == ["-u", "train.py", "x"]


def test_failure_is_written_to_the_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Launched
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(CannotStart):
        holdfast.run.main(["trian.py"])
    assert "trian.py" in path.read_text()
    assert launched == []


def test_flag_for_the_prefix_of_lines_precedes_torchs_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert config_of("train.py").log_line_prefix_template is None
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "variable")
    assert config_of("train.py").log_line_prefix_template == "variable"
    line = ["--log-line-prefix-template", "flag", "train.py"]
    assert config_of(*line).log_line_prefix_template == "flag"
    monkeypatch.setenv("PET_LOG_LINE_PREFIX_TEMPLATE", "default of the flag")
    assert config_of("train.py").log_line_prefix_template == "default of the flag"
