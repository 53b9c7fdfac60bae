from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import CannotStart, EnvironmentProblem, UsageError
from holdfast.launcher import api
from holdfast.launcher import launch as launching
from holdfast.launcher.config import LaunchConfig
from holdfast.launcher.launch import (
    OS_ERROR_HINTS,
    elastic_launch,
    entrypoint_name,
    launch_agent,
    os_error_problem,
    split_endpoint,
)
from holdfast.net.listening import ReservedPort
from holdfast.processes.failures.failure import ChildFailedError
from holdfast.processes.logs.specs import DefaultLogsSpecs, LogsDest, Std
from holdfast.processes.signals import SignalException

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("number", OS_ERROR_HINTS)
def test_a_limit_that_was_reached_is_named_with_what_to_do(number: int) -> None:
    told = os_error_problem(OSError(number, os.strerror(number)))
    assert isinstance(told, EnvironmentProblem)
    assert str(told).startswith(f"the workers could not be run: {os.strerror(number)} (")
    assert told.hint == OS_ERROR_HINTS[number]


def test_a_file_is_named_if_there_is_one() -> None:
    told = os_error_problem(OSError(errno.ENOSPC, "No space left on device", "/logs/x"))
    assert told is not None
    assert told.message.endswith(": /logs/x: No space left on device")


@pytest.mark.parametrize("problem", [OSError(errno.ENOENT, "?"), OSError(), OSError("words")])
def test_other_errors_are_not_the_machines(problem: OSError) -> None:
    assert os_error_problem(problem) is None


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
    """Return what a launch must leave alone."""
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
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": nproc,
            "max_restarts": 0,
            "start_method": "fork",
            "monitor_interval": 3600.0,
            **settings,
        }
    )


def launch(
    settings: LaunchConfig, entrypoint: Callable[..., Any] | str | None, *args: Any
) -> dict[int, Any]:
    """Launch as anyone would, and check that the program around is left alone, come what may."""
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


# Values.


def scaled(factor: int, text: str) -> tuple[int, str]:
    return factor * int(os.environ["RANK"]), text


def test_a_function_returns_its_values_by_rank() -> None:
    values = launch(config(3), scaled, 10, "rank $local_rank")
    assert values == {0: (0, "rank 0"), 1: (10, "rank 1"), 2: (20, "rank 2")}


def test_a_function_is_sent_to_new_interpreters_by_default() -> None:
    values = launch(config(start_method="spawn"), scaled, 10, "x")
    assert values == {0: (0, "x")}


def test_a_program_returns_nothing() -> None:
    assert shell("exit 0", 2) == {0: None, 1: None}


def test_the_agent_can_be_launched_without_the_wrapper() -> None:
    assert launch_agent(config(), "/bin/sh", ["-c", "exit 0"]) == {0: None}
    assert api.launch_agent is launch_agent
    assert api.elastic_launch is elastic_launch


def test_arguments_of_a_program_may_be_of_any_type(folder: Path) -> None:
    launch(config(), "/bin/sh", "-c", 'echo "$@" > seen', "sh", 7, folder, None)
    assert seen() == [f"7 {folder} None"]


def test_it_works_in_a_thread() -> None:
    job = elastic_launch(config(2), "/bin/sh")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(job, "-c", "exit 0").result() == {0: None, 1: None}
        failed = pool.submit(job, "-c", "exit 4").exception()
    assert isinstance(failed, ChildFailedError)
    assert failed.get_first_failure()[1].exitcode == 4


# What cannot be launched.


@pytest.mark.parametrize("nothing", [None, ""])
def test_nothing_to_run_is_refused(nothing: str | None) -> None:
    with pytest.raises(UsageError, match=r"^entrypoint: there is nothing to run"):
        launch(config(), nothing)


@pytest.mark.parametrize("most", [1, 2])
def test_a_backend_that_nobody_knows_is_refused(most: int) -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-backend: 'zoo' is unknown; accepted: c10d, "):
        launch(config(max_nodes=most, rdzv_backend="zoo"), "/bin/sh", "-c", "touch started")
    assert not Path("started").exists()


def test_an_event_handler_that_there_is_not_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="'nobody'"):
        shell("touch started", event_log_handler="nobody")
    assert not Path("started").exists()


def test_options_for_binding_that_say_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^numa_options: .* names no way of binding"):
        shell("touch started", numa_options=object())
    assert not Path("started").exists()


