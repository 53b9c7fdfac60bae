"""The commands for running jobs: `ps`, `status`, `top`, `logs`, `events`, `restart`, `drain`, `undrain`, `stop`.

They find a job by themselves if this user has just one on this machine. Elsewhere it is said where its
nodes meet, with the flags and the token of `holdfast run`. All they know of a job comes from
`control.job_client`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.cli.parser import CommandParser, Help
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.views import tables

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from typing import Any

    from holdfast.control.connection import Endpoint
    from holdfast.control.job_client import JobClient, LocalJob, Place
    from holdfast.wire.messages import JobSummary

WATCH_EVERY_S = 1.0
GIVE_UP_S = 60.0
"""A job whose state cannot be read for so long is not watched any more."""
BEGIN_EVERY_S = 0.5
"""How often it is looked for nodes whose logs are not followed yet."""
NODES_SHOWN = 10
CLEAR = "\x1b[H\x1b[2J"
RANKS_MAX = 65_536
ELSEWHERE = "elsewhere say where its nodes meet: --rdzv-endpoint, with --rdzv-backend if it is etcd, or --ha"

WHERE = """
Without --rdzv-endpoint, --rdzv-backend or --ha the job is looked for among
those that have an agent of yours on this machine.
"""
TEXTS: dict[str, tuple[str, str]] = {
    "ps": (
        """\
List the jobs that have an agent of yours on this machine; with
--rdzv-endpoint those of a coordinator, or of etcd with --rdzv-backend etcd.
""",
        """\
examples:
  holdfast ps
  holdfast ps --rdzv-endpoint head:29400
  holdfast ps --rdzv-backend etcd --rdzv-endpoint etcd0:2379
""",
    ),
    "status": (
        "Show the state of a job: rounds, nodes, workers, restarts and their causes,\n"
        "progress and goodput where workers report them.\n" + WHERE,
        """\
examples:
  holdfast status
  holdfast status --watch
  holdfast status nightly --json --rdzv-endpoint head:29400
  holdfast status nightly --ha node0,node1,node2
""",
    ),
    "top": (
        "Watch a job in the terminal: its nodes and ranks, how fast they are, where the\n"
        "time of restarts went; with keys for logs, stacks, restart, drain and stop.\n"
        "It needs textual: pip install 'holdfast[top]'.\n" + WHERE,
        """\
examples:
  holdfast top
  holdfast top nightly --rdzv-endpoint head:29400
""",
    ),
    "logs": (
        "Show what workers write to their files (--redirects, --tee), of any rank of\nany node.\n"
        + WHERE,
        """\
examples:
  holdfast logs --follow
      all ranks from the start of this generation on, through restarts
  holdfast logs --rank 0,8-15 --tail 20
  holdfast logs --node node7 --grep Error
""",
    ),
    "events": (
        "Show what happened in a job, as far as it is remembered.\n" + WHERE,
        """\
examples:
  holdfast events
  holdfast events --follow --json
""",
    ),
    "restart": (
        "Start all workers of a job anew, as its next generation. No restart is\ncharged.\n"
        + WHERE,
        """\
examples:
  holdfast restart --reason 'new data'
""",
    ),
    "drain": (
        "Stop the workers of a node, after their grace, and give it none until it is\n"
        "undrained. A standby takes its place, or the job gets smaller; it is refused if\n"
        "the job would have too few nodes. No restart is charged.\n" + WHERE,
        """\
examples:
  holdfast drain node7 --reason 'disk is failing'
      NODE is a node as holdfast status lists it, or a host: all its nodes
""",
    ),
    "undrain": (
        "Let a drained node take part again.\n" + WHERE,
        "examples:\n  holdfast undrain node7\n",
    ),
    "stop": (
        "End a job on all nodes, for good: its agents end with exit code 143.\n" + WHERE,
        """\
examples:
  holdfast stop --reason 'wrong learning rate' --grace 60
