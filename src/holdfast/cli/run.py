"""The command `run`: from a parsed command line to a launched job.

`config_from_args` only translates, for any number of nodes and without looking at the script; `run`
decides which rendezvous the job gets, rejects what cannot work, and launches. Neither changes the
environment or the namespace it is given.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.agent.spec import run_script_path
from holdfast.cli import flags
from holdfast.cli.flags import (
    DEFAULT_MASTER_PORT,
    build_parser,
    determine_local_world_size,
    parse_min_max_nnodes,
)
from holdfast.cli.script import (
    check_can_start,
    get_use_env,
    parse_preload,
    worker_command,
)
from holdfast.defaults import EXIT_BARRIER_S
from holdfast.launcher.config import LaunchConfig

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Sequence
    from typing import Any

    from holdfast.cli.flags import Arguments
    from holdfast.numa import NumaOptions
    from holdfast.processes.logs.specs import LogsSpecs

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "execute",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

LOG_LINE_PREFIX_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def get_args_parser() -> ArgumentParser:
    """Return the parser of `holdfast run`, with the `PET_` defaults of the environment."""
    return build_parser()


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line; an invalid one ends the process with one line and exit code 2."""
    return get_args_parser().parse_args(args)


def parse_command(words: Sequence[str]) -> Arguments:
    """Like `parse_args`, but faster for most command lines."""
    return flags.parse_plain(words) or parse_args(words)


def get_rdzv_endpoint(args: Arguments) -> str:
    """Return the endpoint as given, or that of node 0 for the static backend."""
    endpoint = str(args.rdzv_endpoint)
    if args.rdzv_backend != "static":
        return endpoint
    if not endpoint:
        port = DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
        return f"{args.master_addr}:{port}"
    port_text = endpoint.rpartition(":")[2] if ":" in endpoint else ""
    if not port_text.isdecimal():
        flags.reject(
            args.rdzv_endpoint, "--rdzv-endpoint", "has no port", "HOST:PORT for the static backend"
        )
    return endpoint


def config_from_args(args: Arguments) -> tuple[LaunchConfig, Callable[..., None] | str, list[str]]:
    """Translate a command line into a config, the program of the workers, and its arguments."""
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    nproc_per_node = determine_local_world_size(args.nproc_per_node)
    program, program_args = worker_command(args)
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=nproc_per_node,
        logs_specs=_logs_specs(args),
        run_id=str(args.rdzv_id),
        role=str(args.role),
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=str(args.rdzv_backend),
        rdzv_configs=_rdzv_configs(args),
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=os.environ.get(LOG_LINE_PREFIX_ENV),
        local_addr=None if args.local_addr is None else str(args.local_addr),
        event_log_handler=str(args.event_log_handler),
        numa_options=_numa_options(args),
        signals_to_handle=flags.parse_signal_names(args.signals_to_handle),
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        # A namespace made by another parser of these flags may lack Holdfast's own.
        stop_signal=flags.parse_stop_signal(getattr(args, "stop_signal", "SIGTERM")),
        capture_stderr=not getattr(args, "no_capture_stderr", False),
        omp_num_threads=_omp_num_threads(nproc_per_node),
        exit_barrier_timeout=getattr(args, "exit_barrier_timeout", EXIT_BARRIER_S),
        preload=parse_preload(args),
        worker_store=getattr(args, "worker_store", False),
        standalone=args.standalone,
        story=getattr(args, "story", ""),
        metrics_port=getattr(args, "metrics_port", None),
        metrics_addr=getattr(args, "metrics_addr", ""),
        dashboard_port=getattr(args, "dashboard", None),
    )
    return config, program, program_args


def _numa_options(args: Arguments) -> NumaOptions | None:
    if args.numa_binding is None:
        return None
    from holdfast.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(args.numa_binding))


