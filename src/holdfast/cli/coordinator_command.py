"""The command `coordinator`: runs a coordinator without an agent, in the foreground.

The coordinator starts no workers. A job that uses it survives the loss of any agent's machine, but not of
the coordinator's machine. A coordinator that restarts at the same endpoint learns the state of its jobs
from the agents, and with `--state` also from a file.

The command prints one line per change of a job. If it cannot write a line immediately, it drops the line,
so that jobs do not wait for a slow terminal. It runs until a signal arrives.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.cli.parser import CommandParser
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.endpoint_list import FIRST_PROBE_S, EndpointList
from holdfast.coordinator.round_records import RoundRecords
from holdfast.coordinator.server import CoordinatorServer, warn_if_open
from holdfast.coordinator.state_file import StateFile
from holdfast.core.limits import COORDINATORS_MAX
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.cluster_list import advice, parse_machines
from holdfast.etcd.cluster_member import running_member
from holdfast.launcher.story_file import writing_story
from holdfast.net import addresses, async_addresses
from holdfast.net.endpoints import format_endpoint, parse_rendezvous_endpoints
from holdfast.net.listening import is_local, raise_descriptor_limit, try_bind
from holdfast.printable import one_line
from holdfast.processes.signals import SignalException, describe_signal
from holdfast.rendezvous.coordinator_handler import DEFAULT_PORT
from holdfast.rendezvous.ha_handler import cluster_list_of
from holdfast.rendezvous.rdzv_conf import RendezvousParameters, parse, parse_text

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Sequence

    from holdfast.net.tls import TlsFiles, TlsToken
    from holdfast.rendezvous.rdzv_conf import RendezvousConfig

DEFAULT_ENDPOINT = "localhost"
RESOLVE_S = 30.0
ADDRESSES_SHOWN_MAX = 4
NODES_SHOWN_MAX = 100
RESOLVE_OWN_S = 5.0
DRAIN_S = 5.0
"""How long to wait for nodes to receive the outcome of their job."""

DESCRIPTION = """\
Run a coordinator without an agent. Start the agents of all jobs with its
endpoint as --rdzv-endpoint, and with --rdzv-conf is_host=0.
"""
EXAMPLES = """\
examples:
  holdfast coordinator
      for agents on this machine, at localhost:29400
  holdfast coordinator --endpoint head:29400
      for agents on machines that have the same ~/.holdfast/token
  HOLDFAST_TOKEN_FILE=/etc/jobs/token holdfast coordinator --endpoint head:29400
      for agents on any machine, if they use this token
  holdfast coordinator --endpoint localhost:0
      on any free port; the first line of output shows the port
  holdfast coordinator --endpoint head:29400 --state /var/lib/holdfast/state.json
      with a state file; a restarted coordinator continues from it
  holdfast coordinator --endpoint head --rdzv-conf tls_cert=head.pem,tls_key=head.key
      with TLS; agents set tls_ca
  holdfast coordinator --take-over --endpoint node0,node1,node2
      on node1, after node0 is lost: node0 ran the coordinator of the jobs with
      this list
  holdfast coordinator --ha node0,node1,login --rdzv-id my-job
      on login: a third vote in the etcd cluster of a job on two machines

