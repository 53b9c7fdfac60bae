"""How a context asks for workers: the keeper, or the zygote where there is one for them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from holdfast.processes import sweeping
from holdfast.processes.watching import Watching

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from holdfast.processes.keeping import Keeper
    from holdfast.processes.warm import WarmStart


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
        sweeping.become_subreaper_if_wanted()
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