def run(args: Arguments) -> None:
    """Run the job of a parsed command line until it ends; raise if it cannot start or fails."""
    console.check_level()
    given, args = args, _with_rendezvous(args)
    config, program, program_args = config_from_args(args)
    check_can_start(args)
    if config.max_nodes > 1 or _has_multi_node_flags(given):
        from holdfast.cli import flag_warnings

        flag_warnings.warn(given, config)
    if config.omp_num_threads is not None:
        console.info(
            f"OMP_NUM_THREADS is not set; using {config.omp_num_threads} for each of the "
            f"{config.nproc_per_node} workers, so that they do not overload the CPUs"
        )
    from holdfast.launcher.launch import elastic_launch

    elastic_launch(config=config, entrypoint=program)(*program_args)


def execute(args: Arguments) -> None:
    """Run the job, and write a failure to the error file that this process was given, if any."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        run(args)
        return
    from holdfast.processes.failures.error_file import Recording, get_error_handler

    with Recording(get_error_handler()):
        run(args)


def _with_rendezvous(args: Arguments) -> Arguments:
    """Return the arguments with the rendezvous of a single node that asks for none."""
    max_nodes = parse_min_max_nnodes(args.nnodes)[1]
    if getattr(args, "ha", None) is not None:
        args = _with_ha(args)
    backend = str(args.rdzv_backend)
    if args.standalone and max_nodes > 1:
        flags.reject(
            args.nnodes, "--nnodes", "conflicts with --standalone, which is for one node", "1"
        )
    alone = (
        backend == "static"
        and not args.rdzv_endpoint
        and args.master_port is None
        and max_nodes == 1
    )
    if args.standalone or alone:
        args = type(args)(**vars(args))
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        if args.standalone or args.rdzv_id == "none":
            args.rdzv_id = _fresh_run_id()
        args.standalone = True
    elif backend != "static":
        if args.node_rank:
            console.warning(
                f"--node-rank is ignored: --rdzv-backend {backend} assigns node ranks itself"
            )
        if args.master_port is not None:
            console.warning(f"--master-port is ignored by --rdzv-backend {backend}")
    return args


def _with_ha(args: Arguments) -> Arguments:
    """Return the arguments with the rendezvous of `--ha`."""
    from holdfast.etcd.cluster_list import advice, parse_machines

    ha = str(args.ha)
    backend = str(args.rdzv_backend)
    if args.standalone or backend not in ("static", "ha"):
        other = "--standalone" if args.standalone else f"--rdzv-backend {backend}"
        flags.reject(args.ha, "--ha", f"conflicts with {other}", "one of the two")
    if args.rdzv_endpoint:
        flags.reject(args.rdzv_endpoint, "--rdzv-endpoint", "conflicts with --ha", "one of the two")
    warning = advice(len(parse_machines(ha, source=flags.source_of(args.ha, "--ha"))))
    if warning:
        console.warning(f"--ha: {warning}")
    args = type(args)(**vars(args))
    args.rdzv_backend, args.rdzv_endpoint = "ha", ha
    return args


def _has_multi_node_flags(args: Arguments) -> bool:
    """Whether there are flags that a single node may have no use for."""
    spares = getattr(args, "spares", 0)
    return bool(args.rdzv_conf or args.node_rank or args.local_ranks_filter or spares)


def _rdzv_configs(args: Arguments) -> dict[str, Any]:
    configs: dict[str, Any] = dict(flags.parse_rdzv_conf(args.rdzv_conf))
    if args.rdzv_backend == "static":
        configs["rank"] = args.node_rank
    if getattr(args, "spares", 0):
        configs["spares"] = args.spares
    return configs


def _logs_specs(args: Arguments) -> LogsSpecs:
    name = "default" if args.logs_specs is None else args.logs_specs
    kind = flags.load_logs_specs(name)
    redirects: Any = flags.parse_streams(args.redirects, "--redirects")
    tee: Any = flags.parse_streams(args.tee, "--tee")
    if name != "default":
        from holdfast.processes.logs.std import as_std

        redirects, tee = as_std(redirects), as_std(tee)  # A plug-in knows them as such.
    return kind(
        log_dir=flags.parse_log_dir(args.log_dir),
        redirects=redirects,
        tee=tee,
        local_ranks_filter=flags.parse_local_ranks(args.local_ranks_filter),
    )


def _omp_num_threads(nproc_per_node: int) -> int | None:
    return 1 if nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ else None


def _fresh_run_id() -> str:
    """Return a random id in the form of a version 4 UUID, without importing `uuid`."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