SIGINT or SIGTERM stops the coordinator. Agents keep their workers running and
reconnect when a coordinator runs at the endpoint again.
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast coordinator`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast coordinator [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--endpoint",
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default=DEFAULT_ENDPOINT,
        metavar="HOST[:PORT],...",
        help=f"where to listen; the default port is {DEFAULT_PORT}, 0 means any free port. With a loopback "
        "name, listen on loopback only; with any other name, on every address of this machine. With a list, "
        "listen on its first endpoint",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over from a lost coordinator, at this machine's endpoint in the list. The agents must "
        "have the same list as --rdzv-endpoint. Use this only if the machine of that coordinator is lost: "
        "the command cannot verify that, and fails only if a coordinator responds. It exits when all jobs "
        "that it took over have ended",
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="K=V,...",
        help="the same settings as for holdfast run: token_file, auth, tls, tls_cert, tls_key, tls_ca, "
        "advertised_port, keep_alive_interval, keep_alive_max_attempt, reconnect_grace, "
        "recover_timeout, state_file",
    )
    parser.add_argument(
        "--state",
        default="",
        metavar="FILE",
        help="keep the state of the jobs in FILE. A restarted coordinator reads it before the agents "
        "reconnect: generations and restarts never decrease, and an ended job stays ended",
    )
    parser.add_argument(
        "--ha",
        default="",
        metavar="HOST[:PORT],...",
        help="instead of a coordinator, run a member of the etcd cluster of a job with --ha; pass the same "
        "list as to holdfast run",
    )
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="",
        metavar="ID",
        help="with --ha, the run id of its job (default: none); with --take-over, the only job to take over",
    )
    parser.add_argument(
        "--ready-fd",
        type=int,
        default=-1,
        metavar="N",
        help="write the port and a newline to this descriptor once agents can connect, then close it",
    )
    parser.add_argument(
        "--story",
        default="",
        metavar="FILE",
        help="append every step of the coordinator and its cause to FILE, for holdfast story",
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Run the coordinator until a signal arrives; raise `SignalException` for the signal."""
    console.check_level()
    if args.ha:
        with writing_story(args.story):
            _run_member(args)
        return
    endpoints = parse_rendezvous_endpoints(
        args.endpoint, DEFAULT_PORT, COORDINATORS_MAX, flag="--endpoint"
    )
    config = _config(args)
    endpoint_index = _own_endpoint_index(args, endpoints) if args.take_over else 0
    host, port = endpoints[endpoint_index]
    token = config.token_for(host, os.environ)
    tls = config.tls_with(token)
    if tls is not None:
        tls.for_server()  # If a file is unusable, this raises before the port is bound.
    raise_descriptor_limit()
    state_path = args.state or config.state_file
    endpoint_list = _endpoint_list(args, config, endpoints, token) if len(endpoints) > 1 else None
    with writing_story(args.story):
        try:
            listener = try_bind(host, port, is_host=True)
        except EnvironmentProblem as problem:
            if not args.take_over:
                raise
            hint = "did another coordinator take over here? Agents connect only to this port of the machine"
            raise EnvironmentProblem(problem.message, hint=hint) from None
        assert listener is not None
        try:
            warn_if_open(listener, token, tls, host)
            state = StateFile(state_path) if state_path else None
            _serve(
                args,
                config,
                host,
                listener,
                token,
                tls,
                state,
                endpoint_index=endpoint_index,
                endpoint_list=endpoint_list,
            )
        finally:
            listener.close()


def _config(args: argparse.Namespace) -> RendezvousConfig:
    given = parse_text(args.rdzv_conf)
    return parse(RendezvousParameters("c10d", args.endpoint, "none", 1, 1, **given))


def _own_endpoint_index(args: argparse.Namespace, endpoints: Sequence[tuple[str, int]]) -> int:
    """Return the position of this machine in the list of endpoints."""
    if len(endpoints) == 1:
        raise UsageError(
            f"--take-over: --endpoint names one machine, {args.endpoint!r}; accepted: the list that the "
            "agents have as --rdzv-endpoint, HOST[:PORT],HOST[:PORT],..."
        )
    own = []
    for endpoint_index, (host, port) in enumerate(endpoints):
        try:
            found = addresses.resolve_within(host, port, RESOLVE_OWN_S)
        except OSError:
            continue  # The name of a lost machine may no longer resolve.
        if all(is_local(one) for one in found):
            own.append(endpoint_index)
    if any(own):
        return next(filter(None, own))
    if own:
        raise UsageError(
            f"--take-over: this machine is {format_endpoint(*endpoints[0])}, the first of the list; accepted: a "
            "later one",
            hint="restart the agent on this machine: it runs the coordinator",
        )
    raise UsageError(
        f"--take-over: this machine is not in {args.endpoint!r}; accepted: a list that has it after the first entry"
    )


def _endpoint_list(
    args: argparse.Namespace,
    config: RendezvousConfig,
    endpoints: Sequence[tuple[str, int]],
    token: bytes | None,
) -> EndpointList:
    """Return a client that looks for coordinators at the other endpoints."""
    run_id = args.rdzv_id or "none"
    tls = config.tls_with(token, run_id)
    context = tls.for_client() if tls is not None else None
    return EndpointList(
        [
            CoordinatorConnector(
                host,
                port,
                run_id=run_id,
                token=token,
                tls=context,
                has_psk=tls is not None and tls.is_psk,
                server_name=tls.server_name if tls is not None else None,
                endpoint_index=endpoint_index,
            )
            for endpoint_index, (host, port) in enumerate(endpoints)
        ],
        floor=lambda: 0,
    )


def _serve(
    args: argparse.Namespace,
    config: RendezvousConfig,
    host: str,
    listener: socket.socket,
    token: bytes | None,
    tls: TlsFiles | TlsToken | None,
    state: StateFile | None,
    *,
    endpoint_index: int = 0,
    endpoint_list: EndpointList | None = None,
) -> None:
    where = format_endpoint(host, listener.getsockname()[1])

    async def serve() -> signal.Signals | None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[signal.Signals | None] = loop.create_future()

        def end(signum: signal.Signals | None) -> None:
            if not ended.done():
                ended.set_result(signum)

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, end, signum)
        if endpoint_list is not None:
            other = await (
                endpoint_list.other_coordinator(endpoint_index)
                if endpoint_index
                else endpoint_list.replaced_at(0, FIRST_PROBE_S)
            )
            if other:
                raise EnvironmentProblem(
                    f"a coordinator already runs at {other}: none is needed at {where}"
                )
        seen: set[str] = set()

        def report(run_id: str, line: str) -> None:
            _print_line(f"job {run_id!r}: {line}")
            jobs = server.machine.jobs.values()
            if endpoint_index and all(one.job.final for one in jobs):
                end(None)

        def joined(run_id: str, node: str, address: str) -> None:
            if node not in seen and len(seen) < NODES_SHOWN_MAX:
                seen.add(node)
                _print_line(f"job {run_id!r}: {node} joined from {address}")

        server = CoordinatorServer(
            listener,
            silence_s=config.lost_after_s,
            grace_s=config.reconnect_grace,
            token=token,
            advertised_port=config.advertised_port,
            tls=tls.for_server() if tls is not None else None,
            follows_another=True,
            endpoint_index=endpoint_index,
            only_job=args.rdzv_id if endpoint_index else "",
            recover_s=config.recover_timeout,
            state=state,
            records=RoundRecords(listener, console.warning),
            on_change=report,
            on_node=joined if endpoint_index else None,
        )
        port = listener.getsockname()[1]
        secured = [name for name, is_set in (("a token", token), ("TLS", tls)) if is_set]
        what = "taking over" if endpoint_index else "coordinating"
        _print_line(f"{what} at {where}, with {' and '.join(secured) or 'no token'}")
        if endpoint_index:
            whose = f"job {args.rdzv_id!r}" if args.rdzv_id else "all jobs"
            _print_line(f"waiting for the agents of {whose} that have this list as --rdzv-endpoint")
        _announce(args.ready_fd, port)
        checking = loop.create_task(warn_if_not_local(host, port))  # A name server may be slow.
        successor = ""

        async def watch(endpoint_list: EndpointList) -> None:
            nonlocal successor
            successor = await endpoint_list.replaced(endpoint_index)
            end(None)

        watching = loop.create_task(watch(endpoint_list)) if endpoint_list is not None else None
        why = await ended
        for task in filter(None, (checking, watching)):
            task.cancel()
        if successor:
            await server.stop(f"a coordinator took over at {successor}")
            raise EnvironmentProblem(
                f"a coordinator took over at {successor}: the coordinator at {where} stopped"
            )
        if why is None:
            await server.drain(DRAIN_S)
        await server.stop()
        return why

    stopped_by = asyncio.run(serve())
    if stopped_by is not None:
        raise SignalException(f"stopped by {describe_signal(stopped_by)}", stopped_by)
    _print_line("all jobs that were taken over have ended")


def _run_member(args: argparse.Namespace) -> None:
    """Run a member of a job's etcd cluster until a signal arrives, for each run of the job in turn."""
    if args.endpoint != DEFAULT_ENDPOINT or args.state or args.take_over:
        other = "--state" if args.state else "--take-over" if args.take_over else "--endpoint"
        raise UsageError(f"{other}: conflicts with --ha; accepted: one of the two")
    warning = advice(len(parse_machines(args.ha)))
    if warning:
        console.warning(f"--ha: {warning}")
    given = parse_text(args.rdzv_conf)
    run_id = args.rdzv_id or "none"
    params = RendezvousParameters("ha", args.ha, run_id, 1, 1, **given)
    patience_s = parse(params).coordinator_timeout
    machines = cluster_list_of(params)

    async def serve() -> signal.Signals:
        loop = asyncio.get_running_loop()
        stops: asyncio.Queue[signal.Signals | None] = asyncio.Queue()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stops.put_nowait, signum)

        def over() -> None:
            loop.call_soon_threadsafe(stops.put_nowait, None)

        while True:
            with running_member(machines, patience_s=patience_s, on_over=over) as member:
                if member is None:
                    raise UsageError(
                        f"--ha: {args.ha!r} does not name this machine, or an agent of the job already "
                        "runs its member; accepted: a list with an address of this machine"
                    )
                _print_line(f"member of the etcd cluster of job {run_id!r} at {member.name}")
                _announce(args.ready_fd, int(member.name.rpartition(":")[2]))
                args.ready_fd = -1
                end = await stops.get()
            if end is not None:
                return end
            _print_line(f"job {run_id!r}: the run has ended; ready for the next one")

    signum = asyncio.run(serve())
    raise SignalException(f"stopped by {describe_signal(signum)}", signum)


async def warn_if_not_local(host: str, port: int) -> None:
    """Warn if the endpoint does not resolve to this machine.

    The coordinator runs anyway, because the name may belong to a service or a load balancer.
    """
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await async_addresses.resolve_async(host, port)
    except TimeoutError:
        why = f"cannot be resolved here: no response within {RESOLVE_S:g} s"
    except OSError as error:
        why = f"cannot be resolved here: {error.strerror or error}"
    else:
        if any(is_local(one) for one in found):
            return
        ips = ", ".join(sorted({one.ip for one in found})[:ADDRESSES_SHOWN_MAX])
        why = "is not an address of this machine" if ips == host else f"is {ips}, not this machine"
    console.warning(
        f"--endpoint: {host} {why}; agents must reach this process at that address, for example through a "
        "load balancer"
    )


def _print_line(line: str) -> None:
    """Print a line if standard output accepts it immediately."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if poll.poll(0):
            sys.stdout.write(f"{one_line(line)}\n")
            sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        pass  # Standard output is closed.


def _announce(descriptor: int, port: int) -> None:
    if descriptor < 0:
        return
    try:
        os.write(descriptor, f"{port}\n".encode())
        os.close(descriptor)
    except OSError as error:
        raise UsageError(
            f"--ready-fd: cannot write to descriptor {descriptor}: {error.strerror}"
        ) from None
