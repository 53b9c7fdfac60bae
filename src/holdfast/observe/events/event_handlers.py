"""`EventHandler`, and the handlers without further dependencies: null, console and JSON lines.

The caller calls `record` for one event at a time, in order; `flush` at the end of each job; and `close` once, after
the last event. A handler of the program or of a plug-in runs in its own thread, so it may be slow;
`holdfast.observe.background` has the limits.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast.console import write_line
from holdfast.observe.timeline import TimelineLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.observe.events.event import Event


class EventHandler(ABC):
    """Receives events, one by one. Derive from it and `configure` it."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Handle an event; a handler of rendezvous events receives `RdzvEvent`s."""

    def flush(self) -> None:  # noqa: B027 (most handlers do not buffer)
        """Send buffered events; called at the end of a job."""

    def close(self) -> None:  # noqa: B027 (most handlers have nothing to close)
        """Send buffered events, and close. This is the last call."""


class NullEventHandler(EventHandler):
    """Ignores events."""

    def record(self, event: Event) -> None:
        pass


class ConsoleEventHandler(EventHandler):
    """Writes each event as a line to standard error, at any `LOGLEVEL`."""

    def record(self, event: Event) -> None:
        """Raise `OSError` if the console is closed or stuck."""
        write_line(event.serialize())


FILE_BYTES_MAX = 64 * 1024 * 1024
"""A file is rotated before it exceeds this size. So each kind of file needs at most twice this size on a node."""
BUFFERED_MAX = 1000
"""How many events are buffered before the folder exists; the oldest are dropped first."""


class LogDirectoryHandler(EventHandler):
    """Writes the events and the timeline of a job to its log directory.

    With `events` false it writes only the timeline, since another handler writes the events.
    """

    def __init__(
        self,
        folder: str | Callable[[], str | None],
        *,
        events: bool = True,
        file_bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self._events = JsonLinesEventHandler(folder) if events else None
        self._timeline = JsonLinesEventHandler(
            folder, stem="timeline", file_bytes_max=file_bytes_max
        )

    def record(self, event: Event | TimelineLine) -> None:
        """Append a line to one of the files; raise `OSError` if it cannot be written."""
        if isinstance(event, TimelineLine):
            self._timeline.record(event)
            # A reader needs the newest `run` and `generation` lines to interpret the others.
            if event.kind == "run":
                self._timeline.head = (event.serialize(),)
            elif event.kind == "generation":
                self._timeline.head = (*self._timeline.head[:1], event.serialize())
        elif self._events is not None:
            self._events.record(event)

    def flush(self) -> None:
        for one in self._files():
            one.flush()

    def close(self) -> None:
        for one in self._files():
            one.close()

    def _files(self) -> list[JsonLinesEventHandler]:
        return [one for one in (self._timeline, self._events) if one is not None]


class JsonLinesEventHandler(EventHandler):
    """Appends events as JSON lines to `<stem>-<host>-<pid>.jsonl` in a folder.

    Each event is one line, appended by one call, so a reader never sees a partial line and two writers never mix
    their lines. Each node has its own file, since several nodes may share a folder. At `FILE_BYTES_MAX` the file is
    renamed to `<name>.1`, replacing the previous one.

    The folder of a run is created when the first workers start, after the first events. So `folder` may be a
    function that returns None until the folder exists; events are buffered.
    """

    def __init__(
        self,
        folder: str | Callable[[], str | None],
        *,
        file_bytes_max: int = FILE_BYTES_MAX,
        stem: str = "events",
    ) -> None:
        self._folder = folder
        self._stem = stem
        self._file_bytes_max = file_bytes_max
        self._owner = os.getpid()
        self._descriptor: int | None = None
        self._size = 0
        self._buffer: list[str] = []
        self._lost = 0
        self._is_line_begun = False
        self.path = ""
        """The file, once it exists."""
        self.head: tuple[str, ...] = ()
        """The first lines of every further file."""

    def record(self, event: Event | TimelineLine) -> None:
        """Append a line; raise `OSError` if the file cannot be written."""
        self._buffer.append(event.serialize())
        if len(self._buffer) > BUFFERED_MAX:
            del self._buffer[0]
            self._lost += 1
        self.flush()

    def flush(self) -> None:
        """Write the buffered lines, if the folder exists."""
        while self._buffer and self._is_open():
            # A failed write is not retried: the next line may belong to another file.
            self._append(self._buffer.pop(0))

    def close(self) -> None:
        """Write the buffered lines, and close the file."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._lost += len(self._buffer)
        self._buffer.clear()
        if self._lost and self.path:
            raise OSError(f"{self._lost} events were dropped before the folder existed")

    def _is_open(self) -> bool:
        if self._descriptor is None:
            folder = self._folder if isinstance(self._folder, str) else self._folder()
            if folder is None:
                return False
            self.path = self.path or os.path.join(folder, file_name(self._stem))
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
            self._size = os.fstat(self._descriptor).st_size
        return True

    def _append(self, line: str) -> None:
        begin = "\n" if self._is_line_begun else ""
        data = f"{begin}{line}\n".encode()
        if self._size and self._size + len(data) > self._file_bytes_max:
            self._rotate()
        assert self._descriptor is not None
        try:
            written = os.write(self._descriptor, data)
        except OSError as problem:
            # The message, for example of a full disk, then names the file.
            problem.filename = self.path
            raise
        self._size += written
        self._is_line_begun = written < len(data) and (written > 0 or self._is_line_begun)
        if written < len(data):
            raise OSError(f"{self.path}: wrote only {written} of {len(data)} bytes")

    def _rotate(self) -> None:
        """Start a new file. A forked child does not, because its parent still writes to the old one."""
        if os.getpid() != self._owner or self._descriptor is None:
            return
        os.rename(self.path, f"{self.path}.1")
        os.close(self._descriptor)
        self._descriptor = None
        self._is_line_begun = False
        self._is_open()
        for line in self.head:
            self._append(line)


def file_name(stem: str = "events") -> str:
    """Return the name of this agent's file; every agent on this host has its own."""
    host = os.uname().nodename.replace("/", "_") or "node"
    return f"{stem}-{host}-{os.getpid()}.jsonl"
