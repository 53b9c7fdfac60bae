"""A group of worker processes on this node: start, events, stop, results.

`PContext` is one start of the workers; its two kinds differ only in what a worker is
(`SubprocessContext`: a command, `MultiprocessContext`: a function). Nothing here polls at
intervals: one epoll descriptor gathers the keeper's events, the workers' return values and, for
processes that a replaced subprocess handler started, pidfds.

There are two layers of use. A caller of TorchElastic's interface uses `start`, `wait`, `pids` and
`close`. The agent, which decides for itself what an exit means, waits on `fileno()` and uses
`poll_events`, `begin_stop`, `kill_now`, `tick` and `next_deadline`.
"""

from __future__ import annotations

import select
import signal
import time
from abc import ABC, abstractmethod

from holdfast import console
from holdfast.core import stopping
from holdfast.defaults import SHUTDOWN_S
from holdfast.processes.failures.exits import (
    Ended,
    OomKills,
    RunProcsResult,
    ending_of_unkillable,
    failure_of,
    is_retryable,
    report_left_behind,
    start_trouble,
)
from holdfast.processes.keeper import client
from holdfast.processes.keeper.main import descendants_of
from holdfast.processes.logs.specs import require_every_rank
from holdfast.processes.logs.stdio import WorkerStdio
from holdfast.processes.poll import min_of, wait_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from holdfast.processes.failures.failure import ProcessFailure
    from holdfast.processes.keeper.client import Keeper
    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.processes.zygote.client import WarmStart


class Watching:
    """Base of what is told of things by descriptors that become readable."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to take in."""
        return self._epoll.fileno()

    def _watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _take_what_is_ready(self) -> None:
        for fd, _events in self._epoll.poll(0):
            if fd in self._readers:  # One that was taken in before it may have ended the watch.
                self._readers[fd]()

    def _block(self, deadline: float | None) -> None:
        """Wait for anything to happen, or for the deadline."""
        wait_for(deadline, self._epoll.fileno())

    def _end_watching(self) -> None:
        self._epoll.close()


class Asking(Watching, ABC):
    """Base of contexts: has workers started, and hears of those who start them."""

    def __init__(self, keeper: Keeper | None, warm: WarmStart | None) -> None:
        super().__init__()
        self._keeper = keeper
        self._warm = warm
        self._zygote_fd = -1
        self._cpus: dict[int, list[int]] = {}  # Of each worker that is to be bound to some.

    @abstractmethod
    def _hear_keeper(self) -> None:
        """Take in what the keeper has to tell."""

    def _use_keeper(self, keeper: Keeper) -> Keeper:
        self._keeper = keeper
        self._watch(keeper.fileno(), self._hear_keeper)
        if self._warm is not None:
            self._watch_zygote()
        return keeper

    def _ask(
        self,
        rank: int,
        argv: Sequence[str] | None,
        *,
        env: Mapping[str, str],
        cwd: str,
        fds: Mapping[int, int],
        call: Any = None,
    ) -> None:
        """Ask for a worker: of the zygote if it can fork such a one, else of the keeper."""
        assert self._keeper is not None
        cpus = self._cpus.get(rank, ())
        if argv is not None and self._warm is not None and self._warm.takes(argv, env, fds):
            self._warm.spawn(rank, argv, env=env, cwd=cwd, fds=fds, cpus=cpus)
        else:
            self._keeper.spawn(rank, argv, env=env, cwd=cwd, fds=fds, call=call, cpus=cpus)

    def _choose_cpus(self, numa_options: object, count: int) -> None:
        """Find out what each worker is to be bound to, as far as this is asked for."""
        if numa_options is not None:
            from holdfast.numa.binding import cpus_of_workers

            self._cpus = cpus_of_workers(numa_options, range(count))

    def _await_answers(self, all_answered: Callable[[], bool]) -> None:
        """Wait until each worker that was asked for was forked, or could not be."""
        # While they are forked, so that it delays none, and before one has a family of its own.
        client.become_subreaper_if_wanted()
        warm = self._warm
        while True:
            self._hear_keeper()
            if all_answered():
                return
            self._block(warm.next_deadline() if warm is not None else None)
            if warm is not None:
                self._hear_zygote()

    def _hear_zygote(self) -> None:
        warm = self._warm
        assert warm is not None
        warm.take_in()
        warm.tick(time.monotonic())
        if warm.fileno() != self._zygote_fd:
            self._unwatch(self._zygote_fd)
            self._watch_zygote()
        self._hear_keeper()  # A lost zygote has it looked at, and its news would wait.

    def _watch_zygote(self) -> None:
        """Have the zygote's news come in; one that is gone is started again, for the next start."""
        assert self._warm is not None
        assert self._keeper is not None
        if not self._keeper.lost:
            self._warm.prepare(self._keeper)
        self._zygote_fd = self._warm.fileno()
        if self._zygote_fd >= 0:
            self._watch(self._zygote_fd, self._hear_zygote)


