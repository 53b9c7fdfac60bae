"""The verb `coordinator`: the coordinator on its own, in the foreground, until a signal ends it.

Agents need it only where none of them should coordinate: then the job outlives the loss of any
agent's machine but this one's. It starts no workers. One that is started again at the same endpoint
learns from the agents where their jobs are, and with `--state` from a file too.

Its output is one line per change of a job; a line that cannot be written at once is dropped,
because jobs must not wait for a console.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.cli.parser import CommandParser, Help
from holdfast.coordinator.connect import CoordinatorConnector
from holdfast.coordinator.endpoint_list import FIRST_PROBE_S, EndpointList
from holdfast.coordinator.server import CoordinatorServer
from holdfast.coordinator.state_file import StateFile
from holdfast.core.limits import PLACES_MAX
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.cluster_list import advice, parse_machines
from holdfast.etcd.cluster_member import running_member
from holdfast.launcher.config import STORY_ENV
from holdfast.launcher.flag_values import parse_rdzv_conf
from holdfast.launcher.story_file import StoryFile
from holdfast.membership.coordinator import warn_if_open
from holdfast.net import addresses
from holdfast.net.endpoints import format_endpoint, parse_rendezvous_endpoints
from holdfast.net.listening import is_local, raise_descriptor_limit, try_bind
from holdfast.net.token import choose_token
from holdfast.printable import one_line
from holdfast.processes.signals import SignalException, in_words
from holdfast.rendezvous.ha import list_of
from holdfast.rendezvous.rdzv_conf import RendezvousParameters, parse

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from holdfast.net.tls import TlsFiles, TlsToken
    from holdfast.rendezvous.rdzv_conf import RendezvousConfig

DEFAULT_ENDPOINT = "localhost"
DEFAULT_PORT = 29400
RESOLVE_S = 30.0
ADDRESSES_SHOWN_MAX = 4
NODES_SHOWN_MAX = 100
OWN_PLACE_S = 5.0
DRAIN_S = 5.0  # For nodes to receive how their job ended.

DESCRIPTION = """\
Run a coordinator without an agent. Start the agents of all jobs with this
endpoint as --rdzv-endpoint, and with --rdzv-conf is_host=0.
"""
EXAMPLES = """\
examples:
  holdfast coordinator
      for agents on this machine, at localhost:29400
  holdfast coordinator --endpoint head:29400
      for agents on all machines that have the same ~/.holdfast/token
  HOLDFAST_TOKEN_FILE=/etc/jobs/token holdfast coordinator --endpoint head:29400
      for those that have the same token, wherever
  holdfast coordinator --endpoint localhost:0
      at any free port; the first line of output names it
  holdfast coordinator --endpoint head:29400 --state /var/lib/holdfast/state.json
      so that one that is started again goes on where this one was
  holdfast coordinator --endpoint head --rdzv-conf tls_cert=head.pem,tls_key=head.key
      with TLS; agents get tls_ca

  holdfast coordinator --take-over --endpoint node0,node1,node2
      on node1, when node0, where the coordinator of a job with this list was, is
      known to be gone

  holdfast coordinator --ha node0,node1,login --rdzv-id my-job
      on login: a third vote in the cluster of a job of two machines

