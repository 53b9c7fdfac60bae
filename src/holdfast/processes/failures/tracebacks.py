"""Finds the Python traceback in a worker's standard error.

Standard error can contain any text, so this is a heuristic, not a grammar. It knows chained
exceptions, exception groups, syntax errors, the blocks of `faulthandler`, the prefix `[rank0]: ` of
PyTorch, progress bars and colours. It assumes that the text of an exception ends at the first empty
line.

It does not decide whether the traceback is the reason for the exit: a program may print a
traceback and continue.
"""

from __future__ import annotations

import re

# The number of characters to search, from the end of a text.
TEXT_CHARS_MAX = 1024 * 1024

# How many lines after `SomeError: text` may belong to that text.
MESSAGE_LINES_MAX = 200

# The longest line that is shown, in characters. Lists of extension modules are longer.
LINE_CHARS_MAX = 500

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = f"Exception Group {_HEADER}"
_FATAL = "Fatal Python error: "
_CONNECTORS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# PyTorch's prefix, or that of `--tee`.
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?|\[[A-Za-z_]+\d+\]:")
_FRAME = re.compile(r'  File ".*", line \d+')
_SYNTAX_ERROR_FRAME = re.compile(r'  File ".*", line \d+$')
_GROUP_LINE = re.compile(r"\s+[|+]")
_LOG_LINE = re.compile(r"\[?[WEIF]\d{4} \d\d:")  # As PyTorch's C++ side and glog write them.
_FATAL_LINE = re.compile(r"$|  |Thread 0x|Current thread|Extension modules:|Python runtime|<")


def readable_lines(text: str) -> list[str]:
    """Return the lines of the end of `text` without colours and overwritten progress bars."""
    lines = text[-TEXT_CHARS_MAX:].split("\n")
    return [_COLOUR.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in lines]


def find_last_traceback(lines: list[str]) -> tuple[int, int] | None:
    """Return where the last traceback begins and ends among `readable_lines`, or None."""
    bare = _without_prefixes(lines)
    found = None
    at = 0
    only_indented_so_far = True
    while at < len(bare):
        if _begins(bare[at]) or (only_indented_so_far and _FRAME.match(bare[at])):
            end = _end_of_chain(bare, at)
            before = bare[at - 1] if at else ""
            # Python prints these for exceptions in destructors, mostly at shutdown, after the
            # exception that matters.
            if not before.startswith("Exception ignored "):
                found = (at - before.startswith("Exception in thread "), end)
            at = end
        else:
            at += 1
        only_indented_so_far = only_indented_so_far and bare[at - 1].startswith(" ")
    return found


def last_traceback(text: str) -> str:
    """Return the last Python traceback in `text`, without the prefixes of ranks, or ""."""
    lines = readable_lines(text)
    found = find_last_traceback(lines)
    if found is None:
        return ""
    block = _without_prefixes(lines[found[0] : found[1]])
    if block[0].endswith(_HEADER) and not block[0].endswith(_GROUP_HEADER):
        block[0] = _HEADER  # A progress bar may precede it on the same line.
    return "\n".join(block)


def first_of_chain(traceback: str) -> str:
    """Return the first traceback of a chain."""
    lines = traceback.split("\n")
    ends = (at for at, line in enumerate(lines) if line in _CONNECTORS)
    return "\n".join(lines[: next(ends, len(lines))]).rstrip("\n")


def exception_line(traceback: str) -> str:
    """Return the line of a traceback that names its last exception, or ""."""
    lines = traceback.split("\n")
    frames = [at for at, line in enumerate(lines) if _FRAME.match(line)]
    if not frames or lines[0].startswith(_FATAL):
        return lines[0]
    return next((line for line in lines[frames[-1] :] if not line.startswith(" ")), "")


def cut_middle(lines: list[str], lines_max: int) -> list[str]:
    """Return at most `lines_max` lines: both ends of `lines`, and how many are omitted between them."""
    shown = [
        line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]} [...]" for line in lines
    ]
    if len(shown) <= lines_max:
        return shown
    head = (lines_max - 1) // 2
    tail = lines_max - 1 - head
    return [*shown[:head], f"  [... {len(shown) - head - tail} lines omitted ...]", *shown[-tail:]]


def _without_prefixes(lines: list[str]) -> list[str]:
    return [_RANK_PREFIX.sub("", line, count=1) if line[:1] == "[" else line for line in lines]


def _begins(line: str) -> bool:
    return (
        line.endswith(_HEADER)
        or line.startswith(_FATAL)
        or _SYNTAX_ERROR_FRAME.match(line) is not None
    )


def _end_of_chain(lines: list[str], at: int) -> int:
    """Return the end of the traceback at `at` and of the tracebacks chained to it."""
    end = _end_of_traceback(lines, at)
    while True:
        connector = _skip_empty(lines, end)
        following = _skip_empty(lines, connector + 1)
        if following >= len(lines) or lines[connector] not in _CONNECTORS:
            return end
        if not _begins(lines[following]):
            return end
        end = _end_of_traceback(lines, following)


def _end_of_traceback(lines: list[str], at: int) -> int:
    if lines[at].startswith(_FATAL):
        return _end_of_fatal(lines, at)
    if lines[at].endswith(_GROUP_HEADER):
        return _end_of_group(lines, at)
    end = at + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    text_end = min(len(lines), end + MESSAGE_LINES_MAX)
    while end < text_end and not _ends_message(lines[end]):
        end += 1
    return end


def _end_of_fatal(lines: list[str], at: int) -> int:
    end = at + 1
    while end < len(lines) and _FATAL_LINE.match(lines[end]):
        end += 1
    while not lines[end - 1]:
        end -= 1
    return end


def _end_of_group(lines: list[str], at: int) -> int:
    """Return the end of an exception group; the texts of its members may be outside its frame."""
    end = at + 1
    text_end = end + MESSAGE_LINES_MAX
    for here in range(at + 1, len(lines)):
        if _GROUP_LINE.match(lines[here]):
            end = here + 1
            text_end = end + MESSAGE_LINES_MAX
        elif here >= text_end or _ends_message(lines[here]):
            break
    return end


def _ends_message(line: str) -> bool:
    """Return whether `line` certainly does not belong to the text of the exception before it."""
    return (
        not line
        or line == _HEADER
        or line.startswith((_FATAL, "Exception ignored ", "Exception in thread "))
        or _LOG_LINE.match(line) is not None
    )


def _skip_empty(lines: list[str], at: int) -> int:
    while at < len(lines) and not lines[at]:
        at += 1
    return at
