"""A group of worker processes on this node: start, events, stop, results.

`RunningGroup` is one start of the workers of a `GroupSpec`. There are two kinds: a worker is either a command
(`CommandGroup`) or a function (`FunctionGroup` in `function_workers`). Nothing polls at
intervals: one epoll descriptor covers the keeper's events, the zygote's, the workers' return values, and
pidfds of processes that a replaced subprocess handler started.

There are two interfaces. TorchElastic's is `start`, `wait`, `pids` and `close`. The agent, which
decides what an exit means, waits until `fileno()` is readable or `next_deadline()` passes, and takes
the events of `poll_events`: a `WorkerExited` for each worker and, after `begin_stop`, one
`WorkersStopped`.

A worker that fails because of a peer often exits before that peer. If it shows no reason of its own,
its `WorkerExited` is delayed until another worker fails with a reason, up to `EXIT_NS_MAX`. Otherwise
the stop that follows would end the peer too early, and hide the reason.

As in TorchElastic, a program can replace the start of commands: it derives a class from
`SubprocessHandler` and registers a factory with `replace_subprocess_handler`. Such a process is not
below the keeper. A pidfd reports its exit, the handler stops it, and the agent kills its descendants,
or its process group once it has exited.

The path of a worker's exit: the keeper (`keeper/keeper_program.py`) reaps the process, its client
(`keeper/keeper_client.py`) turns the message into `Exited`, `_receive_keeper_events` and
`_worker_exited` record it here, and `poll_events` gives it to the agent's loop.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from holdfast import console, plugins
from holdfast.core import blame, stopping, supervision
from holdfast.core.machine import TICK
from holdfast.core.values import Value
from holdfast.defaults import REAP_S, SHUTDOWN_S
from holdfast.errors import SHORTAGES, EnvironmentProblem, PluginError, shortage_hint
from holdfast.lazy_dataclass import factory_field, lazy_dataclass
from holdfast.numa import binding
from holdfast.processes.failures import failure as process_failure
from holdfast.processes.failures.oom_kills import OomKills
from holdfast.processes.keeper import keeper_client
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.keeper.keeper_program import descendants_of, send_signal
from holdfast.processes.logs.specs import DefaultLogsSpecs, WorkerStdio
from holdfast.processes.poll import min_of, wait_for
from holdfast.processes.procfs import activity_of, has_ended, is_stopped, state_of
from holdfast.processes.signals import as_enum
from holdfast.side_thread import CallTimedOut, SideThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import IO, Any, TextIO

    from holdfast.core.machine import Effect, Event
    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.keeper.deadline import WorkersDeadline
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.processes.zygote.warm_start import WarmStart


# The time limit for reading the files of a failed worker: their file system may not respond.
READ_S_MAX = 2.0
# Signals that end a worker whose peer has exited: a watchdog's, a broken pipe's.
SIGNALS_OF_A_PEER = (signal.SIGABRT, signal.SIGPIPE)
# How long a worker that SIGKILL did not end may take to exit after the keeper's death.
LAST_MS_MAX = 1_000
KILLED_AT_DEADLINE = "the keeper stopped this node's workers at their deadline"
# A worker that still runs so long after the stop signal is reported; earlier if its grace period is short.
SLOW_AFTER_S = 2.0
SLOW_AFTER_SHARE = 0.1
# The time limit for reading what a slow worker does.
ACTIVITY_S_MAX = 2.0
# The `order` of a worker that SIGKILL does not end: after all others, since no node has this many.
ORDER_OF_GIVEN_UP = 1 << 20
LOGS_DEST = (
    "stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files", "filtered_stdout", "filtered_stderr",
)  # fmt: skip
# Temporary errors of an exec.
RETRYABLE_ERRORS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ETXTBSY)

_factory: Callable[..., SubprocessHandler] | None = (
    None  # The factory with which a program replaced the start of commands.
)


@lazy_dataclass
class RunProcsResult:
    """How a group of workers ended, by local rank."""

    return_values: dict[int, Any] = factory_field(default_factory=dict)
    failures: dict[int, ProcessFailure] = factory_field(default_factory=dict)
    stdouts: dict[int, str] = factory_field(default_factory=dict)
    stderrs: dict[int, str] = factory_field(default_factory=dict)

    def is_failed(self) -> bool:
        return len(self.failures) > 0


class WorkerExit(Value):
    """How one worker exited, as first seen."""

    rank: int
    pid: int
    exitcode: int
    detail: str
    order: int
    when_ns: int  # On the wall clock, as in error files.
    after_stop: bool  # A stop had begun before.
    retryable: bool = True  # False if a restart would fail in the same way.
    stray_signal: bool = False  # It died of a signal that the stop, if any, had not sent to it.

    @property
    def failed(self) -> bool:
        """Whether this ending is a failure; an unusual exit with code 0 has a detail."""
        return self.exitcode != 0 or bool(self.detail)


class GroupSpec(Value):
    """One start of a group of workers. All mappings are by local rank, 0 to n-1."""

    name: str
    """The name of the role, for log prefixes."""
    entrypoint: Callable[..., Any] | str
    """A program, with `args` as its arguments, or a function that is called with them."""
    args: dict[int, tuple[Any, ...]]
    envs: dict[int, dict[str, str]]
    logs_specs: LogsSpecs
    log_line_prefixes: dict[int, str] | None = None
    start_method: str = "spawn"
    """How functions start, by `multiprocessing`'s names."""
    numa_options: object = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    capture_stderr: bool = True
    log_tail: int = 0
    """The bytes of each worker's output to keep on disk, if it has no file; 0 for none."""
    world_size: int = 0
    """The number of workers on all nodes; 0 if there are only those of this group."""
    defers_threads: bool = False
    """Whether threads start only when they are needed, because the caller handles events as they arrive.

    Then the group follows the workers' output from its first byte, or from `follow_output` on.
    """


