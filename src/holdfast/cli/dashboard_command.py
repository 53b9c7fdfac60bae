"""The command `dashboard`: serves a web page about a running job.

It needs the extra `holdfast-run[dashboard]` (starlette and uvicorn). Each dashboard creates its own login
token. It writes the token to a file that only its user can read, and prints it if standard output is a
terminal. The token never appears in a URL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.cli.operate import add_job_flags, choice_of, choose_job, connect
from holdfast.cli.parser import CommandParser
from holdfast.control.discovery import local_jobs, open_job
from holdfast.control.job_client import (
    ControlProblem,
    JobNotFound,
    JobUnreachable,
    RequestRefused,
)
from holdfast.core.limits import PORT_MAX
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.net.addresses import LOOPBACK, names_loopback
from holdfast.net.http_server import listen_tcp
from holdfast.net.runtime_dir import runtime_dir
from holdfast.views.dashboard.access import DashboardAccess, random_token
from holdfast.views.dashboard.watched_job import WatchedJob

if TYPE_CHECKING:
    from holdfast.control.job_client import JobClient

DEFAULT_PORT = 29480

DESCRIPTION = """\
Serve a web page about a running job: its state, timeline, ranks, logs, stacks
and failures, with buttons to restart, drain or stop it. The page requires a
login token, which this command prints. Without --rdzv-endpoint, --rdzv-backend
or --ha, the command uses the job that has an agent of yours on this machine.
"""
EXAMPLES = f"""\
examples:
  holdfast dashboard
  holdfast dashboard nightly --port 0
      on any free port
  holdfast dashboard nightly --rdzv-endpoint head:29400 --read-only
  ssh -L {DEFAULT_PORT}:localhost:{DEFAULT_PORT} head
      run this on your own machine to reach a dashboard on head

Requires starlette and uvicorn: pip install 'holdfast-run[dashboard]'
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast dashboard [flags] [JOB]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        metavar="PORT",
        help=f"the port to listen on; 0 for any free port ({DEFAULT_PORT})",
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        metavar="HOST",
        help=f"the address to listen on; traffic to other machines is not encrypted ({LOOPBACK})",
    )
    parser.add_argument(
        "--read-only",
        "--read_only",
        action="store_true",
        help="reject requests that change the job",
    )
    parser.add_argument(
        "--log-dir",
        "--log_dir",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a log directory of the job, to show the tracebacks of failures; may be repeated (none)",
    )
    # An agent passes this when it starts a dashboard. The dashboard exits when stdin is closed.
    parser.add_argument("--agent-pid", type=int, default=0, help=argparse.SUPPRESS)
    add_job_flags(parser, operand=True)
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:9]) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid port; accepted: 0 to {PORT_MAX}")
    return int(text)


def execute(args: argparse.Namespace) -> None:
    """Serve until a signal arrives."""
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401 (report a missing package before anything else)

    choose_job(args)
    for folder in args.log_dir:
        if not os.path.isdir(folder):
            raise UsageError(f"--log-dir: {folder!r} is not a folder; accepted: a log directory")
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    from holdfast.views.dashboard.web_server import serve

    connector = JobConnector(args)
    is_read_only = args.read_only
    if not args.agent_pid:
        async with await connector.connect() as client:  # Reconnect only to this job.
            args.rdzv_id = client.run_id
            is_read_only |= client.read_only
            connector.was_found = True
    listener = listen_tcp(args.host, args.port, name="--port", host_name="--host")
    host, port = listener.getsockname()[:2]
    token = random_token()
    names = (args.host, os.uname().nodename)
    with listener, TokenFile(port, token) as path:
        if not names_loopback(args.host):
            console.warning(
                f"--host {args.host}: the traffic is not encrypted, so anyone on the network path can "
                "read it; ssh -L to a dashboard on loopback is safer"
            )
        shown = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        ended = None
        if args.agent_pid:
            ended = asyncio.ensure_future(_end_of_stdin())
            console.notice(f"dashboard: {shown} (the login token is in {path})")
        else:
            print(f"The dashboard of job {args.rdzv_id!r} is at {shown}")
            if sys.stdout.isatty():
                print(f"Log in with the token {token}")
            print(f"The login token is in {path}", flush=True)
        job = WatchedJob(connector.connect, is_read_only=is_read_only, log_dirs=args.log_dir)
        await serve(listener, DashboardAccess(token, names), job, ended)


async def _end_of_stdin() -> None:
    """Wait until standard input is closed."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read_stdin() -> None:
        if not os.read(0, 1024):
            ended.set()

    loop.add_reader(0, read_stdin)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(0)


class JobConnector:
    """Connects to the job of a dashboard."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.was_found = False
        """Whether the dashboard has reached the job at least once."""

    async def connect(self) -> JobClient:
        if not self._args.agent_pid:
            try:
                return await connect(self._args)
            except ControlProblem as problem:
                is_refused = isinstance(problem, RequestRefused)
                if not self.was_found or choice_of(self._args).names_endpoint or is_refused:
                    raise
                name = self._args.rdzv_id
                raise JobNotFound(f"job {name!r} no longer has an agent on this machine") from None
        for one in await local_jobs():
            if one.here.pid == self._args.agent_pid:
                return await open_job(one)
        raise JobUnreachable("the agent of this dashboard does not respond yet")


class TokenFile:
    """A file with the login token in this user's runtime folder. It is removed on exit."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._path = ""

    def __enter__(self) -> str:
        try:
            self._path = os.path.join(runtime_dir(), f"dashboard-{self._port}.token")
            try:
                os.unlink(self._path)  # A dashboard that was killed left it.
            except FileNotFoundError:
                pass
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(self._path, flags, 0o600), "w") as file:
                file.write(f"{self._token}\n")
        except OSError as problem:
            raise EnvironmentProblem(f"cannot write the login token: {problem}") from None
        return self._path

    def __exit__(self, *_error: object) -> None:
        try:
            os.unlink(self._path)
        except OSError:
            pass  # Another dashboard has removed it.
