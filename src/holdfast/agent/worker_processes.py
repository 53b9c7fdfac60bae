"""The workers of a node as processes: ranks, environments, start, stop and exits.

`WorkerProcesses` starts one `RunningGroup` (`processes.workers.group`) for each generation of a run, and
owns the processes that outlive a generation: the keeper, and the zygote that forks warm workers.

The workers' variables have TorchElastic's names and values; Holdfast's own begin with `HOLDFAST_`.
`HOLDFAST_GENERATION` counts the starts of the workers over the whole job, whatever the reason, and is
the same on every node; `TORCHELASTIC_RESTART_COUNT` counts failures only. `HOLDFAST_FENCE` is the same
on every node, too, and grows with every generation. Unlike the generation it keeps growing if the
coordinator loses its state and counts from 0 again.
"""

from __future__ import annotations

import os
import re
import signal
import string
import threading
import time
from typing import TYPE_CHECKING

from holdfast.agent.preimports import load
from holdfast.agent.spec import RunResult, Worker, WorkerState
from holdfast.core import supervision
from holdfast.core.values import Value
from holdfast.net.runtime_dir import remove_dead_sockets
from holdfast.numa import visible_devices
from holdfast.processes.keeper import keeper_client
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.logs import specs
from holdfast.processes.workers.group import GroupSpec, start_group
from holdfast.processes.zygote import warm_start
from holdfast.worker import LAST_END_ENV, PREVIOUS_WORLD_SIZE_ENV

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeVar

    from holdfast.agent.loop import LongWait
    from holdfast.agent.spec import WorkerGroup
    from holdfast.agent.watchdogs import Watchdogs
    from holdfast.core.machine import Event
    from holdfast.core.supervision import StopReason
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.keeper.deadline import WorkersDeadline
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.processes.workers.group import RunningGroup, RunProcsResult
    from holdfast.processes.zygote.warm_start import WarmStart

    T = TypeVar("T")

LAST_END_CHARS_MAX = 500


class ProcessSettings(Value):
    """How a node's workers are started and stopped, the same in every generation."""

    logs_specs: LogsSpecs
    start_method: str = "spawn"
    """How to start functions: a start method of `multiprocessing`."""
    log_line_prefix_template: str | None = None
    stop_signal: int = signal.SIGTERM
    capture_stderr: bool = True
    log_tail: int = 0
    """The bytes of each worker's output to keep on disk; 0 for none."""
    worker_env: Mapping[str, str] = {}
    """Variables to add to the agent's own environment."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports once, before it forks Python workers."""


class StartOrder(Value):
    """How to start the workers of a generation."""

    generation: int
    restart_count: int
    fence: int = 0
    previous_world_size: int = 0
    """The world size of the previous generation; 0 for the first."""
    last_end: str = ""
    """Why the previous generation ended."""
    deadline: WorkersDeadline | None = None
    """When the keeper kills the workers, unless the agent extends it."""
    defers_threads: bool = False
    """Whether threads start only when they are needed: the caller serves the workers' output itself."""


class StopOrder(Value):
    """How to stop the workers of a generation."""

    reason: StopReason | None
    """None at the end of a run."""
    signum: int
    """0 for the configured signal."""
    grace_s: float
    stuck: Mapping[int, str] = {}
    """Why workers cannot react to a signal, by local rank."""
    node: str = ""
    """For the story of the stop, as `cause`."""
    cause: str = ""


class Environments:
    """Arguments, environments and log prefixes of a generation's workers, by local rank."""

    def __init__(self) -> None:
        self.args: dict[int, tuple[Any, ...]] = {}
        self.envs: dict[int, dict[str, str]] = {}
        self.prefixes: dict[int, str] = {}