def is_retryable(error: tuple[int, str] | None) -> bool:
    """Whether a new start may succeed, because the system only lacked resources."""
    return error is None or error[0] in RETRYABLE_ERRORS


def start_error(error: tuple[int, str] | None) -> str:
    """Return why a forked child could not become the worker."""
    if error is None:
        return ""
    number, step = error
    hint = shortage_hint(number)
    why = f": {os.strerror(number)}" if number else ""
    return f"could not be started: {step}{why}" + (f" ({hint})" if hint else "")


def _wall_ns(at_ns: int) -> int:
    """Return a time of the monotonic clock on the wall clock."""
    return time.time_ns() - (time.monotonic_ns() - at_ns)


def unkillable(pid: int, reap_s: float) -> str:
    """Return the state of a process that survives SIGKILL."""
    state = state_of(pid)
    where = "in uninterruptible sleep" if state == "D" else f"in state {state}"
    return f"survived SIGKILL for {reap_s:g} s: {where}"


def report_slow(workers: dict[int, int], limit_s: float, kill_at: float) -> None:
    """Report what workers do, by local rank, that have not exited after the stop signal."""
    from holdfast.processes import stacks  # Few stops need it.

    for rank, pid in workers.items():
        activity = stacks.activity_of(pid, limit_s=limit_s)
        rest_s = kill_at - time.monotonic()
        if rest_s > 0 and not has_ended(pid):
            console.warning(
                f"worker {rank} (pid {pid}) has not exited yet: {activity}; killing it in {rest_s:.0f} s"
            )


def report_left_behind(workers: dict[int, int], leftovers: list[int], reap_s: float) -> None:
    """Report workers, by local rank, and their leftovers that SIGKILL did not end."""
    for rank, pid in workers.items():
        console.error(f"worker {rank} (pid {pid}) is left behind: it {unkillable(pid, reap_s)}")
    for pid in leftovers:
        what = f"process {pid}, which a worker had started,"
        console.error(f"{what} is left behind: it {unkillable(pid, reap_s)}")


def exit_of_unkillable(rank: int, pid: int, reap_s: float) -> WorkerExit:
    """Return the exit of a worker that SIGKILL does not end: after all others, by SIGKILL."""
    return WorkerExit(
        rank,
        pid,
        -signal.SIGKILL,
        unkillable(pid, reap_s),
        order=ORDER_OF_GIVEN_UP + rank,
        when_ns=time.time_ns(),
        after_stop=True,
    )


def _require_every_rank(mapping: Mapping[int, object], nprocs: int, what: str) -> None:
    """Raise unless the keys are exactly the local ranks of this node."""
    if set(mapping) != set(range(nprocs)):
        raise RuntimeError(
            f"{what}: expected one entry for each local rank {list(range(nprocs))}, "
            f"got {sorted(mapping)}"
        )


def _check_destinations(dest: object, nprocs: int, logs_specs: LogsSpecs) -> None:
    """Raise `PluginError` unless a program's or plug-in's logs specs chose destinations for all workers."""
    source = f"{plugins.owner_of(logs_specs)}: reify"
    plugins.require(dest, LOGS_DEST, source, "a LogsDest")
    for name in ("stdouts", "stderrs", "error_files"):
        try:
            _require_every_rank(getattr(dest, name), nprocs, name)
        except RuntimeError as problem:
            raise PluginError(f"{source}: {problem}") from None


