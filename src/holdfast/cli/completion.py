"""The command `completion`: what a shell needs to complete commands and flags of ours.

It is made of the parsers themselves, so it cannot lag behind them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.cli.parser import CommandParser, Help

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """\
Print what a shell needs to complete the commands and flags of holdfast.
"""
EXAMPLES = """\
examples:
  source <(holdfast completion bash)
      for this shell; in ~/.bashrc for all
  holdfast completion zsh > "${fpath[1]}/_holdfast"
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""

BASH = """\
_holdfast() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} flags=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _holdfast holdfast
"""
ZSH = """\
#compdef holdfast
_holdfast() {{
    local -a flags
    if (( CURRENT == 2 )); then
        compadd -- {commands}
        return
    fi
    case ${{words[2]}} in
{cases}
    esac
    if [[ ${{words[CURRENT]}} == -* ]]; then
        compadd -- $flags
    else
        _files
    fi
}}
if [ "$funcstack[1]" = _holdfast ]; then _holdfast "$@"; else compdef _holdfast holdfast; fi
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `holdfast completion`."""
    parser = CommandParser(
        prog="holdfast completion",
        usage="holdfast completion SHELL",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    return parser


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; an invalid one ends the process with one line and exit code 2."""
    return build_parser().parse_args(args)


def execute(args: argparse.Namespace) -> None:
    """Print the completion for a shell."""
    sys.stdout.write(script_for(args.shell))
    sys.stdout.flush()


def script_for(shell: str) -> str:
    """Return the completion for a shell."""
    flags = flags_of_commands()
    commands = " ".join(flags)
    if shell == "fish":
        lines = [
            "complete -c holdfast -f -n __fish_use_subcommand -a '" + commands + "'",
            *(
                f"complete -c holdfast -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}"
                for name, those in flags.items()
                for flag in those
                if flag.startswith("--")
            ),
        ]
        return "\n".join(lines) + "\n"
    if shell == "zsh":
        cases = [f"        {name}) flags=({' '.join(those)}) ;;" for name, those in flags.items()]
        return ZSH.format(commands=commands, cases="\n".join(cases))
    cases = [f"        {name}) flags='{' '.join(those)}' ;;" for name, those in flags.items()]
    return BASH.format(commands=commands, cases="\n".join(cases))


def flags_of_commands() -> dict[str, list[str]]:
    """Return the flags of each command, in one spelling."""
    from argparse import SUPPRESS

    from holdfast.cli import coordinator, dashboard, dump, operate, report, story, token
    from holdfast.cli.flags import build_parser as parser_of_run

    parsers: dict[str, argparse.ArgumentParser] = {
        "run": parser_of_run(),
        "coordinator": coordinator.build_parser(),
        "token": token.build_parser(),
        **{name: operate.build_parser(name) for name in operate.TEXTS},
        "dump": dump.build_parser(),
        "dashboard": dashboard.build_parser(),
        "report": report.build_parser(),
        "story": story.build_parser(),
        "completion": build_parser(),
    }
    return {
        name: [
            flag
            for action in parser._actions
            for flag in action.option_strings
            if "_" not in flag and action.help != SUPPRESS
        ]
        for name, parser in parsers.items()
    }
