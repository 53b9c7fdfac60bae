"""Small helpers that scripts written for TorchElastic import from `utils`: variables, placeholders
in arguments, free ports, loggers, process states and `CyclingIterator`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from holdfast.agent.worker_env import substitute_local_rank
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.net.listening import listen
from holdfast.processes.procfs import state_of


def get_env_variable_or_raise(env_name: str) -> str:
    """Return a variable of the environment; raise `UsageError`, a `ValueError`, if it is not set.

    An empty variable is set.
    """
    value = os.environ.get(env_name)
    if value is None:
        raise UsageError(f"{env_name}: the variable is not set in the environment")
    return value


class macros:  # noqa: N801 (TorchElastic's name)
    """Placeholders in a worker's arguments, which the agent replaces for each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments of one worker, as the agent would; what is no text stays."""
        return [substitute_local_rank(arg, local_rank) for arg in args]


# Addresses, not names: what `localhost` resolves to, if to anything, must not matter.
_LOOPBACKS = [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0))]


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on loopback at a free port; the caller has to close it."""
    try:
        listener = listen(_LOOPBACKS, backlog=0)
    except OSError as problem:
        raise EnvironmentProblem(
            f"no TCP port of this host could be bound: {problem}",
            hint="is the loopback interface up, and are there descriptors left?",
        ) from None
    listener.setblocking(True)  # noqa: FBT003 (the name says it)
    return listener


def get_free_port() -> int:
    """Return a port that is free on loopback now. Anybody may take it as soon as this returns."""
    with get_socket_with_port() as listener:
        port: int = listener.getsockname()[1]
        return port


def get_log_level() -> str:
    """Return the level where `LOGLEVEL` is not set."""
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger of this name, or else that of the module which calls this.

    Raises `ValueError` if `LOGLEVEL` is no level that `logging` knows.
    """
    if name is None:
        name = sys._getframe(1).f_globals.get("__name__")
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger


def read_proc_state(pid: int) -> str | None:
    """Return the letter of a process's state, None if it is gone or cannot be read."""
    return state_of(pid) or None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether a state is uninterruptible sleep, out of which no signal gets a process."""
    return state is not None and state.startswith("D")


T = TypeVar("T")


class CyclingIterator(Iterator[T], Generic[T]):
    """The elements of `generator_fn(epoch)` for each epoch from `start_epoch` up to `n - 1`.

    The first epoch is always gone through, also one that is beyond `n`. An epoch's iterator is made
    when the one before has ended, the first at once.
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
                # The end of the epochs is the end of this iterator.
                self._elements = self._make(next(self._epochs_left))