# How long a worker that was given up may still take once the keeper is gone too.
LAST_MS_MAX = 1_000


class PContext(Asking):
    """One start of a group of workers. Not thread-safe: use it from one thread at a time."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        keeper: Keeper | None = None,
        warm: WarmStart | None = None,
        capture_stderr: bool = True,
    ) -> None:
        super().__init__(keeper, warm)
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        require_every_rank(args, self.nprocs, "args")
        require_every_rank(envs, self.nprocs, "envs")
        dest = logs_specs.reify(envs)
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.error_files = dest.error_files
        self.filtered_stdout = dest.filtered_stdout
        self.filtered_stderr = dest.filtered_stderr
        require_every_rank(self.stdouts, self.nprocs, "stdouts")
        require_every_rank(self.stderrs, self.nprocs, "stderrs")
        self._stdio = WorkerStdio(
            dest,
            prefixes=log_line_prefixes or {rank: f"[{name}{rank}]:" for rank in range(self.nprocs)},
            stdout_filters=duplicate_stdout_filters or (),
            stderr_filters=duplicate_stderr_filters or (),
            capture_stderr=capture_stderr,
        )
        self.grace_s: float = SHUTDOWN_S
        self.reap_s: float = stopping.REAP_S
        self.stop_signal: int = signal.SIGTERM
        self._owns_keeper = keeper is None
        self._oom_kills = OomKills()
        self._started: dict[int, int] = {}  # rank -> pid
        self._running: set[int] = set()
        self._ended: dict[int, Ended] = {}
        self._fresh: list[Ended] = []
        self._stop: stopping.Stop | None = None
        self._stop_began_ns = 0
        self._leftovers: list[int] = []  # What workers left and SIGKILL does not end.
        self._closed = False

    # TorchElastic's interface.

    def start(self) -> None:
        """Start the workers, all or none; raises once those already started are gone again."""
        if self._started or self._ended:
            raise ValueError("these workers were started before; a context starts them once")
        try:
            self._start()
            self._stdio.begin_following()
        except BaseException:
            self.close(signal.SIGKILL, 0)
            raise

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002
        """Wait until any worker failed or all succeeded, then return how they ended.

        A failure first brings the other workers down. `timeout` is in seconds; 0 only looks, and
        a negative one waits for ever. None means that the time was over before. `period` is
        accepted for compatibility: exits are learnt as they happen. With the result all is
        released, as by `close`.
        """
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while not self._closed:
            self.poll_events(time.monotonic())
            if self._stop is None and (self.first_failure() or self.all_ended()):
                self.begin_stop(self.stop_signal, self.grace_s)
            if self._stop is not None and self._stop.ended:
                result = self.result()
                self.release()
                return result
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return None
            self._block(min_of(deadline, self.next_deadline()))
        return self.result()

    def pids(self) -> dict[int, int]:
        """Return the process id of each worker by local rank."""
        return dict(self._started)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = SHUTDOWN_S) -> None:
        """Bring all workers down: `death_sig`, up to `timeout` seconds, then SIGKILL.

        Returns when nothing is left of them. May be called again.
        """
        if self._closed:
            return
        if self._stop is None:
            self.begin_stop(death_sig or self.stop_signal, timeout)
        while self._stop is not None and not self._stop.ended:
            self._block(self.next_deadline())
            self.poll_events(time.monotonic())
        self.release()

    # The agent's interface.

    def poll_events(self, now: float) -> list[Ended]:
        """Take in what happened, drive a stop that is under way, return the new endings."""
        self._take_what_is_ready()
        self.tick(now)
        fresh, self._fresh = self._fresh, []
        return fresh

    def begin_stop(self, signum: int, grace_s: float, *, hopeless: Iterable[int] = ()) -> None:
        """Begin to bring the workers down; `stop_ended` tells when nothing is left.

        `hopeless` are local ranks that cannot answer a signal, so that asking them is in vain.
        """
        if self._stop is None:
            self._stop_began_ns = time.time_ns()
            self._stop = stopping.Stop(
                self._running,
                signum=int(signum),
                grace_s=grace_s,
                reap_s=self.reap_s,
                hopeless=hopeless,
            )
            self._perform(self._stop.begin(time.monotonic()))

    def kill_now(self) -> None:
        """Shorten a stop that is under way: SIGKILL at once."""
        if self._stop is not None:
            self._perform(self._stop.kill_now(time.monotonic()))

    def tick(self, now: float) -> None:
        """Let a stop that is under way see the time."""
        if self._stop is not None and not self._stop.ended:
            self._perform(self._stop.tick(now))
            if self.stop_ended:  # Time was over, before all were gone.
                self._doubt_keeper()

    def next_deadline(self) -> float | None:
        """Return when `poll_events` is due at the latest, on the monotonic clock."""
        if self._fresh:
            return 0.0  # They came with other news, and nothing will wake anyone for them.
        return self._stop.next_deadline() if self._stop is not None else None

    @property
    def stop_ended(self) -> bool:
        """Whether a stop was begun and nothing is left of the workers."""
        return self._stop is not None and self._stop.ended

    @property
    def given_up(self) -> dict[int, int]:
        """The workers that did not die even of SIGKILL: local rank to process id."""
        ranks = self._stop.given_up if self._stop is not None else ()
        return {rank: self._started[rank] for rank in ranks}

    @property
    def left_behind(self) -> list[int]:
        """The process ids of all that did not die even of SIGKILL: workers, and what they left."""
        return [*self.given_up.values(), *self._leftovers]

    def running(self) -> set[int]:
        """Return the local ranks whose leader runs."""
        return set(self._running)

    def all_ended(self) -> bool:
        """Whether every worker that was asked for has ended."""
        return len(self._ended) == self.nprocs

    def first_failure(self) -> Ended | None:
        """Return the failure that was seen first."""
        failed = [ended for ended in self._ended.values() if ended.failed]
        return min(failed, key=lambda ended: ended.order, default=None)

    def failures_so_far(self) -> dict[int, ProcessFailure]:
        """Return what is known of failed workers; some of their output may still be coming."""
        return {rank: self._failure(ended) for rank, ended in self._ended.items() if ended.failed}

    def result(self) -> RunProcsResult:
        """Return how the workers ended, with the end of each failure's standard error."""
        self._stdio.finish()
        outcome = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        outcome.failures.update(sorted(self.failures_so_far().items()))
        for rank, pid in self.given_up.items():
            outcome.failures[rank] = self._failure(ending_of_unkillable(rank, pid, self.reap_s))
        if not outcome.failures:
            outcome.return_values = {rank: self._value_of(rank) for rank in range(self.nprocs)}
        return outcome

    def release(self) -> None:
        """Let go of descriptors, and of the keeper if it is this context's own."""
        if self._closed:
            return
        self._closed = True
        if self._warm is not None:
            self._warm.forget()
        self._stdio.finish()
        self._stdio.close()
        self._release()
        self._end_watching()
        report_left_behind(self.given_up, self._leftovers, self.reap_s)
        if self._owns_keeper and self._keeper is not None:
            self._keeper.close(wait=not self.left_behind)

    # For the two kinds of worker.

    @abstractmethod
    def _start(self) -> None:
        """Start all workers, or raise."""

    def _value_of(self, rank: int) -> Any:
        """Return what a worker that succeeded returned."""
        del rank
        return None

    def _trouble_at_end(self, rank: int) -> str:
        """Return why a worker that ended with code 0 failed all the same."""
        del rank
        return ""

    def _release(self) -> None:
        """Let go of what the kind of worker needed."""

    def _await_spawned(self, ranks: Sequence[int]) -> None:
        """Wait until each worker that was asked for was forked."""
        if self._warm is not None:
            self._warm.begin()
        self._stdio.begin_following()  # Just the time for its imports: others are at work.
        self._await_answers(lambda: self._started.keys() | self._ended.keys() >= set(ranks))

    def _note_started(self, rank: int, pid: int) -> None:
        self._started[rank] = pid
        self._running.add(rank)
        if self._stop is not None:
            self._stop.killed.add(rank)
            self._kill_tree(rank)  # It was asked for by a start that failed at another worker.

    def _note_ended(
        self, rank: int, pid: int, exitcode: int, detail: str = "", *, retryable: bool = True
    ) -> None:
        if rank in self._ended:
            return
        self._running.discard(rank)
        if exitcode == 0 and not detail:
            detail = self._trouble_at_end(rank)
        elif exitcode == -signal.SIGKILL and self._stop is None and not detail:
            detail = self._oom_kills.explain()
        stop, died_of = self._stop, max(0, -exitcode)
        stray = bool(stop and died_of and not detail and not stop.has_sent(died_of, rank))
        order, now_ns = len(self._ended), time.time_ns()
        ended = Ended(
            rank, pid, exitcode, detail, order, now_ns, stop is not None, retryable, stray
        )
        self._ended[rank] = ended
        self._fresh.append(ended)
        if stop is not None:
            self._perform(stop.leader_ended(time.monotonic(), rank, died_of=died_of))

    def _hear_keeper(self) -> None:
        assert self._keeper is not None
        for event in self._keeper.receive():
            match event:
                case client.Spawned(key) | client.Unspawned(key) | client.Exited(key) if key < 0:
                    pass  # No worker but the zygote, whose own connection tells all.
                case client.Spawned(rank, pid):
                    self._note_started(rank, pid)
                case client.Unspawned(rank, _errno, text):
                    self._note_ended(rank, 0, 127, f"could not be started: {text}")
                case client.Exited(rank, pid, exitcode, trouble):
                    if self._started.get(rank) == pid:  # not one given up by an earlier start
                        detail, retryable = start_trouble(trouble), is_retryable(trouble)
                        self._note_ended(rank, pid, exitcode, detail, retryable=retryable)
                case client.Empty():
                    if self._stop is not None:
                        self._stop.cleared()
                case client.KeeperLost():
                    self._lose_keeper()

    def _lose_keeper(self) -> None:
        """Take in that the keeper was killed: the kernel has killed the workers with it."""
        assert self._keeper is not None
        self._unwatch(self._keeper.fileno())
        self._owns_keeper = True  # Nobody else can use it any more.
        client.sweep_after_loss()
        keeper = f"the keeper of the workers (pid {self._keeper.pid})"
        for rank in range(self.nprocs):
            if rank not in self._started:
                self._note_ended(rank, 0, 127, f"could not be started: {keeper} is gone")
            elif rank not in self.given_up or client.ended_soon(self._started[rank], LAST_MS_MAX):
                detail = f"{keeper} was killed, and they with it"
                self._note_ended(rank, self._started[rank], -signal.SIGKILL, detail)
        if self._stop is not None:
            self._stop.abandon()

    def _doubt_keeper(self) -> None:
        """Tell what cannot be killed from what a keeper that is stuck or stopped does not kill."""
        assert self._keeper is not None
        assert self._stop is not None
        if not self._keeper.answers():
            self._keeper.kill()
        self._hear_keeper()
        if self._stop.leftovers_given_up:
            spared = self._warm.pids() if self._warm is not None else []
            self._leftovers = [*{*descendants_of(self._keeper.pid)}.difference(spared)]

    def _perform(self, effects: Sequence[stopping.Effect]) -> None:
        keeper = self._keeper
        for effect in effects:
            if keeper is None or keeper.lost:
                assert self._stop is not None
                self._stop.abandon()
                return
            match effect:
                case stopping.SignalLeader(key, signum):
                    self._signal_leader(key, signum)
                case stopping.KillTree(key):
                    if self._stop is not None and self._stop.grace_expired:
                        console.warning(
                            f"worker {key} (pid {self._started[key]}) did not end in time: killed"
                        )
                    self._kill_tree(key)
                case stopping.AskLeftovers(signum):
                    keeper.ask_leftovers(signum)
                case stopping.SweepLeftovers():
                    keeper.sweep()

    def _signal_leader(self, rank: int, signum: int) -> None:
        assert self._keeper is not None
        self._keeper.signal(rank, signum)

    def _kill_tree(self, rank: int) -> None:
        assert self._keeper is not None
        self._keeper.kill_tree(rank)

    def _failure(self, ended: Ended) -> ProcessFailure:
        return failure_of(
            ended,
            stop_began_ns=self._stop_began_ns,
            error_file=self.error_files[ended.rank],
            stderr_tail=self._stdio.stderr_tail(ended.rank),
            stdout_file=self.stdouts[ended.rank],
            stderr_file=self.stderrs[ended.rank],
        )