""",
    ),
}
ACTIONS = ("restart", "drain", "undrain", "stop")


def build_parser(name: str) -> CommandParser:
    """Return the parser of one of the commands."""
    description, examples = TEXTS[name]
    operand = {"drain": " NODE [JOB]", "undrain": " NODE [JOB]", "ps": ""}.get(name, " [JOB]")
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage=f"holdfast {name} [flags]{operand}",
        description=description,
        epilog=examples,
        formatter_class=Help,
    )
    if "NODE" in operand:
        parser.add_argument("node", metavar="NODE", help="a node or a host of the job")
    if name in ("status", "events", "ps"):
        parser.add_argument("--json", action="store_true", help="for programs: JSON")
    if name == "status":
        parser.add_argument(
            "--watch", action="store_true", help="show it again every second, until Ctrl-C"
        )
    if name in ("logs", "events"):
        parser.add_argument(
            "-f", "--follow", action="store_true", help="go on with what comes, until Ctrl-C"
        )
    if name == "logs":
        parser.add_argument(
            "--rank", default="", metavar="R,R-R", help="only of these ranks (all): 0,8-15"
        )
        parser.add_argument("--node", default="", metavar="NODE", help="only of this node or host")
        parser.add_argument(
            "--tail", type=int, default=-1, metavar="N", help="begin with the last N lines of each"
        )
        parser.add_argument("--grep", default="", metavar="TEXT", help="only lines with this text")
        parser.add_argument(
            "--no-prefix", "--no_prefix", action="store_true", help="lines as they were written"
        )
    if name in ACTIONS:
        parser.add_argument(
            "--reason", default="", metavar="TEXT", help="why, for the consoles of all nodes"
        )
    if name == "stop":
        parser.add_argument(
            "--grace",
            type=float,
            metavar="SECONDS",
            help="how long workers have to end by themselves (as the job was started)",
        )
    add_place(parser, operand="JOB" in operand)
    parser.set_defaults(command=name)
    return parser


def add_place(parser: argparse.ArgumentParser, *, operand: bool) -> None:
    """Add the flags that say which job is meant, and JOB; see `choose_job`."""
    if operand:
        parser.add_argument(
            "job", nargs="?", default="", metavar="JOB", help="run id of the job, as --rdzv-id"
        )
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        "--run-id",
        "--run_id",
        dest="rdzv_id",
        default="",
        metavar="ID",
        help="run id of the job, if there are several",
    )
    parser.add_argument(
        "--rdzv-backend",
        "--rdzv_backend",
        default="",
        metavar="NAME",
        help="where its nodes meet, if not at a coordinator: etcd or file",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="the coordinator of the job, its etcd or folder (the agents on this machine)",
    )
    parser.add_argument(
        "--ha", default="", metavar="HOST[:PORT],...", help="the machines of a job with --ha"
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="K=V,...",
        help="settings, as for holdfast run: token_file, auth, tls, tls_ca, ...",
    )


def choose_job(parsed: argparse.Namespace) -> None:
    """Take JOB for --rdzv-id."""
    if parsed.job and parsed.rdzv_id not in ("", parsed.job):
        raise UsageError(
            f"--rdzv-id: {parsed.rdzv_id!r} is not the job {parsed.job!r}; accepted: one of the two"
        )
    parsed.rdzv_id = parsed.rdzv_id or parsed.job


def parse_ranks(text: str) -> list[int]:
    """Return the ranks of a list like `0,8-15`."""
    ranks: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--rank: {part!r} is no rank; accepted: a list like 0,8-15")
        # More digits than Python turns into a number are too large all the same.
        span = range(int(first[:9]), int((last if dash else first)[:9]) + 1)
        if not span:
            raise UsageError(
                f"--rank: {part!r} ends before it begins; accepted: a list like 0,8-15"
            )
        if len(ranks) + len(span) > RANKS_MAX:
            raise UsageError(f"--rank: more than {RANKS_MAX} ranks")
        ranks += span
    return ranks


def check(args: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments that are not valid together, and parse the others."""
    if args.command != "ps":
        choose_job(args)
    if args.command == "logs":
        args.ranks = parse_ranks(args.rank)
        if args.tail < -1:
            raise UsageError(f"--tail: {args.tail} is not a number of lines; accepted: 0 or more")


def execute(args: argparse.Namespace) -> None:
    """Run one of the commands."""
    import asyncio

    check(args)
    commands: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, None]]] = {
        "ps": _ps,
        "status": _status,
        "top": _top,
        "logs": _logs,
        "events": _events,
    }
    asyncio.run(commands.get(args.command, _act)(args))


# Which job.


async def connect(args: argparse.Namespace) -> JobClient:
    """Return a connection to the one job that is meant; raise if that is not clear."""
    from holdfast.control.connection import JobNotFound
    from holdfast.control.job_client import open_job

    place, beside = await find_place(args)
    client = await open_job(place, beside)
    if client.run_id:
        return client
    jobs = [one.run_id for one in await client.jobs()]
    going = f"at {args.rdzv_endpoint}"
    if len(jobs) != 1:
        client.close()
        raise _unclear(jobs, going) if jobs else JobNotFound(f"no job {going}")
    client.run_id = jobs[0]
    return client


