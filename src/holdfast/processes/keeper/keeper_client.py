"""The agent's side of the keeper: start a keeper, request workers from it, receive their exits.

There are three ways to make a keeper. `Keeper.start` runs `keeper/keeper_program.py`, which serves
commands and new interpreters. `Keeper.run_program` runs another program as the keeper: the fork server
of function workers (start method `forkserver`). `Keeper.fork` forks this process, for function workers
that must share its memory (start method `fork`). `prestart` starts a keeper in the background; the next
`Keeper.start` takes it over.

The end of the module handles orphans: processes whose keeper was killed. An agent that is a process
of its own (`adopt_orphans`) adopts, kills and reaps them. A program that contains an agent may have
children of its own; there, the init process inherits the orphans.
"""

from __future__ import annotations

import _socket as socket  # Python's own wrapper takes longer to import than a keeper to start.
import marshal
import os
import select
import sys
import time
from _thread import get_ident
from errno import EBADF, EMFILE
from typing import TYPE_CHECKING

from holdfast.core.values import Value
from holdfast.defaults import AGENT_SECRETS
from holdfast.errors import EnvironmentProblem, UsageError, shortage_hint
from holdfast.processes.keeper import keeper_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, ClassVar

SIGKILL = 9
# How long to wait for a killed process to exit.
REAP_MS_MAX = 10_000
# Each round kills one more layer: the processes that were forked during the previous round.
SWEEP_ROUNDS_MAX = 100
RECEIVE_BYTES = 1 << 18
# How long to wait for the processes that were killed with their keeper to exit.
KILLED_MS_MAX = 1_000
# How long a keeper may take to kill everything below it; after that it counts as stuck.
CLOSE_MS_MAX = keeper_program.SHUTDOWN_MS_MAX + 5_000
# How long a keeper may take to respond. The agent checks this only if the workers did not exit in time.
RESPONSE_MS_MAX = 2_000


class Spawned(Value):
    """A worker was forked."""

    key: int
    pid: int


class SpawnFailed(Value):
    """A worker could not even be forked."""

    key: int
    errno: int
    text: str


class Exited(Value):
    """A worker's leader exited; `exitcode` is the negative signal number if a signal ended it."""

    key: int
    pid: int
    exitcode: int
    error: tuple[int, str] | None
    """Error number and step, if the child could not become the worker."""
    at_ns: int = 0
    """When it was reaped, on the monotonic clock."""


class Expired(Value):
    """The timer of `Keeper.watch` has expired: the keeper is killing all workers."""

    at_ns: int
    """When the kill began, on the monotonic clock."""


class DescendantsExited(Value):
    """The keeper has no descendants left."""


class KeeperDied(Value):
    """The keeper has died; the kernel has killed its workers."""


Event = Spawned | SpawnFailed | Exited | Expired | DescendantsExited | KeeperDied


def decode(event: tuple[Any, ...]) -> Event:
    """Convert a keeper's tuple into an event."""
    match event:
        case ("spawned", key, pid):
            return Spawned(key, pid)
        case ("spawn_failed", key, errno, text):
            return SpawnFailed(key, errno, text)
        case ("exited", key, pid, code, status, error, at_ns):
            exitcode = status if code == os.CLD_EXITED else -status
            return Exited(key, pid, exitcode, error, at_ns)
        case ("expired", _number, at_ns):
            return Expired(at_ns)
        case ("empty", _number):
            return DescendantsExited()
    raise EnvironmentProblem(f"the keeper sent an unknown event: {event!r}")