class RunningGroup(ABC):
    """One start of a group of workers. Not thread-safe: use it from one thread at a time."""

    def __init__(
        self,
        spec: GroupSpec,
        *,
        keeper: Keeper | None = None,
        warm: WarmStart | None = None,
        deadline: WorkersDeadline | None = None,
    ) -> None:
        """`warm` requires its `keeper`. When `deadline` passes, the keeper kills the workers."""
        self.spec = spec
        self.name = spec.name
        self.entrypoint = spec.entrypoint
        self.args = spec.args
        self.envs = spec.envs
        self.nprocs = len(spec.args)
        self._world_size = max(spec.world_size, self.nprocs)
        _require_every_rank(spec.args, self.nprocs, "args")
        _require_every_rank(spec.envs, self.nprocs, "envs")
        dest = spec.logs_specs.reify(spec.envs)
        if isinstance(spec.logs_specs, DefaultLogsSpecs):
            spec.logs_specs.use_attempt()
        else:
            _check_destinations(dest, self.nprocs, spec.logs_specs)
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.error_files = dest.error_files
        self._stdio = WorkerStdio(
            dest,
            prefixes=spec.log_line_prefixes
            or {rank: f"[{spec.name}{rank}]:" for rank in range(self.nprocs)},
            stdout_filters=spec.duplicate_stdout_filters or (),
            stderr_filters=spec.duplicate_stderr_filters or (),
            capture_stderr=spec.capture_stderr,
            log_tail=spec.log_tail,
        )
        self.grace_s: float = SHUTDOWN_S
        self.reap_s: float = REAP_S
        self.stop_signal: int = signal.SIGTERM
        self._keeper = keeper
        self._deadline = deadline
        self._owns_keeper = keeper is None
        self._warm = warm
        self._zygote_fd = -1
        self._inherited: dict[str, str] | None = None
        self._cpus: dict[int, list[int]] = {}  # Of each worker that is bound to CPUs.
        self._defers_threads = spec.defers_threads
        self._unfollowed: list[int] = []  # Descriptors of output that is not followed yet.
        self._oom_kills: OomKills | None = None
        self._shortage: OSError | None = None  # Why a worker could not be forked.
        self._failure_reader: SideThread | None = None
        self._started: dict[int, int] = {}  # rank -> pid
        self._running: set[int] = set()
        self._exits: dict[int, WorkerExit] = {}
        self.generation = 0
        """The generation of the events. The agent sets this and `explain`."""
        self.explain: Callable[[ProcessFailure], None] | None = None
        """Adds to a failure what the agent knows about it."""
        self._pending: list[WorkerExit | keeper_client.Expired] = []
        self._failures_at_end: dict[int, ProcessFailure] | None = None
        self._delayed: list[WorkerExit] = []  # Delayed, so that their cause appears first.
        self._delayed_until = 0.0
        self._stop: stopping.Stop | None = None
        self._stop_began_ns = 0
        self._expired = False  # The keeper is killing all workers, at the deadline of the node.
        self._stderr_before_stop: dict[int, int] = {}  # Bytes on standard error.
        self._stop_reported = False
        self._slow_report: threading.Thread | None = None
        self._leftovers: list[int] = []  # Left by workers; SIGKILL does not end them.
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._closed = False

    # TorchElastic's interface.

    def start(self) -> None:
        """Start all workers. If one cannot start, end the others and raise."""
        if self._started or self._exits:
            raise ValueError("these workers are already started; a context starts them only once")
        try:
            self._start()
            self._begin_output()
        except BaseException:
            self.close(signal.SIGKILL, 0)
            raise

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002
        """Wait until any worker failed or all succeeded, then return how they exited.

        A failure stops the other workers first. `timeout` is in seconds: 0 does not wait, a
        negative one waits without a limit. If the timeout passes first, this returns None; otherwise
        it releases everything, as `close` does. `period` is ignored, because exits are events.
        """
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while not self._closed:
            self.poll_events(time.monotonic())
            if self._stop is None and self.is_over:
                self._stop_when_over()
            if self.stop_ended:
                result = self.result()
                self.release()
                return result
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return None
            self._block(min_of(deadline, self.next_deadline()))
        return self.result()

    def _stop_when_over(self) -> None:
        """Stop the workers that still run, because one has failed or all have exited."""
        self.begin_stop(self.stop_signal, self.grace_s)

    def pids(self) -> dict[int, int]:
        return dict(self._started)

    def log_files(self) -> list[tuple[int, str, str]]:
        """Return local rank, stream and path of each file with a worker's output, complete or a tail."""
        tails = self._stdio.tail_files
        found = [
            (rank, name, tails.get((rank, which)) or files[rank])
            for which, name, files in ((1, "stdout", self.stdouts), (2, "stderr", self.stderrs))
            for rank in range(self.nprocs)
        ]
        return [(rank, name, path) for rank, name, path in found if path not in ("", os.devnull)]

    @property
    def filtered_stdout(self) -> TextIO | None:
        """The file with the lines of standard output that match a filter; None without filters."""
        return self._stdio.filtered_file(1)

    @property
    def filtered_stderr(self) -> TextIO | None:
        """The file with the lines of standard error that match a filter; None without filters."""
        return self._stdio.filtered_file(2)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = SHUTDOWN_S) -> None:
        """Stop all workers: `death_sig`, up to `timeout` seconds, then SIGKILL.

        Returns when all their processes have exited. May be called again.
        """
        if self._closed:
            return
        self.begin_stop(death_sig or self.stop_signal, timeout)
        self._stop_reported = True  # The caller takes no events.
        while not self.stop_ended:
            self._block(self.next_deadline())
            self.poll_events(time.monotonic())
        self.release()

    # The agent's interface.

    def fileno(self) -> int:
        """Return the descriptor that is readable when `poll_events` has something."""
        return self._epoll.fileno()

    def poll_events(self, now: float) -> list[Event]:
        """Read what happened, continue a stop, and return the new events for the supervision."""
        self._read_all()
        if self._delayed and now >= self._delayed_until:
            self._report_held_exits()
        if self._stop is not None and not self._stop.ended:
            self._perform(self._stop.handle(now, TICK, self._stop.story.last))
            if self._stop.ended:  # The time limit passed before all processes had exited.
                self._check_keeper()
        events: list[Event] = []
        for one in self._pending:
            match one:
                case WorkerExit(rank=rank, failed=failed, retryable=retryable):
                    events.append(
                        supervision.WorkerExited(self.generation, rank, failed, retryable)
                    )
                case keeper_client.Expired():
                    events.append(supervision.WorkersExpired(self.generation))
        self._pending.clear()
        if self.stop_ended and not self._stop_reported:
            events.append(self.stopped())
        return events

    def next_deadline(self) -> float | None:
        """Return when `poll_events` is due at the latest, on the monotonic clock."""
        if self._pending or (self.stop_ended and not self._stop_reported):
            return 0.0  # No descriptor becomes readable for these.
        if self._delayed:
            return self._delayed_until
        return self._stop.next_deadline() if self._stop is not None else None

    def begin_stop(
        self,
        signum: int,
        grace_s: float,
        *,
        unresponsive: Iterable[int] = (),
        node: str = "",
        cause: str = "",
    ) -> None:
        """Begin to stop the workers; `WorkersStopped` follows when all processes have exited.

        `unresponsive` are local ranks that cannot react to a signal: they get SIGKILL at once.
        `node` and `cause` are for the story of the stop.
        """
        if self._stop is None:
            self._report_held_exits()
            self._stop_began_ns = self._stop_began_ns or time.time_ns()
            self._follow_if_written()
            self._stderr_before_stop = {
                rank: self._stdio.stderr_written(rank) for rank in self._running
            }
            self._stop = stopping.Stop(
                self._running,
                signum=int(signum),
                grace_s=grace_s,
                reap_s=self.reap_s,
                unresponsive=unresponsive,
                notice_s=min(SLOW_AFTER_S, grace_s * SLOW_AFTER_SHARE),
            )
            self._stop.story.node = node
            self._stop_event(stopping.StopRequested(), cause)

    def follow_output(self) -> None:
        """Follow the workers' output from now on, even if there is none yet."""
        for fd in self._unfollowed:
            self._unwatch(fd)
        self._unfollowed, self._defers_threads = [], False
        self._stdio.begin_following()

    def kill_now(self) -> None:
        """Shorten the stop: SIGKILL at once."""
        self._stop_event(stopping.KillRequested())

    @property
    def stop_ended(self) -> bool:
        """Whether a stop has begun and ended."""
        return self._stop is not None and self._stop.ended

    @property
    def given_up(self) -> dict[int, int]:
        """The process ids of workers that SIGKILL did not end, by local rank."""
        ranks = self._stop.given_up if self._stop is not None else ()
        return {rank: self._started[rank] for rank in ranks}

    @property
    def left_behind(self) -> list[int]:
        """The process ids that SIGKILL did not end: workers, and processes that they started."""
        return [*self.given_up.values(), *self._leftovers]

    def running(self) -> set[int]:
        return set(self._running)

    @property
    def is_over(self) -> bool:
        """Whether a worker has failed or all have exited, and no exit is delayed."""
        return not self._delayed and (self.all_ended() or self.first_failure() is not None)

    def all_ended(self) -> bool:
        return len(self._exits) == self.nprocs

    def first_failure(self) -> WorkerExit | None:
        failed = [exited for exited in self._exits.values() if exited.failed]
        return min(failed, key=lambda exited: exited.order, default=None)

    def stopped(self) -> Event:
        """Return the event at the end of a stop."""
        self._stop_reported = True
        failed = any(failure.failed_by_itself() for failure in self._all_failures().values())
        return supervision.WorkersStopped(self.generation, len(self.left_behind), failed)

    def failures_so_far(self) -> dict[int, ProcessFailure]:
        """Return the failures so far; their output may be incomplete."""
        return self._explained(exited for exited in self._exits.values() if exited.failed)

    def _explained(self, exits: Iterable[WorkerExit]) -> dict[int, ProcessFailure]:
        failures = {exited.rank: self._failure(exited) for exited in exits}
        if self.explain is not None:
            for failure in failures.values():
                self.explain(failure)
        return failures

    def _all_failures(self) -> dict[int, ProcessFailure]:
        """Return all failures after a stop, with the end of each worker's standard error."""
        if self._failures_at_end is None:
            self._finish_output()
            given_up = self.given_up.items()
            self._failures_at_end = {
                **dict(sorted(self.failures_so_far().items())),
                **self._explained(exit_of_unkillable(*one, self.reap_s) for one in given_up),
            }
        return self._failures_at_end

    def result(self) -> RunProcsResult:
        """Return how the workers exited, after a stop."""
        outcome = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        outcome.failures.update(self._all_failures())
        if not outcome.failures:
            outcome.return_values = self.return_values()
        return outcome

    def return_values(self) -> dict[int, Any]:
        """Return the workers' return values by local rank, once all have succeeded."""
        return {rank: self._value_of(rank) for rank in range(self.nprocs)}

    def release(self) -> None:
        """Release the descriptors, and the keeper if it is this group's own."""
        if self._closed:
            return
        self._closed = True
        if self._warm is not None:
            self._warm.forget()
        if self._slow_report is not None:
            self._slow_report.join(ACTIVITY_S_MAX)
        self._finish_output()
        self._stdio.close()
        self._release()
        self._epoll.close()
        report_left_behind(self.given_up, self._leftovers, self.reap_s)
        if self._owns_keeper and self._keeper is not None:
            self._keeper.close(wait=not self.left_behind)

    # For the two kinds of worker.

    @abstractmethod
    def _start(self) -> None:
        """Start all workers, or raise."""

    def _value_of(self, rank: int) -> Any:
        """Return the return value of a worker that succeeded."""
        del rank
        return None

    def _problem_at_exit(self, rank: int) -> str:
        """Return why a worker failed although it exited with code 0; else an empty string."""
        del rank
        return ""

    def _release(self) -> None:  # noqa: B027 (not every kind has something)
        """Release what this kind of worker needed."""

    def _use_keeper(self, keeper: Keeper) -> None:
        self._keeper = keeper
        if self._deadline is not None:
            keeper.watch(self._deadline.timer_fds, self._deadline.presence_fd)
        self._watch(keeper.fileno(), self._receive_keeper_events)
        if self._warm is not None:
            self._watch_zygote()

    def _choose_cpus(self) -> None:
        if self.spec.numa_options is not None:
            self._cpus = binding.cpus_of_workers(self.spec.numa_options, range(self.nprocs))

    def _spawn(
        self,
        rank: int,
        argv: Sequence[str] | None,
        passed: Mapping[int, int] | None = None,
        call: Any = None,
    ) -> None:
        """Request a worker from the zygote if that can fork it, else from the keeper.

        `passed` are its descriptors besides the standard streams.
        """
        assert self._keeper is not None
        streams = self._stdio.open(rank)
        fds = {**streams, **(passed or {})}
        if self._inherited is None:
            self._inherited = keeper_client.inherited_environment()
        env = {**self._inherited, **self.envs[rank]}
        cwd, cpus = keeper_client.working_directory(), self._cpus.get(rank, ())
        try:
            if argv is not None and self._warm is not None and self._warm.can_fork(argv, env, fds):
                self._warm.spawn(rank, argv, env=env, cwd=cwd, fds=fds, cpus=cpus)
            else:
                self._keeper.spawn(rank, argv, env=env, cwd=cwd, fds=fds, call=call, cpus=cpus)
        finally:
            for fd in streams.values():
                os.close(fd)

    def _await_spawned(self) -> None:
        warm, ranks = self._warm, set(range(self.nprocs))
        if warm is not None:
            warm.begin()
        self._begin_output()
        # Do this while the keeper forks the workers, so that it delays no worker, and before a worker has
        # children.
        keeper_client.become_subreaper_if_wanted()
        self._oom_kills = OomKills()
        while True:
            self._receive_keeper_events()
            if self._started.keys() | self._exits.keys() >= ranks:
                break
            self._block(warm.next_deadline() if warm is not None else None)
            self._read_all()
            if warm is not None:
                self._receive_zygote_events()
        if self._shortage is not None:
            raise self._shortage

    # What the workers write.

    def _begin_output(self) -> None:
        """Follow the workers' output: at once or, if the caller handles events, when there is some."""
        if not self._defers_threads:
            self._stdio.begin_following()
        elif not self._unfollowed:
            self._unfollowed = self._stdio.begin_with_files()
            for fd in self._unfollowed:
                self._watch_output(fd)

    def _watch_output(self, fd: int) -> None:
        self._watch(fd, lambda: self._output_arrived(fd))

    def _output_arrived(self, fd: int) -> None:
        self._unwatch(fd)  # The stream may have ended, without any output.
        self._follow_if_written()

    def _follow_if_written(self) -> None:
        if self._stdio.has_unread():
            self.follow_output()

    def _finish_output(self) -> None:
        self._follow_if_written()
        self._stdio.finish()

    # What the keeper and the zygote report.

    def _receive_keeper_events(self) -> None:
        assert self._keeper is not None
        for event in self._keeper.receive():
            match event:
                case (
                    keeper_client.Spawned(key)
                    | keeper_client.SpawnFailed(key)
                    | keeper_client.Exited(key)
                ) if key < 0:
                    pass  # Not a worker but the zygote; its own connection reports everything.
                case keeper_client.Spawned(rank, pid):
                    self._worker_started(rank, pid)
                case keeper_client.SpawnFailed(rank, number, text):
                    if number in SHORTAGES:
                        self._shortage = OSError(number, text)
                    self._worker_exited(rank, 0, 127, f"could not be started: {text}")
                case keeper_client.Exited(rank, pid, exitcode, error, at_ns):
                    # Ignore a worker on which an earlier start gave up.
                    if self._started.get(rank) == pid:
                        detail, retryable = start_error(error), is_retryable(error)
                        if error is not None and error[0] in SHORTAGES:
                            exitcode = EnvironmentProblem.exit_code
                        self._worker_exited(
                            rank, pid, exitcode, detail, retryable=retryable, at_ns=at_ns
                        )
                case keeper_client.Expired(at_ns):
                    self._expired, self._stop_began_ns = True, _wall_ns(at_ns)
                    self._pending.append(event)
                case keeper_client.DescendantsExited():
                    self._stop_event(stopping.LeftoversGone())
                case keeper_client.KeeperDied():
                    self._keeper_lost()

    def _worker_started(self, rank: int, pid: int) -> None:
        self._started[rank] = pid
        self._running.add(rank)
        if self._stop is not None:
            self._stop.killed.add(rank)
            self._kill_tree(rank)  # Another worker of the same start failed to start.

    def _worker_exited(
        self,
        rank: int,
        pid: int,
        exitcode: int,
        detail: str = "",
        *,
        retryable: bool = True,
        at_ns: int = 0,
    ) -> None:
        if rank in self._exits:
            return
        self._running.discard(rank)
        if exitcode == 0 and not detail:
            detail = self._problem_at_exit(rank)
        elif exitcode == -signal.SIGKILL and self._expired and not detail:
            detail = KILLED_AT_DEADLINE
        elif exitcode == -signal.SIGKILL and self._stop is None and not detail:
            detail = self._oom_kills.explain() if self._oom_kills is not None else ""
        stop, died_of = self._stop, max(0, -exitcode)
        exited = WorkerExit(
            rank,
            pid,
            exitcode,
            detail,
            order=len(self._exits),
            when_ns=_wall_ns(at_ns) if at_ns else time.time_ns(),
            after_stop=stop is not None or self._expired,
            retryable=retryable,
            stray_signal=bool(stop and died_of and not detail and not stop.has_sent(died_of, rank)),
        )
        self._exits[rank] = exited
        if exited.failed and self._may_be_consequence(exited):
            self._delayed.append(exited)
        else:
            if exited.failed:
                self._report_held_exits()
            self._pending.append(exited)
        if len(self._exits) == self._world_size:
            self._report_held_exits()  # No peer remains that could be the cause.
        if stop is not None:
            self._stop_event(stopping.LeaderExited(rank, died_of))

    def _report_held_exits(self) -> None:
        """Report the delayed exits."""
        self._pending += self._delayed
        self._delayed.clear()

    def _keeper_lost(self) -> None:
        """Note that the keeper was killed: the kernel has killed the workers with it."""
        assert self._keeper is not None
        self._unwatch(self._keeper.fileno())
        self._owns_keeper = True  # No other group can use it now.
        keeper_client.sweep_after_loss()
        keeper = f"the keeper of the workers (pid {self._keeper.pid})"
        for rank in range(self.nprocs):
            pid = self._started.get(rank)
            if pid is None:
                self._worker_exited(rank, 0, 127, f"could not be started: {keeper} has exited")
            elif rank not in self.given_up or keeper_client.ended_soon(pid, LAST_MS_MAX):
                detail = f"{keeper} was killed, so the kernel killed the workers"
                self._worker_exited(rank, pid, -signal.SIGKILL, detail)
        self._stop_event(stopping.KeeperLost())

    def _check_keeper(self) -> None:
        """Kill a stuck or stopped keeper, which would not kill the workers; note processes that survive SIGKILL."""
        assert self._keeper is not None
        assert self._stop is not None
        if not self._keeper.responds():
            self._keeper.kill()
        self._receive_keeper_events()
        if self._stop.leftovers_given_up:
            spared = self._warm.pids() if self._warm is not None else []
            self._leftovers = [*{*descendants_of(self._keeper.pid)}.difference(spared)]

    def _receive_zygote_events(self) -> None:
        warm = self._warm
        assert warm is not None
        warm.receive_events()
        warm.tick(time.monotonic())
        if warm.fileno() != self._zygote_fd:
            self._unwatch(self._zygote_fd)
            self._watch_zygote()
        self._receive_keeper_events()  # If the zygote was lost, `warm` has read from the keeper.

    def _watch_zygote(self) -> None:
        """Watch the zygote; restart it for the next start if it has exited."""
        assert self._warm is not None
        assert self._keeper is not None
        if not self._keeper.lost:
            self._warm.prepare(self._keeper)
        self._zygote_fd = self._warm.fileno()
        if self._zygote_fd >= 0:
            self._watch(self._zygote_fd, self._receive_zygote_events)

    # The stop.

    def _stop_event(self, event: Event, cause: str = "") -> None:
        """Pass an event to the stop, if one is in progress, and perform its effects."""
        if self._stop is not None:
            cause = cause or self._stop.story.last
            self._perform(self._stop.handle(time.monotonic(), event, cause))

    def _perform(self, effects: Sequence[Effect]) -> None:
        keeper = self._keeper
        for effect in effects:
            if keeper is None or keeper.lost:
                self._stop_event(stopping.KeeperLost())
                return
            match effect:
                case stopping.SignalLeader(key, signum):
                    self._signal_leader(key, signum)
                case stopping.KillTree(key):
                    if self._stop is not None and self._stop.grace_expired:
                        console.warning(
                            f"worker {key} (pid {self._started[key]}) did not exit in time: killed it "
                            f"({activity_of(self._started[key])})"
                        )
                    self._kill_tree(key)
                case stopping.ReportSlow(keys, rest_s):
                    pids = {key: self._started[key] for key in keys}
                    self._report_slow(pids, min(ACTIVITY_S_MAX, rest_s), rest_s)
                case stopping.SignalLeftovers(signum):
                    keeper.signal_leftovers(signum)
                case stopping.KillLeftovers() if keeper.is_childless:
                    self._stop_event(stopping.LeftoversGone())
                case stopping.KillLeftovers():
                    keeper.sweep()

    def _report_slow(self, workers: dict[int, int], limit_s: float, rest_s: float) -> None:
        """Report what slow workers do, in a thread: it takes too long for the agent's loop."""
        kill_at = time.monotonic() + rest_s
        self._slow_report = threading.Thread(
            target=report_slow, args=(workers, limit_s, kill_at), name="holdfast-slow", daemon=True
        )
        try:
            self._slow_report.start()
        except RuntimeError:
            self._slow_report = None  # No thread can be started.

    def _signal_leader(self, rank: int, signum: int) -> None:
        assert self._keeper is not None
        self._keeper.signal(rank, signum)

    def _kill_tree(self, rank: int) -> None:
        assert self._keeper is not None
        if is_stopped(self._keeper.pid):
            self._keeper.kill()  # A stopped keeper would not kill them.
        else:
            self._keeper.kill_tree(rank)

    def _may_be_consequence(self, exited: WorkerExit) -> bool:
        """Return whether a worker may have failed because of a peer that has not exited yet."""
        now = time.monotonic()
        self._delayed_until = self._delayed_until or now + blame.EXIT_NS_MAX / 1e9
        if self._stop is not None or now >= self._delayed_until or self._world_size == 1:
            return False
        if exited.detail or (exited.exitcode < 0 and -exited.exitcode not in SIGNALS_OF_A_PEER):
            return False
        return self._failure(exited).trace() in (blame.FailureTrace.PEER, blame.FailureTrace.SILENT)

    def _failure(self, exited: WorkerExit) -> ProcessFailure:
        self._follow_if_written()
        if self._failure_reader is None:
            self._failure_reader = SideThread("holdfast-failures", READ_S_MAX)
        try:
            return self._failure_reader.call(self._read_failure, exited)
        except CallTimedOut as problem:
            failure = process_failure.failure_of(
                exited, stop_began_ns=self._stop_began_ns, error_file=""
            )
            what = f"cannot read its error file and standard error: {problem}"
            failure.detail = f"{failure.detail}; {what}" if failure.detail else what
            return failure

    def _read_failure(self, exited: WorkerExit) -> ProcessFailure:
        rank = exited.rank
        tail = self._stdio.stderr_tail(rank)
        traceback_at, traceback_ns = self._stdio.log_tail(rank, tail)
        return process_failure.failure_of(
            exited,
            stop_began_ns=self._stop_began_ns,
            traceback_before_stop=0 <= traceback_at < self._stderr_before_stop.get(rank, 0),
            stderr_traceback_ns=traceback_ns,
            error_file=self.error_files[rank],
            stderr_tail=tail,
            stdout_file=self.stdouts[rank],
            stderr_file=self.stderrs[rank],
        )

    # Descriptors.

    def _watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _read_all(self) -> None:
        for fd, _events in self._epoll.poll(0):
            if fd in self._readers:  # An earlier reader may have ended this watch.
                self._readers[fd]()

    def _block(self, deadline: float | None) -> None:
        wait_for(deadline, self._epoll.fileno())