def test_too_few_descriptors_for_the_workers_are_told_in_one_line() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with pytest.raises(EnvironmentProblem, match=r"Too many open files \(.*`ulimit -n`.*\)$"):
            shell("touch started", 30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert temporary_folders() == []


def test_errors_that_are_no_limit_of_the_machine_stay_what_they_are() -> None:
    class Broken(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the log server is down")

    with pytest.raises(ConnectionRefusedError):
        shell("exit 0", logs_specs=Broken())


def test_a_disk_that_cannot_be_written_is_told_in_one_line() -> None:
    class Full(DefaultLogsSpecs):
        @property
        def run_dir(self) -> str | None:
            raise OSError(errno.ENOSPC, "No space left on device", "/logs")

    with pytest.raises(EnvironmentProblem, match=r"/logs: No space left on device \(free space"):
        shell("exit 1", logs_specs=Full())


def test_a_current_folder_that_was_removed_is_no_obstacle(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir("gone")
    os.rmdir(folder / "gone")
    assert elastic_launch(config(), "/bin/sh")("-c", "exit 0") == {0: None}


def test_no_workers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^local_world_size: 0 workers"):
        shell("exit 0", 0)


def test_an_unknown_start_method_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(UsageError, match=r"^start_method: 'clone' is unknown"):
        launch(config(start_method="clone"), scaled, 1, "x")
    assert temporary_folders() == []


# Failures.


def test_a_failure_tells_its_story(folder: Path) -> None:
    os.mkfifo("ready")
    script = (
        "if [ $RANK = 1 ]; then read go < ready; echo because >&2; exit 7; fi;"
        "echo go > ready; sleep 1000"
    )
    logs = DefaultLogsSpecs("logs", redirects=Std.ERR)
    error = fails(script, 2, logs_specs=logs, run_id="my job", max_restarts=0)
    rank, first = error.get_first_failure()
    assert (error.name, rank, first.exitcode) == ("/bin/sh", 1, 7)
    assert error.failures[0].consequence
    assert error.restarts == ""
    assert Path(error.log_dir).parent == folder / "logs"
    assert error.report_file == f"{error.log_dir}/failure.json"
    report = json.loads(Path(error.report_file).read_text())
    assert {name: report[name] for name in ("name", "run_id", "log_dir", "exit_status")} == {
        "name": "/bin/sh",
        "run_id": "my job",
        "log_dir": error.log_dir,
        "exit_status": 7,
    }
    assert (report["generation"], report["max_restarts"]) == (0, 0)
    assert (report["first"]["rank"], report["first"]["stderr_tail"]) == (1, "because\n")
    assert [other["rank"] for other in report["others"]] == [0]


def test_a_failure_says_after_how_many_restarts() -> None:
    error = fails("echo $TORCHELASTIC_RESTART_COUNT >> seen; exit 5", max_restarts=2)
    assert error.restarts == "after 2 of 2 restarts"
    assert seen() == ["0", "1", "2"]
    report = json.loads(Path(error.report_file).read_text())
    assert (report["generation"], report["max_restarts"]) == (2, 2)


def test_a_restart_may_succeed() -> None:
    assert shell("[ $TORCHELASTIC_RESTART_COUNT = 1 ]", max_restarts=1) == {0: None}


def test_a_failed_function_is_known_by_its_name_and_its_traceback() -> None:
    with pytest.raises(ChildFailedError) as failed:
        launch(config(), scaled, "not a number")
    assert failed.value.name == "scaled"
    assert "TypeError" in failed.value.failures[0].traceback_text()
    assert failed.value.failures[0].error_file.endswith("/attempt_0/0/error.json")


def test_a_missing_program_is_a_failure_and_is_not_tried_again() -> None:
    with pytest.raises(ChildFailedError) as failed:
        launch(config(max_restarts=3), "/no/such/program")
    assert failed.value.restarts == "after 0 of 3 restarts"
    assert failed.value.failures[0].exitcode == CannotStart.exit_code


def test_a_report_that_cannot_be_written_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launching, "REPORT_FILE", "no/such/folder/failure.json")
    error = fails("exit 3")
    assert error.report_file == ""
    (warning,) = caplog.messages
    assert "could not be written" in warning
    assert "No such file or directory" in warning


def test_a_report_that_cannot_be_made_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the user's folder has a `numbers.py`, which a library takes for Python's."""
    monkeypatch.delattr("holdfast.processes.failures.report", raising=False)
    monkeypatch.setitem(sys.modules, "holdfast.processes.failures.report", None)
    assert fails("exit 3").report_file == ""
    (warning,) = caplog.messages
    assert "could not be written" in warning
    assert "holdfast.processes.failures.report" in warning


def test_workers_that_were_stopped_without_failing_are_told_of() -> None:
    """An unhealthy worker may end with code 0 when it is asked to stop."""
    from holdfast.agent.spec import RunResult, WorkerState

    made: Any = object()
    error = launching.failure_of(
        "train.py", RunResult(WorkerState.FAILED), config(), made, "job", 0
    )
    assert isinstance(error, EnvironmentProblem)
    assert str(error) == "train.py: the workers were not healthy and were stopped"


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        ("./train.sh", ["-c", "x"], "./train.sh"),
        (sys.executable, ["-u", "train.py", "--lr", "1"], "train.py"),
        (sys.executable, ["-u", "", "train.py"], "train.py"),
        (sys.executable, ["-u"], sys.executable),
        (sys.executable, [7], "7"),
        (scaled, [1], "scaled"),
    ],
)
def test_workers_are_known_by_their_script(
    entrypoint: Callable[..., Any] | str, args: list[Any], name: str
) -> None:
    assert entrypoint_name(entrypoint, args) == name


# Logs.


def test_a_temporary_log_folder_goes_with_a_success() -> None:
    shell("ls tmp > seen")
    assert len(seen()) == 1
    assert temporary_folders() == []


def test_a_temporary_log_folder_stays_after_a_failure() -> None:
    error = fails("exit 1")
    (name,) = temporary_folders()
    assert error.log_dir.startswith(f"{os.getcwd()}/tmp/{name}/")


@pytest.mark.parametrize("chosen", [{"redirects": Std.OUT}, {"tee": {0: Std.ERR}}])
def test_a_temporary_log_folder_stays_if_streams_were_sent_there(chosen: dict[str, Any]) -> None:
    logs = DefaultLogsSpecs(**chosen)
    shell("echo out; echo err >&2", logs_specs=logs)
    (name,) = temporary_folders()
    assert logs.root_log_dir == f"{os.getcwd()}/tmp/{name}"
    assert len(list(Path("tmp").glob("*/*/attempt_0/0/std*.log"))) == 1


def test_a_log_folder_of_the_callers_stays() -> None:
    shell("exit 0", logs_specs=DefaultLogsSpecs("logs"))
    assert len(list(Path("logs").glob("*/attempt_0/0"))) == 1


def test_no_folder_is_made_where_none_is_wanted() -> None:
    error = fails("exit 2", logs_specs=DefaultLogsSpecs(os.devnull))
    assert (error.log_dir, error.report_file) == ("", "")
    assert temporary_folders() == []


def test_a_signal_ends_the_job_and_leaves_no_temporary_folder() -> None:
    os.mkfifo("ready")

    def send() -> None:
        Path("ready").read_text()
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        with pytest.raises(SignalException) as ended:
            shell("echo go > ready; sleep 1000", max_restarts=3)
        sending.result()
    assert ended.value.sigval is signal.SIGTERM
    assert temporary_folders() == []


def test_a_cleaner_of_temporary_folders_does_not_end_the_job() -> None:
    error = fails("rm -rf tmp/holdfast_*; echo $TORCHELASTIC_ERROR_FILE; exit 6", max_restarts=1)
    assert error.get_first_failure()[1].exitcode == 6
    assert error.restarts == "after 1 of 1 restarts"


def test_launches_of_one_config_do_not_remove_each_others_logs() -> None:
    """The one that fails outlives the other, and its logs do too."""
    os.mkfifo("go")
    job = elastic_launch(config(), "/bin/sh")
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(job, "-c", "read line < go; exit 3")
        job("-c", "exit 0")
        Path("go").write_text("now\n")
        error = failing.exception()
    assert isinstance(error, ChildFailedError)
    assert json.loads(Path(error.report_file).read_text())["exit_status"] == 3


def test_logs_specs_of_a_plug_in_are_used_as_they_are() -> None:
    class Mine(DefaultLogsSpecs):
        started = 0

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            self.started += 1
            return super().reify(envs)

    mine = Mine("logs")
    shell("exit 0", logs_specs=mine)
    assert mine.started == 1
    assert mine.run_dir is not None


# Settings that reach the workers.


def environment_of_a_worker(**settings: Any) -> dict[str, str]:
    shell("env > environment", **settings)
    return dict(line.partition("=")[::2] for line in seen("environment"))


def test_a_config_serves_for_several_launches(folder: Path) -> None:
    again = config(2, max_restarts=1)
    values = [launch(again, scaled, n, "x") for n in (1, 2)]
    assert values == [{0: (0, "x"), 1: (1, "x")}, {0: (0, "x"), 1: (2, "x")}]
    assert temporary_folders() == []


def test_each_launch_without_an_id_gets_one_of_its_own() -> None:
    again = config()
    job = elastic_launch(again, "/bin/sh")
    for _ in range(2):
        job("-c", "echo $TORCHELASTIC_RUN_ID >> seen")
    one, other = seen()
    assert one != other
    assert again.run_id == ""


def test_an_address_and_a_free_port_are_found_where_none_is_named() -> None:
    env = environment_of_a_worker(run_id="job")
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(env["MASTER_PORT"]) <= 65535
    assert env["TORCHELASTIC_RUN_ID"] == "job"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert env["ROLE_NAME"] == "default_role"


def test_all_starts_of_a_job_have_the_same_port() -> None:
    fails("echo $MASTER_PORT >> seen; exit 1", max_restarts=2)
    assert len(seen()) == 3
    assert len(set(seen())) == 1


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
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "head:0"}, ("127.0.0.1", None)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}, ("127.0.0.1", None)),
        ({"rdzv_backend": "c10d", "local_addr": "10.0.0.7"}, ("10.0.0.7", None)),
    ],
)
def test_where_workers_meet(settings: dict[str, Any], address: tuple[str, str | None]) -> None:
    # The agent would bind a port that is named, which may not be free here.
    env = environment_of_a_worker(**settings, worker_store=True)
    host, port = address
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["MASTER_ADDR"] == host
    assert env["MASTER_PORT"] == port if port else int(env["MASTER_PORT"]) > 1023


GREET_THE_STORE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as store:
    store.sendall(b"\\x00\\xce\\xf7\\x85\\x3c" + b"\\x0dabcd")
    assert store.recv(4) == b"abcd"
"""


def test_the_store_is_served_at_the_port_that_is_named() -> None:
    with ReservedPort() as free:
        port = free.number
    settings = config(rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}")
    launch(settings, sys.executable, "-c", GREET_THE_STORE, "127.0.0.1", str(port))


def test_torchelastics_variable_leaves_the_store_to_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert environment_of_a_worker()["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    "endpoint", ["head", ":29500", "head:", "head:port", "head:70000", "head:-1"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not an endpoint; accepted: host:port"):
        shell("exit 0", rdzv_backend="static", rdzv_endpoint=endpoint)


def test_an_endpoint_is_split_at_the_last_colon() -> None:
    assert split_endpoint(" host.name:29500 ") == ("host.name", 29500)
    assert split_endpoint("[::1]:29500") == ("::1", 29500)


def test_settings_for_workers_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR2")
    env = environment_of_a_worker(
        role="trainer", omp_num_threads=4, signals_to_handle="SIGTERM", max_restarts=6
    )
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM"
    assert env["TORCHELASTIC_MAX_RESTARTS"] == "6"
    assert env["ROLE_NAME"] == "trainer"


def test_workers_threads_are_left_alone_unless_said() -> None:
    assert "OMP_NUM_THREADS" not in environment_of_a_worker()


def test_the_config_reaches_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(
        2,
        stop_signal="SIGUSR1",
        shutdown_timeout=1.5,
        exit_barrier_timeout=2.5,
        log_line_prefix_template="<$rank>",
        capture_stderr=False,
        signals_to_handle="SIGUSR2",
        virtual_local_rank=True,
        duplicate_stdout_filters=["a"],
        duplicate_stderr_filters=["b"],
        numa_options="node",
    )
    handler = launching.rendezvous_of(made, "job")
    agent = launching.make_agent(made, DefaultLogsSpecs(), "train", [1], handler, None)
    spec = agent.get_worker_group().spec
    assert (spec.local_world_size, spec.args, spec.entrypoint) == (2, (1,), "train")
    assert spec.virtual_local_rank
    assert spec.numa_options == "node"
    assert (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters) == (["a"], ["b"])
    assert (agent._stop_signal, agent._shutdown_timeout) == (signal.SIGUSR1, 1.5)
    assert agent._exit_barrier_timeout == 2.5
    assert agent._log_line_prefix_template == "<$rank>"
    assert not agent._capture_stderr
    assert agent._signals_to_handle == "SIGUSR2"


def preload_given(settings: LaunchConfig, entrypoint: Any, *args: Any) -> tuple[str, ...]:
    handler = launching.rendezvous_of(settings, "job")
    try:
        return launching.make_agent(
            settings, DefaultLogsSpecs(), entrypoint, list(args), handler, None
        )._preload
    finally:
        handler.shutdown()


def test_the_agent_is_given_the_modules_to_preload(folder: Path) -> None:
    (folder / "train.py").write_text("import json, wave")
    command = (sys.executable, "-u", "train.py")
    assert preload_given(config(), *command) == ()
    assert preload_given(config(preload="b,a"), *command) == ("b", "a")
    assert preload_given(config(preload="b,auto"), *command) == ("b", "json", "wave")
    assert preload_given(config(preload="b", start_method="spawn"), scaled) == ("b",)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_preloading_contradicts_the_other_ways_to_start_functions(method: str) -> None:
    with pytest.raises(UsageError, match=f"^preload: contradicts start_method='{method}'"):
        launch(config(preload="json", start_method=method), scaled, 1, "x")
    assert temporary_folders() == []
