"""Events as JSON lines on standard error, as TorchElastic's `console` shows them.

A console that takes nothing (a pager nobody scrolls, a terminal held by Ctrl-S) loses events; the
job does not wait for it longer than `CONSOLE_MS_MAX` each time.
"""

from __future__ import annotations

import select
import sys

from holdfast.events.handlers import EventHandler
from holdfast.messages import CONSOLE_MS_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.events.values import Event


class ConsoleEventHandler(EventHandler):
    """Writes each event as a line to standard error, whatever `LOGLEVEL` says."""

    def record(self, event: Event) -> None:
        """Write the event. Raises `OSError` if the console is closed or stuck."""
        stream = sys.stderr
        if stream is None:
            raise OSError("there is no standard error")
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError, AttributeError):
            pass  # A stream of Python's own, such as a notebook's, is never stuck.
        else:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            if not poll.poll(CONSOLE_MS_MAX):
                raise OSError(f"the console takes no line for {CONSOLE_MS_MAX} ms")
        stream.write(f"{event.serialize()}\n")
        stream.flush()
