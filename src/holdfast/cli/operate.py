"""The commands for running jobs: `ps`, `status`, `top`, `logs`, `events`, `restart`, `drain`, `undrain`, `stop`.

If the user has one job on this machine, the commands find it by its agent's socket. For any other job,
they take the same rendezvous flags and token as `holdfast run`. The table of commands (`cli.commands`) names the
function of each command. The function calls `control.job_client` and prints the text that `views.tables` renders.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from holdfast import console
from holdfast.cli.commands import COMMANDS
from holdfast.cli.parser import CommandParser
from holdfast.control import discovery
from holdfast.control.discovery import (
    AgentDirectory,
    JobChoice,
    local_jobs,
    location_of,
    stored_jobs,
)
from holdfast.control.job_client import (
    ControlProblem,
    JobNotFound,
    JobOver,
    JobUnreachable,
    RequestRefused,
    check_same_job,
    end_shown_by,
)
from holdfast.control.job_logs import follow_logs, parse_ranks
from holdfast.control.name_matching import match_node
from holdfast.core.limits import GRACE_S_MAX, REQUEST_WHY_CHARS_MAX
from holdfast.core.requests import Action, RequestRefusal
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.rendezvous.rdzv_conf import parse_text
from holdfast.views import tables
from holdfast.wire.messages import LogsQuery

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from typing import Any

    from holdfast.control.job_client import JobClient
    from holdfast.wire.messages import JobSummary

WATCH_EVERY_S = 1.0
GIVE_UP_S = 60.0
"""`status --watch` exits if the job is unreachable for this long, and nothing told its end."""
CLEAR = "\x1b[H\x1b[2J"

FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "agents": (
        ["--agents"],
        {"action": "store_true", "help": "list the agents on this machine instead of jobs"},
    ),
    "json": (["--json"], {"action": "store_true", "help": "print JSON"}),
    "watch": (
        ["--watch"],
        {"action": "store_true", "help": "refresh every second, until the job ends"},
    ),
    "follow": (
        ["-f", "--follow"],
        {"action": "store_true", "help": "keep following, until Ctrl-C"},
    ),
    "rank": (
        ["--rank"],
        {"default": "", "metavar": "R,R-R", "help": "only these ranks (all): 0,8-15"},
    ),
    "node": (
        ["--node"],
        {
            "default": "",
            "metavar": "NODE",
            "help": "only this node (its name, the start of it, or its number) or host",
        },
    ),
    "tail": (
        ["--tail"],
        {
            "type": int,
            "default": -1,
            "metavar": "N",
            "help": "start with the last N lines of each",
        },
    ),
    "grep": (
        ["--grep"],
        {"default": "", "metavar": "TEXT", "help": "only lines that contain this text"},
    ),
    "no-prefix": (
        ["--no-prefix", "--no_prefix"],
        {"action": "store_true", "help": "omit the rank of each line"},
    ),
    "raw": (
        ["--raw"],
        {"action": "store_true", "help": "do not escape control sequences on a terminal"},
    ),
    "reason": (
        ["--reason"],
        {"default": "", "metavar": "TEXT", "help": "the reason, shown on all nodes"},
    ),
    "grace": (
        ["--grace"],
        {
            "type": float,
            "metavar": "SECONDS",
            "help": "how long workers may take to exit (the value set by holdfast run)",
        },
    ),
}
"""The flags that the table of commands refers to by name."""


def build_parser(name: str) -> CommandParser:
    """Return the parser of a command, made from its row in the table of commands."""
    row = COMMANDS[name]
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage=f"holdfast {name} [flags] {row.operands}".rstrip(),
        description=row.description,
        epilog=row.examples,
    )
    if "NODE" in row.operands:
        parser.add_argument(
            "node", metavar="NODE", help="a node of the job, by its name or number, or a host"
        )
    for flag in row.flags:
        names, settings = FLAGS[flag]
        parser.add_argument(*names, **settings)
    add_job_flags(parser, operand="[JOB]" in row.operands)
    parser.set_defaults(command=name)
    return parser


def add_job_flags(parser: argparse.ArgumentParser, *, operand: bool) -> None:
    """Add the flags that choose a job, and the operand JOB if `operand` is set."""
    if operand:
        parser.add_argument(
            "job",
            nargs="?",
            default="",
            metavar="JOB",
            help="run id of the job, or the start of it, same as --rdzv-id",
        )
    parser.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        "--run-id",
        "--run_id",
        dest="rdzv_id",
        default="",
        metavar="ID",
        help="run id of the job, or the start of it, if there are several",
    )
    parser.add_argument(
        "--rdzv-backend",
        "--rdzv_backend",
        default="",
        metavar="NAME",
        help="the job's backend, if it has no coordinator: etcd or file",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="the job's coordinator, etcd or folder (the agents on this machine)",
    )
    parser.add_argument(
        "--ha", default="", metavar="HOST[:PORT],...", help="the --ha list of the job"
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="K=V,...",
        help="the same settings as for holdfast run: token_file, auth, tls, tls_ca, ...",
    )


def choose_job(parsed: argparse.Namespace) -> None:
    """Use the operand JOB, if the command has one, as --rdzv-id."""
    if "job" not in parsed:
        return
    if parsed.job and parsed.rdzv_id not in ("", parsed.job):
        raise UsageError(
            f"--rdzv-id: {parsed.rdzv_id!r} conflicts with JOB {parsed.job!r}; accepted: one of the two"
        )
    parsed.rdzv_id = parsed.rdzv_id or parsed.job


def choice_of(args: argparse.Namespace) -> JobChoice:
    """Return the flags that choose a job, as a `JobChoice`."""
    return JobChoice(
        run_id=args.rdzv_id,
        backend=args.rdzv_backend,
        endpoint=args.rdzv_endpoint,
        ha=args.ha,
        settings=parse_text(args.rdzv_conf),
    )


async def connect(args: argparse.Namespace) -> JobClient:
    """Return a client of the chosen job."""
    return await discovery.connect(choice_of(args), print_problem)


def command(
    work: Callable[[argparse.Namespace], Coroutine[Any, Any, None]],
) -> Callable[[argparse.Namespace], None]:
    """Turn a coroutine function into a function that runs a command."""

    def run(args: argparse.Namespace) -> None:
        choose_job(args)
        asyncio.run(work(args))

    return run


def print_problem(line: str) -> None:
    """Print why the output is late or incomplete, for example that an agent does not respond."""
    print(f"holdfast: {line}", file=sys.stderr, flush=True)


@command
async def list_jobs(args: argparse.Namespace) -> None:
    """Print the running jobs that have an agent here, or those at an endpoint."""
    choice = choice_of(args)
    if choice.names_endpoint:
        if args.agents:
            raise UsageError("--agents lists the agents on this machine; omit the endpoint")
        rows = [tables.job_row(one) for one in await _jobs_of(choice) if not one.outcome]
    else:
        agents = [one.here for one in await local_jobs(print_problem)]
        if args.agents:
            rows = [tables.agent_row(one) for one in agents]
        else:
            agents.sort(key=lambda one: one.run_id)
            jobs = groupby(agents, key=lambda one: one.run_id)
            rows = [tables.local_job_row([*job]) for _, job in jobs]
    if args.json:
        for row in rows:
            print_json(row)
    elif rows:
        heads = [name.upper() for name in rows[0]]
        cells = [["-" if one is None else one for one in row.values()] for row in rows]
        print_text(tables.table([heads, *cells]))
    elif choice.names_endpoint:
        print_problem("no job runs there")
    else:
        print_problem("no job of yours runs on this machine")


async def _jobs_of(choice: JobChoice) -> list[JobSummary]:
    location = location_of(choice)
    if isinstance(location, AgentDirectory):
        return await stored_jobs(location, print_problem)
    async with await discovery.open_job(location) as client:
        return await client.jobs()


@command
async def show_status(args: argparse.Namespace) -> None:
    """Print the state of a job."""
    now = asyncio.get_running_loop().time
    last: JobSummary | None = None
    last_problem, reached_at, has_left = "", now(), False
    client = await connect(args)
    try:
        args.rdzv_id = client.run_id  # If the agent exits, another one of the same job replaces it.
        while True:
            try:
                if client.is_over and not client.outcome:  # There may be another agent here.
                    has_left |= client.has_left
                    client.close()
                    client = check_same_job(await connect(args), args.rdzv_id)
                last = await client.status(watch=True)
            except JobNotFound as problem:
                hosts = [one.host for one in last.nodes] if last is not None else []
                end = end_shown_by(problem, hosts, has_left=has_left)
                if last is None or end is None:
                    raise
                _show_status(args, replace(last, outcome=end[0], why=end[1]), ())
                return
            except JobUnreachable as problem:
                is_lost = client.is_over and choice_of(args).names_endpoint
                if not args.watch or is_lost or now() - reached_at >= GIVE_UP_S:
                    raise
                if problem.message != last_problem and not client.is_over:
                    _print_problems("status", [problem.message])
                last_problem = problem.message
                await asyncio.sleep(WATCH_EVERY_S)
            else:
                last_problem, reached_at, has_left = "", now(), False
                _show_status(args, last, client.agents.unreached)
                if not args.watch or last.outcome:
                    return
                await client.wait_closed(WATCH_EVERY_S)
    finally:
        client.close()


def _show_status(args: argparse.Namespace, job: JobSummary, unreached: Sequence[str]) -> None:
    if args.json:
        print_json(job)
        _print_problems("status", unreached)
    else:
        text = tables.status_text(job, unreached)
        print_text((CLEAR if args.watch and sys.stdout.isatty() else "") + text)


@command
async def open_top(args: argparse.Namespace) -> None:
    """Show a job in the terminal until the user quits."""
    from holdfast.views.top.run_top import run  # Requires textual.

    # textual reads from stdin and writes to stderr.
    if not all(one and one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr)):
        raise EnvironmentProblem(
            "holdfast top needs a terminal", hint="use holdfast status --watch, which does not"
        )
    client = await connect(args)
    args.rdzv_id = client.run_id  # If the connection is lost, reconnect to the same job.
    await run(client, lambda: connect(args))


@command
async def print_events(args: argparse.Namespace) -> None:
    """Print the events of a job."""
    async with await connect(args) as client:
        client.agents.on_unreached = lambda line: _print_problems("events", [line])
        async for event in client.events(follow=args.follow):
            if args.json:
                print_json(event)
            else:
                line = tables.event_line(event)
                style = console.RED if event.is_problem else ""
                print_text(f"{console.paint(line, style, sys.stdout) if style else line}\n")


@command
async def print_logs(args: argparse.Namespace) -> None:
    """Print the workers' output from their log files."""
    ranks = parse_ranks(args.rank)
    if args.tail < -1:
        raise UsageError(f"--tail: {args.tail} is not a number of lines; accepted: 0 or more")
    wanted = LogsQuery(ranks=ranks, tail=args.tail, follow=args.follow, grep=args.grep)
    is_terminal = sys.stdout.isatty()
    printer = tables.LogPrinter(
        prefixed=not args.no_prefix,
        coloured=console.is_coloured(sys.stdout),
        escaped=is_terminal and not args.raw,
    )
    async with await connect(args) as client:
        on_problem = lambda line: _print_problems("logs", [line])  # noqa: E731
        node = await _node_named(client, args.node) if args.node else ""
        await follow_logs(client, wanted, node, printer.show, on_problem)


