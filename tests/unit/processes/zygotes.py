"""The same command twice: started by a keeper, and forked from a zygote below the same keeper."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from holdfast.processes.keeper.keeper_client import Event, Exited, Keeper, Spawned
from holdfast.processes.zygote.warm_start import WarmStart, parse_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

PATIENCE_S = 60


class Outcome(NamedTuple):
    """How a worker exited, and its output."""

    exitcode: int
    trouble: tuple[int, str] | None
    out: str
    err: str


class Harness:
    """A keeper and a zygote that has imported `modules`; `words` is what workers run."""

    def __init__(
        self,
        *words: str,
        modules: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: object = None,
    ) -> None:
        self.argv = [sys.executable, *words]
        self.env = dict(os.environ if env is None else env)
        self.cwd = str(cwd or os.getcwd())
        self.keeper = Keeper.start()
        command = parse_command(self.argv)
        assert command is not None
        self.warm = WarmStart(command, modules, env=self.env)
        self.events: list[Event] = []
        self.keys = 0

    def __enter__(self) -> Self:
        before = os.getcwd()
        os.chdir(self.cwd)
        try:
            self.warm.await_ready(self.keeper)
        finally:
            os.chdir(before)
        return self

    def __exit__(self, *_: object) -> None:
        self.warm.forget()
        self.warm.close()
        self.keeper.close()

    def handle_events(self) -> None:
        """Wait for events of either, and handle them."""
        now = time.monotonic()
        due = min(self.warm.next_deadline() or now + PATIENCE_S, now + PATIENCE_S)
        watched = [self.keeper.fileno(), *[fd for fd in [self.warm.fileno()] if fd >= 0]]
        ready, _, _ = select.select(watched, [], [], max(0, due - now))
        assert ready or self.warm.next_deadline() is not None, "no event arrives"
        self.warm.receive_events()
        self.warm.tick(time.monotonic())
        self.events += self.keeper.receive()

    def start(
        self,
        *words: str,
        warm: bool = True,
        fds: Mapping[int, int],
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Request a worker and return its key."""
        self.keys += 1
        argv = [sys.executable, *words] if words else self.argv
        given = self.env if env is None else env
        how: Any = {"env": given, "cwd": self.cwd, "fds": fds}
        if warm:
            assert self.warm.can_fork(argv, how["env"], fds)
            self.warm.spawn(self.keys, argv, **how)
            self.warm.begin()
        else:
            self.keeper.spawn(self.keys, argv, **how)
        return self.keys

    def pid(self, key: int) -> int:
        """Wait until a worker is forked, and return its process id."""
        while True:
            for event in self.events:
                if isinstance(event, Spawned) and event.key == key:
                    return event.pid
            self.handle_events()

    def exited(self, key: int) -> Exited:
        """Wait until a worker has exited."""
        while True:
            for event in self.events:
                if isinstance(event, Exited) and event.key == key:
                    return event
            self.handle_events()

    def run(
        self,
        *words: str,
        warm: bool = True,
        fds: Mapping[int, int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run a command until it exits, with pipes as its streams."""
        stdin, stdin_write = os.pipe()
        os.close(stdin_write)
        (out, out_write), (err, err_write) = os.pipe(), os.pipe()
        given = {0: stdin, 1: out_write, 2: err_write, **(fds or {})}
        key = self.start(*words, warm=warm, fds=given, env=env)
        for fd in (stdin, out_write, err_write):
            os.close(fd)
        exited = self.exited(key)
        with open(out) as out_stream, open(err) as err_stream:
            return Outcome(exited.exitcode, exited.error, out_stream.read(), err_stream.read())

    def both(self, *words: str, **how: Any) -> tuple[Outcome, Outcome]:
        """Return what a new interpreter does and what a forked one does."""
        return self.run(*words, warm=False, **how), self.run(*words, warm=True, **how)
