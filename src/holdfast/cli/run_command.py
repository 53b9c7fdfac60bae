"""The command `run`: from a command line to a launched job.

`config_from_args` only translates, for any number of nodes, and does not read the script. `run` chooses
the rendezvous of the job, rejects a command line that cannot work, and launches. Neither changes the
environment or the caller's namespace.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

from holdfast import console, numa, plugins
from holdfast.agent.spec import run_script_path
from holdfast.cli import parser as parser_module
from holdfast.cli.command_line import split
from holdfast.cli.script import check_can_start, get_use_env, parse_preload, worker_command
from holdfast.core import job_settings
from holdfast.defaults import SHELLS
from holdfast.errors import UsageError
from holdfast.launcher import flag_values as values
from holdfast.launcher.config import (
    DEFAULT_MASTER_PORT,
    FLAGS,
    LOG_LINE_PREFIX_ENV,
    OTHER,
    Flag,
    LaunchConfig,
)
from holdfast.launcher.flag_values import determine_local_world_size, parse_min_max_nnodes
from holdfast.launcher.launch_job import elastic_launch, is_single_node
from holdfast.processes.failures import error_file
from holdfast.rendezvous.backends import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from holdfast.cli.parser import ScriptParser
    from holdfast.numa import NumaOptions
    from holdfast.processes.logs.specs import LogsSpecs

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

HELP = Flag(OTHER, "--help", default=None, metavar="", meaning="show this and exit", short="-h")
PRINT_COMPLETION = Flag(
    OTHER, "--print-completion", default=None, metavar="SHELL",
    meaning="print shell completion and exit, as holdfast completion does: bash, zsh, fish or tcsh",
    choices=SHELLS, from_environment=False,
)  # fmt: skip
SHOWN_AND_EXIT = (HELP, PRINT_COMPLETION)
"""Flags that argparse acts on while it parses; no script need follow."""
BY_SPELLING = {spelling: flag for flag in (*FLAGS, *SHOWN_AND_EXIT) for spelling in flag.spellings}

USAGE = "holdfast run [flags] SCRIPT [arguments of the script]"

DESCRIPTION = """\
Start SCRIPT several times, as the workers of one job, and supervise them. If one
fails, stop all of them; then restart them while restarts remain, or else report
the failure. SCRIPT gets all arguments that follow it, unchanged."""

EPILOG = """\
Flags can be written with - or _ (--max-restarts, --max_restarts), and abbreviated
as long as they stay unambiguous. The variable PET_<FLAG>, such as
PET_MAX_RESTARTS, sets a default (except for --dry-run, --json, --logs-specs,
--numa-binding and --print-completion).

Exit codes: 0 if every worker succeeded; otherwise the code of the worker that
failed first on any node, or 128+N if signal N ended it or this command; 2 for an
invalid command line; 78 if the rendezvous fails; 126 or 127 if SCRIPT cannot start.

Examples:
  One worker:
    holdfast run train.py --epochs 3
  One worker per GPU, restarted up to three times:
    holdfast run --nproc-per-node gpu --max-restarts 3 -m my.training
  PyTorch imported once on the node, for all workers and all restarts:
    holdfast run --nproc-per-node 8 --preload torch --max-restarts 3 train.py
  Output on the console, prefixed with the rank, and in files:
    holdfast run --nproc-per-node 4 --tee 3 --log-dir logs train.py
  Two to four nodes, which can join and leave; the same command on each of them:
    holdfast run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 \\
        --rdzv-id my-job --max-restarts 3 train.py
  The same on etcd, so that the job survives the loss of any of its machines:
    holdfast run --nnodes 2:4 --rdzv-backend etcd --rdzv-endpoint db0,db1,db2 \\
        --rdzv-id my-job --max-restarts 3 train.py
  A program that is not Python:
    holdfast run --nproc-per-node 2 --no-python ./simulate --steps 10
