"""From a configuration to a finished job: `launch_agent`, and `elastic_launch` around it."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast import console, plugins
from holdfast.agent.assembly import agent_of
from holdfast.agent.loop import LoopSettings
from holdfast.agent.spec import WorkerSpec, run_script_path
from holdfast.agent.worker_processes import ProcessSettings
from holdfast.core.limits import check_node_range
from holdfast.core.supervision import SupervisionSettings
from holdfast.core.values import Value
from holdfast.errors import (
    EnvironmentProblem,
    UsageError,
    find_shortage,
    shortage_hint,
)
from holdfast.launcher import preload
from holdfast.launcher.job_name import reserved_job_name
from holdfast.launcher.observers import LaunchObservers
from holdfast.launcher.story_file import writing_story
from holdfast.net.addresses import own_address
from holdfast.numa import binding
from holdfast.processes.failures import failure as process_failure
from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.signals import SIGNALS_ENV, parse_signal
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.handler import follows_views
from holdfast.rendezvous.rendezvous_errors import RendezvousGracefulExitError
from holdfast.rendezvous.worker_store import SingleNodeHandler, workers_serve_by_environment
from holdfast.side_thread import SideThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Any, TypeVar

    from holdfast.agent.loop import AgentLoop
    from holdfast.agent.side_services import HealthServer
    from holdfast.agent.spec import RunResult
    from holdfast.core.supervision import Supervision
    from holdfast.launcher.config import LaunchConfig
    from holdfast.processes.failures.failure import ChildFailedError
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

    Settings = TypeVar("Settings")

# Hints by the error number.
OS_ERROR_HINTS = {
    errno.ENOSPC: "free space on the disk, or choose another directory with --log-dir",
    errno.EDQUOT: "free space on the disk, or choose another directory with --log-dir",
    errno.EROFS: "choose a writable directory with --log-dir",
}


def refusal_behind(problem: Exception) -> EnvironmentProblem | None:
    """Return an error with a hint if a limit of this machine caused the problem; otherwise None."""
    if not isinstance(problem, OSError):
        return find_shortage(problem)
    remedy = OS_ERROR_HINTS.get(problem.errno or 0) or shortage_hint(problem.errno)
    if not remedy:
        return None
    where = f"{problem.filename}: " if problem.filename else ""
    return EnvironmentProblem(f"cannot run the workers: {where}{problem.strerror}", hint=remedy)


REPORT_FILE = "failure.json"
REPORT_S = 5.0
"""The time limit for writing the report, so that a hanging file system does not delay the end of the job."""


class elastic_launch:  # noqa: N801 (TorchElastic's name)
    """Launches a function or a program as the workers of a job.

    ::

        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
        values = elastic_launch(config, train)(1e-3)
        values[0]  # what the worker of rank 0 returned

    Works in a script, a thread or a notebook; in a notebook use ``start_method="fork"`` for
    functions defined in it.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the workers with these arguments; return their values by global rank."""
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthServer | None = None,
) -> dict[int, Any]:
    """Run this node's part of a job and return its workers' values by global rank.

    Raises `ChildFailedError` when a worker failed for good, `SignalException` when a signal
    ended the job, and a `HoldfastError` when it could not be run at all.
    """
    if not entrypoint:
        raise UsageError("entrypoint: missing; accepted: a program or a function")
    with run_id_of(config, entrypoint_name(entrypoint, args)) as run_id:
        launch = Launch(config, run_id, entrypoint, args, logs_specs_of(config))
        check_binding(config)
        with writing_story(config.story), cluster_of(launch):
            return _run(launch, health_check_server)


def run_id_of(config: LaunchConfig, program: str) -> AbstractContextManager[str]:
    """Return the context in which the job has its run id; by default, a name for one node, else a random id."""
    if config.run_id:
        return nullcontext(config.run_id)
    # Nodes that start the same program in the same minute must not meet by accident.
    return (
        reserved_job_name(program) if is_single_node(config) else nullcontext(os.urandom(16).hex())
    )


class Launch(Value):
    """One launch of a job on this node."""

    config: LaunchConfig
    run_id: str
    entrypoint: Callable[..., Any] | str
    args: list[Any]
    logs_specs: LogsSpecs

    @property
    def name(self) -> str:
        """The workers' name in reports: the script rather than the interpreter."""
        return entrypoint_name(self.entrypoint, self.args)


def cluster_of(launch: Launch) -> AbstractContextManager[object]:
    """Return the context in which this machine runs its member of the job's own etcd, with `--ha`."""
    if Backend.named(launch.config.rdzv_backend) is not Backend.HA:
        return nullcontext()
    from holdfast.etcd.cluster_member import running_member
    from holdfast.rendezvous.ha_handler import cluster_list_of
    from holdfast.rendezvous.rdzv_conf import parse

    params = parameters_of(launch.config, launch.run_id)
    return running_member(cluster_list_of(params), patience_s=parse(params).coordinator_timeout)


