"""The table of commands, for dispatch, parsers, the overview, completion and suggestions.

The module of a command is imported when the command is used. It has a function `build_parser(name)` and the
function that runs the command. The commands for running jobs share one module; their help and flags are in the
table too.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command."""

    name: str
    summary: str
    module: str
    extra: str = ""
    """The optional dependencies that it needs, as in `pip install 'holdfast-run[extra]'`."""
    function: str = "execute"
    """The function in `module` that runs the command. It gets the parsed arguments."""
    operands: str = ""
    flags: tuple[str, ...] = ()
    """Its flags in `cli.operate`, besides those that choose a job."""
    description: str = ""
    examples: str = ""


_RUNNING = "holdfast.cli.operate"
_DEFAULT_JOB = """
Without --rdzv-endpoint, --rdzv-backend or --ha, the command uses the job that
has an agent of yours on this machine.
"""

GROUPS = {
    "Run": (
        Command(
            "run", "start workers on this machine and supervise them", "holdfast.cli.run_command"
        ),
        Command(
            "coordinator", "run a coordinator without an agent", "holdfast.cli.coordinator_command"
        ),
        Command(
            "token", "create your token, or derive others from it", "holdfast.cli.token_command"
        ),
    ),
    "Watch": (
        Command(
            "ps",
            "list the jobs on this machine, or at a coordinator",
            _RUNNING,
            function="list_jobs",
            flags=("agents", "json"),
            description="""\
List the running jobs that have an agent of yours on this machine. With
--rdzv-endpoint, list the jobs of a coordinator; with --rdzv-backend etcd or file,
those on etcd or in a shared folder. With --ha, list the job of these machines.
""",
            examples="""\
examples:
  holdfast ps
  holdfast ps --rdzv-endpoint head:29400
  holdfast ps --rdzv-backend etcd --rdzv-endpoint etcd0:2379
""",
        ),
        Command(
            "status",
            "show the state of a job",
            _RUNNING,
            function="show_status",
            operands="[JOB]",
            flags=("json", "watch"),
            description=f"""\
Show the state of a job: rounds, nodes, workers, restarts and their causes;
progress, remaining time, loss and goodput if workers report them.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast status
  holdfast status --watch
  holdfast status nightly --json --rdzv-endpoint head:29400
  holdfast status nightly --ha node0,node1,node2
""",
        ),
        Command(
            "top",
            "watch and steer a job in the terminal",
            _RUNNING,
            extra="top",
            function="open_top",
            operands="[JOB]",
            description=f"""\
Watch a job in the terminal: its nodes and ranks, their speed and memory over
time, and how long each stage of a restart took. Keys show logs and stacks, and
restart, drain or stop.
Requires textual: pip install 'holdfast-run[top]'.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast top
  holdfast top nightly --rdzv-endpoint head:29400
""",
        ),
        Command(
            "dashboard",
            "serve a web page to watch and steer a job",
            "holdfast.cli.dashboard_command",
            extra="dashboard",
        ),
        Command(
            "logs",
            "show the output of workers, of any rank on any node",
            _RUNNING,
            function="print_logs",
            operands="[JOB]",
            flags=("follow", "rank", "node", "tail", "grep", "no-prefix", "raw"),
            description=f"""\
Show the output of workers, of any rank on any node: the files of --redirects and
--tee, or else the last 16 MB, which every job keeps (--log-tail).
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast logs --follow
      all ranks, from the start of this generation or of what is kept of it;
      continues after restarts
  holdfast logs --rank 0,8-15 --tail 20
  holdfast logs --node node7 --grep Error
""",
        ),
        Command(
            "events",
            "show what happened in a job",
            _RUNNING,
            function="print_events",
            operands="[JOB]",
            flags=("json", "follow"),
            description=f"""\
Show the recent events of a job.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast events
  holdfast events --follow --json
""",
        ),
        Command(
            "dump",
            "show the Python stacks of workers, here or on all nodes",
            "holdfast.cli.dump_command",
        ),
    ),
    "Steer": (
        Command(
            "restart",
            "restart all workers of a job",
            _RUNNING,
            function="request",
            operands="[JOB]",
            flags=("reason",),
            description=f"""\
Restart all workers of a job, as its next generation. This does not count
against --max-restarts.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast restart --reason 'new data'
""",
        ),
        Command(
            "drain",
            "take a node out of a job until it is undrained",
            _RUNNING,
            function="request",
            operands="NODE [JOB]",
            flags=("reason",),
            description=f"""\
Stop the workers of a node within their grace period, and start none there
until the node is undrained. A standby replaces the node, or the job continues
with fewer nodes. If too few nodes would remain, the command fails. This does
not count against --max-restarts.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast drain node7 --reason 'disk is failing'
  holdfast drain 2
      NODE is a node that holdfast status lists, by its name, the start of its
      name or its number; or a host (all of its nodes)
""",
        ),
        Command(
            "undrain",
            "let a drained node rejoin its job",
            _RUNNING,
            function="request",
            operands="NODE [JOB]",
            flags=("reason",),
            description=f"""\
Let a drained node run workers again.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast undrain node7
""",
        ),
        Command(
            "stop",
            "end a job on all nodes",
            _RUNNING,
            function="request",
            operands="[JOB]",
            flags=("reason", "grace"),
            description=f"""\
Stop a job on all nodes permanently. Its agents exit with code 143.
{_DEFAULT_JOB}""",
            examples="""\
examples:
  holdfast stop --reason 'wrong learning rate' --grace 60
""",
        ),
    ),
    "Afterwards": (
        Command(
            "report",
            "write a report about a job from its log directories",
            "holdfast.cli.report_command",
        ),
    ),
    "Develop": (
        Command(
            "story",
            "show the steps of a job, from the files of --story",
            "holdfast.cli.story_command",
        ),
        Command(
            "completion",
            "print shell completion of commands, flags, jobs and nodes",
            "holdfast.cli.completion_command",
        ),
    ),
}
"""The commands, grouped as in the overview."""
TABLE = tuple(command for group in GROUPS.values() for command in group)
COMMANDS = {command.name: command for command in TABLE}


def overview() -> str:
    """Return the help of `holdfast` itself."""
    lines = "\n\n".join(
        "\n".join([f"{group}:", *(f"  {one.name:<12} {one.summary}" for one in commands)])
        for group, commands in GROUPS.items()
    )
    return f"""\
usage: holdfast COMMAND ...

An elastic, fault-tolerant launcher and supervisor for distributed jobs.

{lines}

Flags:
  --version    show the version and exit
  -h, --help   show this help and exit

See holdfast COMMAND --help for the flags of a command.
"""
