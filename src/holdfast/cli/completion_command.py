"""The command `completion`: shell code that completes the commands and flags of `holdfast`.

The table of commands and their parsers supply the words.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.cli.commands import TABLE
from holdfast.cli.parser import CommandParser

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from holdfast.cli.commands import Command

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """\
Print shell code that completes the commands and flags of holdfast.
"""
EXAMPLES = """\
examples:
  source <(holdfast completion bash)
      for this shell; add the line to ~/.bashrc for all shells
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


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast completion`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast completion SHELL",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    return parser


def execute(args: Namespace) -> None:
    """Print the completion code for a shell."""
    sys.stdout.write(script_for(args.shell))
    sys.stdout.flush()


def script_for(shell: str) -> str:
    """Return the completion code for a shell."""
    flags = flags_of_commands()
    commands = " ".join(flags)
    if shell == "fish":
        lines = [
            "complete -c holdfast -f -n __fish_use_subcommand -a '" + commands + "'",
            *(
                f"complete -c holdfast -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}"
                for name, names in flags.items()
                for flag in names
                if flag.startswith("--")
            ),
        ]
        return "\n".join(lines) + "\n"
    if shell == "zsh":
        cases = [f"        {name}) flags=({' '.join(names)}) ;;" for name, names in flags.items()]
        return ZSH.format(commands=commands, cases="\n".join(cases))
    cases = [f"        {name}) flags='{' '.join(names)}' ;;" for name, names in flags.items()]
    return BASH.format(commands=commands, cases="\n".join(cases))


def flags_of_commands() -> dict[str, list[str]]:
    """Return the flags of each command, without their spellings with underscores."""
    return {command.name: _flags_of(command) for command in TABLE}


def _flags_of(command: Command) -> list[str]:
    parser: ArgumentParser = import_module(command.module).build_parser(command.name)
    return [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if "_" not in flag and action.help != SUPPRESS
    ]