# Commands.


class SubprocessHandler:
    """One command worker: its `Popen`, its log files, and how it is signalled."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: object = None,
    ) -> None:
        self._files: list[IO[bytes]] = []
        self._stdout = self._open(stdout)
        self._stderr = self._open(stderr)
        self.local_rank_id = local_rank_id
        try:
            words = (entrypoint, *map(str, args))
            environment = {**keeper_client.inherited_environment(), **env}
            if numa_options is None:
                self.proc = self._popen(words, environment)
            else:
                chosen = binding.cpus_of_workers(numa_options, [local_rank_id])
                with binding.OnCpus(chosen.get(local_rank_id, ())):
                    self.proc = self._popen(words, environment)
        except BaseException:
            self._close_files()
            raise

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the process group, by default with SIGTERM, and close the log files."""
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:
            pass
        self._close_files()

    def _close_files(self) -> None:
        for stream in self._files:
            stream.close()
        self._files.clear()

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True
        )

    def _open(self, path: str | None) -> IO[bytes] | None:
        if not path:
            return None
        stream = open(path, "wb")  # noqa: SIM115 (closed with the worker)
        self._files.append(stream)
        return stream


def get_subprocess_handler(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str | None,
    stderr: str | None,
    local_rank_id: int,
    numa_options: object = None,
) -> SubprocessHandler:
    """Create the handler of one command worker, with the registered factory if there is one."""
    return (_factory or SubprocessHandler)(
        entrypoint=entrypoint,
        args=args,
        env=env,
        stdout=stdout,
        stderr=stderr,
        local_rank_id=local_rank_id,
        numa_options=numa_options,
    )


