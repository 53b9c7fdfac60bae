"""Warm starts: Python workers that a zygote forks, after it has imported modules.

A warm start is only an optimization: if the zygote fails, the keeper spawns each worker that the
zygote has not confirmed. The keeper takes over a worker that the zygote forked, and treats it like
any other.

Only known forms of a Python command line start warm (`parse_command`); an interactive Python, a
program from standard input, and unknown options do not.
`zygote/zygote_program.py` is the program.
"""

from __future__ import annotations

import _socket as socket
import marshal
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.values import Value
from holdfast.processes.keeper.keeper_client import (
    RECEIVE_BYTES,
    inherited_environment,
    send_message,
    take_messages,
    working_directory,
)
from holdfast.processes.keeper.keeper_program import descendants_of
from holdfast.processes.logs.specs import reserve_standard_descriptors
from holdfast.processes.poll import wait_for
from holdfast.processes.workers.group import custom_handler_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from holdfast.processes.keeper.keeper_client import Keeper


PLAIN_FLAGS = "bBdEIOPqRsSu"
FLAGS_WITH_VALUE = "WX"
PROGRAM_FLAGS = "cm"


class PythonCommand(Value):
    """`kind` is `script`, `m` or `c`; `what` is the path, the module or the text."""

    program: str
    flags: tuple[str, ...]
    kind: str
    what: str
    args: tuple[str, ...]

    def words(self) -> list[str]:
        kind = [] if self.kind == "script" else [f"-{self.kind}"]
        return [self.program, *self.flags, *kind, self.what, *self.args]

    def has_same_interpreter(self, other: PythonCommand) -> bool:
        """Whether both begin with the same interpreter and options."""
        return (self.program, self.flags) == (other.program, other.flags)


def parse_command(argv: Sequence[str]) -> PythonCommand | None:
    """Parse a command; return None if it is not Python, or runs no program."""
    program, *words = argv
    name = os.path.basename(program)
    if program != sys.executable and not name.startswith("python"):
        return None
    flags: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            return PythonCommand(program, tuple(flags), "script", word, tuple(words))
        letters = word[1:]
        if not letters or letters.startswith("-"):
            return None  # Standard input, or a long option.
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in PLAIN_FLAGS:
                flags.append(f"-{letter}")
                continue
            if letter not in FLAGS_WITH_VALUE + PROGRAM_FLAGS or not (letters or words):
                return None
            value, letters = letters or words.pop(0), ""
            if letter in PROGRAM_FLAGS:
                return PythonCommand(program, tuple(flags), letter, value, tuple(words))
            flags += [f"-{letter}", value]
    return None


# The program, which this module does not import, and the descriptors that it keeps free for workers.
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote_program.py")
RESERVED_END = 64
# The number of descriptors that the zygote needs: the reserved ones, and as many for modules and forks.
DESCRIPTORS_MIN = 2 * RESERVED_END
MARSHAL_VERSION = 2  # As in the program, which another Python may run.
# How many workers the zygote forks at a time: each has some descriptors in transit to the zygote.
BATCH_MAX = 16
# How long the zygote may take for a batch, after its imports. Forks take milliseconds.
FORK_S_MAX = 30.0
# How many times in a row the zygote may be lost before workers start without it.
LOSSES_MAX = 3
# Variables that a process reads only at its start. A worker that differs in them starts cold.
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_TUNABLES")