class Keeper:
    """A running keeper. Single-threaded use; close it when done."""

    _prestarted: Keeper | None = None
    _program = b""
    _running: ClassVar[set[Keeper]] = set()
    # Folders, each with the thread that created it.
    _removed_if_killed: ClassVar[dict[str, int]] = {}

    def __init__(self, pid: int, control: socket.socket) -> None:
        from holdfast.net.listening import restore_descriptor_limit

        self.pid = pid
        self._owner = os.getpid()
        self._control = control
        self._received = bytearray()
        self._events: list[Event] = []
        self._deadlines_set = 0
        self._workers_requested = 0
        self._childless_after = 0
        self._clearings_requested = 0
        self._clearings_confirmed = 0
        self.lost = False
        self._is_ending = False
        self._loss_reported = False
        self._thread = get_ident()
        Keeper._running.add(self)
        restore_descriptor_limit(pid)  # Workers inherit the keeper's limit.
        self._announce_folder()

    @classmethod
    def start(cls) -> Keeper:
        prestarted, Keeper._prestarted = Keeper._prestarted, None
        if (
            prestarted is not None and prestarted._owner == os.getpid()
        ):  # Otherwise the keeper belongs to the parent process.
            return prestarted
        return cls.start_another()

    @classmethod
    def start_another(cls) -> Keeper:
        """Return a keeper for processes other than workers; a prestarted keeper is for workers."""
        try:
            script = cls._open_program()
        except OSError as error:
            raise _cannot_start(_program_path(), error) from None
        # Running it from a descriptor keeps this project's name off its command line:
        # a kill by name must not hit both the agent and its keeper.
        argv = [sys.executable, "-I", "-S", "/dev/fd/4", "keeper of agent", str(os.getpid())]
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
        try:
            return cls.run_program(argv, script, null, (os.POSIX_SPAWN_DUP2, 0, 1))
        finally:
            os.close(script)

    @classmethod
    def run_program(cls, argv: Sequence[str], payload_fd: int, *file_actions: Any) -> Keeper:
        """Return a keeper that is another program: it has the control socket as descriptor 3
        and `payload_fd` as descriptor 4.
        """
        try:
            ours, its = socket.socketpair()
        except OSError as error:
            raise _cannot_start(argv[0], error) from None
        try:
            pid = os.posix_spawn(
                argv[0],
                list(argv),
                inherited_environment(),  # Workers can read their keeper's environment.
                # Move these first: they may have the numbers of standard streams that this process closed.
                file_actions=[*_moved_to(its.fileno(), 3, payload_fd, 4), *file_actions],
                setsid=True,
                setsigmask=[],
            )
        except OSError as error:
            ours.close()
            raise _cannot_start(argv[0], error) from None
        finally:
            its.close()
        return cls(pid, ours)

    @classmethod
    def remember_program(cls) -> None:
        """Let later keepers run this program, even if its file is removed or replaced."""
        if not cls._program:
            with open(_program_path(), "rb") as stream:
                Keeper._program = stream.read()

    @classmethod
    def _open_program(cls) -> int:
        if not cls._program:
            return os.open(_program_path(), os.O_RDONLY | os.O_CLOEXEC)
        script = os.memfd_create("keeper")
        os.write(script, cls._program)
        return script

    @classmethod
    def prestart(cls) -> None:
        """Start a keeper that the next `start` of this process returns."""
        if cls._prestarted is None:
            Keeper._prestarted = cls.start()

    @classmethod
    def discard_prestarted(cls) -> None:
        if cls._prestarted is not None:
            cls._prestarted.close()
            Keeper._prestarted = None

    @classmethod
    def remove_if_killed(cls, folder: str) -> None:
        """Let the keeper remove a folder if this process is killed. Call this before creating the folder."""
        cls._removed_if_killed[folder] = get_ident()
        cls._announce_all()

    @classmethod
    def keep_if_killed(cls, folder: str) -> None:
        """Cancel `remove_if_killed`: the folder was removed, or must stay."""
        if cls._removed_if_killed.pop(folder, None) is not None:
            cls._announce_all()

    @classmethod
    def _announce_all(cls) -> None:
        for keeper in [*cls._running]:
            if keeper._owner == os.getpid() and keeper._thread == get_ident():
                keeper._announce_folder(withheld=True)

    def _announce_folder(self, *, withheld: bool = False) -> None:
        folders = [one for one, thread in self._removed_if_killed.items() if thread == self._thread]
        if folders or withheld:
            self._send(("inherit", folders))

    @classmethod
    def fork(cls, run_call: Callable[[Any], int]) -> Keeper:
        """Return a keeper that is a fork of this process and runs calls with its memory."""
        try:
            ours, its = socket.socketpair()
        except OSError as error:
            raise _cannot_start("a fork", error) from None
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # It is None if the console is closed.
                stream.flush()
        keeper_program.load_prctl()  # Another thread may be importing while we fork.
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            its.close()
            raise _cannot_start("a fork", error) from None
        if pid == 0:
            try:
                ours.close()
                os.setsid()
                keeper_program.serve(its.detach(), run_call)
            finally:
                os._exit(0)
        its.close()
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` has something."""
        return self._control.fileno()

    def spawn(
        self,
        key: int,
        argv: Sequence[str] | None,
        *,
        env: Mapping[str, str],
        cwd: str,
        fds: Mapping[int, int],
        call: Any = None,
        cpus: Sequence[int] = (),
    ) -> None:
        """Request a worker; `fds` maps its descriptors to ours.

        `cpus` binds it to these CPUs before it begins.
        """
        if len(fds) > keeper_program.MESSAGE_FDS_MAX:
            raise UsageError(
                f"cannot pass {len(fds)} file descriptors to a worker; accepted: up to "
                f"{keeper_program.MESSAGE_FDS_MAX} queues, pipes and the like"
            )
        words = argv and [_plain(word) for word in argv]
        plain_env = {_plain(name): _plain(value) for name, value in env.items()}
        request = ("spawn", key, list(fds), words, plain_env, cwd, call, list(cpus))
        self._workers_requested += 1
        self._send(request, list(fds.values()))

    def adopt(self, key: int, pid: int, error_fd: int, go_fd: int) -> None:
        """Turn an orphan below the keeper into a worker.

        It reports a start error through the first pipe, and waits at the second to begin.
        """
        self._workers_requested += 1
        self._send(("adopt", key, pid), [error_fd, go_fd])

    def signal(self, key: int, signum: int) -> None:
        self._send(("signal", key, int(signum)))

    def kill_tree(self, key: int) -> None:
        self._send(("kill", key))

    def watch(self, timer_fds: Sequence[int], held_fd: int = -1) -> None:
        """Let the keeper kill all workers when a timer expires; these replace earlier timers.

        The first timer spares an agent that is ready to run and only gets no CPU.

        A socket `held_fd` stays open until the keeper and the workers have exited.
        """
        self._deadlines_set += 1
        fds = [fd for fd in (*timer_fds, held_fd) if fd >= 0]
        self._send(("deadline", self._deadlines_set, len(fds)), fds)

    def signal_leftovers(self, signum: int) -> None:
        """Signal the processes that exited workers left behind; `DescendantsExited` follows once they exit."""
        # Numbered, to match responses to requests.
        self._clearings_requested += 1
        self._send(("clear", int(signum), self._clearings_requested))

    @property
    def is_childless(self) -> bool:
        """Whether the keeper has reported that it has no child processes."""
        return self._childless_after == self._workers_requested

    def sweep(self) -> None:
        """SIGKILL the processes that exited workers left behind; `DescendantsExited` follows once they exit."""
        self.signal_leftovers(SIGKILL)

    def receive(self) -> list[Event]:
        """Return the events that have arrived, without waiting."""
        self._receive_events()
        events, self._events = self._events, []
        return events

    def is_gone(self) -> bool:
        """Check whether the keeper has exited; `receive` still returns its events."""
        self._receive_events()
        return self.lost

    def responds(self) -> bool:
        """Whether the keeper reacts to the last request within a limited time."""
        deadline = time.monotonic() + RESPONSE_MS_MAX / 1000
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        while True:
            self._receive_events()
            if self.lost or self._clearings_confirmed == self._clearings_requested:
                return not self.lost
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000 + 1):
                return False

    def kill(self) -> None:
        """SIGKILL the keeper and its descendants, in case the keeper does not react."""
        if self._owner == os.getpid() and not self.lost:
            below = keeper_program.descendants_of(self.pid)
            for pid in [*below, self.pid]:
                keeper_program.send_signal(pid, SIGKILL)
            # It is reaped in `close`; until then no other process gets its id.
            ended_soon(self.pid)
            deadline = time.monotonic() + KILLED_MS_MAX / 1000
            for pid in below:
                ended_soon(pid, max(0, int((deadline - time.monotonic()) * 1000)))

    def _receive_events(self) -> None:
        while not self.lost:
            try:
                data = self._control.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self.lost = not data
            self._received += data
        for event in take_messages(self._received):
            self._add_event(event)
        if self.lost and not self._loss_reported:
            # Last, because the events before the loss are still valid.
            self._loss_reported = True
            self._events.append(KeeperDied())

    def _add_event(self, event: tuple[Any, ...]) -> None:
        if event[0] == "clearing":
            self._clearings_confirmed = event[1]
        elif event[0] == "childless":
            self._childless_after = event[1]
        elif event[0] == "expired" and event[1] != self._deadlines_set:
            pass  # The event belongs to an earlier generation.
        elif event[0] != "empty" or event[1] == self._clearings_requested:
            self._events.append(decode(event))

    def close(self, *, wait: bool = True) -> None:
        """Let the keeper kill all its descendants, and wait until it exits.

        Without `wait`, return at once; the keeper exits soon, unless a descendant cannot be killed.
        """
        self.hang_up()
        if wait:
            self.await_end()

    def hang_up(self) -> None:
        """Let the keeper kill all its descendants and exit; the first half of `close`."""
        if self._control.fileno() < 0:
            return
        Keeper._running.discard(self)
        if self._owner == os.getpid():
            self._send(("inherit", []))  # This process is alive, and removes its folders itself.
            # Closing alone has no effect while a process forked from this one has a copy of the socket.
            self._control.shutdown(socket.SHUT_RDWR)
            self._is_ending = True
        self._control.close()

    def await_end(self) -> None:
        """Wait until the keeper exits after `hang_up`; the second half of `close`."""
        if self._is_ending and not reap_soon(self.pid, CLOSE_MS_MAX):
            keeper_program.send_signal(self.pid, SIGKILL)  # The kernel then kills the workers.
            reap_soon(self.pid)
        self._is_ending = False

    def _send(self, request: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        try:
            send_message(self._control, marshal.dumps(request), fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # `receive` reports the lost keeper.


def send_message(control: socket.socket, body: bytes, fds: Sequence[int] = ()) -> None:
    """Send a length-prefixed message, and descriptors with it."""
    message = len(body).to_bytes(4, "little") + body
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
    # SIGPIPE may have its default action in this program, which would end it.
    sent = control.sendmsg([message], passed, socket.MSG_NOSIGNAL)
    control.sendall(message[sent:], socket.MSG_NOSIGNAL)


def take_messages(received: bytearray) -> Iterator[tuple[Any, ...]]:
    """Remove and return the complete messages at the start of the bytes received from a child."""
    while len(received) >= 4:
        size = int.from_bytes(received[:4], "little")
        if len(received) < 4 + size:
            break
        body = bytes(received[4 : 4 + size])
        del received[: 4 + size]
        yield marshal.loads(body)  # noqa: S302 (our own child's)


def working_directory() -> str:
    """Return the working directory for `spawn`; "." if it was deleted, because the keeper is in it too."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "."


def inherited_environment() -> dict[str, str]:
    """Return the variables that keepers and workers inherit: all but the secrets of agents."""
    return {name: value for name, value in os.environ.items() if name not in AGENT_SECRETS}


def _plain(value: object) -> str:
    """Return the text of a value as a plain `str`, because `marshal` rejects subclasses."""
    if type(value) is str:
        return value
    if isinstance(value, (bytes, os.PathLike)):
        return os.fsdecode(value)
    return str.__str__(value) if isinstance(value, str) else str(value)


def _program_path() -> str:
    """Return the path of the keeper's compiled file, which starts faster, or else of its source."""
    cached: str | None = getattr(keeper_program.__spec__, "cached", None)
    if cached and _is_current(cached, keeper_program.__file__):
        return cached
    return keeper_program.__file__


def _is_current(cached: str, source: str) -> bool:
    """Whether the import system would use a compiled file for this source."""
    try:
        with open(cached, "rb") as stream:
            header = stream.read(16)
        about = os.stat(source)
    except OSError:
        return False
    if header[4:8] == b"\1\0\0\0":  # It has a hash instead of the time, and needs no check.
        return True
    made_of = (int(about.st_mtime) & 0xFFFFFFFF, about.st_size & 0xFFFFFFFF)
    return header[4:16] == bytes(4) + b"".join(part.to_bytes(4, "little") for part in made_of)


def _cannot_start(what: str, error: OSError) -> EnvironmentProblem:
    # For the kernel, a descriptor number beyond the limit is a bad descriptor.
    number = EMFILE if error.errno == EBADF else error.errno
    return EnvironmentProblem(
        f"cannot start {what} as the keeper of the workers: {os.strerror(number or 0)}",
        hint=shortage_hint(number),
    )


def _moved_to(first: int, first_target: int, second: int, second_target: int) -> list[Any]:
    """Return file actions that move two descriptors without one overwriting the other."""
    parked = max(first, first_target, second, second_target) + 1
    return [
        (os.POSIX_SPAWN_DUP2, first, parked),
        (os.POSIX_SPAWN_DUP2, second, second_target),
        (os.POSIX_SPAWN_DUP2, parked, first_target),
        (os.POSIX_SPAWN_CLOSE, parked),
    ]


# Orphans: the processes that a killed keeper leaves behind.

_adopts = False
_is_subreaper = False


def adopt_orphans() -> None:
    """Let this process adopt the orphans of a killed keeper, once workers run.

    Call this only in a process that is an agent and nothing else: another program may have its own
    children, which must not be killed.
    """
    global _adopts  # noqa: PLW0603 (a property of the process)
    _adopts = True


def become_subreaper_if_wanted() -> None:
    """Become a subreaper if `adopt_orphans` was called; called while workers are forked."""
    global _is_subreaper  # noqa: PLW0603 (a property of the process)
    if _adopts and not _is_subreaper:
        keeper_program.load_prctl()(keeper_program.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _is_subreaper = True


def sweep_after_loss() -> None:
    """SIGKILL and reap every process below this one, if it adopts orphans at all."""
    if not _is_subreaper:
        return
    stuck: set[int] = set()  # SIGKILL does not end these.
    for _ in range(SWEEP_ROUNDS_MAX):
        pids = [pid for pid in keeper_program.descendants_of(os.getpid()) if pid not in stuck]
        if not pids:
            return
        for pid in pids:
            keeper_program.send_signal(pid, SIGKILL)
        for pid in pids:
            if not reap_soon(pid, 0 if stuck else REAP_MS_MAX):
                stuck.add(pid)


def ended_soon(pid: int, ms_max: int = REAP_MS_MAX) -> bool:
    """Whether a process exits within the time; does not reap it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(ms_max))
    finally:
        os.close(pidfd)


def reap_soon(pid: int, ms_max: int = REAP_MS_MAX) -> bool:
    """Wait for a child to exit, and reap it; False if that takes too long."""
    if not ended_soon(pid, ms_max):
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass  # Already reaped, or not our child yet; `sweep_after_loss` then finds it again.
    return True
