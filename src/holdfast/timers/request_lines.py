"""Requests out of the bytes of a pipe, line by line.

A line that cannot be understood costs nothing but itself, and is told in words. Writers write a
line in one piece, so a piece without an end can only come from one that broke off, or that is not
ours: what follows it on the same line is found nevertheless.
"""

from __future__ import annotations

from holdfast.timers.requests import TIME_MAX, FileTimerRequest, is_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeGuard

LINE_BYTES_MAX = 4096
"""A line with its end is no longer than what the kernel writes in one piece (PIPE_BUF)."""

SIGNAL_MAX = 64
SHOWN_BYTES_MAX = 80
START = b'{"version"'


class Unreadable(ValueError):
    """Says in a few words why a line is no request."""


class Lines:
    """Puts pieces of bytes together to lines; keeps the beginning of one that has not ended."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False  # The line was too long: nothing of it counts.

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that end in this piece; one that is too long comes as its beginning."""
        *ended, self._rest = (self._rest + chunk).split(b"\n")
        for line in ended:
            if self._skipping:
                self._skipping = False
                line = line[-LINE_BYTES_MAX:]  # noqa: PLW2901 (it may have a whole one at its end)
                if START not in line:
                    continue
            yield line
        if len(self._rest) >= LINE_BYTES_MAX:
            if not self._skipping:
                yield self._rest[:LINE_BYTES_MAX]
            self._skipping = True
            self._rest = self._rest[-LINE_BYTES_MAX:]


def parse(line: bytes) -> FileTimerRequest:
    """Return the request of a line; raise `Unreadable` if it is none."""
    try:
        return _parse(line)
    except Unreadable:
        start = line.rfind(START)
        if start <= 0:
            raise
        return _parse(line[start:])


def _parse(line: bytes) -> FileTimerRequest:
    import json

    if len(line) >= LINE_BYTES_MAX:
        raise Unreadable(f"longer than {LINE_BYTES_MAX} bytes: {shown(line)}")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise Unreadable(f"no JSON: {shown(line)}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"no object: {shown(line)}")
    pid, scope, expires, signum = map(found.get, ("pid", "scope_id", "expiration_time", "signal"))
    if not _is_number(pid, int) or pid <= 0 or pid >= 1 << 31:
        raise Unreadable(f"its pid is no process: {shown(line)}")
    if not isinstance(scope, str):
        raise Unreadable(f"its scope_id is no text: {shown(line)}")
    if not is_time(expires):
        raise Unreadable(f"its expiration_time is no time: {shown(line)}")
    if not _is_number(signum, int) or signum > SIGNAL_MAX:
        raise Unreadable(f"its signal is none: {shown(line)}")
    return FileTimerRequest(pid, scope, float(min(expires, TIME_MAX)), signum)


def shown(line: bytes) -> str:
    """Return a line as it can be shown to a person."""
    short = line[:SHOWN_BYTES_MAX]
    return repr(short.decode(errors="replace")) + ("..." if len(line) > len(short) else "")


def _is_number(value: Any, *kinds: type) -> TypeGuard[Any]:
    return isinstance(value, kinds) and not isinstance(value, bool)
