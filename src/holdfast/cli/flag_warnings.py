"""Warnings about flags that have no effect, one line each.

torchrun ignores such flags silently, and a command line that works with torchrun must work here. Only a
value that no job can use is therefore an error. `run` imports this module only if the command line may
need a warning.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.launcher.flag_values import parse_local_ranks, source_of
from holdfast.launcher.launch_job import is_single_node
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.coordinator_handler import DEFAULT_PORT
from holdfast.rendezvous.rdzv_conf import SET_BY_LAUNCHES, RendezvousParameters, parse

if TYPE_CHECKING:
    from argparse import Namespace

    from holdfast.launcher.config import LaunchConfig

STATIC_HOST = "127.0.0.1"


def warn(args: Namespace, config: LaunchConfig) -> None:
    """Print warnings about `args`, and the `config` parsed from them.

    Raise `UsageError` if a setting in `--rdzv-conf` is invalid.
    """
    if is_single_node(config):
        _warn_one_node(args, config)
    elif config.max_nodes > 1:
        _warn_loopback(args, config)
    _warn_filter(args, config)


def _warn_one_node(args: Namespace, config: LaunchConfig) -> None:
    # `cli.run_command` warns about the other backends, for any number of nodes.
    is_static = Backend.named(args.rdzv_backend) is Backend.STATIC
    if args.node_rank and (args.standalone or is_static):
        console.warning(
            f"--node-rank {args.node_rank} is ignored: the job has one node, which has rank 0"
        )
    if config.rdzv_configs.keys() <= SET_BY_LAUNCHES:
        return
    conf = parse(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=1,
            max_nodes=sys.maxsize,  # With fewer nodes, `parse` would reject the spares.
            **config.rdzv_configs,
        )
    )
    if conf.job_settings().spares:
        console.warning("--spares is ignored: the job has one node")


def _warn_loopback(args: Namespace, config: LaunchConfig) -> None:
    """Warn about a default endpoint that other machines cannot reach."""
    if Backend.named(config.rdzv_backend) is Backend.HA or args.rdzv_endpoint:
        return
    backend = Backend.named(args.rdzv_backend)
    if backend is Backend.STATIC and args.master_addr == STATIC_HOST:
        _, _, port = config.rdzv_endpoint.rpartition(":")
        missing, place, wanted = "--master-addr", f"{STATIC_HOST}:{port}", "the address of node 0"
    elif backend is Backend.C10D and config.rdzv_configs.get("store_type") != "file":
        missing, place = "--rdzv-endpoint", f"localhost:{DEFAULT_PORT}"
        wanted = f"HOST:{DEFAULT_PORT} of the node that runs the coordinator"
    else:
        return
    console.warning(
        f"the endpoint of this job is {place}, which only agents on this machine can reach; "
        f"to use other machines, set {missing} to {wanted}"
    )


def _warn_filter(args: Namespace, config: LaunchConfig) -> None:
    wanted = parse_local_ranks(args.local_ranks_filter) or set()
    unknown = sorted(rank for rank in wanted if rank >= config.nproc_per_node)
    if not unknown:
        return
    flag = source_of(args.local_ranks_filter, "--local-ranks-filter")
    ranks = ", ".join(map(str, unknown))
    nothing = "" if len(unknown) < len(wanted) else "; no output is shown"
    console.warning(f"{flag}: no local rank {ranks} among {config.nproc_per_node} workers{nothing}")