"""


def build_parser(name: str = "run") -> ScriptParser:
    """Return the parser of `holdfast run`, with the `PET_` defaults of the environment."""
    parser = parser_module.ScriptParser(
        prog=f"holdfast {name}",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        add_help=False,
    )
    names = dict.fromkeys(flag.group for flag in FLAGS)
    groups = {name: parser.add_argument_group(name) for name in names}
    for flag in FLAGS:
        _add(groups[flag.group], flag)
    completion = PRINT_COMPLETION
    groups[OTHER].add_argument(
        *completion.spellings,
        action=parser_module.PrintCompletion,
        metavar=completion.metavar,
        choices=completion.choices,
        help=completion.help,
    )
    groups[OTHER].add_argument(*HELP.spellings, action="help", help=HELP.help)
    parser.add_argument("training_script", help=argparse.SUPPRESS)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    # argparse converts a default that is text, but only if the command line has no value. So an invalid
    # variable breaks neither `--help` nor a command line that has the flag.
    default = flag.default_now()
    if flag.metavar:
        group.add_argument(
            *flag.spellings,
            dest=flag.dest,
            default=default,
            metavar=flag.metavar,
            choices=flag.choices,
            type=_converter(flag),
            help=flag.help,
        )
    else:
        switch = group.add_argument(
            *flag.spellings, dest=flag.dest, action="store_true", default=default, help=flag.help
        )
        switch.type = _converter(flag)


def _converter(flag: Flag) -> Callable[[str], object]:
    def converted(text: str) -> object:
        try:
            return flag.convert(text, flag.name)
        except UsageError as error:
            raise parser_module.InvalidFlag(str(error)) from None

    return converted


def get_args_parser() -> ScriptParser:
    """Return the parser of `holdfast run`; a program can add flags to it."""
    return build_parser()


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. If it is invalid, print one line and exit with code 2."""
    return get_args_parser().parse_args(args)


def read_args(words: list[str]) -> argparse.Namespace:
    """Parse a command line as `parse_args` does.

    This function parses the flags of the table itself, which is faster. It leaves help, mistakes and joined
    short flags to argparse.
    """
    flags, script = split(words, BY_SPELLING)
    args: argparse.Namespace = SimpleNamespace()  # type: ignore[assignment]
    for written, following in flags:
        name, equals, text = written.partition("=")
        flag = BY_SPELLING.get(name, HELP)
        texts = [text] if equals else following
        if flag in SHOWN_AND_EXIT or len(texts) != (flag.nargs is None):
            return parse_args(words)
        setattr(args, flag.dest, flag.convert(texts[0], flag.name) if texts else True)
    if not script:
        return parse_args(words)
    for flag in (*FLAGS, PRINT_COMPLETION):
        if not hasattr(args, flag.dest):
            default = flag.default_now()
            if isinstance(default, values.FromEnvironment):
                default = flag.convert(default, flag.name)
            setattr(args, flag.dest, default)
    args.training_script, *args.training_script_args = script
    return args


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Return the endpoint as given, or that of node 0 for the static backend."""
    endpoint = str(args.rdzv_endpoint)
    if Backend.named(args.rdzv_backend) is not Backend.STATIC:
        return endpoint
    if not endpoint:
        port = DEFAULT_MASTER_PORT if args.master_port is None else args.master_port
        return f"{args.master_addr}:{port}"
    port_text = endpoint.rpartition(":")[2] if ":" in endpoint else ""
    if not port_text.isdecimal():
        values.reject(
            args.rdzv_endpoint, "--rdzv-endpoint", "has no port", "HOST:PORT for the static backend"
        )
    return endpoint


def config_from_args(
    args: argparse.Namespace,
) -> tuple[LaunchConfig, Callable[..., None] | str, list[str]]:
    """Translate a command line into a config, the program of the workers, and its arguments."""
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    nproc_per_node = determine_local_world_size(args.nproc_per_node)
    program, program_args = worker_command(args)
    # The parser of another program may lack some of these flags.
    given: dict[str, Any] = {
        flag.field: _plain(getattr(args, flag.dest, flag.default)) for flag in FLAGS if flag.field
    }
    config = LaunchConfig(
        **given,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=nproc_per_node,
        logs_specs=_logs_specs(args),
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_configs=_rdzv_configs(args),
        log_line_prefix_template=_plain(getattr(args, "log_line_prefix_template", ""))
        or os.environ.get(LOG_LINE_PREFIX_ENV),
        numa_options=_numa_options(args),
        capture_stderr=not getattr(args, "no_capture_stderr", False),
        omp_num_threads=_omp_num_threads(nproc_per_node),
        preload=parse_preload(args),
    )
    return config, program, program_args


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, values.FromEnvironment) else value


def _numa_options(args: argparse.Namespace) -> NumaOptions | None:
    if args.numa_binding is None:
        return None
    return numa.NumaOptions(numa.AffinityMode(args.numa_binding))


def run(args: argparse.Namespace) -> None:
    """Run the job of a parsed command line until it ends; raise if it cannot start or fails."""
    console.check_level()
    if getattr(args, "json", False) and not args.dry_run:
        raise UsageError("--json: has an effect only with --dry-run")
    given, args = args, _with_rendezvous(args)
    config, program, program_args = config_from_args(args)
    check_can_start(args)
    if config.max_nodes > 1 or _has_multi_node_flags(given):
        # The checks import modules that a plain job of one node does not need.
        from holdfast.cli import flag_warnings

        flag_warnings.warn(given, config)
    if config.run_id == "none" and is_single_node(config):
        config.run_id = ""  # No other node needs the name.
    if config.omp_num_threads is not None:
        console.info(
            f"OMP_NUM_THREADS is not set; using {config.omp_num_threads} for each of the "
            f"{config.nproc_per_node} workers, so that they do not overload the CPUs"
        )
    if getattr(args, "dry_run", False):
        from holdfast.cli import dry_run

        dry_run.show(dry_run.plan(config, program, program_args), as_json=args.json)
        return
    elastic_launch(config=config, entrypoint=program)(*program_args)


def execute(args: argparse.Namespace) -> None:
    """Run the job; if it fails, write the failure to this process's own error file, if it has one."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        run(args)
        return
    with error_file.recording():
        run(args)


