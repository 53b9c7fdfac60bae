"""`holdfast run --dry-run`: checks a command line, and prints what it would run.

The checks are those of a real run, with the same errors and exit codes, as far as they need no other machine.
`plan` starts no worker, listens on no port, and creates no file and no token. It loads the plug-ins that the command
line names. On a machine of the `--ha` list it runs `etcd --version`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from typing import TYPE_CHECKING

import msgspec

from holdfast import console
from holdfast.agent.spec import WorkerGroup, WorkerSpec, run_script_path
from holdfast.agent.watchdogs import ENABLE_ENV, FILE_ENV, TRUE_WORDS
from holdfast.agent.worker_processes import place_workers, substitute_local_rank, worker_environment
from holdfast.cli.operate import print_json, print_text
from holdfast.core.limits import check_node_range
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.launcher import launch_job
from holdfast.launcher.job_name import default_job_name
from holdfast.launcher.observers import check_event_handler
from holdfast.net.token import own_path
from holdfast.processes.logs.specs import DefaultLogsSpecs, problem_of_making
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.worker_store import SingleNodeHandler
from holdfast.wire.handshake import FILE_VARIABLE, VARIABLE
from holdfast.worker import PAGE_ENV

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from holdfast.launcher.config import LaunchConfig
    from holdfast.rendezvous.rdzv_conf import RendezvousConfig, RendezvousParameters

AGREED = (
    "GROUP_WORLD_SIZE", "HOLDFAST_FENCE", "MASTER_ADDR", "MASTER_PORT", "ROLE_WORLD_SIZE", "WORLD_SIZE",
)  # fmt: skip
"""Variables whose values the nodes of a job agree on."""
DEFAULT_ENDPOINT = "localhost"
LABEL_CHARS = 12


class Plan(msgspec.Struct, kw_only=True):
    """What a command line would run on this node."""

    job: str
    min_nodes: int
    max_nodes: int
    workers_per_node: int
    backend: str
    """Empty if no other node can join, like the endpoint and the token."""
    endpoint: str
    token: str
    """Where the token comes from."""
    command: list[str]
    """The command line of the worker with local rank 0."""
    preload: list[str]
    max_restarts: int
    stop_signal: str
    shutdown_timeout_s: float
    failure_grace_s: float
    log_dir: str
    """Empty for a temporary folder."""
    environment: dict[str, str | None]
    """What rank 0 gets besides the environment of this command; None for a value that is not known yet."""


def plan(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[str]) -> Plan:
    """Return what this configuration would run; raise as a real run would."""
    launch_job.check_binding(config)
    is_alone = launch_job.is_single_node(config)
    if is_alone and not config.run_id:
        config.run_id = default_job_name(launch_job.entrypoint_name(entrypoint, list(args)))
    check_event_handler(config.event_log_handler)
    preload = launch_job.preload_of(config, entrypoint, list(args))
    handler, token = _check_rendezvous(config)
    log_dir = _check_output(config)
    interpreted = [sys.executable] if entrypoint is run_script_path else [str(entrypoint)]
    return Plan(
        job=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        workers_per_node=config.nproc_per_node,
        backend="" if is_alone else config.rdzv_backend,
        endpoint="" if is_alone else config.rdzv_endpoint or DEFAULT_ENDPOINT,
        token=token,
        command=[*interpreted, *(str(substitute_local_rank(one, 0)) for one in args)],
        preload=[*preload],
        max_restarts=config.max_restarts,
        stop_signal=config.stop_signal,
        shutdown_timeout_s=float(config.shutdown_timeout or 0.0),
        failure_grace_s=float(config.failure_grace or 0.0),
        log_dir=log_dir,
        environment=_environment(config, handler, has_files=log_dir != os.devnull),
    )


# The checks.


def _check_rendezvous(config: LaunchConfig) -> tuple[SingleNodeHandler, str]:
    """Raise if no node can join with these settings. Return a handler that knows the values known now,
    and where the token comes from.
    """
    try:
        check_node_range(config.min_nodes, config.max_nodes)
    except ValueError as problem:
        raise UsageError(f"--nnodes: {problem}") from None
    if launch_job.is_single_node(config):
        handler = launch_job.rendezvous_of(config, config.run_id)
        assert isinstance(handler, SingleNodeHandler)
        return handler, ""
    from holdfast.rendezvous import handler_registry, rdzv_conf

    params = launch_job.parameters_of(config, config.run_id, config.local_addr)
    backend = params.kind
    conf, token = rdzv_conf.parse(params), ""
    conf.job_settings(config.max_restarts)
    if backend is None:
        handler_registry.rendezvous_handler_registry.creator_of(config.rdzv_backend)
    elif backend is Backend.FILE:
        _check_folder(params)
    elif backend is Backend.HA:
        _check_etcd(params)
    else:  # These handlers connect to nothing until the node joins.
        launch_job.rendezvous_of(config, config.run_id).shutdown()
    if backend is not None and backend.takes_token:
        token = _check_token(conf, params)
    return SingleNodeHandler(config.run_id, workers_serve=conf.worker_store), token


def _check_folder(params: RendezvousParameters) -> None:
    from holdfast.rendezvous.file_backend import not_writable, shared_folder_of

    folder = shared_folder_of(params)
    if problem_of_making(folder) is not None:
        raise not_writable(folder)


def _check_token(conf: RendezvousConfig, params: RendezvousParameters) -> str:
    """Return where the token comes from; raise if it is not usable."""
    variables = [name for name in (FILE_VARIABLE, VARIABLE) if name in os.environ]
    source = conf.token_file or (variables[0] if variables else own_path())
    is_missing = source == own_path() and not os.path.lexists(source)
    try:
        has_token = _has_token(conf, params)
    except EnvironmentProblem:
        if not is_missing:
            raise
        return f"{source}, which the first start creates; machines with another home need a copy"
    return source if has_token else "none"


def _has_token(conf: RendezvousConfig, params: RendezvousParameters) -> bool:
    if params.kind is Backend.HA:
        from holdfast.rendezvous.ha_handler import cluster_list_of

        return cluster_list_of(params, make_token=False).token is not None
    from holdfast.core.limits import COORDINATORS_MAX
    from holdfast.net.endpoints import parse_rendezvous_endpoints
    from holdfast.rendezvous.coordinator_handler import DEFAULT_PORT

    (host, _), *_others = parse_rendezvous_endpoints(
        params.endpoint, DEFAULT_PORT, COORDINATORS_MAX
    )
    token = conf.token_for(host, os.environ, make=False)
    conf.tls_with(token, params.run_id)
    return token is not None


def _check_etcd(params: RendezvousParameters) -> None:
    """Raise if this machine is in the `--ha` list and cannot run its member; warn if it is there twice."""
    from holdfast.etcd.cluster_list import FLAG, ClusterList, parse_machines
    from holdfast.etcd.optional_h11 import require_h11
    from holdfast.etcd.own_entry import own_entries, shared_machine
    from holdfast.etcd.runner import find_etcd

    require_h11()
    of = ClusterList(run_id=params.run_id, machines=parse_machines(params.endpoint))
    own = next(own_entries(of.machines), None)
    if own is None:
        return
    find_etcd(FLAG)
    if warning := asyncio.run(shared_machine(of, of.names[own])):
        console.warning(warning)


def _check_output(config: LaunchConfig) -> str:
    """Return the log directory; raise if it cannot be used."""
    logs = config.logs_specs
    if not isinstance(logs, DefaultLogsSpecs):
        return ""
    logs.check()
    return logs.given_log_dir or ""


# The environment of rank 0.


def _environment(
    config: LaunchConfig, handler: SingleNodeHandler, *, has_files: bool
) -> dict[str, str | None]:
    size = config.nproc_per_node
    spec = WorkerSpec(
        config.role,
        size,
        handler,
        entrypoint="-",
        max_restarts=config.max_restarts,
        virtual_local_rank=config.virtual_local_rank,
    )
    group = WorkerGroup(spec)
    group.workers = place_workers(size, 0, 0, size, size)
    group.group_rank, group.group_world_size = 0, 1
    group.master_addr, group.master_port = handler.master_addr, handler.master_port
    given = launch_job.worker_environment_of(config)
    known: dict[str, str | None] = {
        **given,
        **worker_environment(
            group,
            group.workers[0],
            generation=0,
            restart_count=0,
            inherited={**os.environ, **given},
        ),
    }
    unknown = ["HOLDFAST_FENCE", PAGE_ENV]
    if not launch_job.is_single_node(config):
        unknown += AGREED
        if Backend.named(config.rdzv_backend) is None:
            unknown.append("TORCHELASTIC_USE_AGENT_STORE")
    elif not handler.master_port:
        unknown.append("MASTER_PORT")
    if os.environ.get(ENABLE_ENV, "").strip().lower() in TRUE_WORDS:
        unknown.append(FILE_ENV)
    known["TORCHELASTIC_ERROR_FILE"] = None if has_files else ""
    return dict(sorted((known | dict.fromkeys(unknown)).items()))


# The output.


def show(wanted: Plan, *, as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        print_json(wanted)
    else:
        print_text(text_of(wanted))


def text_of(wanted: Plan) -> str:
    """Return a plan as lines for people."""
    low, high = wanted.min_nodes, wanted.max_nodes
    rows = [
        ("job", wanted.job or "a random id"),
        ("nodes", str(low) if low == high else f"{low} to {high}"),
        ("workers", f"{wanted.workers_per_node} on this node"),
        (
            "rendezvous",
            f"{wanted.backend} at {wanted.endpoint}" if wanted.backend else "none needed",
        ),
        *([("token", wanted.token)] if wanted.token else []),
        ("command", shlex.join(wanted.command)),
        *([("preload", ", ".join(wanted.preload))] if wanted.preload else []),
        ("restarts", f"at most {wanted.max_restarts}"),
        (
            "stop",
            (
                f"{wanted.stop_signal}, and SIGKILL after {wanted.shutdown_timeout_s:g} s; "
                f"after a failure, {wanted.failure_grace_s:g} s"
            ),
        ),
        ("logs", _logs_text(wanted.log_dir)),
    ]
    lines = [f"{name:<{LABEL_CHARS}} {value}" for name, value in rows]
    lines.append("environment of rank 0, besides that of this command:")
    for name, value in wanted.environment.items():
        later = "rendezvous" if wanted.backend and name in AGREED else "start"
        shown = f"(decided at the {later})" if value is None else shlex.quote(value)
        lines.append(f"  {name}={shown}")
    return "\n".join(lines) + "\n"


def _logs_text(log_dir: str) -> str:
    if log_dir == os.devnull:
        return "no files"
    return f"a new folder in {log_dir}" if log_dir else "a temporary folder"