def is_elsewhere(args: argparse.Namespace) -> bool:
    """Whether it is said where the job is, and not to be looked for on this machine."""
    return bool(args.rdzv_endpoint or args.rdzv_backend or args.ha)


async def find_place(args: argparse.Namespace) -> tuple[Place, list[LocalJob]]:
    """Return where the job is that is meant, and all its agents on this machine."""
    from holdfast.control.connection import JobNotFound
    from holdfast.control.discovery import Directory
    from holdfast.control.job_client import local_jobs, run_ids_of

    if is_elsewhere(args):
        place = place_of(args)
        if isinstance(place, Directory) and not place.run_id:
            there = await run_ids_of(place)
            if len(there) != 1:
                at = f"at {place.where}"
                raise _unclear(there, at) if there else JobNotFound(f"no job {at}")
            place.run_id = there[0]
        return place, []
    found = await local_jobs(tell_late)
    if args.rdzv_id:
        found = [one for one in found if one.here.run_id == args.rdzv_id]
        if not found:
            raise JobNotFound(
                f"no agent of the job {args.rdzv_id!r} on this machine", hint=ELSEWHERE
            )
    if not found:
        raise JobNotFound("no job of yours has an agent on this machine", hint=ELSEWHERE)
    names = sorted({one.here.run_id for one in found})
    if len(names) > 1:
        raise _unclear(names, "on this machine")
    return found[0], found


def tell_late(pids: list[str]) -> None:
    """Say why a command takes long to begin."""
    agents = f"the agent{'s' * (len(pids) > 1)} with pid {', '.join(pids)}"
    print(f"holdfast: waiting for {agents} to answer", file=sys.stderr, flush=True)


def _unclear(names: list[str], where: str) -> UsageError:
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return UsageError(
        f"there are several jobs {where}: {listed}", hint="choose one: JOB or --rdzv-id"
    )


def place_of(args: argparse.Namespace) -> Place:
    """Return where the flags say that the job is."""
    from holdfast.control.discovery import directory_of
    from holdfast.launcher.flag_values import parse_rdzv_conf
    from holdfast.rendezvous.config import RendezvousParameters

    backend, endpoint = args.rdzv_backend or "c10d", args.rdzv_endpoint
    if args.ha:
        for other, name in ((endpoint, "--rdzv-endpoint"), (args.rdzv_backend, "--rdzv-backend")):
            if other:
                raise UsageError(f"{name}: {other!r} conflicts with --ha; accepted: one of the two")
        backend, endpoint = "ha", args.ha
    given = parse_rdzv_conf(args.rdzv_conf)
    params = RendezvousParameters(backend, endpoint, args.rdzv_id, 1, 1, **given)
    return directory_of(params) or _endpoint_of(args, given)


def _endpoint_of(args: argparse.Namespace, given: dict[str, str]) -> Endpoint:
    """Return the coordinator that the flags name."""
    import os

    from holdfast.control.connection import Endpoint
    from holdfast.net.endpoints import parse_rendezvous_endpoint
    from holdfast.net.token import choose_token
    from holdfast.rendezvous.config import RendezvousParameters, parse
    from holdfast.rendezvous.coordinator import DEFAULT_PORT
    from holdfast.wire.handshake import READ_ONLY_PREFIX

    host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, DEFAULT_PORT)
    run_id = args.rdzv_id
    config = parse(
        RendezvousParameters("c10d", args.rdzv_endpoint, run_id or "none", 1, 1, **given)
    )
    token = choose_token(
        host,
        os.environ,
        token_file=config.token_file,
        auth=config.auth,
        certified=config.certified,
        read_only=True,
        make=False,
    )
    tls = config.tls_with(token, run_id)
    if tls is not None and tls.is_psk and token is not None and token.startswith(READ_ONLY_PREFIX):
        raise UsageError("--rdzv-conf: tls=psk needs the token itself, and this one is read-only")
    return Endpoint(
        host=host,
        port=port,
        run_id=run_id,
        token=token,
        tls=tls.for_client() if tls is not None else None,
        server_name=tls.server_name if tls is not None else None,
    )


# The commands.


