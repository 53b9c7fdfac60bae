"""Requests to a timer server, to set or release a timer, as JSON lines.

An invalid line does not affect other lines. Writers write each line in one piece. So an incomplete line is from a
writer that was interrupted or from another program; the parser still finds a request that follows it on the same
line.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from holdfast import console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeGuard


RELEASED = -1
"""The `expiration_time` of a request that releases its timer."""

TIME_MAX = 1e15
"""The limit of an expiry in seconds, for example for `expires(after=math.inf)`."""


def is_valid_expiry(value: object) -> TypeGuard[float]:
    """Whether a value can be an expiry: a number, and not `nan`."""
    return isinstance(value, (int, float)) and type(value) is not bool and value > -TIME_MAX


class TimerRequest:
    """A timer of one worker. A negative `expiration_time` (seconds since 1970) releases it."""

    __slots__ = ("expiration_time", "scope_id", "worker_id")

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def _fields(self) -> tuple[Any, ...]:
        return (self.worker_id, self.scope_id, self.expiration_time)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimerRequest):
            return NotImplemented
        return type(other) is type(self) and other._fields() == self._fields()

    __hash__ = None  # type: ignore[assignment]  # It can be changed.

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._fields()}"


class FileTimerRequest(TimerRequest):
    """A timer of one process. On expiry the process receives `signal`, if that is positive.

    The wire format is TorchElastic's: a line of JSON.
    """

    __slots__ = ("signal", "version")

    def __init__(
        self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0
    ) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """The process that the timer watches."""
        pid: int = self.worker_id
        return pid

    def _fields(self) -> tuple[Any, ...]:
        return (*super()._fields(), self.signal)

    def to_json(self) -> str:
        """Return the request in its wire format, without the newline."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_id,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )


LINE_BYTES_MAX = 4096
"""The limit of a line with its newline: as much as the kernel writes in one piece (PIPE_BUF)."""

SIGNAL_MAX = 64
SHOWN_BYTES_MAX = 80
START = b'{"version"'


class InvalidRequest(ValueError):
    """A line is not a request; the text gives the reason in a few words."""


class LineSplitter:
    """Splits chunks into lines; buffers the last line until its end arrives."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False  # Whether the current line is too long and is being skipped.

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that end in this chunk, truncated if they are too long."""
        *ended, self._rest = (self._rest + chunk).split(b"\n")
        for line in ended:
            if self._skipping:
                self._skipping = False
                line = line[-LINE_BYTES_MAX:]  # noqa: PLW2901 (its end may be a complete request)
                if START not in line:
                    continue
            yield line
        if len(self._rest) >= LINE_BYTES_MAX:
            if not self._skipping:
                yield self._rest[:LINE_BYTES_MAX]
            self._skipping = True
            self._rest = self._rest[-LINE_BYTES_MAX:]


def parse_request(line: bytes) -> FileTimerRequest:
    """Return the request of a line; raise `InvalidRequest` if it is not one."""
    try:
        return _parse_line(line)
    except InvalidRequest:
        start = line.rfind(START)
        if start <= 0:
            raise
        return _parse_line(line[start:])


def _parse_line(line: bytes) -> FileTimerRequest:
    if len(line) >= LINE_BYTES_MAX:
        raise InvalidRequest(f"longer than {LINE_BYTES_MAX} bytes: {excerpt(line)}")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"not JSON: {excerpt(line)}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"not an object: {excerpt(line)}")
    pid, scope, expires, signum = map(found.get, ("pid", "scope_id", "expiration_time", "signal"))
    if not _is_number(pid, int) or pid <= 0 or pid >= 1 << 31:
        raise InvalidRequest(f"invalid pid: {excerpt(line)}")
    if not isinstance(scope, str):
        raise InvalidRequest(f"invalid scope_id: {excerpt(line)}")
    if not is_valid_expiry(expires):
        raise InvalidRequest(f"invalid expiration_time: {excerpt(line)}")
    if not _is_number(signum, int) or signum > SIGNAL_MAX:
        raise InvalidRequest(f"invalid signal: {excerpt(line)}")
    return FileTimerRequest(pid, scope, float(min(expires, TIME_MAX)), signum)


def excerpt(line: bytes) -> str:
    """Return the beginning of a line, for a message."""
    short = line[:SHOWN_BYTES_MAX]
    return repr(short.decode(errors="replace")) + ("..." if len(line) > len(short) else "")


def _is_number(value: Any, *kinds: type) -> TypeGuard[Any]:
    return isinstance(value, kinds) and not isinstance(value, bool)


NAMED_MAX = 5
"""How many refusals of one kind are reported; the rest are only counted."""


class RefusalLog:
    """Reports refused requests; a faulty script cannot fill the log."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, reason: str, detail: str, level: int = console.WARNING) -> None:
        """Report that the request `detail` was refused, for `reason`."""
        count = self._counts[reason] = self._counts.get(reason, 0) + 1
        if count <= NAMED_MAX:
            console.log(level, f"timer request refused: {reason}: {detail}")
        if count == NAMED_MAX:
            console.log(level, f"timer request refused: {reason}: further ones are not reported")
