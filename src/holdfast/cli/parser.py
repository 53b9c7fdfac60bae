"""argparse parsers with one-line errors; `ScriptParser` is for flags that are followed by a script.

`ScriptParser` splits the command line (`cli.command_line`) before argparse parses the flags. An error exits with
code 2 and prints no usage. The flags of `holdfast run` are in `launcher.config`.
"""

from __future__ import annotations

import argparse
import os
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.cli.command_line import split
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

HELP_COLUMNS, HELP_COLUMNS_MAX = 80, 100
HELP_INDENT = 26
SUGGESTIONS_MAX = 1
STRAY_CHARS_MAX = 2
"""A word may have up to this many wrong letters at its end, if the rest is the beginning of only one flag."""
PREFIX_CHARS_MIN = 6  # Shorter prefixes, like `--no-`, match too much.
SIMILARITY_MIN = 0.6
RDZV, RDZV_SIMILARITY_MIN = "--rdzv-", 0.8  # All `--rdzv-` flags start with the same letters.


class InvalidFlag(Exception):
    """A value is invalid. Not a `ValueError`, whose message argparse would replace."""


class PrintCompletion(argparse.Action):
    """Prints shell completion and exits, like help."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        del namespace, option_string
        from holdfast.cli.completion_command import script_for

        sys.stdout.write(script_for(values))
        parser.exit()


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with one spelling of each flag. It does not import shutil to find the width."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("max_help_position", HELP_INDENT)
        options.setdefault("width", _help_columns())
        super().__init__(prog, **options)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if "_" not in name]
        if not shown:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        return ", ".join(shown) + value


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line with exit code 2, in the form of our own messages."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **settings)
        self._positionals.title, self._optionals.title = "Arguments", "Flags"

    def error(self, message: str) -> NoReturn:
        """Report an error that argparse found."""
        self.fail(self._reworded(message))

    def fail(self, text: str) -> NoReturn:
        """End the process with one line and exit code 2."""
        self.exit(2, console.error_line(self.prog, text))

    def _reworded(self, message: str) -> str:
        for start, describe in (
            ("argument ", self._describe_value),
            ("unrecognized arguments: ", self._describe_unknown),
            ("ambiguous option: ", _describe_ambiguous),
        ):
            if message.startswith(start):
                return describe(message.removeprefix(start))
        missing = message.removeprefix("the following arguments are required: ")
        return f"{missing} is missing; usage: {self.usage}" if missing != message else message

    def _describe_value(self, message: str) -> str:
        names, _, problem = message.partition(": ")
        longs = [name for name in names.split("/") if name.startswith("--")]
        name = longs[0] if longs else names
        action = next(
            one for one in self._actions if name in (*one.option_strings, one.metavar, one.dest)
        )
        value = problem.rpartition(" value: ")[2]
        if problem.startswith("ignored explicit argument"):
            problem = "does not take a value"
        elif problem.startswith("expected "):
            problem = f"needs a value; accepted: {action.metavar or action.dest.upper()}"
        elif problem.startswith("invalid int value"):
            problem = f"{value} is not a whole number; accepted: digits, such as 5"
        elif problem.startswith("invalid float value"):
            problem = f"{value} is not a number; accepted: digits, such as 0.5"
        elif problem.startswith("invalid choice") and action.choices is not None:
            given = problem.removeprefix("invalid choice: ").partition(" (")[0]
            problem = f"{given} is not known; accepted: {', '.join(map(str, action.choices))}"
        return f"{name}: {problem}"

    def _describe_unknown(self, words: str) -> str:
        word = words.split(maxsplit=1)[0]
        if not word.startswith("-"):
            return f"{word}: unexpected argument; usage: {self.usage}"
        return f"{word}: unknown flag; {self._suggestion(word)}"

    def _suggestion(self, word: str) -> str:
        shown = [one for one in self._actions if one.help != argparse.SUPPRESS]
        names = [name for one in shown for name in one.option_strings if "_" not in name]
        known = [name for name in names if name not in ("-h", "--help")]
        return suggestion(word, known) or f"see {self.prog} --help"


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return a question that suggests a known word; empty if none is similar."""
    name = word.partition("=")[0].replace("_", "-")
    for length in range(len(name) - 1, len(name) - 1 - STRAY_CHARS_MAX, -1):
        fitting = [full for full in known if full.startswith(name[:length])]
        if length >= PREFIX_CHARS_MIN and len(fitting) == 1:
            return f"did you mean {fitting[0]}?"
    similarity = RDZV_SIMILARITY_MIN if name.startswith(RDZV) else SIMILARITY_MIN
    bare = {one.lstrip("-"): one for one in known}  # The dashes are similar in all flags.
    close = get_close_matches(name.lstrip("-"), bare, n=SUGGESTIONS_MAX, cutoff=similarity)
    return f"did you mean {bare[close[0]]}?" if close else ""


def _describe_ambiguous(message: str) -> str:
    name, _, names = message.partition(" could match ")
    return f"{name}: ambiguous; could be {', '.join(n for n in names.split(', ') if '_' not in n)}"


class ScriptParser(CommandParser):
    """Parses `[flags] SCRIPT [arguments of the script]`."""

    _last: tuple[str, list[str]]  # The last flag, with its values.

    def parse_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> argparse.Namespace:
        """Parse a command line. If it is invalid, print one line and exit with code 2."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.fail(self._describe_unknown(unknown[0]))
        return parsed

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Like `parse_args`, but return unknown flags."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            flags, script = split(words, self._option_string_actions)
            self._last = flags[-1] if flags else ("", [])
            given = [word for flag, values in flags for word in (flag, *values)]
            if script:
                given += ["--", *script]
            return super().parse_known_args(given, namespace)
        except (InvalidFlag, UsageError) as refused:
            self.fail(str(refused))

    def _reworded(self, message: str) -> str:
        if "training_script" in message:
            name, values = self._last
            taken = values[-1] if values and values[-1].endswith(".py") else ""
            hint = f": {taken} was parsed as the value of {name.replace('_', '-')}" if taken else ""
            return f"no script given{hint}; usage: {self.usage}"
        return super()._reworded(message)

    def _suggestion(self, word: str) -> str:
        found = super()._suggestion(word)
        if word.replace("_", "-").startswith(RDZV) and not found.startswith("did you mean"):
            return "set rendezvous settings with --rdzv-conf KEY=VALUE"
        return found


def _help_columns() -> int:
    """Return the width of help: `COLUMNS`, the terminal's, or 80, up to a limit."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        width = int(columns)
    else:
        try:
            width = os.get_terminal_size(1).columns or HELP_COLUMNS
        except OSError:
            width = HELP_COLUMNS
    return min(width, HELP_COLUMNS_MAX) - 2
