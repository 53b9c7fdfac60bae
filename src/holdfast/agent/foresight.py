"""What an agent needs when something fails, imported while nothing does.

A start imports little, to be quick. But what a failure and a restart need must not be looked for
when they come: by then the installation may have been upgraded under the job, or its file system
may be away. A job that ends before `QUIET_S` imports nothing for that.
"""

from __future__ import annotations

from holdfast import messages

QUIET_S = 1.0

NEEDED = (
    "traceback",
    "holdfast.agent.event_recorder",
    "holdfast.core.visible_devices",
    "holdfast.events.job",
    "holdfast.events.json_lines",
    "holdfast.processes.failures",
    "holdfast.processes.remote_failures",
    "holdfast.processes.report",
    "holdfast.processes.report_text",
    "holdfast.processes.tracebacks",
    "holdfast.rendezvous.errors",
    "holdfast.store.tcp_loop",
)


class Foresight:
    """Imports what is needed once, some time after it was told to begin."""

    def __init__(self) -> None:
        self._due: float | None = None

    def begin(self, now: float) -> None:
        """Have it done after a while."""
        self._due = now + QUIET_S

    def next_deadline(self) -> float | None:
        """Return when to `look`, if that is still to come."""
        return self._due

    def look(self, now: float) -> None:
        """Import it, if it is time."""
        if self._due is None or now < self._due:
            return
        self._due = None
        for name in NEEDED:
            try:
                __import__(name)
            except Exception as problem:  # noqa: BLE001 (a failure would meet it, and is not here yet)
                what = f"{name}: {messages.of(problem)}"
                messages.warning(f"what a failure would need cannot be imported: {what}")
        messages.debug("ready for failures")
