r"""Chunks of one stream in, whole prefixed lines out.

The one thing to know: a chunk that holds only plain lines is prefixed by a single
`bytes.replace` and written by a single call; lines are looked at one by one only where a
filter finds something. A lone `\r` ends a piece too, so that progress bars are seen.
It does not read anything and knows nothing of files or threads.
"""

from __future__ import annotations

from holdfast import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.processes.sinks import Sink

# A line that goes on for longer than this is shown in pieces, each on a line of its own. It
# bounds the memory that a worker which never ends its line can take.
LINE_BYTES_MAX = 1 << 20


class PrefixedLines:
    r"""The lines of one stream on their way to its sinks.

    `to` gets every line (or those that `accept` takes), `filtered_to` gets each line that
    holds at least one of `filters`. Both get them in order, whole, and with `prefix`. A filter
    and `accept` see the line without its prefix; `accept` sees it with its line end.
    """

    __slots__ = (
        "_accept", "_accept_failed", "_cr_held", "_filtered_to", "_filters", "_held",
        "_line_bytes_max", "_next_line", "_plain", "_prefix", "_to",
    )  # fmt: skip

    def __init__(
        self,
        prefix: bytes,
        to: Sink | None,
        *,
        filters: Sequence[bytes] = (),
        filtered_to: Sink | None = None,
        accept: Callable[[bytes], bool] | None = None,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        # A line end within the prefix would take the lines apart.
        self._prefix = prefix.replace(b"\r", b" ").replace(b"\n", b" ")
        self._next_line = b"\n" + self._prefix
        self._to = to
        self._filters = tuple(filters) if filtered_to is not None else ()
        self._filtered_to = filtered_to
        self._accept = accept
        self._accept_failed = False
        self._plain = to is not None and accept is None and not self._filters
        self._line_bytes_max = line_bytes_max
        # The start of a line whose end has not come yet, with the prefix before it.
        self._held = bytearray(self._prefix)
        # A `\r` at the end of a chunk waits for its successor: it may be half of a `\r\n`.
        self._cr_held = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream; write the lines that they complete."""
        if self._to is None and not self._filters:
            return
        if self._cr_held:
            data = b"\r" + data
            self._cr_held = False
        if not self._plain or b"\r" in data:
            self._feed_slowly(data)
        else:
            assert self._to is not None
            marked = data.replace(b"\n", self._next_line) if self._prefix else data
            cut = marked.rfind(b"\n") + 1
            if cut:
                self._to.write(self._held, marked, cut)
                self._held[:] = marked[cut:]
            else:
                self._held += data
        if len(self._held) - len(self._prefix) > self._line_bytes_max:
            self._emit_overlong()

    def flush(self) -> None:
        r"""End the stream: write what is held as a last line, with the `\n` it lacks."""
        if self._cr_held:
            self._cr_held = False
            self._emit(b"\r\n")
        elif len(self._held) > len(self._prefix):
            self._emit(b"\n")

    def _feed_slowly(self, data: bytes) -> None:
        if data.endswith(b"\r"):
            self._cr_held = True
            data = data[:-1]
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            self._emit(data[:cut])
        self._held += data[cut:]

    def _emit_overlong(self) -> None:
        """Write the held bytes in pieces of the allowed length; keep at least one byte."""
        held = bytes(self._held[len(self._prefix) :])
        start = 0
        while len(held) - start > self._line_bytes_max:
            self._held[len(self._prefix) :] = held[start : start + self._line_bytes_max]
            self._emit(b"\n")
            start += self._line_bytes_max
        self._held += held[start:]

    def _emit(self, ended: bytes) -> None:
        """Write the held bytes and `ended`, which ends with a line end; hold nothing after."""
        if self._filters or self._accept is not None:
            raw = bytes(self._held[len(self._prefix) :]) + ended
            self._emit_filtered(raw)
        if self._to is not None and self._accept is None:
            marked = self._mark(ended)
            self._to.write(self._held, marked, len(marked) - len(self._prefix))
        self._held[:] = self._prefix

    def _mark(self, ended: bytes) -> bytes:
        r"""Put the prefix behind each line end, at the speed of `bytes.replace`.

        First behind every `\r`; where a `\n` follows, the two are one line end and the prefix
        is taken out again. That is exact: each `\r` is followed by one prefix of ours.
        """
        if b"\r" in ended:
            ended = ended.replace(b"\r", b"\r" + self._prefix)
            ended = ended.replace(b"\r" + self._prefix + b"\n", b"\r\n")
        return ended.replace(b"\n", self._next_line)

    def _emit_filtered(self, raw: bytes) -> None:
        matching = any(text in raw for text in self._filters)
        if not matching and (self._accept is None or self._to is None):
            return
        lines = raw.splitlines(keepends=True)
        if matching and self._filtered_to is not None:
            found = [line for line in lines if any(text in line for text in self._filters)]
            self._write_lines(self._filtered_to, found)
        if self._accept is not None and self._to is not None:
            self._write_lines(self._to, [line for line in lines if self._accepted(line)])

    def _write_lines(self, sink: Sink, lines: list[bytes]) -> None:
        if lines:
            sink.write(b"", b"".join([part for line in lines for part in (self._prefix, line)]))

    def _accepted(self, line: bytes) -> bool:
        assert self._accept is not None
        try:
            return self._accept(line)
        except Exception as problem:  # noqa: BLE001 - the caller's own code may raise anything
            if not self._accept_failed:
                self._accept_failed = True
                messages.warning(
                    f"a filter of log lines failed, its lines are shown: "
                    f"{type(problem).__name__}: {problem}"
                )
            return True


class RawBytes:
    """The bytes of one stream on their way to its sink, at once and as they are.

    For a person who watches one terminal: a prompt has no line end, and a progress bar shows its
    state only until the next one.
    """

    __slots__ = ("_to",)

    def __init__(self, to: Sink | None) -> None:
        self._to = to

    def feed(self, data: bytes) -> None:
        """Write the next bytes of the stream."""
        if self._to is not None:
            self._to.write(data)

    def flush(self) -> None:
        """End the stream; nothing was held back."""
