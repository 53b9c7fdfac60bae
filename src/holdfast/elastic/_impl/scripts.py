"""Small helpers that scripts written for TorchElastic import from `utils`: variables, placeholders
in arguments, free ports, stores, loggers, process states and `CyclingIterator`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.agent.worker_processes import substitute_local_rank
from holdfast.elastic._impl.torch_types import as_torch_store_errors
from holdfast.errors import EnvironmentProblem, UsageError, shortage_hint
from holdfast.net.listening import bind, wildcard_addresses
from holdfast.processes.procfs import state_of
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    import socket


def get_env_variable_or_raise(env_name: str) -> str:
    """Return an environment variable, which may be empty; raise `UsageError` (a `ValueError`) if unset."""
    value = os.environ.get(env_name)
    if value is None:
        raise UsageError(f"{env_name}: not set in the environment")
    return value


class macros:  # noqa: N801 (TorchElastic's name)
    """Placeholders in a worker's arguments, which the agent replaces for each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments of one worker with the placeholders replaced, as the agent does."""
        return [substitute_local_rank(arg, local_rank) for arg in args]


def get_socket_with_port() -> socket.socket:
    """Return a socket bound to a port that is free on all addresses; the caller has to close it.

    The socket does not listen, so no client connects to it by mistake. A port is certain to be free only while a
    socket holds it, so prefer to pass on the socket.
    """
    try:
        return bind(wildcard_addresses(0), reuse=False)
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot bind a TCP port of this host: {problem}", hint=shortage_hint(problem.errno)
        ) from None


def get_free_port() -> int:
    """Return a port that is free on all addresses now. Another process may take it at any time."""
    with get_socket_with_port() as held:
        port: int = held.getsockname()[1]
        return port


MEMBERS = "_tcp_store/num_members"
"""The prefix of torch's keys for the clients of `create_c10d_store` that wait for each other."""


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 60 * 10,
    wait_for_workers: bool = True,
    retries: int = 3,  # noqa: ARG001 (torch's signature)
    use_libuv: bool | None = None,
) -> C10dStore:
    """Return a store at an endpoint, or serve one there; port -1 selects a free port.

    With `wait_for_workers`, this returns after all `world_size` workers have connected. `retries` has no
    effect, because the kernel chooses a free port. `use_libuv` and `USE_LIBUV` have no effect, because
    there is one kind of server. If torch is loaded, errors also have torch's types.
    """
    if server_port == -1 and world_size > 1:
        raise UsageError(f"server_port: missing; required for {world_size} processes")
    if server_port == -1 and not is_server:
        raise UsageError("server_port: missing; required for a client")
    with as_torch_store_errors():
        store = C10dStore(
            server_addr,
            0 if server_port == -1 else server_port,
            world_size,
            is_server,
            timedelta(seconds=timeout),
            wait_for_workers,
        )
        store.libuvBackend = (
            os.environ.get("USE_LIBUV", "1") == "1" if use_libuv is None else use_libuv
        )
        try:
            if wait_for_workers:
                _join_workers(store, world_size)
        except BaseException:
            store.close()
            raise
    return store


class C10dStore(TCPStore):
    """A store that `create_c10d_store` created."""

    libuvBackend = True  # noqa: N815 (torch's name)
    """The requested value; it has no effect."""


def _join_workers(store: TCPStore, world_size: int) -> None:
    """Wait for the other workers, with the keys that torch's processes use."""
    if store.add(f"{MEMBERS}/num_members", 1) == world_size:
        store.set(f"{MEMBERS}/last_member", "<val_ignored>")
    store.wait([f"{MEMBERS}/last_member"])


def get_log_level() -> str:
    """Return the level that applies if `LOGLEVEL` is not set."""
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger of this name; without a name, the logger of the calling module.

    Raises `ValueError` if `LOGLEVEL` is not a level of `logging`.
    """
    if name is None:
        name = sys._getframe(1).f_globals.get("__name__")
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger


def read_proc_state(pid: int) -> str | None:
    """Return the letter of a process's state, None if it has exited or is not readable."""
    return state_of(pid) or None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether a state is uninterruptible sleep, which no signal interrupts."""
    return state is not None and state.startswith("D")


T = TypeVar("T")


class CyclingIterator(Iterator[T], Generic[T]):
    """The elements of `generator_fn(epoch)` for each epoch from `start_epoch` up to `n - 1`.

    The first epoch always runs, even if `start_epoch` is `n` or more. The iterator of the first epoch is
    created at once, that of each later epoch when the previous one has ended.
    """

    def __init__(
        self, n: int, generator_fn: Callable[[int], Iterator[T]], start_epoch: int = 0
    ) -> None:
        self._epochs_left = iter(range(start_epoch + 1, n))
        self._make = generator_fn
        self._elements = generator_fn(start_epoch)

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                return next(self._elements)
            except StopIteration:
                # This iterator ends with the last epoch.
                self._elements = self._make(next(self._epochs_left))
