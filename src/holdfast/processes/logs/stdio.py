"""The standard streams of a group's workers, and what the agent keeps of them.

A worker writes a redirected stream to a file itself, and inherits a stream for the console. The
exception is standard error for the console: it passes through the agent, so that the failure report
can show its end even for a program without an error file. If the console is a terminal, workers
write to a pseudo-terminal.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem, shortage_hint
from holdfast.processes.logs.specs import usable_filters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from holdfast.processes.logs.follower import LogFollower, PipeStream
    from holdfast.processes.logs.lines import Sink
    from holdfast.processes.logs.specs import LogsDest

# The part of a worker's standard error that is kept for the report: some hundred lines.
TAIL_BYTES_MAX = 64 * 1024
# How long a report waits, once, for the rest of a worker's output: the console may be blocked.
CATCH_UP_S = 1.0
STDIN, STDOUT, STDERR = 0, 1, 2


def is_descriptor(stream: TextIO | None, fd: int) -> bool:
    """Whether a Python stream is the process's own descriptor, so that workers can inherit it.

    In a notebook or under a test runner's capture `sys.stdout` is another object. The output of
    workers that inherit descriptor 1 would then be invisible.
    """
    try:
        return stream is not None and stream.fileno() == fd
    except (OSError, ValueError, AttributeError):
        return False


def hold_standard_places() -> None:
    """Fill descriptors 0, 1 and 2 where they are closed.

    Otherwise a pipe of this process could get such a number, and replace a worker's stream.
    """
    for fd in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number: this one.


class WorkerStdio:
    """Opens the streams of each worker, and follows them where necessary.

    Following begins with `begin_following`, after the workers were requested, so that its imports do
    not delay them. A caller that watches the descriptors of `begin_with_files` can delay it until
    there is something to read.
    """

    def __init__(
        self,
        dest: LogsDest,
        *,
        prefixes: Mapping[int, str],
        stdout_filters: Sequence[str] = (),
        stderr_filters: Sequence[str] = (),
        capture_stderr: bool = True,
    ) -> None:
        hold_standard_places()
        self._dest = dest
        self._prefixes = {rank: prefix.encode() for rank, prefix in prefixes.items()}
        self._filters = {
            STDOUT: usable_filters(dest.filtered_stdout, stdout_filters),
            STDERR: usable_filters(dest.filtered_stderr, stderr_filters),
        }
        self._capture_stderr = capture_stderr
        self._follower: LogFollower | None = None
        self._console_stuck = False
        self._closed = False
        self._is_behind = False
        self._pipes: dict[tuple[int, int], int] = {}
        self._hidden: set[tuple[int, int]] = set()
        self._files: list[tuple[int, int, str]] = []
        self._captured: dict[tuple[int, int], PipeStream] = {}
        self._sinks: dict[int, Sink] = {}
        self._filtered: dict[int, Sink] = {}
        self._filtered_files: dict[int, TextIO] = {}

    def open(self, rank: int) -> dict[int, int]:
        """Return fresh descriptors for a worker's streams 0, 1 and 2; close them once it runs."""
        opened = {STDIN: self._open_stdin()}
        try:
            for which, paths in ((STDOUT, self._dest.stdouts), (STDERR, self._dest.stderrs)):
                opened[which] = self._open_output(rank, which, paths.get(rank, ""))
        except BaseException:
            for fd in opened.values():
                os.close(fd)
            raise
        return opened

    def note_files(self, rank: int) -> None:
        """Follow the files of a worker that opens its streams itself."""
        for which, paths in ((STDOUT, self._dest.stdouts), (STDERR, self._dest.stderrs)):
            if paths.get(rank):
                self._files.append((rank, which, paths[rank]))

    def begin_with_files(self) -> list[int]:
        """Follow the files; return the descriptors of all other streams."""
        for which, filters in self._filters.items():
            if filters:  # Create the file even if no stream matches.
                self._filtered_sink(which)
        for rank, which, path in self._files:
            self._follow_file(rank, which, path)
        self._files.clear()
        return [*self._pipes.values()]

    def begin_following(self) -> None:
        self.begin_with_files()
        for (rank, which), fd in self._pipes.items():
            sink = None if (rank, which) in self._hidden else self._console_sink(which)
            # Several workers on one pipe must not break each other's lines.
            raw = len(self._prefixes) == 1 or os.isatty(which)
            self._captured[rank, which] = self._follow().follow_fd(
                fd, to=sink, tail_bytes_max=TAIL_BYTES_MAX, raw=raw
            )
        self._pipes.clear()

    def has_unread(self) -> bool:
        """Whether a worker has written something that is not followed yet."""
        poll = select.poll()
        for fd in self._pipes.values():
            poll.register(fd, select.POLLIN)
        # The end of an empty stream is another kind of event.
        return any(events & select.POLLIN for _, events in poll.poll(0))

    def finish(self) -> None:
        """Pass on the rest of the output; call it when the workers have exited.

        If the console blocks for too long, later calls do not wait for it.
        """
        if self._follower is not None and not self._console_stuck:
            self._console_stuck = not self._follower.finish_all()

    def close(self) -> None:
        for fd in self._pipes.values():
            os.close(fd)
        self._pipes.clear()
        if self._follower is not None:
            self._follower.close(drain_s_max=0 if self._console_stuck else None)
            self._follower = None
        for sink in self._filtered.values():
            sink.close()
        for file in self._filtered_files.values():
            file.close()
        self._closed = True

    def filtered_file(self, which: int) -> TextIO | None:
        """Return the file of a stream's filtered lines, open for appending; None without filters.

        Callers may read its name or write to it. `close` closes it.
        """
        if not self._filters[which]:
            return None
        if which not in self._filtered_files:
            self._filtered_files[which] = open(  # noqa: SIM115 (closed by `close`)
                self._filtered_path(which), "a", errors="replace", buffering=1
            )
            if self._closed:
                self._filtered_files[which].close()
        return self._filtered_files[which]

    def stderr_tail(self, rank: int) -> str:
        """Return the end of a worker's standard error; empty if it is not kept."""
        captured = self._captured.get((rank, STDERR))
        if captured is not None:
            # The last output often contains the reason of the exit, and may be unread.
            if not self._is_behind:
                self._is_behind = not captured.catch_up(CATCH_UP_S)
            return captured.tail(TAIL_BYTES_MAX).decode(errors="replace")
        path = self._dest.stderrs.get(rank, "")
        if not path or path == os.devnull:
            return ""
        try:
            with open(path, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES_MAX))
                return stream.read(TAIL_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""

    def stderr_written(self, rank: int) -> int:
        """Return the number of bytes read from the pipe of a worker's standard error; 0 without one."""
        captured = self._captured.get((rank, STDERR))
        return captured.written() if captured is not None else 0

    def last_words(self, rank: int, tail: str) -> tuple[int, int]:
        """Return the position (in bytes from the start) and the time (in nanoseconds since the epoch)
        of the last traceback in the end of a worker's standard error; -1 and 0 if unknown.
        """
        from holdfast.processes.failures import tracebacks

        found = tracebacks.find_last_traceback(tracebacks.readable_lines(tail))
        if found is None:
            return -1, 0
        captured = self._captured.get((rank, STDERR))
        if captured is None:
            try:  # A file that only the worker writes: no later than its last write.
                return -1, os.stat(self._dest.stderrs[rank]).st_mtime_ns
            except (OSError, KeyError):
                return -1, 0
        after = sum(len(line.encode()) + 1 for line in tail.split("\n")[found[0] :]) - 1
        position = max(0, captured.written() - after)
        came_ns = captured.came_ns(position)
        return position, time.time_ns() - time.monotonic_ns() + came_ns if came_ns else 0

    def _open_stdin(self) -> int:
        # If it is closed, descriptor 0 may now be another file of this process.
        if sys.__stdin__ is not None and not sys.__stdin__.closed:
            try:
                return os.dup(STDIN)
            except OSError:
                pass
        return os.open(os.devnull, os.O_RDONLY)

    def _open_output(self, rank: int, which: int, path: str) -> int:
        hidden = path == os.devnull and which == STDERR and self._capture_stderr
        if path and not hidden:
            self._files.append((rank, which, path))
            return self._open_file(path)
        console = sys.stdout if which == STDOUT else sys.stderr
        inheritable = is_descriptor(console, which) and not hidden
        if inheritable and (which == STDOUT or not self._capture_stderr):
            console.flush()
            return os.dup(which)
        read, write = self._open_detour(which, is_terminal=inheritable and os.isatty(which))
        self._pipes[rank, which] = read
        if hidden:  # It is not shown, but the report needs its end.
            self._hidden.add((rank, which))
        return write

    def _open_file(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except OSError as problem:
            raise EnvironmentProblem(
                f"cannot write {path}: {problem.strerror}", hint=shortage_hint(problem.errno)
            ) from None

    def _follow_file(self, rank: int, which: int, path: str) -> None:
        teed = rank in (self._dest.tee_stdouts if which == STDOUT else self._dest.tee_stderrs)
        filters = self._filters[which]
        if path == os.devnull or (not teed and not filters):
            return
        self._follow().follow_file(
            path,
            prefix=self._prefixes.get(rank, b""),
            to=self._console_sink(which) if teed else None,
            filters=filters,
            filtered_to=self._filtered_sink(which) if filters else None,
        )

    def _open_detour(self, which: int, *, is_terminal: bool) -> tuple[int, int]:
        if not is_terminal:
            return os.pipe()
        import termios

        read, write = os.openpty()
        # The real terminal adds carriage returns; this one must not.
        attributes = termios.tcgetattr(write)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(write, termios.TCSANOW, attributes)
        size = fcntl.ioctl(which, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(write, termios.TIOCSWINSZ, size)
        return read, write

    def _follow(self) -> LogFollower:
        if self._follower is None:
            from holdfast.processes.logs.follower import LogFollower

            self._follower = LogFollower()
            self._follower.start()
        return self._follower

    def _console_sink(self, which: int) -> Sink:
        if which not in self._sinks:
            from holdfast.processes.logs.lines import Sink

            self._sinks[which] = Sink.of_stream(sys.stdout if which == STDOUT else sys.stderr)
        return self._sinks[which]

    def _filtered_sink(self, which: int) -> Sink:
        """Return where the filtered lines of a stream go; all ranks share it."""
        if which not in self._filtered:
            from holdfast.processes.logs.lines import Sink

            self._filtered[which] = Sink.to_file(self._filtered_path(which))
        return self._filtered[which]

    def _filtered_path(self, which: int) -> str:
        return self._dest.filtered_stdout if which == STDOUT else self._dest.filtered_stderr
