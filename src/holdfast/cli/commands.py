"""The table of commands, for dispatch, the overview, completion and suggestions.

The module of a command is imported when the command is used. It has two functions: `build_parser(name)`
and `execute(arguments)`.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command."""

    name: str
    summary: str
    module: str
    extra: str = ""
    """The optional dependencies that it needs, as in `pip install 'holdfast[extra]'`."""


_RUNNING = "holdfast.cli.operate"

TABLE = (
    Command("run", "start workers on this machine and supervise them", "holdfast.cli.run_command"),
    Command(
        "coordinator", "run a coordinator without an agent", "holdfast.cli.coordinator_command"
    ),
    Command("token", "create your token, or derive others from it", "holdfast.cli.token_command"),
    Command("ps", "list the jobs on this machine, or at a coordinator", _RUNNING),
    Command("status", "show the state of a job", _RUNNING),
    Command("top", "watch and steer a job in the terminal", _RUNNING, extra="top"),
    Command("logs", "show the output of workers, of any rank on any node", _RUNNING),
    Command("events", "show what happened in a job", _RUNNING),
    Command("restart", "restart all workers of a job", _RUNNING),
    Command("drain", "take a node out of a job until it is undrained", _RUNNING),
    Command("undrain", "let a drained node rejoin its job", _RUNNING),
    Command("stop", "end a job on all nodes", _RUNNING),
    Command(
        "dump",
        "show the Python stacks of workers, here or on all nodes",
        "holdfast.cli.dump_command",
    ),
    Command(
        "dashboard",
        "serve a web page to watch and steer a job",
        "holdfast.cli.dashboard_command",
        "dashboard",
    ),
    Command(
        "report",
        "write a report about a job from its log directories",
        "holdfast.cli.report_command",
    ),
    Command(
        "story", "show the steps of a job, from the files of --story", "holdfast.cli.story_command"
    ),
    Command(
        "completion",
        "print the shell completion of commands and flags",
        "holdfast.cli.completion_command",
    ),
)
COMMANDS = {command.name: command for command in TABLE}


def overview() -> str:
    """Return the help of `holdfast` itself."""
    lines = "\n".join(f"  {command.name:<12} {command.summary}" for command in TABLE)
    return f"""\
usage: holdfast COMMAND ...

An elastic, fault-tolerant launcher and supervisor for distributed jobs.

Commands:
{lines}

Flags:
  --version    show the version and exit
  -h, --help   show this help and exit

See holdfast COMMAND --help for the flags of a command.
"""
