"""The replaceable way a command worker is started.

Holdfast starts commands through its keeper and does not use this class itself. It is here for
programs that bring a handler of their own, as they do for TorchElastic: derive from
`SubprocessHandler`, and register what makes it with `replace_subprocess_handler`.
"""

from __future__ import annotations

import os
import signal

from holdfast.processes.keeping import inherited_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import IO, Any

_factory: Callable[..., SubprocessHandler] | None = None


class SubprocessHandler:
    """One command worker: its `Popen`, its log files, and how it is told to end."""

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
        """Signal the process group, SIGTERM unless told otherwise, and close the log files."""
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
    """Have command workers started by `factory`, or None for Holdfast's own way again.

    The factory gets the arguments of `get_subprocess_handler` by name. Returns what was
    registered before.
    """
    global _factory
    previous, _factory = _factory, factory
    return previous


def custom_handler_factory() -> Callable[..., SubprocessHandler] | None:
    """Return the registered factory, None while Holdfast's own way is in force."""
    return _factory