class RequestedWorker:
    """One requested worker, with copies of its descriptors until it is forked."""

    def __init__(
        self,
        key: int,
        command: PythonCommand,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        fds: Mapping[int, int],
        cpus: list[int],
    ) -> None:
        self.key = key
        self.command = command
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.cpus = cpus
        self.fds: dict[int, int] = {}
        self.error_fd = self.go_fd = -1  # The keeper's ends of the two pipes.
        try:
            for target, fd in fds.items():
                self.fds[target] = os.dup(fd)
        except OSError:
            self.close()
            raise

    def send_to(self, zygote: Zygote, serial: int) -> None:
        plain = self.command
        words = (self.argv, plain.kind, plain.what, list(plain.args), self.env, self.cwd)
        self.error_fd, error_out = os.pipe()
        try:
            go_in, self.go_fd = os.pipe()
            fds = [*self.fds.values(), error_out, go_in]
            zygote.send(("worker", serial, list(self.fds), *words, self.cpus), fds)
            os.close(go_in)
        finally:
            os.close(error_out)

    def hand_over(self, keeper: Keeper, pid: int) -> None:
        keeper.adopt(self.key, pid, self.error_fd, self.go_fd)
        self.close()

    def start_cold(self, keeper: Keeper) -> None:
        """Let the keeper start the worker; a copy that the zygote may have forked never begins."""
        keeper.spawn(self.key, self.argv, env=self.env, cwd=self.cwd, fds=self.fds, cpus=self.cpus)
        self.close()

    def close(self) -> None:
        for fd in (*self.fds.values(), self.error_fd, self.go_fd):
            if fd >= 0:
                os.close(fd)
        self.fds.clear()
        self.error_fd = self.go_fd = -1


