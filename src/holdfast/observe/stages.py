"""Where the time of each generation went, as one node saw it: out of its lifecycle events, by its clock.

`stages_of` is pure. All times are differences of one host's monotonic clock; for a person elsewhere
they are told as ages, so that no clocks are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.limits import WHY_CHARS_MAX
from holdfast.core.supervision import StopReason
from holdfast.observe import lifecycle
from holdfast.printable import one_line
from holdfast.wire.control import GenerationStages

if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN = -1.0


class _Generation:
    """What is known of one generation."""

    def __init__(self, number: int, started_at: float, gone_at: float, met_at: float) -> None:
        self.number, self.started_at = number, started_at
        self.gone_at, self.met_at = gone_at, met_at
        """When the workers before it were gone, and when the nodes had met for it; 0 if not known."""
        self.started: lifecycle.GenerationStarted | None = None
        self.first_steps: dict[int, float] = {}
        self.first_heartbeats: dict[int, float] = {}
        self.last_step_at = 0.0
        self.failed_at = 0.0
        self.stopping: lifecycle.GenerationStopping | None = None
        self.stopped_at = 0.0
        self.failures: tuple[lifecycle.WorkerFailure, ...] = ()
        self.asked = ""

    def stages(self, now: float) -> GenerationStages:
        started, stopping = self.started, self.stopping
        firsts = self.first_steps or self.first_heartbeats
        first_step_s = UNKNOWN
        if started is not None and len(firsts) >= len(started.workers):
            first_step_s = max(firsts.values()) - self.started_at
        detect_s = stop_s = UNKNOWN
        if stopping is not None:
            since = self.failed_at
            if not since and stopping.reason is StopReason.UNHEALTHY:
                since = self.last_step_at  # They hung from then on, as far as it is known.
            if since:
                detect_s = stopping.at - since
            if self.stopped_at:
                stop_s = self.stopped_at - stopping.at
        reason = detail = ""
        if stopping is not None:
            reason = stopping.reason.value
            detail = stopping.detail
            if stopping.reason is StopReason.ASKED:
                detail = self.asked
            elif self.failures:
                first = self.failures[0]
                detail = f"rank {first.global_rank} failed: {first.ending}"
        return GenerationStages(
            generation=self.number,
            age_s=max(0.0, now - self.started_at),
            ran_s=max(0.0, (stopping.at if stopping is not None else now) - self.started_at),
            is_over=stopping is not None,
            world_size=started.world_size if started is not None else 0,
            why=one_line(started.why, WHY_CHARS_MAX) if started is not None else "",
            regroup_s=_between(self.gone_at, self.met_at),
            start_s=_between(self.met_at, self.started_at),
            first_step_s=max(UNKNOWN, first_step_s),
            detect_s=max(UNKNOWN, detect_s),
            stop_s=stop_s,
            reason=reason,
            detail=one_line(detail, WHY_CHARS_MAX),
        )


def _between(begin: float, end: float) -> float:
    return max(0.0, end - begin) if begin and end else UNKNOWN


def stages_of(
    now: float, began_at: float, events: Iterable[lifecycle.LifecycleEvent]
) -> list[GenerationStages]:
    """Return the generations that these events are of, the oldest first; the node began at `began_at`."""
    found: dict[int, _Generation] = {}
    gone_at, met_at = began_at, 0.0

    def of(number: int) -> _Generation:
        return found.setdefault(number, _Generation(number, began_at, 0.0, 0.0))

    for event in events:
        match event:
            case lifecycle.RendezvousEnded():
                met_at = 0.0 if event.error else event.at
            case lifecycle.GenerationStarted(generation=number):
                found[number] = _Generation(number, event.at, gone_at, met_at or gone_at)
                found[number].started = event
                gone_at = met_at = 0.0
            case lifecycle.FirstHeartbeat(generation=number):
                of(number).first_heartbeats.setdefault(event.worker.global_rank, event.at)
            case lifecycle.ProgressSampled(generation=number):
                for rank, _, at in event.steps:
                    of(number).first_steps.setdefault(rank, at)
                    of(number).last_step_at = max(of(number).last_step_at, at)
            case lifecycle.WorkerEnded(generation=number) if event.failed:
                generation = of(number)
                if generation.stopping is None and not generation.failed_at:
                    generation.failed_at = event.at
            case lifecycle.GenerationStopping(generation=number):
                of(number).stopping = event
            case lifecycle.GenerationStopped(generation=number):
                of(number).stopped_at = gone_at = event.at
            case lifecycle.WorkersFailed(generation=number):
                of(number).failures = event.failures
            case lifecycle.Requested() if found:
                found[max(found)].asked = event.what
    return [found[number].stages(now) for number in sorted(found)]