SIGINT or SIGTERM stops it. Agents keep their workers running and wait for a
coordinator to be back at the endpoint.
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast coordinator`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast coordinator [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument(
        "--endpoint",
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default=DEFAULT_ENDPOINT,
        metavar="HOST[:PORT],...",
        help=f"where to listen; the default port is {DEFAULT_PORT}, 0 is any free one. Loopback names "
        "listen on loopback only, all others on every address of this machine. Of a list, as the agents "
        "have it, the first",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="coordinate for agents that have this list as --rdzv-endpoint, at the place of this machine "
        "in it, because the machine that did so is gone. That is for you to know: this only sees whether "
        "it answers, and refuses to begin if it does. Ends with the jobs that it took over",
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="K=V,...",
        help="settings, as for holdfast run: token_file, auth, tls, tls_cert, tls_key, tls_ca, "
        "advertised_port, keep_alive_interval, keep_alive_max_attempt, reconnect_grace, "
        "recover_timeout, state_file",
    )
    parser.add_argument(
        "--state",
        default="",
        metavar="FILE",
        help="keep in FILE where the jobs are, so that a coordinator that is started again knows it "
        "though their agents are away: generation and restarts never go back, and a job that is "
        "over stays over",
    )
    parser.add_argument(
        "--ha",
        default="",
        metavar="HOST[:PORT],...",
        help="be one of the machines that run the etcd of a job with --ha, instead of a coordinator; "
        "the same list as for holdfast run",
    )
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default="",
        metavar="ID",
        help="run id of the job: with --ha (none); with --take-over, to take over this one alone",
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
        help="append every step of the coordinator to FILE, each with its cause: see holdfast story",
    )
    return parser


def execute(args: argparse.Namespace) -> None:
    """Coordinate until a signal comes, which is raised as `SignalException`."""
    console.check_level()
    if args.ha:
        with _story(args.story):
            _be_member(args)
        return
    ends = parse_rendezvous_endpoints(args.endpoint, DEFAULT_PORT, PLACES_MAX, flag="--endpoint")
    config = _config(args)
    place = _own_place(args, ends) if args.take_over else 0
    host, port = ends[place]
    token = choose_token(
        host,
        os.environ,
        token_file=config.token_file,
        auth=config.auth,
        certified=config.certified,
    )
    tls = config.tls_with(token)
    if tls is not None:
        tls.for_server()  # Files that cannot be used are reported before the port is bound.
    raise_descriptor_limit()
    state_path = args.state or config.state_file
    places = _places(args, config, ends, token) if len(ends) > 1 else None
    with _story(args.story):
        try:
            listener = try_bind(host, port, is_host=True)
        except EnvironmentProblem as problem:
            if not args.take_over:
                raise
            hint = "did another coordinator take over here? Agents know of no other port on this machine"
            raise EnvironmentProblem(problem.message, hint=hint) from None
        assert listener is not None
        try:
            warn_if_open(listener, token, tls, host)
            state = _open_state(state_path)
            _serve(args, config, host, listener, token, tls, state, place=place, places=places)
        finally:
            listener.close()


def _story(path: str) -> AbstractContextManager[object]:
    named = path or os.environ.get(STORY_ENV, "")
    if not named:
        return nullcontext()

    return StoryFile(named, source="--story" if path else STORY_ENV)


def _open_state(path: str | None) -> StateFile | None:
    if not path:
        return None

    return StateFile(path)


def _config(args: argparse.Namespace) -> RendezvousConfig:
    given = parse_rdzv_conf(args.rdzv_conf)
    return parse(RendezvousParameters("c10d", args.endpoint, "none", 1, 1, **given))


def _own_place(args: argparse.Namespace, ends: Sequence[tuple[str, int]]) -> int:
    """Return which of the endpoints is this machine's, to take over at."""
    if len(ends) == 1:
        raise UsageError(
            f"--take-over: --endpoint names one machine, {args.endpoint!r}; accepted: the list that the "
            "agents have as --rdzv-endpoint, HOST[:PORT],HOST[:PORT],..."
        )
    own = []
    for place, (host, port) in enumerate(ends):
        try:
            found = addresses.resolve_within(host, port, OWN_PLACE_S)
        except OSError:
            continue  # The name of a machine that is gone may be gone with it.
        if all(is_local(one) for one in found):
            own.append(place)
    if any(own):
        return next(filter(None, own))
    if own:
        raise UsageError(
            f"--take-over: this machine is {format_endpoint(*ends[0])}, the first of the list; accepted: a "
            "later one",
            hint="start the agent here again, and it coordinates",
        )
    raise UsageError(
        f"--take-over: this machine is not in {args.endpoint!r}; accepted: one of the list, after the first"
    )


def _places(
    args: argparse.Namespace,
    config: RendezvousConfig,
    ends: Sequence[tuple[str, int]],
    token: bytes | None,
) -> EndpointList:
    """Return how to look for coordinators at the other endpoints, as an agent of the job would."""
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
                place=place,
            )
            for place, (host, port) in enumerate(ends)
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
    place: int = 0,
    places: EndpointList | None = None,
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
        if places is not None:
            answers = await (
                places.others(place) if place else places.replaced_at(0, FIRST_PROBE_S)
            )
            if answers:
                raise EnvironmentProblem(
                    f"a coordinator answers at {answers}: none is needed at {where}"
                )
        known: set[str] = set()

        def report(run_id: str, line: str) -> None:
            _print_line(f"job {run_id!r}: {line}")
            jobs = server.machine.jobs.values()
            if place and all(one.job.final for one in jobs):
                end(None)

        def came(run_id: str, node: str, address: str) -> None:
            if node not in known and len(known) < NODES_SHOWN_MAX:
                known.add(node)
                _print_line(f"job {run_id!r}: {node} came from {address}")

        server = CoordinatorServer(
            listener,
            silence_s=config.lost_after_s,
            grace_s=config.reconnect_grace,
            token=token,
            advertised_port=config.advertised_port,
            tls=tls.for_server() if tls is not None else None,
            follows_another=True,
            place=place,
            only_job=args.rdzv_id if place else "",
            recover_s=config.recover_timeout,
            state=state,
            on_change=report,
            on_node=came if place else None,
        )
        port = listener.getsockname()[1]
        secured = [name for name, there in (("a token", token), ("TLS", tls)) if there]
        what = "taking over" if place else "coordinating"
        _print_line(f"{what} at {where}, with {' and '.join(secured) or 'no token'}")
        if place:
            whose = f"job {args.rdzv_id!r}" if args.rdzv_id else "all jobs"
            _print_line(f"waiting for the agents of {whose} that have this list as --rdzv-endpoint")
        _announce(args.ready_fd, port)
        checking = loop.create_task(warn_of_name(host, port))  # Name servers may be slow.
        by = ""

        async def watch(places: EndpointList) -> None:
            nonlocal by
            by = await places.replaced(place)
            end(None)

        watching = loop.create_task(watch(places)) if places is not None else None
        why = await ended
        for task in filter(None, (checking, watching)):
            task.cancel()
        if by:
            await server.stop(f"a coordinator took over at {by}")
            raise EnvironmentProblem(f"a coordinator took over at {by}: the one at {where} ended")
        if why is None:
            await server.drain(DRAIN_S)
        await server.stop()
        return why

    stopped_by = asyncio.run(serve())
    if stopped_by is not None:
        raise SignalException(f"stopped by {in_words(stopped_by)}", stopped_by)
    _print_line("all jobs that were taken over are over")


def _be_member(args: argparse.Namespace) -> None:
    """Run a member of a job's cluster until a signal comes, through as many runs as there are."""
    if args.endpoint != DEFAULT_ENDPOINT or args.state or args.take_over:
        other = "--state" if args.state else "--take-over" if args.take_over else "--endpoint"
        raise UsageError(f"{other}: conflicts with --ha; accepted: one of the two")
    warning = advice(len(parse_machines(args.ha)))
    if warning:
        console.warning(f"--ha: {warning}")
    given = parse_rdzv_conf(args.rdzv_conf)
    run_id = args.rdzv_id or "none"
    params = RendezvousParameters("ha", args.ha, run_id, 1, 1, **given)
    patience_s = parse(params).coordinator_timeout
    machines = list_of(params)

    async def serve() -> signal.Signals:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[signal.Signals | None] = asyncio.Queue()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, news.put_nowait, signum)

        def over() -> None:
            loop.call_soon_threadsafe(news.put_nowait, None)

        while True:
            with running_member(machines, patience_s=patience_s, on_over=over) as member:
                if member is None:
                    raise UsageError(
                        f"--ha: {args.ha!r} does not name this machine, or an agent of the job here has "
                        "its place; accepted: a list with an address of this machine"
                    )
                _print_line(f"a member of the cluster of job {run_id!r} at {member.name}")
                _announce(args.ready_fd, int(member.name.rpartition(":")[2]))
                args.ready_fd = -1
                end = await news.get()
            if end is not None:
                return end
            _print_line(f"job {run_id!r}: the run is over; ready for the next one")

    signum = asyncio.run(serve())
    raise SignalException(f"stopped by {in_words(signum)}", signum)


async def warn_of_name(host: str, port: int) -> None:
    """Warn of an endpoint that is not this machine's, as far as can be seen from here.

    It may be a service's or a load balancer's, so this is no reason not to serve.
    """
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await addresses.resolve_async(host, port)
    except TimeoutError:
        why = f"cannot be resolved here: no answer within {RESOLVE_S:g} s"
    except OSError as error:
        why = f"cannot be resolved here: {error.strerror or error}"
    else:
        if any(is_local(one) for one in found):
            return
        ips = ", ".join(sorted({one.ip for one in found})[:ADDRESSES_SHOWN_MAX])
        why = "is not an address of this machine" if ips == host else f"is {ips}, not this machine"
    console.warning(
        f"--endpoint: {host} {why}; agents must reach this process by it, as through a load balancer"
    )


def _print_line(line: str) -> None:
    """Print a line, if it can be written at once."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if poll.poll(0):
            sys.stdout.write(f"{one_line(line)}\n")
            sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        pass  # There is no console.


def _announce(descriptor: int, port: int) -> None:
    if descriptor < 0:
        return
    try:
        os.write(descriptor, f"{port}\n".encode())
        os.close(descriptor)
    except OSError as error:
        raise UsageError(
            f"--ready-fd: {descriptor} cannot be written to: {error.strerror}"
        ) from None
