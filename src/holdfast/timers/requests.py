"""What a client asks of a server: to set a timer, or to release it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeGuard

RELEASED = -1
"""Stands in a request for the time of a timer that is to be released."""

TIME_MAX = 1e15
"""Seconds; what expires later, as `expires(after=math.inf)` does, expires then."""


def is_time(value: object) -> TypeGuard[float]:
    """Return whether a value can be when a timer expires: a number, and not `nan`."""
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
    """A timer of one process; `signal` is what it gets when the time is up, none if not positive.

    On the wire it is a line of JSON, the same as TorchElastic's.
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
        """The process that is watched."""
        pid: int = self.worker_id
        return pid

    def _fields(self) -> tuple[Any, ...]:
        return (*super()._fields(), self.signal)

    def to_json(self) -> str:
        """Return the request as it goes over the wire, without the end of the line."""
        import json

        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_id,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )
