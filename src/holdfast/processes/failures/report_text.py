"""The failure report as text: short, complete, and with the labels that people search for.

The report shows the first failure in full, and each other failure on one line, because the others nearly
always follow from the first. It omits the middle of a long traceback, with a note, and never shows the same
traceback twice. Much of the text comes from workers, also on other nodes, so unprintable characters are escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.printable import one_line
from holdfast.processes.failures import tracebacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.processes.failures.failure import ChildFailedError, ProcessFailure

# How many lines of a traceback, and of a message without one, are shown.
TRACEBACK_LINES_MAX = 60

# How many lines of the end of standard error are shown.
STDERR_LINES_MAX = 20

# How many of the other failures are shown; the JSON report has them all.
OTHERS_MAX = 64

WIDTH_MAX = 60

_SEE_ABOVE = "[the traceback above]"


def format_report(
    error: ChildFailedError,
    border: str = "=",
    section: str = "-",
    red: Callable[[str], str] = str,
) -> str:
    """Return the report on `error`, beginning with a line break as exception texts should.

    `red` is applied to each line about the root cause.
    """
    (rank, first), *others = error.in_order()
    title = one_line(f"{error.name} FAILED {error.restarts}".rstrip())
    root = _first_failure(rank, first)
    rivals = error.rivals()
    if rivals:
        ranks = ", ".join(map(str, sorted([rank, *rivals])[:OTHERS_MAX]))
        root.insert(
            0, f"  uncertain : one of ranks {ranks} failed first; their times are too close"
        )
    more = [_one_line(rank, failure, first.host) for rank, failure in others[:OTHERS_MAX]]
    if len(others) > OTHERS_MAX:
        more.append(f"  ... and {len(others) - OTHERS_MAX} more")
    if others and error.many_nodes:
        more.append(
            "  (on this node and on the node of the root cause; other nodes report their own)"
        )
    where = []
    if error.log_dir:
        where.append(f"Logs:   {error.log_dir}")
    if error.report_file:
        where.append(f"Report: {error.report_file}")
    root, more, where = ([one_line(line) for line in part] for part in (root, more, where))
    width = min(WIDTH_MAX, max(map(len, [title, *root, *more, *where])))
    line, rule = section * width, border * width
    text = [
        "",
        rule,
        red(title),
        line,
        *map(red, ["Root Cause (first observed failure):", *root]),
        line,
        "Other Failures:",
        *(more or ["  <NO_OTHER_FAILURES>"]),
        *([line, *where] if where else []),
        rule,
    ]
    return "\n".join(text)


def _first_failure(rank: int, failure: ProcessFailure) -> list[str]:
    ending = failure.ending()
    # "exit code 7" would only repeat the number before it.
    words = ending.removeprefix(f"exit code {failure.exitcode}")
    words = words if words.startswith(",") or not words else f" {words}"
    lines = [
        f"  time      : {failure.timestamp_isoformat()}",
        f"  host      : {failure.host}",
        f"  rank      : {rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {failure.exitcode} (pid: {failure.pid}){words}",
    ]
    if failure.detail:
        lines.append(f"  reason    : {' '.join(failure.detail.split())}")
    lines.append(f"  error_file: {failure.error_file}")
    lines += _cause(failure)
    lines += _stderr(failure)
    if failure.stdout_file not in ("", "/dev/null"):
        lines.append(f"  stdout log: {failure.stdout_file}")
    if failure.stderr_file not in ("", "/dev/null"):
        lines.append(f"  stderr log: {failure.stderr_file}")
    return lines


def _cause(failure: ProcessFailure) -> list[str]:
    """Return the lines of the traceback, and of the message if it contains more."""
    recorded = failure.recorded_traceback()
    traceback = recorded or failure.traceback_text()
    message = failure.recorded_message()
    lines = []
    messages = [message] if message and message.strip() not in traceback else []
    messages += [failure.handler_message()]
    text = "\n".join(one.strip("\n") for one in messages if one)
    if text:
        lines += _block("message   :", tracebacks.readable_lines(text), TRACEBACK_LINES_MAX)
    if traceback:
        label = "traceback :" if recorded else "traceback : (the last one on stderr)"
        lines += _block(label, tracebacks.readable_lines(traceback), TRACEBACK_LINES_MAX)
    else:
        file = "no error file" if failure.error_file == "<N/A>" else "none in the error file"
        stderr = "none at the end of stderr" if failure.stderr_tail.strip() else "no stderr either"
        lines.append(f"  traceback : none found ({file}, {stderr})")
    return lines


def _stderr(failure: ProcessFailure) -> list[str]:
    """Return the end of standard error, without the traceback that is shown already."""
    lines = tracebacks.readable_lines(failure.stderr_tail)
    found = tracebacks.find_last_traceback(lines)
    if found is not None:
        # The error file's traceback and the one on stderr begin differently but end alike.
        start, end = found
        end_on_stderr = tracebacks.last_traceback(failure.stderr_tail).rpartition("\n")[2]
        if end_on_stderr in failure.traceback_text().split("\n"):
            lines[start:end] = [_SEE_ABOVE]
    while lines and not lines[-1]:
        lines.pop()
    if not any(line and line != _SEE_ABOVE for line in lines):
        return []
    tail = lines[-STDERR_LINES_MAX:]
    while not tail[0]:
        tail.pop(0)
    label = "stderr    : (the last line)"
    if len(tail) > 1:
        label = f"stderr    : (the last {len(tail)} lines)"
    return _block(label, tail, STDERR_LINES_MAX)


def _block(label: str, lines: list[str], lines_max: int) -> list[str]:
    shown = tracebacks.cut_middle(lines, lines_max)
    return [f"  {label}", *(f"    {line}".rstrip() for line in shown)]


def _one_line(rank: int, failure: ProcessFailure, first_host: str) -> str:
    where = "" if failure.host == first_host else f" on {failure.host}"
    mark = " [consequence: after the stop began]" if failure.consequence else ""
    added = failure.handler_message().strip().partition("\n")[0]
    mark = f": {added}{mark}" if added else mark
    who = f"rank {rank} (local_rank: {failure.local_rank}, pid: {failure.pid}){where}"
    return tracebacks.cut_middle([f"  {who}: {failure.summary()}{mark}"], 1)[0]
