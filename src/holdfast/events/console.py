"""Events as JSON lines on standard error, as TorchElastic's `console` shows them.

A console that takes nothing (a pager nobody scrolls, a terminal held by Ctrl-S) loses events; the
job does not wait for it longer than `messages.CONSOLE_MS_MAX` each time.
"""

from __future__ import annotations

from holdfast.events.handlers import EventHandler
from holdfast.messages import put_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.events.values import Event


class ConsoleEventHandler(EventHandler):
    """Writes each event as a line to standard error, whatever `LOGLEVEL` says."""

    def record(self, event: Event) -> None:
        """Write the event. Raises `OSError` if the console is closed or stuck."""
        put_line(event.serialize())
