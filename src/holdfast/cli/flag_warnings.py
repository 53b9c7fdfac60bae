"""Flags that are taken and cannot do what the person meant by them: one line each.

The one thing to know: torchrun ignores all of this without a word, and scripts that start under it
must start here. So only a value that no job could use is refused; the rest is a warning. `run`
imports this module only for a command line that gives it something to look at.
"""

from __future__ import annotations

import sys

from holdfast import console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.cli.flags import Arguments
    from holdfast.launcher.config import LaunchConfig

STATIC_PLACE = "127.0.0.1"
COORDINATED = ("c10d", "holdfast")


def warn(args: Arguments, config: LaunchConfig) -> None:
    """Say what is odd about a command line, given as the person wrote it and as it was read.

    Raises `UsageError` for a setting of `--rdzv-conf` that cannot be used.
    """
    from holdfast.launcher.launch import needs_no_others

    if needs_no_others(config):
        _of_one_node(args, config)
    elif config.max_nodes > 1:
        _of_loopback(args, config)
    _of_filter(args, config)


def _of_one_node(args: Arguments, config: LaunchConfig) -> None:
    # Other backends say so whatever the number of nodes.
    if args.node_rank and (args.standalone or str(args.rdzv_backend) == "static"):
        console.warning(f"--node-rank {args.node_rank} is ignored: the only node of a job is 0")
    if not args.rdzv_conf and not getattr(args, "spares", 0):
        return
    from holdfast.rendezvous.config import RendezvousParameters, parse

    conf = parse(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=1,
            max_nodes=sys.maxsize,  # So that spares are no fault: they are ignored.
            **config.rdzv_configs,
        )
    )
    if conf.spares:
        console.warning("--spares is ignored: the job has one node")


def _of_loopback(args: Arguments, config: LaunchConfig) -> None:
    """Warn of a place that nobody chose and no other machine can come to."""
    if args.rdzv_endpoint:
        return
    backend = str(args.rdzv_backend)
    if backend == "static" and args.master_addr == STATIC_PLACE:
        _, _, port = config.rdzv_endpoint.rpartition(":")
        missing, place, wanted = "--master-addr", f"{STATIC_PLACE}:{port}", "the address of node 0"
    elif backend in COORDINATED and config.rdzv_configs.get("store_type") != "file":
        from holdfast.rendezvous.coordinator import DEFAULT_PORT

        missing, place = "--rdzv-endpoint", f"localhost:{DEFAULT_PORT}"
        wanted = f"HOST:{DEFAULT_PORT} of the node that is to coordinate"
    else:
        return
    console.warning(
        f"the nodes of this job meet at {place}, where only agents on this machine can come; "
        f"for others give {missing}, {wanted}"
    )


def _of_filter(args: Arguments, config: LaunchConfig) -> None:
    from holdfast.cli.flags import parse_local_ranks, source_of

    wanted = parse_local_ranks(args.local_ranks_filter) or set()
    strangers = sorted(rank for rank in wanted if rank >= config.nproc_per_node)
    if not strangers:
        return
    flag = source_of(args.local_ranks_filter, "--local-ranks-filter")
    ranks = ", ".join(map(str, strangers))
    nothing = "" if len(strangers) < len(wanted) else ": no output of any is shown"
    console.warning(
        f"{flag}: no worker has local rank {ranks}, there are {config.nproc_per_node} here{nothing}"
    )
