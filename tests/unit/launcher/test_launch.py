from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch_job import elastic_launch
from holdfast.net.addresses import own_address
from holdfast.processes.failures.failure import ChildFailedError
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.logs.std import Std
from holdfast.rendezvous.handler_registry import rendezvous_handler_registry as registry
from holdfast.rendezvous.worker_store import SingleNodeHandler

if TYPE_CHECKING:
    from collections.abc import Callable


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
OURS = ("TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of the test; temporary folders are made in `tmp` below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def state_of_the_program() -> tuple[object, ...]:
    """Return the state that a launch must not change."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST")
    return (
        environment,
        [signal.getsignal(one) for one in HANDLED],
        wakeup_fd,
        os.getcwd(),
        threading.active_count(),
    )


def config(nproc: int = 1, **settings: Any) -> LaunchConfig:
    return LaunchConfig(
        **{
            "min_nodes": 1, "max_nodes": 1, "nproc_per_node": nproc, "max_restarts": 0,
            "start_method": "fork", "monitor_interval": 3600.0, **settings,
        }
    )  # fmt: skip


def launch(
    settings: LaunchConfig, entrypoint: Callable[..., Any] | str | None, *args: Any
) -> dict[int, Any]:
    """Launch a job, and check that the calling program's state is unchanged, whatever happens."""
    before = state_of_the_program()
    try:
        return elastic_launch(settings, entrypoint)(*args)
    finally:
        assert state_of_the_program() == before


def shell(script: str, nproc: int = 1, **settings: Any) -> dict[int, Any]:
    return launch(config(nproc, **settings), "/bin/sh", "-c", script)


def fails(script: str, nproc: int = 1, **settings: Any) -> ChildFailedError:
    with pytest.raises(ChildFailedError) as failed:
        shell(script, nproc, **settings)
    return failed.value


def seen(name: str = "seen") -> list[str]:
    return sorted(Path(name).read_text().splitlines())


def temporary_folders() -> list[str]:
    return os.listdir("tmp")


def test_launch_works_in_a_removed_working_directory(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir("gone")
    os.rmdir(folder / "gone")
    assert elastic_launch(config(), "/bin/sh")("-c", "exit 0") == {0: None}


class GrowsOnce(SingleNodeHandler):
    """A rendezvous that another node wants to join while the first generation runs."""

    waiting = 1
    polls_membership = True

    def num_nodes_waiting(self) -> int:
        if not os.path.exists("started"):
            return 0
        waiting, self.waiting = self.waiting, 0
        return waiting


def test_failure_report_has_the_generation_and_not_the_restart_count() -> None:
    backend = "grows-once"
    registry.register(backend, lambda params: GrowsOnce(params.run_id, backend=backend))
    script = "[ $HOLDFAST_GENERATION = 1 ] && exit 3; touch started; exec sleep 1000"
    error = fails(script, rdzv_backend=backend, monitor_interval=0.01)
    report = json.loads(Path(error.report_file).read_text())
    assert (report["generation"], report["max_restarts"]) == (1, 0)


class Unleavable(SingleNodeHandler):
    """A rendezvous that cannot be left."""

    def shutdown(self) -> bool:
        super().shutdown()
        raise KeyError("lease")


def test_failing_shutdown_of_a_handler_does_not_replace_the_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = "unleavable"
    registry.register(backend, lambda params: Unleavable(params.run_id, backend=backend))
    assert fails("exit 3", rdzv_backend=backend).get_first_failure()[1].exitcode == 3
    assert [line for line in caplog.messages if "Unleavable: " in line and "'lease'" in line]


@pytest.mark.parametrize("chosen", [{"redirects": Std.OUT}, {"tee": {0: Std.ERR}}])
def test_temporary_log_folder_with_redirected_streams_is_kept(chosen: dict[str, Any]) -> None:
    logs = DefaultLogsSpecs(**chosen)
    shell("echo out; echo err >&2", logs_specs=logs)
    (name,) = temporary_folders()
    assert logs.root_log_dir == f"{os.getcwd()}/tmp/{name}"
    assert len(list(Path("tmp").glob("*/*/attempt_0/0/std*.log"))) == 1


def test_launches_of_one_config_do_not_remove_each_others_logs() -> None:
    """The failing launch ends after the other, and keeps its logs."""
    os.mkfifo("go")
    job = elastic_launch(config(), "/bin/sh")
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(job, "-c", "read line < go; exit 3")
        job("-c", "exit 0")
        Path("go").write_text("now\n")
        error = failing.exception()
    assert isinstance(error, ChildFailedError)
    assert json.loads(Path(error.report_file).read_text())["exit_status"] == 3


def environment_of_a_worker(**settings: Any) -> dict[str, str]:
    shell("env > environment", **settings)
    return dict(line.partition("=")[::2] for line in seen("environment"))


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"rdzv_backend": "static", "rdzv_endpoint": "10.0.0.9:29611"}, ("10.0.0.9", "29611")),
        ({"rdzv_backend": "static", "rdzv_endpoint": "[fe80::1]:29611"}, ("fe80::1", "29611")),
        (
            {"rdzv_backend": "static", "rdzv_endpoint": "head:1", "local_addr": "10.0.0.7"},
            ("head", "1"),
        ),
        ({"rdzv_backend": "static", "rdzv_endpoint": "head:0"}, ("head", None)),
        ({"rdzv_backend": "c10d"}, ("127.0.0.1", None)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "head:0"}, (own_address(), None)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}, (own_address(), None)),
        (
            {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "standalone": True},
            ("127.0.0.1", None),
        ),
        ({"rdzv_backend": "c10d", "local_addr": "10.0.0.7"}, ("10.0.0.7", None)),
    ],
)
def test_workers_get_master_addr_and_port_of_the_rendezvous(
    settings: dict[str, Any], address: tuple[str, str | None]
) -> None:
    # The agent would bind a given port, which may not be free here.
    env = environment_of_a_worker(**settings, worker_store=True)
    host, port = address
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["MASTER_ADDR"] == host
    assert env["MASTER_PORT"] == port if port else int(env["MASTER_PORT"]) > 1023
