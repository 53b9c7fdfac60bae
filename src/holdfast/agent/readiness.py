"""Whether the workers of the current generation run, out of what the agent tells of itself.

An onlooker like any other; the health checks ask it from another thread, for which reason all that
it knows is one text: why the node is not ready, or nothing.
"""

from __future__ import annotations

from holdfast.agent.moments import Ended, Exited, Moment, Started, Stopped, Stopping

NOT_YET = "the workers are not started yet"


class Readiness:
    """An onlooker; `why_not` is the `ready_callback` of a health check."""

    name = "the readiness check"

    def __init__(self) -> None:
        self._reason = NOT_YET
        self._running: set[int] = set()
        self._generation = -1

    def why_not(self) -> str:
        """Return why the workers do not run; nothing if they do."""
        return self._reason

    def __call__(self, moment: Moment) -> None:
        """Note what has happened."""
        if isinstance(moment, Started):
            self._generation = moment.generation
            self._running = {worker.local_rank for worker in moment.workers}
            self._reason = "" if self._running else "the node has no workers"
        elif isinstance(moment, Exited):
            self._note_exit(moment)
        elif isinstance(moment, Stopping) and moment.generation >= self._generation:
            self._reason = f"the workers are being stopped: {moment.reason}"
        elif isinstance(moment, Stopped) and moment.generation >= self._generation:
            self._reason = "the workers are stopped, and not started again yet"
        elif isinstance(moment, Ended):
            self._reason = "the run has ended"

    def _note_exit(self, moment: Exited) -> None:
        if moment.generation != self._generation:
            return
        self._running.discard(moment.worker.local_rank)
        if moment.failed:
            self._reason = f"worker {moment.worker.global_rank} has failed"
        elif not self._running and not self._reason:
            self._reason = "the workers have finished"