def _run(launch: Launch, health_check_server: HealthServer | None) -> dict[int, Any]:
    config, logs_specs = launch.config, launch.logs_specs
    handler = rendezvous_of(config, launch.run_id)
    agent = make_agent(launch, handler, health_check_server)
    observers = LaunchObservers(config, logs_specs)
    failure: Exception | None = None
    result: RunResult | None = None
    try:
        observers.begin(agent)
        result = agent.run()
        if result.is_failed():
            failure = failure_of(launch, result, agent.machine)
            close_for_all(handler)
    except RendezvousGracefulExitError as end:  # This node was a standby and was not needed.
        console.notice(str(end))
        return {}
    except (OSError, RuntimeError, ImportError) as problem:
        # A worker's error is a result. This is an error of starting or supervising workers.
        refused = refusal_behind(problem)
        if refused is None:
            raise
        raise refused from problem
    finally:
        try:
            leave(handler)
        finally:
            observers.end()
        try:
            if failure is None:  # Only a failure needs its logs; a signal does not.
                discard_logs(logs_specs, ran=result is not None)
                if result is not None and isinstance(logs_specs, DefaultLogsSpecs):
                    logs_specs.discard_tails()
            elif type(logs_specs) is DefaultLogsSpecs:
                logs_specs.keep()
        finally:
            agent.close()
    if failure is not None:
        raise failure
    return result.return_values


def close_for_all(handler: RendezvousHandler) -> None:
    """End a failed job for the other nodes too, unless a coordinator has done so already.

    Otherwise the others would wait for this node to rejoin. If the handler raises, this prints a warning, and the
    job still reports its own failure.
    """
    if follows_views(handler):
        return
    try:
        handler.set_closed()
    except Exception as problem:  # noqa: BLE001 (a handler may be the user's)
        console.warning(f"cannot report the failure to the other nodes: {problem}")


def leave(handler: RendezvousHandler) -> None:
    """Leave the job. If the handler raises, this prints an error, and the job keeps its result."""
    try:
        handler.shutdown()
    except Exception as problem:  # noqa: BLE001 (a handler may be the user's)
        who = plugins.owner_of(handler)
        console.error(f"{who}: cannot shut down the rendezvous: {console.describe(problem)}")


def check_binding(config: LaunchConfig) -> None:
    """Raise if workers cannot be bound to CPUs as configured, before other nodes wait for them."""
    if config.numa_options is not None:
        binding.cpus_of_workers(config.numa_options, range(config.nproc_per_node))


def rendezvous_of(config: LaunchConfig, run_id: str) -> RendezvousHandler:
    """Return the rendezvous of this node. A job of one node alone needs no network."""
    try:
        check_node_range(config.min_nodes, config.max_nodes)
    except ValueError as problem:
        raise UsageError(f"--nnodes: {problem}") from None
    local_addr = config.local_addr or own_address_if_named(config)
    if is_single_node(config):
        addr, port = None, None
        if config.rdzv_endpoint and Backend.named(config.rdzv_backend) is Backend.STATIC:
            addr, port = split_endpoint(config.rdzv_endpoint)
        return SingleNodeHandler(
            run_id,
            backend=config.rdzv_backend,
            master_addr=addr or local_addr,
            master_port=port,
            workers_serve=config.worker_store or workers_serve_by_environment(),
            store_access=store_access_of(config),
        )
    from holdfast.rendezvous.handler_registry import get_rendezvous_handler

    return get_rendezvous_handler(parameters_of(config, run_id, local_addr))


def parameters_of(
    config: LaunchConfig, run_id: str, local_addr: str | None = None
) -> RendezvousParameters:
    """Return the parameters of the rendezvous."""
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

    settings = dict(config.rdzv_configs)
    if config.worker_store:
        settings["worker_store"] = True
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=local_addr,
        **settings,
    )


def store_access_of(config: LaunchConfig) -> str:
    """Return which clients the workers' store of a one-node job serves; by default, all."""
    if config.rdzv_configs.get("store") is None:
        return "open"
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters, value_of

    params = RendezvousParameters(config.rdzv_backend, "", "none", 1, 1, **config.rdzv_configs)
    return str(value_of(params, "store"))


def own_address_if_named(config: LaunchConfig) -> str | None:
    """Return this host's address for the workers' store, if a job of one node names an endpoint.

    Jobs on other machines may use that store, as the replica groups of one training run do. torchrun
    sets the same address.
    """
    alone = config.standalone or config.max_nodes > 1 or not config.rdzv_endpoint
    if alone or Backend.named(config.rdzv_backend) is not Backend.C10D:
        return None
    return own_address()


def is_single_node(config: LaunchConfig) -> bool:
    """Whether no other node can join: the job has one node at most, and names no endpoint."""
    backend = Backend.named(config.rdzv_backend)
    if config.max_nodes > 1 or backend is None or backend.needs_endpoint:
        return False
    if backend is Backend.STATIC:
        return True
    endpoint = config.rdzv_endpoint
    return not endpoint or (endpoint.endswith(":0") and "," not in endpoint)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address is in brackets."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or not host or "," in host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"--rdzv-endpoint: {endpoint!r} is not an endpoint; accepted: host:port, and "
            "[address]:port for IPv6"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def logs_specs_of(config: LaunchConfig) -> LogsSpecs:
    """Return the logs specs with directories of their own; those of a plug-in are used as they are."""
    assert config.logs_specs is not None
    # A class derived from ours is used as it is too: its author may keep a reference to the instance.
    if type(config.logs_specs) is DefaultLogsSpecs:
        return config.logs_specs.for_another_run()
    return config.logs_specs


