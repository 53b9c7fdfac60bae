"""Commands as workers: a program and its arguments, spawned by the keeper.

As in TorchElastic, a program can replace the start of commands: it derives a class from
`SubprocessHandler` and registers a factory with `replace_subprocess_handler`. Such a process is not
below the keeper. A pidfd reports its exit, the handler stops it, and the agent kills its descendants,
or its process group once it has exited.
"""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING

from holdfast.processes.keeper import keeper_program
from holdfast.processes.keeper.keeper_client import Keeper, inherited_environment
from holdfast.processes.signals import as_enum
from holdfast.processes.workers.group import PContext

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import IO, Any

    from holdfast.processes.workers.group import GroupSpec


_factory: Callable[..., SubprocessHandler] | None = None


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
            environment = {**inherited_environment(), **env}
            if numa_options is None:
                self.proc = self._popen(words, environment)
            else:
                from holdfast.numa.binding import OnCpus, cpus_of_workers

                chosen = cpus_of_workers(numa_options, [local_rank_id])
                with OnCpus(chosen.get(local_rank_id, ())):
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
        import subprocess

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
    """Make the handler of one command worker, by the registered factory if there is one."""
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


class SubprocessContext(PContext):
    """Workers that are commands; `entrypoint` is the program, `args` its arguments by rank."""

    def __init__(self, spec: GroupSpec, **resources: Any) -> None:
        super().__init__(spec, **resources)
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}
        self._pidfds: dict[int, int] = {}  # rank -> pidfd

    def _start(self) -> None:
        # Replaced handlers need the keeper, too: it reports that no process is left.
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
        # Before it is reaped: until then its number, and so the group, cannot be reused.
        handler.close(as_enum(signal.SIGKILL))
        self._worker_exited(rank, handler.proc.pid, handler.proc.wait())

    def _keeper_lost(self) -> None:
        # Workers of replaced handlers are not below the keeper, so they survive its end.
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
            # The leader first: it could start others.
            for one in [pid, *keeper_program.descendants_of(pid)]:
                keeper_program.send_signal(one, signal.SIGKILL)
        else:
            super()._kill_tree(rank)

    def _release(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
