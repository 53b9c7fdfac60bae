"""Functions as workers: one process per local rank, each of which returns a value.

The workers run `holdfast.processes.workers.function_child`.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import TYPE_CHECKING

from holdfast.defaults import START_METHODS
from holdfast.errors import UsageError
from holdfast.processes.keeper.keeper_client import Keeper
from holdfast.processes.keeper.keeper_program import MESSAGE_FDS_MAX
from holdfast.processes.workers import function_child
from holdfast.processes.workers.group import RunningGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from holdfast.processes.workers.group import GroupSpec, RunProcsResult

READ_BYTES = 1 << 20


class ReturnedValue:
    """The pipe on which one worker sends back its value."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.data = bytearray()
        self.too_large = False

    def take(self) -> bool:
        """Read what has arrived; return False at the end."""
        while not self.too_large:
            try:
                piece = os.read(self.read_fd, READ_BYTES)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self.data += piece
            if len(self.data) > function_child.RESULT_BYTES_MAX:
                # A worker checks the size itself, so another process must be writing to this pipe.
                self.too_large = True
                self.data.clear()
        return False

    def close_read(self) -> None:
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def close_write(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1


class Returns:
    """The connection by which workers tell that they have returned, and wait until all have.

    All workers share one end. Each writes one byte, and reads one.
    """

    def __init__(self, nprocs: int) -> None:
        ours, theirs = socket.socketpair()
        self.fd, self.workers_fd = ours.detach(), theirs.detach()
        os.set_blocking(self.fd, False)
        self._missing = nprocs
        self._nprocs = nprocs

    def take(self) -> None:
        """Note which workers have returned; let all exit if none is missing."""
        try:
            self._missing -= len(os.read(self.fd, READ_BYTES))
        except BlockingIOError:
            return
        if self._missing == 0:
            os.write(self.fd, b"e" * self._nprocs)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.workers_fd)


class FunctionGroup(RunningGroup):
    """Workers that call `entrypoint(*args[rank])`. The result contains the value of each."""

    def __init__(self, spec: GroupSpec, **resources: Any) -> None:
        if spec.start_method not in START_METHODS:
            raise UsageError(
                f"start_method: {spec.start_method!r} is unknown; accepted: "
                f"{', '.join(START_METHODS)}"
            )
        super().__init__(spec, **resources)
        self.start_method = spec.start_method
        self._returned: dict[int, ReturnedValue] = {}
        self._returns: Returns | None = None
        self._unpickled: dict[int, Any] = {}

    def result(self) -> RunProcsResult:
        """Return how the workers exited; as in TorchElastic, without those that a failure stopped."""
        outcome = super().result()
        failed = {
            rank: failure
            for rank, failure in outcome.failures.items()
            if not failure.only_stopped()
        }
        outcome.failures = failed or outcome.failures
        return outcome

    def _start(self) -> None:
        self._choose_cpus()
        self._returns = Returns(self.nprocs)
        self._watch(self._returns.fd, self._returns.take)
        starter = {
            "spawn": self._start_spawned,
            "forkserver": self._start_from_server,
            "fork": self._start_forked,
        }[self.start_method]
        starter()
        self._await_spawned()

    def _start_spawned(self) -> None:
        self._use_keeper(self._keeper or Keeper.start())
        command = function_child.interpreter_command("main")
        preparation = function_child.pack_preparation(self.name)
        tracker_fd = function_child.tracker_fd()
        for rank in range(self.nprocs):
            packed = function_child.pack_call(self._callable(), self.args[rank])
            call_fd = file_in_memory(pickle.dumps((preparation, packed.data, tracker_fd >= 0)))
            returned = self._expect_value(rank)
            passed = {
                function_child.CALL_FD: call_fd,
                **packed.passed_fds(returned.write_fd, self._peers_fd, tracker_fd),
            }
            try:
                self._spawn(rank, command, passed)
            finally:
                os.close(call_fd)
                returned.close_write()

    def _start_from_server(self) -> None:
        ranks = range(self.nprocs)
        calls = [function_child.pack_call(self._callable(), self.args[rank]) for rank in ranks]
        fds_max = max((len(packed.fds) for packed in calls), default=0)
        end_fd = function_child.ARGUMENTS_FD + min(fds_max, MESSAGE_FDS_MAX)
        preparation = function_child.pack_preparation(self.name)
        payload = (os.getpid(), preparation, function_child.preload_modules(), end_fd)
        payload_fd = file_in_memory(pickle.dumps(payload))
        # This keeper has imported the user's modules; the shared keeper has not.
        self._owns_keeper = True
        try:
            self._use_keeper(
                Keeper.run_program(function_child.interpreter_command("serve_forks"), payload_fd)
            )
        finally:
            os.close(payload_fd)
        tracker_fd = function_child.tracker_fd()
        for rank, packed in zip(ranks, calls, strict=True):
            returned = self._expect_value(rank)
            passed = packed.passed_fds(returned.write_fd, self._peers_fd, tracker_fd)
            try:
                self._spawn(rank, None, passed, call=(packed.data, list(passed)))
            finally:
                returned.close_write()

    def _start_forked(self) -> None:
        expected = [self._expect_value(rank) for rank in range(self.nprocs)]
        # The keeper is a fork of this process in its present state, for one start.
        self._owns_keeper = True
        self._use_keeper(Keeper.fork(self._run_in_fork))
        for rank in range(self.nprocs):
            self._spawn(rank, None, {}, call=rank)
        for returned in expected:
            returned.close_write()

    def _expect_value(self, rank: int) -> ReturnedValue:
        returned = self._returned[rank] = ReturnedValue()
        self._watch(returned.read_fd, lambda: self._take_value(rank))
        return returned

    def _run_in_fork(self, rank: int) -> int:
        result_fd = self._returned[rank].write_fd
        return function_child.call_in_fork(
            lambda: function_child.call_and_return(
                self._callable(), self.args[rank], result_fd, self._peers_fd
            )
        )

    @property
    def _peers_fd(self) -> int:
        assert self._returns is not None
        return self._returns.workers_fd

    def _callable(self) -> Callable[..., Any]:
        assert callable(self.entrypoint)
        return self.entrypoint

    def _take_value(self, rank: int) -> None:
        returned = self._returned[rank]
        if not returned.take():
            self._unwatch(returned.read_fd)
            if returned.too_large:
                returned.close_read()  # A writer would block.

    def _problem_at_exit(self, rank: int) -> str:
        self._take_value(rank)
        returned = self._returned[rank]
        if returned.too_large:
            return (
                f"sent back more than {function_child.RESULT_BYTES_MAX} bytes as its return value"
            )
        data = returned.data
        if not data:
            return "exited with code 0 without a return value, for example by os._exit"
        try:
            self._unpickled[rank] = pickle.loads(data)  # noqa: S301 (our own worker's)
        except Exception as error:  # noqa: BLE001 (whatever a user's class raises)
            return f"its return value is not readable: {type(error).__name__}: {error}"
        return ""

    def _value_of(self, rank: int) -> Any:
        return self._unpickled[rank]

    def _release(self) -> None:
        for returned in self._returned.values():
            returned.close_write()
            self._unwatch(returned.read_fd)
            returned.close_read()
        self._returned.clear()
        if self._returns is not None:
            self._unwatch(self._returns.fd)
            self._returns.close()
            self._returns = None


def file_in_memory(data: bytes) -> int:
    """Return a descriptor of an unnamed file in memory, ready to be read from its start."""
    fd = os.memfd_create("holdfast-call")
    with open(fd, "wb", closefd=False) as stream:
        stream.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