class WorkerProcesses:
    """The processes of one node's workers, from `prepare` to `close`. It can be used again."""

    def __init__(self, group: WorkerGroup, settings: ProcessSettings, watchdogs: Watchdogs) -> None:
        self.group = group
        self.settings = settings
        self.context: RunningGroup | None = None
        self.result = RunResult(WorkerState.INIT)
        self.is_active = False
        self._watchdogs = watchdogs
        self._generation = -1
        self._stuck: Mapping[int, str] = {}
        self._keeper: Keeper | None = None
        self._warm: WarmStart | None = None

    # The start.

    def prepare(self) -> None:
        """Begin to import the modules to preload while this node joins the others."""
        settings, spec = self.settings, self.group.spec
        if not settings.preload:
            return
        assert spec.entrypoint is not None
        self._warm = warm_start.warm_start(
            settings.preload, spec.entrypoint, spec.args, settings.start_method, settings.worker_env
        )
        keeper = self._obtain_keeper()
        if self._warm is not None and keeper is not None:
            # A zygote that hangs in the user's modules may outlive its keeper.
            keeper_client.become_subreaper_if_wanted()
            self._warm.prepare(keeper)
            # Meanwhile, load the modules that the first start and restart need in this process.
            load("holdfast.processes.failures.failure")
            load("holdfast.processes.logs.follower")

    def is_ready(self) -> bool:
        if self._warm is None:
            return True
        keeper = self._obtain_keeper()
        return keeper is None or self._warm.check_ready(keeper)

    @property
    def activity(self) -> str:
        if self._warm is None or self.is_active:
            return ""
        return self._warm.activity(time.monotonic())

    def start(self, order: StartOrder, long_wait: LongWait) -> Mapping[int, object]:
        given = self.environments(order)
        self.add_watchdogs(given.envs)
        return self.launch(order, given, long_wait)

    def environments(self, order: StartOrder) -> Environments:
        """Return arguments, environments and log prefixes of a generation's workers."""
        given, group, settings = Environments(), self.group, self.settings
        inherited = {**os.environ, **settings.worker_env}
        before: dict[str, str] = {}
        if order.previous_world_size:
            before[PREVIOUS_WORLD_SIZE_ENV] = str(order.previous_world_size)
            before[LAST_END_ENV] = order.last_end[:LAST_END_CHARS_MAX]
        for worker in group.workers:
            rank = worker.local_rank
            given.envs[rank] = {
                **settings.worker_env,
                **worker_environment(
                    group,
                    worker,
                    generation=order.generation,
                    restart_count=order.restart_count,
                    fence=order.fence,
                    inherited=inherited,
                ),
                **before,
            }
            given.args[rank] = tuple(substitute_local_rank(arg, rank) for arg in group.spec.args)
            if settings.log_line_prefix_template:
                given.prefixes[rank] = log_line_prefix(
                    settings.log_line_prefix_template, group.spec.role, worker
                )
        return given

    def add_watchdogs(self, envs: dict[int, dict[str, str]]) -> None:
        """Prepare timers and progress pages, and add them to the workers' environments."""
        self._watchdogs.begin(envs, {**os.environ, **self.settings.worker_env})
        for rank, env in envs.items():
            env.update(self._watchdogs.environment(rank))

    def launch(self, order: StartOrder, given: Environments, long_wait: LongWait) -> dict[int, int]:
        """Start the processes; return their ids by local rank."""
        self.release()
        self._generation, self._stuck = order.generation, {}
        keeper = self._obtain_keeper() if self._warm is not None else None
        if self._warm is not None and keeper is not None:
            with long_wait("imports"):  # Importing the user's modules may take any time.
                self._warm.await_ready(keeper)
        if callable(self.group.spec.entrypoint):
            with long_wait("the start of functions"):  # A fork server imports the user's modules.
                context = self._start_context(order, given)
        else:
            context = self._start_context(order, given)
        context.stop_signal = self.settings.stop_signal
        self.adopt(context)
        return context.pids()

    def adopt(self, context: RunningGroup) -> None:
        """Follow the processes of a context that was started."""
        context.generation, context.explain = self._generation, self.explain
        self.context, self.is_active = context, True
        self._watchdogs.started(self._generation, context.pids(), context.stderrs)

    def _start_context(self, order: StartOrder, given: Environments) -> RunningGroup:
        spec, settings = self.group.spec, self.settings
        assert spec.entrypoint is not None
        if order.deadline is not None:
            order.deadline.begin()
        group = GroupSpec(
            spec.role,
            spec.entrypoint,
            given.args,
            given.envs,
            settings.logs_specs,
            log_line_prefixes=given.prefixes or None,
            start_method=settings.start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            capture_stderr=settings.capture_stderr,
            log_tail=settings.log_tail,
            world_size=self.group.workers[0].world_size,
            defers_threads=order.defers_threads,
        )
        return start_group(
            group, keeper=self._obtain_keeper(), warm=self._warm, deadline=order.deadline
        )

    def _obtain_keeper(self) -> Keeper | None:
        """Return the keeper of all generations; None if each start makes its own."""
        if callable(self.group.spec.entrypoint) and self.settings.start_method != "spawn":
            return None
        if self._keeper is not None and self._keeper.is_gone():
            keeper_client.sweep_after_loss()  # It may have died while there were no workers.
            self._keeper.close()
            self._keeper = None
        if self._keeper is None:
            self._keeper = Keeper.start()
        return self._keeper

    # The stop.

    def begin_stop(self, order: StopOrder) -> Event | None:
        if not self.is_active or self.context is None:
            return None
        self._stuck = order.stuck
        self.context.begin_stop(
            order.signum or self.settings.stop_signal,
            order.grace_s,
            unresponsive=order.stuck,
            node=order.node,
            cause=order.cause,
        )
        return None

    def kill(self) -> None:
        if self.context is not None:
            self.context.kill_now()

    # Events.

    def events(self, now: float) -> list[Event]:
        context = self.context
        if context is None or not self.is_active:
            if self._warm is not None:
                self._warm.receive_events()
            return []
        events = context.poll_events(now)
        if any(isinstance(event, supervision.WorkersStopped) for event in events):
            self.keep_result(context)
        return events

    def keep_result(self, context: RunningGroup) -> None:
        """Keep the results of the workers, which have all exited."""
        self.is_active = False
        self.result = self.outcome(context.result())

    def descriptors(self) -> list[int]:
        if self.is_active and self.context is not None:
            return [self.context.fileno()]
        zygote = self._warm.fileno() if self._warm is not None else -1
        return [zygote] if zygote >= 0 else []

    def next_deadline(self, now: float) -> float | None:
        del now
        return self.context.next_deadline() if self.is_active and self.context is not None else None

    # Results.

    def outcome(self, result: RunProcsResult) -> RunResult:
        """Return how workers ended, by global rank."""
        return RunResult(
            WorkerState.FAILED if result.is_failed() else WorkerState.SUCCEEDED,
            self.by_global_rank(result.return_values),
            self.by_global_rank(result.failures),
        )

    def failures_so_far(self) -> dict[int, ProcessFailure]:
        if not self.is_active or self.context is None:
            return self.result.failures
        return self.by_global_rank(self.context.failures_so_far())

    def by_global_rank(self, of_workers: dict[int, T]) -> dict[int, T]:
        """Convert a mapping from local to global ranks."""
        workers = self.group.workers
        return {workers[rank].global_rank: one for rank, one in of_workers.items()}

    def explain(self, failure: ProcessFailure) -> None:
        """Add to a failure the cause that the watchdogs or the supervision know."""
        detail = self._stuck.get(failure.local_rank, "")
        if detail:
            failure.detail = f"{detail}; {failure.detail}" if failure.detail else detail
            failure.consequence = failure.stopped = False
        self._watchdogs.explain(failure)

    # The end.

    def start_deferred_services(self) -> None:
        if self.context is not None:
            self.context.follow_output()
        # A slow file system must not delay the agent.
        cleaner = threading.Thread(target=self._clean, name="holdfast-clean", daemon=True)
        try:
            cleaner.start()
        except RuntimeError:
            pass  # The system has no thread left; a later agent cleans up.

    def _clean(self) -> None:
        """Remove what agents left behind that were killed."""
        remove_dead_sockets()
        if getattr(self.settings.logs_specs, "is_kept_only_on_failure", False):
            specs.remove_abandoned_directories()

    def release(self) -> None:
        """Release the descriptors of the last generation."""
        if self.context is not None:
            self.context.release()
            self.context = None
        self.is_active = False

    def close(self) -> None:
        left_behind = self.context.left_behind if self.context is not None else []
        self.release()
        if self._warm is not None:
            self._warm.close()
            self._warm = None
        if self._keeper is not None:
            self._keeper.hang_up()
            if left_behind:  # The keeper would wait for them.
                self._keeper = None

    def await_keeper(self) -> None:
        """Wait until the keeper of the last run has exited."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.await_end()


# The ranks, arguments and environment of each worker.


def place_workers(
    count: int, first_rank: int, first_role_rank: int, world_size: int, role_world_size: int
) -> list[Worker]:
    """Return the workers of a node with consecutive ranks."""
    return [
        Worker(one, first_rank + one, first_role_rank + one, world_size, role_world_size)
        for one in range(count)
    ]


def worker_environment(
    group: WorkerGroup,
    worker: Worker,
    *,
    generation: int,
    restart_count: int,
    fence: int = 0,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that a worker gets on top of the agent's environment."""
    spec = group.spec
    # If the caller sets the address, something else serves the store.
    serves = spec.rdzv_handler.use_agent_store and not (spec.master_addr or spec.master_port)
    env = {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(serves),
        "HOLDFAST_GENERATION": str(generation),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if fence:
        env["HOLDFAST_FENCE"] = str(fence)
    if "OMP_NUM_THREADS" in inherited:
        env["OMP_NUM_THREADS"] = inherited["OMP_NUM_THREADS"]
    if spec.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env.update(visible_devices.device_variables(inherited, worker.local_rank))
    return env


def substitute_local_rank(arg: Any, local_rank: int | str) -> Any:
    """Replace `${local_rank}` and `$local_rank` in a text argument; leave other values unchanged."""
    if not isinstance(arg, str) or "local_rank" not in arg:
        return arg
    return re.sub(r"\$(?:\{local_rank\}|local_rank\b)", str(local_rank), arg)


def log_line_prefix(template: str, role: str, worker: Worker) -> str:
    """Fill a prefix template; unknown names stay unchanged."""
    return string.Template(template).safe_substitute(
        role_name=role,
        rank=worker.global_rank,
        local_rank=worker.local_rank,
        hostname=os.uname().nodename,
    )
