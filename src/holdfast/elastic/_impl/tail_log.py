"""TorchElastic's names for following log files: `TailLog` and `tail_logfile`.

Both use `LogFollower`, so all files of a `TailLog` share one thread, which reads them when they are
written. `interval_sec` has no effect. `start()` starts the thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.processes.logs.follower import LogFollower, Sink

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import TextIO

__all__ = ["TailLog", "tail_logfile"]


def _every_line(_: str) -> bool:
    return True


def _follow(
    follower: LogFollower,
    header: str,
    file: str,
    sink: Sink,
    log_line_filter: Callable[[str], bool] | None,
) -> None:
    accept: Callable[[bytes], bool] | None = None
    if log_line_filter is not None and log_line_filter is not _every_line:

        def accept(line: bytes) -> bool:
            return log_line_filter(line.decode("utf-8", "replace"))

    prefix = header.encode("utf-8", "replace")
    follower.follow_file(os.fspath(file), prefix=prefix, to=sink, accept=accept)


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,  # noqa: ARG001 - part of TorchElastic's signature
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Write each line of `file` to `dst` with `header` before it, until `finished` is set.

    Then reads to the end and returns. Creates the file if it does not exist. Without a filter it writes
    every line (PyTorch then writes none). `interval_sec` has no effect: the kernel reports writes.
    """
    follower = LogFollower()
    try:
        _follow(follower, header, file, Sink.of_stream(dst), log_line_filter)
        follower.start()
        finished.wait()
    finally:
        follower.close()


class TailLog:
    """Writes the lines of several files to `dst`, each with the header of its local rank.

    The header is `log_line_prefixes[rank]`, or `[<name><rank>]:` if there is none. The caller keeps
    `dst` open until `stop()` has returned. `interval_sec` has no effect: the kernel reports writes.
    """

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,  # noqa: ARG002 - part of TorchElastic's signature
        log_line_filter: Callable[[str], bool] = _every_line,
    ) -> None:
        self._name = name
        self._log_files = dict(log_files)
        self._dst = dst
        self._prefixes = dict(log_line_prefixes or {})
        self._log_line_filter = log_line_filter
        self._follower: LogFollower | None = None
        self._stopped = False

    def start(self) -> TailLog:
        """Begin to follow the files; do nothing if there are none."""
        if not self._log_files or self._follower is not None or self._stopped:
            return self
        self._follower = LogFollower()
        sink = Sink.of_stream(self._dst)
        try:
            for rank, file in self._log_files.items():
                header = self._prefixes.get(rank, f"[{self._name}{rank}]:")
                _follow(self._follower, header, file, sink, self._log_line_filter)
        except BaseException:
            self.stop()
            raise
        self._follower.start()
        return self

    def stop(self) -> None:
        """Write the unread rest of each file, then end the thread. May be called again."""
        self._stopped = True
        if self._follower is not None:
            self._follower.close()

    def stopped(self) -> bool:
        """Return whether `stop()` was called."""
        return self._stopped