def make_agent(
    launch: Launch, handler: RendezvousHandler, health_check_server: HealthServer | None
) -> AgentLoop:
    """Return the agent of a launch."""
    config = launch.config
    spec = settings_of(
        WorkerSpec,
        config,
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        fn=None,
        entrypoint=launch.entrypoint,
        args=tuple(launch.args),
        master_port=None,
        master_addr=None,
    )
    assert config.shutdown_timeout is not None
    settings = settings_of(
        ProcessSettings,
        config,
        logs_specs=launch.logs_specs,
        stop_signal=parse_signal(config.stop_signal, flag="--stop-signal"),
        worker_env=worker_environment_of(config),
        preload=preload_of(config, launch.entrypoint, launch.args),
    )
    return agent_of(
        spec,
        settings,
        supervision=settings_of(SupervisionSettings, config),
        loop=settings_of(LoopSettings, config),
        health_server=health_check_server,
    )


def worker_environment_of(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that the config sets for all workers; the calling program does not get them."""
    env = {SIGNALS_ENV: config.signals_to_handle}
    if config.omp_num_threads is not None:
        env["OMP_NUM_THREADS"] = str(config.omp_num_threads)
    return env


def settings_of(kind: type[Settings], config: LaunchConfig, **computed: Any) -> Settings:
    """Return settings of the agent: the fields of `config` with the same names, and `computed` ones."""
    fields: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    names = (name for name in fields if name not in computed)
    return kind(**computed, **{name: getattr(config, name) for name in names})


def preload_of(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> tuple[str, ...]:
    """Return the modules to import before workers are forked, with `auto` resolved."""
    if not config.preload:
        return ()
    if callable(entrypoint) and config.start_method != "spawn":
        raise UsageError(
            f"preload: conflicts with start_method={config.start_method!r}; accepted: 'spawn', "
            "whose workers are then forked from the process that has imported the modules"
        )
    return preload.modules_to_preload(config.preload, entrypoint, args)


def entrypoint_name(entrypoint: Callable[..., Any] | str, args: list[Any]) -> str:
    """Return the name of the workers for reports: the script rather than the interpreter."""
    if not isinstance(entrypoint, str):
        if entrypoint is run_script_path and args:
            return str(args[0])
        name: str = getattr(entrypoint, "__name__", repr(entrypoint))
        return name
    if entrypoint == sys.executable:
        words = (str(arg) for arg in args)
        return next((word for word in words if word and not word.startswith("-")), entrypoint)
    return entrypoint


def failure_of(launch: Launch, result: RunResult, machine: Supervision) -> Exception:
    """Return the error of a failed run, and write it as JSON."""
    config = launch.config
    if not result.failures:
        return EnvironmentProblem(f"{launch.name}: the workers were unhealthy and were stopped")
    error = process_failure.ChildFailedError(launch.name, result.failures)
    error.many_nodes = config.max_nodes > 1
    if config.max_restarts:
        error.restarts = f"after {machine.restart_count} of {config.max_restarts} restarts"
    run_dir = getattr(launch.logs_specs, "run_dir", None)
    if run_dir:
        error.log_dir = run_dir
        path = os.path.join(run_dir, REPORT_FILE)
        write_report(error, path, launch, machine.failed_generation)
    return error


def write_report(error: ChildFailedError, path: str, launch: Launch, generation: int) -> None:
    """Write the failure as JSON beside the logs.

    Neither a full disk nor a user's module that shadows one of ours may hide the failure.
    """
    try:
        from holdfast.processes.failures import failure_report  # It needs msgspec.

        written = failure_report.FailureReport.from_error(
            error,
            run_id=launch.run_id,
            generation=generation,
            max_restarts=launch.config.max_restarts,
            log_dir=error.log_dir,
        )
        SideThread("holdfast-report", REPORT_S).call(written.write, path)
        error.report_file = path
    except Exception as problem:  # noqa: BLE001
        what = getattr(problem, "strerror", None) or console.describe(problem)
        console.warning(f"cannot write the failure report to {path}: {what}")


def discard_logs(specs: Any, *, ran: bool) -> None:
    """Remove a temporary log directory that has nothing to keep.

    If the job could not run, also remove a directory for output that is still empty. Otherwise print where
    the output is.
    """
    if getattr(specs, "keeps_nothing", False):
        specs.discard_if_temporary()
    elif getattr(specs, "is_temporary", False) and not (
        isinstance(specs, DefaultLogsSpecs) and not ran and specs.discard_if_empty()
    ):
        console.warning(
            f"worker output kept in {specs.run_dir}; use --log-dir to choose the directory"
        )