class Zygote:
    """A running zygote, below a keeper."""

    _keys = 0

    def __init__(self, keeper: Keeper, control: socket.socket) -> None:
        self.keeper = keeper
        self.control = control
        Zygote._keys -= 1
        self.key = Zygote._keys  # A new key, because an earlier zygote may still be exiting.
        self.pid = 0
        self.is_ready = False
        self.is_lost = False
        self.is_stuck = False
        self.importing = ""
        self.began_at = time.monotonic()
        self._received = bytearray()

    @classmethod
    def start(
        cls,
        keeper: Keeper,
        command: PythonCommand,
        env: Mapping[str, str],
        modules: Sequence[str],
        path: list[str] | None,
    ) -> Zygote:
        """Start a zygote, and let it import."""
        reserve_standard_descriptors()
        ours, its = socket.socketpair()
        zygote = cls(keeper, ours)
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            argv = [command.program, *command.flags, PROGRAM, str(os.getpid())]
            # Leave room: a worker's command line later replaces this one in `ps`.
            room = "-" * (_shown_bytes(command.words()) - _shown_bytes(argv))
            keeper.spawn(
                zygote.key,
                [*argv, room],
                env=env,
                cwd=working_directory(),
                # The output of modules at import does not belong to a worker.
                fds={0: null, 1: 2, 2: 2, 3: its.fileno()},
            )
        finally:
            its.close()
            os.close(null)
        zygote.send(("preload", list(modules), command.kind, command.what, path))
        return zygote

    def send(self, request: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        """Send a request; if the zygote has exited, or blocks for too long, it is lost."""
        self.control.settimeout(FORK_S_MAX)
        try:
            send_message(self.control, marshal.dumps(request, MARSHAL_VERSION), fds)
        except (BrokenPipeError, ConnectionResetError):
            self.is_lost = True
        except TimeoutError:
            self.is_lost = self.is_stuck = True

    def receive(self) -> list[tuple[Any, ...]]:
        self.control.settimeout(0)
        while not self.is_lost:
            try:
                data = self.control.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_lost = not data
            self._received += data
        return [*take_messages(self._received)]

    def end(self) -> None:
        """Kill it and everything below it. Workers are below the keeper, so they continue."""
        self.is_lost = True
        self.keeper.kill_tree(self.key)


class WarmStart:
    """Starts the Python workers of an agent from a zygote, as long as there is one."""

    def __init__(
        self,
        command: PythonCommand,
        modules: Sequence[str],
        *,
        env: Mapping[str, str],
        path: list[str] | None = None,
    ) -> None:
        """`command` is the workers' program, and `env` their common environment. `path` is the `sys.path`
        of workers that are functions.
        """
        self._command = command
        self._modules = modules
        self._env = dict(env)
        self._path = path
        self._zygote: Zygote | None = None
        self._is_cold = False
        self._losses = 0
        self._serial = 0
        self._waiting: deque[RequestedWorker] = deque()
        self._sent: dict[int, RequestedWorker] = {}  # by serial
        self._due: float | None = None

    # The zygote itself.

    def prepare(self, keeper: Keeper) -> None:
        """Start a zygote unless one runs; it imports in the background."""
        zygote = self._zygote
        if self._is_cold or (zygote and not zygote.is_lost and zygote.keeper is keeper):
            return
        self.close()
        self._zygote = Zygote.start(keeper, self._command, self._env, self._modules, self._path)
        if self._zygote.is_lost:  # It exited before it received the list of imports.
            self._abandon_zygote("")

    def check_ready(self, keeper: Keeper) -> bool:
        """Return whether workers can start: the zygote has imported all modules, or has failed.

        If not, call this again when `fileno` is readable.
        """
        while not self._is_cold and not keeper.is_gone():
            self.prepare(keeper)
            self.receive_events()
            zygote = self._zygote
            if zygote is not None and not zygote.is_lost:
                return zygote.is_ready
        return True

    def await_ready(self, keeper: Keeper) -> None:
        """Wait until `check_ready`."""
        while not self.check_ready(keeper):
            wait_for(None, self.fileno())

    def activity(self, now: float) -> str:
        """Return what the zygote imports, and since when; empty if it does not."""
        zygote = self._zygote
        if self._is_cold or zygote is None or zygote.is_lost or zygote.is_ready:
            return ""
        return f"preloading {', '.join(self._modules)}, {now - zygote.began_at:.0f} s"

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive_events` has something; -1 for none."""
        return -1 if self._zygote is None or self._zygote.is_lost else self._zygote.control.fileno()

    def pids(self) -> list[int]:
        """Return the process ids of the zygote and its children; they are not leftovers of workers."""
        pid = self._zygote.pid if self._zygote is not None else 0
        return [pid, *descendants_of(pid)] if pid else []

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.control.close()
            self._zygote = None

    # Workers.

    def can_fork(self, argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int]) -> bool:
        """Whether the zygote can fork such a worker."""
        zygote = self._zygote
        if zygote is None or zygote.is_lost or not zygote.is_ready:
            return False
        command = parse_command(argv)
        if command is None or not command.has_same_interpreter(self._command):
            return False
        return max(fds, default=0) < RESERVED_END and _read_at_start(env) == _read_at_start(
            self._env
        )

    def spawn(
        self,
        key: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        fds: Mapping[int, int],
        cpus: Sequence[int] = (),
    ) -> None:
        """Request a worker that the zygote `can_fork`. `begin` then makes the zygote fork all of them."""
        command = parse_command(argv)
        assert command is not None
        self._waiting.append(
            RequestedWorker(key, command, list(argv), dict(env), cwd, fds, list(cpus))
        )

    def begin(self) -> None:
        zygote = self._zygote
        if self._sent or not self._waiting or zygote is None:
            return
        while self._waiting and len(self._sent) < BATCH_MAX and not zygote.is_lost:
            self._serial += 1
            worker = self._sent[self._serial] = self._waiting.popleft()
            worker.send_to(zygote, self._serial)
        zygote.send(("fork",))
        self._due = time.monotonic() + FORK_S_MAX
        if zygote.is_lost:
            self._abandon_zygote("does not read its requests" if zygote.is_stuck else "")

    def next_deadline(self) -> float | None:
        """Return when `tick` is due, on the monotonic clock."""
        return self._due

    def tick(self, now: float) -> None:
        """Give up on a zygote that takes far too long for a fork."""
        if self._due is not None and now >= self._due and self._zygote is not None:
            self._abandon_zygote(f"has not forked a worker for {FORK_S_MAX:g} s")

    def forget(self) -> None:
        """Drop the requested workers that have not started."""
        for worker in (*self._sent.values(), *self._waiting):
            worker.close()
        self._sent.clear()
        self._waiting.clear()
        self._due = None

    def receive_events(self) -> None:
        """Handle the zygote's events."""
        zygote = self._zygote
        if zygote is None or zygote.is_lost:
            return
        for event in zygote.receive():
            self._handle(zygote, event)
        if zygote.is_lost:
            self._abandon_zygote("")
        elif not self._sent:
            self._due = None
            self.begin()

    def _handle(self, zygote: Zygote, event: tuple[Any, ...]) -> None:
        match event:
            case ("forked", serial, pid) if serial in self._sent:
                self._losses = 0
                self._sent.pop(serial).hand_over(zygote.keeper, pid)
            case ("not_forked", serial) if serial in self._sent:
                self._sent.pop(serial).start_cold(zygote.keeper)
            case ("importing", module):
                zygote.importing = module
            case ("ready", pid):
                zygote.is_ready, zygote.pid, zygote.importing = True, pid, ""
            case ("unimportable", module, why):
                console.warning(f"preload: cannot import {module}: {why}")
            case ("threads", module, names, native):
                console.warning(_about_threads(module, names, native))
            case ("device", module, path):
                console.warning(
                    f"preload: importing {module} opened {path}, which is unusable after a fork; "
                    "workers start without preloading"
                )
                self._is_cold = True
                zygote.end()

    def _abandon_zygote(self, why: str) -> None:
        """Continue without this zygote: workers that it has not forked start cold."""
        zygote = self._zygote
        assert zygote is not None
        zygote.end()
        for worker in (*self._sent.values(), *self._waiting):
            worker.start_cold(zygote.keeper)
        self.forget()
        if self._is_cold or zygote.keeper.is_gone():
            return  # It was killed on purpose, or exited with the keeper.
        self._losses += 1
        where = f" while it imported {zygote.importing}" if zygote.importing else ""
        what = f"the process that preloads {', '.join(self._modules)} {why or f'was lost{where}'}"
        if self._losses < LOSSES_MAX:
            say = console.warning if why else console.info
            say(f"{what}; restarting it")
        else:
            self._is_cold = True
            console.warning(
                f"{what}, {LOSSES_MAX} times in a row; workers start without preloading"
            )


def _about_threads(module: str, names: list[str], native: int) -> str:
    threads = [*names, *([f"{native} native"] if native else [])]
    return (
        f"preload: importing {module} started threads ({', '.join(threads)}), which forked workers "
        "will not have; remove it from --preload if it needs them"
    )


def _shown_bytes(words: list[str]) -> int:
    return len(os.fsencode("\0".join(words)))


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


def warm_start(
    modules: Sequence[str],
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    start_method: str,
    worker_env: Mapping[str, str],
) -> WarmStart | None:
    """Return a `WarmStart` for these workers; if they cannot be forked, print a warning and return None."""
    path = None
    if callable(entrypoint):
        if start_method != "spawn":
            return unusable(f"start_method={start_method!r} already forks the functions")
        from holdfast.processes.workers import function_child

        argv = function_child.interpreter_command("main")
        modules = [*modules, "holdfast.processes.workers.function_child"]
        path = list(sys.path)
    else:
        if custom_handler_factory() is not None:
            return unusable("the program starts its workers with its own subprocess handler")
        argv = [entrypoint, *map(str, args)]
    command = parse_command(argv)
    if command is None:
        name = os.path.basename(argv[0])
        return unusable(f"the workers run {name}, not a Python script, module or command")
    limit = os.sysconf("SC_OPEN_MAX")
    if 0 <= limit < DESCRIPTORS_MIN:
        return unusable(
            f"the limit of open files, `ulimit -n`, is {limit}; it must be at least {DESCRIPTORS_MIN}"
        )
    env = {**inherited_environment(), **worker_env}
    return WarmStart(command, modules, env=env, path=path)


def unusable(why: str) -> WarmStart | None:
    """Warn that these workers cannot be forked."""
    console.warning(f"preload has no effect: {why}")
    return None
