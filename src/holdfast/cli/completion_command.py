"""The command `completion`: shell code that completes the commands and flags of `holdfast`, jobs and nodes.

The table of commands and their parsers supply the words. For jobs and nodes the code runs this command again, with
`--names` (`cli.running_names`).
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.cli.commands import COMMANDS, TABLE
from holdfast.cli.parser import CommandParser
from holdfast.cli.running_names import NAMED, offered_names
from holdfast.defaults import SHELLS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from holdfast.cli.commands import Command

DESCRIPTION = """\
Print shell code that completes the commands and flags of holdfast, and the
names of running jobs and their nodes.
"""
EXAMPLES = """\
examples:
  source <(holdfast completion bash)
      for this shell; add the line to ~/.bashrc for all shells
  holdfast completion zsh > "${fpath[1]}/_holdfast"
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
  holdfast completion tcsh > ~/.holdfast.tcsh
      for tcsh; add the line `source ~/.holdfast.tcsh` to ~/.tcshrc
"""

BASH = """\
_holdfast() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} flags= named= names=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
        return
    fi
    if [ -n "$named" ]; then
        names=$(printf '%s\\n' "${{COMP_WORDS[@]:1:COMP_CWORD-1}}")
        names=$(holdfast completion bash --names "$names" "$word" 2>/dev/null)
    fi
    if [ -n "$names" ]; then
        COMPREPLY=($names)
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _holdfast holdfast
"""
ZSH = """\
#compdef holdfast
_holdfast() {{
    local -a flags names
    local named=
    if (( CURRENT == 2 )); then
        compadd -- {commands}
        return
    fi
    case ${{words[2]}} in
{cases}
    esac
    if [[ ${{words[CURRENT]}} == -* ]]; then
        compadd -- $flags
        return
    fi
    if [[ -n $named ]]; then
        names=${{(F)words[2,CURRENT-1]}}
        names=(${{(f)"$(holdfast completion zsh --names "$names" "$words[CURRENT]" 2>/dev/null)"}})
    fi
    if (( $#names )); then
        compadd -- $names
    else
        _files
    fi
}}
if [ "$funcstack[1]" = _holdfast ]; then _holdfast "$@"; else compdef _holdfast holdfast; fi
"""
FISH_NAMES = (
    "complete -c holdfast -f -n '__fish_seen_subcommand_from {commands}' -a '(holdfast completion fish "
    "--names (string join \\n -- (commandline -opc)[2..-1] | string collect) (commandline -ct))'"
)
# tcsh puts the line up to the cursor into COMMAND_LINE, and uses the first rule that fits.
TCSH = """\
complete holdfast 'p/1/({commands})/' \\
    'C/-*/`holdfast completion tcsh --names "$COMMAND_LINE" ""`/' \\
    'n/{{{named}}}/`holdfast completion tcsh --names "$COMMAND_LINE" ""`/' \\
    'p/*/f/'
"""


def build_parser(name: str) -> CommandParser:
    """Return the parser of `holdfast completion`."""
    parser = CommandParser(
        prog=f"holdfast {name}",
        usage="holdfast completion SHELL",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    # The words after `holdfast`, one a line, and the one at the cursor; for tcsh the whole line.
    parser.add_argument("--names", nargs=2, default=None, help=SUPPRESS)
    parser.add_argument(
        "shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
    )
    return parser


def execute(args: Namespace) -> None:
    """Print the completion code for a shell."""
    if args.names is None:
        text = script_for(args.shell)
    else:
        words, begun = args.names
        offered = (
            for_tcsh(words) if args.shell == "tcsh" else offered_names(words.split("\n"), begun)
        )
        text = "".join(f"{name}\n" for name in offered)
    sys.stdout.write(text)
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
            FISH_NAMES.format(commands=" ".join(NAMED)),
        ]
        return "\n".join(lines) + "\n"
    if shell == "tcsh":
        return TCSH.format(commands=commands, named=",".join(NAMED))
    cases = "\n".join(_case(shell, name, names) for name, names in flags.items())
    return (ZSH if shell == "zsh" else BASH).format(commands=commands, cases=cases)


def for_tcsh(line: str) -> list[str]:
    """Return the flags, jobs or nodes that can continue a line of `holdfast`."""
    words = line.split()[1:]
    begun = words.pop() if words and not line[-1].isspace() else ""
    if begun.startswith("-"):
        return _flags_of(COMMANDS[words[0]]) if words and words[0] in COMMANDS else []
    return offered_names(words, begun) if words else []


def _case(shell: str, name: str, flags: list[str]) -> str:
    words = " ".join(flags)
    listed = f"({words})" if shell == "zsh" else f"'{words}'"
    return f"        {name}) flags={listed}{' named=1' if name in NAMED else ''} ;;"


def flags_of_commands() -> dict[str, list[str]]:
    """Return the flags of each command, without their spellings with underscores."""
    return {command.name: _flags_of(command) for command in TABLE}


def _flags_of(command: Command) -> list[str]:
    return [
        flag
        for action in parser_of(command)._actions
        for flag in action.option_strings
        if "_" not in flag and action.help != SUPPRESS
    ]


def parser_of(command: Command) -> ArgumentParser:
    """Return the parser of a command."""
    parser: ArgumentParser = import_module(command.module).build_parser(command.name)
    return parser