def replace_subprocess_handler(
    factory: Callable[..., SubprocessHandler] | None,
) -> Callable[..., SubprocessHandler] | None:
    """Start command workers by `factory`; None restores the default.

    The factory gets the arguments of `get_subprocess_handler` by name. Returns the previous factory.
    """
    global _factory
    previous, _factory = _factory, factory
    return previous


def custom_handler_factory() -> Callable[..., SubprocessHandler] | None:
    """Return the registered factory, or None."""
    return _factory


class CommandGroup(RunningGroup):
    """Workers that are commands; `entrypoint` is the program, `args` its arguments by rank."""

    def __init__(self, spec: GroupSpec, **resources: Any) -> None:
        super().__init__(spec, **resources)
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}
        self._pidfds: dict[int, int] = {}  # rank -> pidfd

    def _start(self) -> None:
        # Replaced handlers need the keeper too: it reports that no process is left.
        self._use_keeper(self._keeper or Keeper.start())
        if custom_handler_factory() is not None:
            for rank in range(self.nprocs):
                self._start_by_handler(rank)
            return
        self._choose_cpus()
        for rank in range(self.nprocs):
            self._spawn(rank, [str(self.entrypoint), *map(str, self.args[rank])])
        self._await_spawned()

    def _start_by_handler(self, rank: int) -> None:
        handler = get_subprocess_handler(
            entrypoint=str(self.entrypoint),
            args=self.args[rank],
            env=self.envs[rank],
            stdout=self.stdouts[rank] or None,
            stderr=self.stderrs[rank] or None,
            local_rank_id=rank,
            numa_options=self.spec.numa_options,
        )
        self.subprocess_handlers[rank] = handler
        self._pidfds[rank] = os.pidfd_open(handler.proc.pid)
        self._worker_started(rank, handler.proc.pid)
        self._watch(self._pidfds[rank], lambda: self._handler_exited(rank))
        self._stdio.note_files(rank)

    def _handler_exited(self, rank: int) -> None:
        handler = self.subprocess_handlers[rank]
        self._unwatch(self._pidfds[rank])
        # Do this before reaping it: until then, its process id, and so the group's, is not reused.
        handler.close(as_enum(signal.SIGKILL))
        self._worker_exited(rank, handler.proc.pid, handler.proc.wait())

    def _keeper_lost(self) -> None:
        # Workers of replaced handlers are not below the keeper, so they survive it.
        orphaned = [rank for rank in self.subprocess_handlers if rank in self._running]
        for rank in orphaned:
            self._kill_tree(rank)
        super()._keeper_lost()
        for rank in orphaned:
            if select.select([self._pidfds[rank]], [], [], self.reap_s)[0]:
                self._handler_exited(rank)

    def _signal_leader(self, rank: int, signum: int) -> None:
        if rank in self.subprocess_handlers:
            self.subprocess_handlers[rank].close(as_enum(signum))
        else:
            super()._signal_leader(rank, signum)

    def _kill_tree(self, rank: int) -> None:
        if rank in self.subprocess_handlers:
            pid = self.subprocess_handlers[rank].proc.pid
            # Kill the leader first, so that it starts no more processes.
            for one in [pid, *descendants_of(pid)]:
                send_signal(one, signal.SIGKILL)
        else:
            super()._kill_tree(rank)

    def _release(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def start_group(
    spec: GroupSpec,
    *,
    keeper: Keeper | None = None,
    warm: WarmStart | None = None,
    deadline: WorkersDeadline | None = None,
) -> RunningGroup:
    """Start one worker for each local rank and return their context, which must be closed.

    `warm` is for commands, and for functions that start by `spawn`.
    """
    context: RunningGroup
    try:
        if isinstance(spec.entrypoint, str):
            context = CommandGroup(spec, keeper=keeper, warm=warm, deadline=deadline)
        else:
            # Most jobs run commands.
            from holdfast.processes.workers.function_workers import FunctionGroup

            if spec.start_method != "spawn":
                keeper = warm = None  # A keeper that forks functions serves only one start.
            context = FunctionGroup(spec, keeper=keeper, warm=warm, deadline=deadline)
        context.start()
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        workers = "1 worker" if len(spec.args) == 1 else f"{len(spec.args)} workers"
        raise EnvironmentProblem(
            f"cannot start {workers}: {error.strerror}", hint=shortage_hint(error.errno)
        ) from error
    return context