def _with_rendezvous(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the rendezvous of a single node, if no other is requested."""
    max_nodes = parse_min_max_nnodes(args.nnodes)[1]
    if getattr(args, "ha", None) is not None:
        args = _with_ha(args)
    is_static = Backend.named(args.rdzv_backend) is Backend.STATIC
    if args.standalone and max_nodes > 1:
        values.reject(
            args.nnodes, "--nnodes", "conflicts with --standalone, which is for one node", "1"
        )
    alone = is_static and not args.rdzv_endpoint and args.master_port is None and max_nodes == 1
    if args.standalone or alone:
        args = type(args)(**vars(args))
        args.rdzv_backend = Backend.C10D.value
        args.rdzv_endpoint = "localhost:0"
        args.standalone = True
    elif not is_static:
        backend = str(args.rdzv_backend)
        if args.node_rank:
            console.warning(
                f"--node-rank is ignored: --rdzv-backend {backend} assigns node ranks itself"
            )
        if args.master_port is not None:
            console.warning(f"--master-port is ignored by --rdzv-backend {backend}")
    return args


def _with_ha(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the rendezvous of `--ha`."""
    from holdfast.etcd.cluster_list import advice, parse_machines  # Only for --ha.

    ha = str(args.ha)
    backend = str(args.rdzv_backend)
    if args.standalone or Backend.named(backend) not in (Backend.STATIC, Backend.HA):
        other = "--standalone" if args.standalone else f"--rdzv-backend {backend}"
        values.reject(args.ha, "--ha", f"conflicts with {other}", "one of the two")
    if args.rdzv_endpoint:
        values.reject(
            args.rdzv_endpoint, "--rdzv-endpoint", "conflicts with --ha", "one of the two"
        )
    warning = advice(len(parse_machines(ha, source=values.source_of(args.ha, "--ha"))))
    if warning:
        console.warning(f"--ha: {warning}")
    args = type(args)(**vars(args))
    args.rdzv_backend, args.rdzv_endpoint = Backend.HA.value, ha
    return args


def _has_multi_node_flags(args: argparse.Namespace) -> bool:
    """Whether there are flags that may have no effect on a single node."""
    return bool(args.rdzv_conf or args.node_rank or args.local_ranks_filter or _job_wide(args))


def _job_wide(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `rdzv_configs` from flags of settings that all nodes share."""
    flags = [flag for flag in FLAGS if flag.setting and not flag.field]
    given = [(flag, getattr(args, flag.dest, flag.default)) for flag in flags]
    return {
        job_settings.SETTINGS[flag.setting].key: value
        for flag, value in given
        if value != flag.default
    }


def _rdzv_configs(args: argparse.Namespace) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    if args.rdzv_conf:  # Most jobs of one node do not need the table of keys.
        from holdfast.rendezvous.rdzv_conf import FLAG, parse_text

        configs.update(parse_text(args.rdzv_conf, values.source_of(args.rdzv_conf, FLAG)))
    if Backend.named(args.rdzv_backend) is Backend.STATIC:
        configs["rank"] = args.node_rank
    return configs | _job_wide(args)


def _logs_specs(args: argparse.Namespace) -> LogsSpecs:
    name = "default" if args.logs_specs is None else args.logs_specs
    chosen: dict[str, Any] = {
        "log_dir": values.parse_log_dir(args.log_dir),
        "redirects": values.parse_streams(args.redirects, "--redirects"),
        "tee": values.parse_streams(args.tee, "--tee"),
        "local_ranks_filter": values.parse_local_ranks(args.local_ranks_filter),
    }
    kind = values.load_logs_specs(name)
    with plugins.calling(plugins.owner_of(kind)):
        return kind(**chosen)


def _omp_num_threads(nproc_per_node: int) -> int | None:
    return 1 if nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ else None
