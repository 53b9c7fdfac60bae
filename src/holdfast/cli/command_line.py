"""Splits a command line of `holdfast run` into flags and script: `[flags] SCRIPT [arguments of the script]`.

All words after the script are its arguments, even if they look like flags of ours. A flag can be abbreviated
to a prefix that no other flag has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class Option(Protocol):
        """A flag of `launcher.config`, or an action of argparse."""

        @property
        def nargs(self) -> int | str | None:
            """How many values follow; None for one."""


def split(
    words: list[str], known: Mapping[str, Option]
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return each flag, with its name in full, and its values; then the script and its arguments.

    `known` has the options by their spellings. `--flag=value` is one word without values. The result includes
    unknown flags, without values.
    """
    flags: list[tuple[str, list[str]]] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return flags, words[at + 1 :]
        if not _is_flag(word, known):
            return flags, [word, *_without_separator(words[at + 1 :])]
        written, missing = _read_flag(word, known)
        values: list[str] = []
        at += 1
        while missing and at < len(words) and not _is_flag(words[at], known):
            values.append(words[at])
            missing -= 1
            at += 1
        flags.append((written, values))
    return flags, []


def _is_flag(word: str, known: Mapping[str, Option]) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    if word == "--" or _fitting(word.partition("=")[0], known):
        return True
    negative_number = word[1:].replace(".", "", 1).isdecimal()
    return not negative_number and " " not in word


def _read_flag(word: str, known: Mapping[str, Option]) -> tuple[str, int]:
    """Return the flag in full, and how many of the next words are its values."""
    if not word.startswith("--"):
        return word, _values_of_short(word, known)
    name, equals, value = word.partition("=")
    fitting = _fitting(name, known)
    if not fitting:
        return word, 0
    last_spellings = {id(option): full for full, option in fitting.items()}
    if len(last_spellings) > 1:
        meant = ", ".join(full.replace("_", "-") for full in last_spellings.values())
        raise UsageError(f"{name}: ambiguous; could be {meant}")
    full, option = next(iter(fitting.items()))
    return full + equals + value, 0 if equals else _values_of(option)


def _values_of_short(word: str, known: Mapping[str, Option]) -> int:
    """Return how many values follow `-r`, `-mr` (1 each) or `-m`, `-r3` (none)."""
    for at, letter in enumerate(word[1:], start=1):
        option = known.get(f"-{letter}")
        if option is None:
            return 0
        values = _values_of(option)
        if values:
            return values if at == len(word) - 1 else 0
    return 0


def _fitting(name: str, known: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options with a spelling that is `name` or begins with it, by spelling."""
    if name in known:
        return {name: known[name]}
    if not name.startswith("--"):
        return {}
    return {full: option for full, option in known.items() if full.startswith(name)}


def _values_of(option: Option) -> int:
    return option.nargs if isinstance(option.nargs, int) else 1


def _without_separator(words: list[str]) -> list[str]:
    """Drop a `--` right after the script: torchrun does, and scripts rely on not seeing it."""
    return words[1:] if words[:1] == ["--"] else words