async def _ps(args: argparse.Namespace) -> None:
    from holdfast.control.job_client import local_jobs

    if is_elsewhere(args):
        rows = [tables.job_row(one) for one in await _jobs_of(place_of(args))]
    else:
        rows = [tables.agent_row(one.here) for one in await local_jobs(tell_late)]
    if args.json:
        for row in rows:
            _print_json(row)
    elif rows:
        heads = [name.upper() for name in rows[0]]
        _print(tables.table([heads, *([*row.values()] for row in rows)]))


async def _jobs_of(place: Place) -> list[JobSummary]:
    from holdfast.control.discovery import Directory
    from holdfast.control.job_client import open_job, stored_jobs

    if isinstance(place, Directory):
        return await stored_jobs(place)
    async with await open_job(place) as client:
        return await client.jobs()


async def _status(args: argparse.Namespace) -> None:
    import asyncio

    from holdfast.control.connection import JobUnreachable

    async with await connect(args) as client:
        told = ""
        now = asyncio.get_running_loop().time
        reached_at = now()
        while True:
            try:
                job = await client.status(watch=True)
            except JobUnreachable as problem:
                is_gone = client.is_over or now() - reached_at >= GIVE_UP_S
                if not args.watch or is_gone:
                    raise
                if problem.message != told:
                    _complain("status", [problem.message])
                told = problem.message
            else:
                told = ""
                reached_at = now()
                _show_status(args, job, client.agents.unreached)
            if not args.watch:
                return
            await asyncio.sleep(WATCH_EVERY_S)


def _show_status(args: argparse.Namespace, job: JobSummary, unreached: Sequence[str]) -> None:
    if args.json:
        _print_json(job)
        _complain("status", unreached)
    else:
        text = tables.status_text(job, unreached)
        _print((CLEAR if args.watch and sys.stdout.isatty() else "") + text)


async def _top(args: argparse.Namespace) -> None:
    from holdfast.views.top.run import run  # It needs textual.

    # textual reads from the first and writes to the last of these.
    if not all(one and one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr)):
        raise EnvironmentProblem(
            "this is not a terminal", hint="holdfast status --watch needs none"
        )
    client = await connect(args)
    args.rdzv_id = (
        client.run_id
    )  # After a loss of the connection it is this job that is looked for.
    await run(client, lambda: connect(args))


async def _events(args: argparse.Namespace) -> None:
    async with await connect(args) as client:
        client.agents.on_unreached = lambda line: _complain("events", [line])
        async for event in client.events(follow=args.follow):
            if args.json:
                _print_json(event)
            else:
                _print(f"{tables.event_line(event)}\n")


def _complain(command: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"holdfast {command}: {line}", file=sys.stderr, flush=True)


async def _act(args: argparse.Namespace) -> None:
    from holdfast.core.limits import ASKED_WHY_CHARS_MAX, GRACE_S_MAX
    from holdfast.core.protocol import Action

    grace_s = getattr(args, "grace", None)
    if len(args.reason) > ASKED_WHY_CHARS_MAX:
        raise UsageError(
            f"--reason: {len(args.reason)} characters; accepted: up to {ASKED_WHY_CHARS_MAX}"
        )
    if grace_s is None:
        grace_s = -1.0  # As the job was started.
    elif not 0 <= grace_s <= GRACE_S_MAX:
        raise UsageError(
            f"--grace: {grace_s:g} is not a number of seconds; accepted: 0 to {GRACE_S_MAX:g}"
        )
    async with await connect(args) as client:
        node = getattr(args, "node", "")
        action = Action(args.command)
        as_is = await client.request(action, node=node, why=args.reason, grace_s=grace_s)
        what = as_is or f"{args.command} {node}".strip() + " granted"
        _print(f"job {client.run_id!r}: {what}\n")


async def _logs(args: argparse.Namespace) -> None:
    from holdfast.control.job_logs import follow_logs
    from holdfast.wire.control import LogsQuery

    wanted = LogsQuery(ranks=args.ranks, tail=args.tail, follow=args.follow, grep=args.grep)
    printer = tables.LogPrinter(prefixed=not args.no_prefix, coloured=sys.stdout.isatty())
    async with await connect(args) as client:
        complain = lambda line: _complain("logs", [line])  # noqa: E731
        await follow_logs(client, wanted, args.node, printer.show, complain)


def _print_json(value: object) -> None:
    import msgspec

    _print(msgspec.json.encode(value).decode() + "\n")


def _print(text: str) -> None:
    """Write to standard output, whatever its encoding is; raise if that fails."""
    if sys.stdout is None:
        raise EnvironmentProblem("standard output is closed")
    encoding = sys.stdout.encoding
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot write to standard output: {problem.strerror or problem}"
        ) from None