@command
async def request(args: argparse.Namespace) -> None:
    """Send a request to a job: restart, drain, undrain or stop."""
    grace_s = getattr(args, "grace", None)
    if len(args.reason) > REQUEST_WHY_CHARS_MAX:
        raise UsageError(
            f"--reason: {len(args.reason)} characters; accepted: up to {REQUEST_WHY_CHARS_MAX}"
        )
    if grace_s is None:
        grace_s = -1.0  # The grace period of the job.
    elif not 0 <= grace_s <= GRACE_S_MAX:
        raise UsageError(
            f"--grace: {grace_s:g} seconds is out of range; accepted: 0 to {GRACE_S_MAX:g}"
        )
    action = Action(args.command)
    if action is not Action.STOP:
        await _submit(args, action, grace_s)
        return
    try:
        try:
            await _submit(args, action, grace_s)
        except JobUnreachable:  # Somebody else may have stopped the job meanwhile.
            await _submit_stop_again(args, grace_s)
    except RequestRefused as problem:
        if problem.refusal != RequestRefusal.OVER.value:
            raise
        print_text(f"job {args.rdzv_id!r}: {problem}\n")
    except JobOver as problem:
        print_text(f"job {args.rdzv_id!r}: {problem}\n")


async def _submit_stop_again(args: argparse.Namespace, grace_s: float) -> None:
    try:
        await _submit(args, Action.STOP, grace_s)
    except JobNotFound:
        print_text(f"job {args.rdzv_id!r}: the job has ended\n")


async def _submit(args: argparse.Namespace, action: Action, grace_s: float) -> None:
    async with await connect(args) as client:
        args.rdzv_id = client.run_id
        node = getattr(args, "node", "")
        if node:
            node = await _node_named(client, node)
        unchanged = await client.request(action, node=node, why=args.reason, grace_s=grace_s)
        what = unchanged or f"{args.command} {node}".strip() + " accepted"
        print_text(f"job {client.run_id!r}: {what}\n")


async def _node_named(client: JobClient, text: str) -> str:
    """Return the id or host that the user means; without the state of the job, what the user wrote."""
    try:
        return match_node(text, await client.status())
    except ControlProblem:
        return text


def _print_problems(command: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"holdfast {command}: {line}", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print_text(msgspec.json.encode(value).decode() + "\n")


def print_text(text: str) -> None:
    """Write to standard output and escape characters that its encoding lacks; raise if that fails."""
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
