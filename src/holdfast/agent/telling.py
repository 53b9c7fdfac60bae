"""Turns what an agent does into the moments that onlookers are told: `RunTeller`.

The agent says in passing what happens; here it is put together with what the agent knows of itself.
While nobody looks on, nothing is put together at all.
"""

from __future__ import annotations

import os
import sys

from holdfast.agent import moments
from holdfast.agent.moments import Moment, Onlookers, WorkerEnd, WorkerFact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.agent.own_records import OwnRecords
    from holdfast.agent.simple import SimpleElasticAgent
    from holdfast.agent.workers import RunResult, Worker, WorkerSpec


class RunTeller:
    """Tells the onlookers of one agent."""

    def __init__(self, agent: SimpleElasticAgent) -> None:
        self.onlookers = Onlookers()
        self._agent = agent
        self._own: OwnRecords | None = None
        self._began_at = 0.0
        self._since = 0.0  # When the node began to look for its place among the others.
        self._has_met = False  # Whether that has come to an end, good or bad.
        self._entered = 0

    # A context around all that is told of one run; around another one it adds nothing.

    def __enter__(self) -> None:
        """Let an agent that no launcher looks on at keep records; `UsageError` if it cannot."""
        if not self._entered and not self.onlookers.recorded:
            self._begin_own_records()
        self._entered += 1

    def __exit__(self, *problem: object) -> None:
        """Wait until whoever wants the records has them."""
        self._entered -= 1
        if not self._entered and self._own is not None:
            self._own.end()

    def _begin_own_records(self) -> None:
        from holdfast.agent.own_records import OwnRecords, wanted

        destination = self._agent.get_worker_group().spec.event_log_handler
        if self._own is None:
            if not wanted(destination):
                return
            logs_specs = getattr(self._agent, "_logs_specs", None)
            self._own = OwnRecords(destination, lambda: getattr(logs_specs, "run_dir", None))
            self.onlookers.add(self._own)
        self._own.begin()

    # What is told.

    def tell(self, moment: Moment) -> None:
        """Tell everybody."""
        self.onlookers.tell(moment)

    def began(self) -> None:
        """A run begins."""
        at, wall = moments.now()
        self._began_at = self._since = at
        self._has_met = False
        if self.onlookers:
            self.tell(self.beginning(at, wall))

    def beginning(self, at: float = 0.0, wall: float = 0.0) -> moments.Began:
        """Return what this run is, as a moment."""
        spec = self._agent.get_worker_group().spec
        handler = spec.rdzv_handler
        return moments.Began(
            at,
            wall,
            handler.get_run_id(),
            spec.role,
            handler.get_backend(),
            spec.get_entrypoint_name(),
            spec.local_world_size,
            spec.max_restarts,
            _program(spec),
        )

    def place(self, error: BaseException | None = None) -> moments.Met:
        """Return the place of this node among the others, as a moment."""
        at, wall = moments.now()
        rank, size = self._place()
        restarts = self._agent.machine.restart_count
        took_s = at - self._since
        return moments.Met(at, wall, took_s, rank, size, _traceback(error), restarts)

    def met(self, error: BaseException | None = None) -> None:
        """The node has its place among the others, or could not get one."""
        self._has_met = True
        if self.onlookers:
            self.tell(self.place(error))

    def ranked(self, took_s: float = 0.0, error: BaseException | None = None) -> None:
        """The workers have their ranks."""
        if self.onlookers:
            at, wall = moments.now()
            rank, size = self._place()
            restarts = self._agent.machine.restart_count
            self.tell(moments.Ranked(at, wall, took_s, rank, size, _traceback(error), restarts))

    def started(self, since: float) -> None:
        """All workers of a generation are started."""
        if not self.onlookers:
            return
        at, wall = moments.now()
        rank, size = self._place()
        machine = self._agent.machine
        workers = tuple(_fact(one) for one in self._agent.get_worker_group().workers)
        self.tell(
            moments.Started(
                at, wall, at - since, machine.generation, machine.restart_count, rank, size, workers
            )
        )
        self.looked("healthy")

    def looked(self, state: str) -> None:
        """It is known how the workers are."""
        if self.onlookers:
            left = self._agent.machine.budget.left
            self.tell(moments.Looked(moments.now()[0], state, left))

    def exited(self, local_rank: int, *, failed: bool) -> None:
        """A worker has ended by itself."""
        if self.onlookers:
            at, wall = moments.now()
            worker = _fact(self._agent.get_worker_group().workers[local_rank])
            self.tell(moments.Exited(at, wall, self._agent.machine.generation, worker, failed))

    def spoke(self, local_rank: int) -> None:
        """A worker has made its first call of `holdfast.worker`."""
        if self.onlookers:
            worker = _fact(self._agent.get_worker_group().workers[local_rank])
            generation = self._agent.machine.generation
            self.tell(moments.Spoke(moments.now()[0], generation, worker))

    def stopping(self, generation: int, reason: str) -> None:
        """What is left of a generation is being stopped."""
        if self.onlookers:
            self.tell(moments.Stopping(moments.now()[0], generation, reason))

    def stopped(self, generation: int) -> None:
        """Nothing of a generation is left."""
        self._since = moments.now()[0]
        self._has_met = False
        if self.onlookers:
            self.tell(moments.Stopped(self._since, generation))

    def ended(self, result: RunResult) -> RunResult:
        """The run has ended with this result."""
        if self.onlookers:
            self._tell_end(result, None)
        return result

    def failed(self, error: BaseException) -> None:
        """The run has ended with an error of the agent's."""
        if not self.onlookers:
            return
        from holdfast.rendezvous.errors import RendezvousError

        if isinstance(error, RendezvousError) and not self._has_met:
            self.met(error)
        self._tell_end(None, error)

    def _tell_end(self, result: RunResult | None, error: BaseException | None) -> None:
        at, wall = moments.now()
        rank, size = self._place()
        machine = self._agent.machine
        spec = self._agent.get_worker_group().spec
        self.tell(
            moments.Ended(
                at,
                wall,
                at - self._began_at,
                result.state.name.lower() if result is not None else "",
                machine.restart_count,
                machine.budget.left,
                spec.max_restarts,
                rank,
                size,
                self._ends(result) if result is not None else (),
                _traceback(error),
            )
        )

    def _place(self) -> tuple[int | None, int | None]:
        group = self._agent.get_worker_group()
        return group.group_rank, group.group_world_size

    def _ends(self, result: RunResult) -> tuple[WorkerEnd, ...]:
        ends = []
        for worker in self._agent.get_worker_group().workers:
            failure = result.failures.get(worker.global_rank)
            if failure is not None and not failure.consequence:
                error = _json(failure.error_file_data)
                ends.append(WorkerEnd(_fact(worker), "failed", failure.exitcode, error))
            elif result.is_failed():
                code = failure.exitcode if failure is not None else None
                ends.append(WorkerEnd(_fact(worker), "terminated", code))
            else:
                ends.append(WorkerEnd(_fact(worker), "succeeded", 0))
        return tuple(ends)


def _program(spec: WorkerSpec) -> str:
    """Return the name of the script or module that an interpreter runs, or else the entry point's.

    Of a program that is given as text there is no name, and nobody wants it as one.
    """
    name = spec.get_entrypoint_name()
    if spec.entrypoint != sys.executable and name != "run_script_path":  # What --run-path calls.
        return name
    for word in map(str, spec.args):
        if word == "-c":
            break
        if word and not word.startswith("-"):
            return os.path.basename(word)
    return name


def _fact(worker: Worker) -> WorkerFact:
    pid = worker.id if isinstance(worker.id, int) else 0
    return WorkerFact(
        worker.local_rank, worker.global_rank, worker.role_rank, worker.role_world_size, pid
    )


def _json(data: object) -> str:
    import json

    return json.dumps(data, default=str)


def _traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    import traceback

    return "".join(traceback.format_exception(error))
