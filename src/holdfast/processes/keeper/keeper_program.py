"""The keeper: a tiny process between the agent and its workers, so that no process outlives them.

The keeper is the parent of every worker and adopts every process that a worker leaves behind (it is a
"child subreaper"). So everything that a worker starts stays below the keeper, even after double forks and in
new sessions. When the agent closes the control socket or exits, for any reason, the keeper kills
everything below it. When the keeper itself is killed, the kernel kills the workers
(`PR_SET_PDEATHSIG`), and an agent that is also a subreaper kills the rest.

The agent starts the keeper as a separate program instead of forking it. So the keeper is small
(forking it is cheap), has one thread (the death signal is tied to the *thread* that forked) and does
not share the agent's command line (``pkill -9 -f train.py`` must not hit both at once). For the same
reasons it imports only C modules of the standard library, never `holdfast`.

The agent sends requests and receives events, both as length-prefixed `marshal` tuples over a
private socket pair. Both processes run the same interpreter. The requests, by their first item:

``spawn key targets argv env cwd call cpus``
    Fork a worker; the message carries one file descriptor for each number in ``targets``. With
    ``argv`` None it runs ``run_call(call)`` instead of a program; it is bound to ``cpus``, if any.
    A negative key marks a helper of the agent: it exits with the keeper, and ``clear`` spares it.
``adopt key pid``
    Turn an orphan, which the keeper already has as a child, into a worker. The message carries two pipes: the orphan
    reports its start error through the first, and waits at the second. It begins when it reads the
    keeper's process id there.
``signal key signum``      Signal one worker's leader.
``kill key``               SIGKILL one worker's whole tree.
``deadline number count``  Kill all workers when a timer expires. The message carries two timers, which
                           the agent extends: the first spares an agent that is ready to run and only
                           gets no CPU. Before the kill the keeper sends ``expired number ns``.
                           If the count is 3, the message also carries a socket, which the keeper
                           holds open until the workers have exited.
``clear signum number``    Signal everything that exited workers left behind. The keeper sends ``clearing
                           number`` at once, and ``empty number`` when all of it has exited.
``inherit folders``        Remove these folders and their contents if the agent is killed; replaces
                           the previous such request.

Further events: ``spawned key pid``, ``spawn_failed key errno text`` and ``exited key pid code
status error ns``, in the order of the exits. ``error`` is None, or ``(errno, step)`` if the child
could not become the worker; ``ns`` is the time on the monotonic clock. If the last exit leaves nothing
below the keeper, ``childless number`` follows; ``number`` counts the requests for workers so far.

The keeper decides nothing: while the agent is alive, it has no timeouts or retries of its own.
`keeper/keeper_client.py` is the agent's side.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import fcntl
import gc
import marshal
import os
import select
import sys
import time
from errno import EACCES, EINVAL, EMFILE, ENOEXEC, EPERM

TYPE_CHECKING = False  # `typing` itself would double the keeper's start-up.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
MESSAGE_FDS_MAX = 253  # The kernel's limit for one message.
RECEIVE_BYTES = 1 << 18
# How long the keeper waits for the processes that it killed after its agent exited. A process in
# uninterruptible sleep may take longer; the keeper leaves it to the init process.
SHUTDOWN_MS_MAX = 10_000
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_TYPE, IS_FOLDER = 0o170000, 0o040000  # Of a file's mode.
NOT_EXECUTABLE = (EACCES, ENOEXEC, EPERM)  # Exit status 126, as in a shell; all else is 127.

_functions: dict[str, Callable[..., int]] = {}


def load_function(name: str) -> Callable[..., int]:
    """Return a function of libc."""
    if name not in _functions:
        import _ctypes  # Without the classes of `ctypes`, which take longer than all the rest.

        class Function(_ctypes.CFuncPtr):
            _flags_ = _ctypes.FUNCFLAG_CDECL

        _functions[name] = Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name))  # type: ignore[arg-type]
    return _functions[name]


def load_prctl() -> Callable[..., int]:
    """Return libc's `prctl`. Load it before a fork: the child must not run the import system."""
    return load_function("prctl")


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, including exited ones that were not reaped."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as listing:
                found.extend(map(int, listing.read().split()))
        except FileNotFoundError:
            if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
                return children_by_scan(pid)  # A kernel without CONFIG_PROC_CHILDREN.
        except (ProcessLookupError, PermissionError):
            pass  # A thread may exit meanwhile; the children of the other threads still count.
    return found


def children_by_scan(pid: int) -> list[int]:
    """Return the direct children of a process by reading the parent of every process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    # The second field is the program's name, which may contain anything.
                    if int(stat.read().rpartition(b")")[2].split()[1]) == pid:
                        found.append(int(name))
            except (OSError, IndexError):  # It exited meanwhile, or is hidden from this user.
                continue
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all processes below a process, parents before their children."""
    found: list[int] = []
    level = children_of(pid)
    while level:
        found.extend(level)
        level = [child for parent in level for child in children_of(parent)]
    return found


def send_signal(pid: int, signum: int) -> None:
    """Signal a process, unless it has exited or this process may no longer signal it."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def is_starved(pid: int) -> bool:
    """Whether a process is not stopped, and one of its threads waits for a CPU."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    states = set()
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat:
                states.add(stat.read().rpartition(b")")[2].split()[0])
        except (OSError, IndexError):
            continue
    return b"R" in states


def remove_tree(path: str) -> None:
    """Remove a folder of this user and its contents, or raise `OSError`.

    If a cleaner of temporary folders has removed it, another user may have taken its name: so this follows no link, and
    touches no folder of another user.
    """
    folder = os.open(path, FOLDER)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(EPERM, os.strerror(EPERM), path)
        empty_folder(folder)
    finally:
        os.close(folder)
    os.rmdir(path)


def empty_folder(folder: int) -> None:
    """Remove the contents of an open folder."""
    for name in os.listdir(folder):
        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & FILE_TYPE != IS_FOLDER:
            os.unlink(name, dir_fd=folder)
            continue
        inner = os.open(name, FOLDER, dir_fd=folder)
        try:
            empty_folder(inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)


class LeaderProcess:
    """The state of one worker's leader."""

    __slots__ = ("error_fd", "exit_fd", "key", "pid")

    def __init__(self, key: int, pid: int, error_fd: int) -> None:
        self.key = key
        self.pid = pid
        self.error_fd = error_fd
        self.exit_fd = -1
        os.set_blocking(error_fd, False)  # Another process may briefly hold the other end.

    def start_error(self) -> tuple[int, str] | None:
        """Return why the child could not become the worker, and close the pipe that reports it."""
        try:
            text = os.read(self.error_fd, 4096)
        except BlockingIOError:
            text = b""
        os.close(self.error_fd)
        if not text:
            return None
        errno, _, step = text.decode(errors="replace").partition(" ")
        return int(errno), step


class KeeperProgram:
    """The loop: requests in, events out, children reaped."""

    def __init__(self, control_fd: int, run_call: Callable[[Any], int] | None) -> None:
        # A copy of this socket in a worker would hide the keeper's death from the agent.
        os.set_inheritable(control_fd, False)  # noqa: FBT003
        self.control = socket.socket(fileno=control_fd)
        self.run_call = run_call
        self.prctl = load_prctl()
        self.pid = os.getpid()
        self.workers: dict[int, LeaderProcess] = {}  # by pid
        self.requested = 0  # The number of workers requested so far.
        self.exits = select.epoll()  # Of the workers' pidfds; it reports them in the order of exit.
        self.clearing = 0  # The signal that leftovers get; 0 while none is requested.
        self.clearing_number = 0
        self.deadline_fds = (-1, -1)
        self.deadline_number = 0
        self.held_fd = -1
        self.poll = select.poll()
        self.received = bytearray()
        self.received_fds: list[int] = []
        self.unsent = bytearray()
        self.inherited: list[str] = []
        self.agent_fd = self.watch_agent()
        self.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Ignored signals stay ignored after an exec, so workers need the original dispositions.
        self.dispositions = {number: signal.getsignal(number) for number in IGNORED_SIGNALS}
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.wake_in, self.wake_out = os.pipe()
        os.set_blocking(self.wake_in, False)
        os.set_blocking(self.wake_out, False)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.set_wakeup_fd(self.wake_out, warn_on_full_buffer=False)
        # A fork inherits the agent's mask, and would miss the exits of workers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])

    def watch_agent(self) -> int:
        """Return a pidfd of the agent, -1 if the kernel has none.

        The socket alone is not enough: processes that the agent forked have a copy of its end.
        """
        maker = self.control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.agent = agent = int.from_bytes(maker[:4], sys.byteorder)
        try:
            agent_fd = os.pidfd_open(agent)
        except (AttributeError, OSError):
            agent_fd = -1
        if os.getppid() != agent:
            self.control.shutdown(socket.SHUT_RD)  # It has exited already: treat that as a hang-up.
        return agent_fd

    def serve(self) -> None:
        """Serve until the agent exits or hangs up."""
        poll = self.poll
        poll.register(self.wake_in, select.POLLIN)
        poll.register(self.control.fileno(), select.POLLIN)
        if self.agent_fd >= 0:
            poll.register(self.agent_fd, select.POLLIN)
        while True:
            writing = select.POLLOUT if self.unsent else 0
            poll.modify(self.control.fileno(), select.POLLIN | writing)
            for fd, events in poll.poll():
                if fd == self.agent_fd:
                    return
                if fd == self.wake_in:
                    self.reap()
                    continue
                if fd in self.deadline_fds:
                    self.expire(fd)
                    continue
                if fd != self.control.fileno():
                    continue  # A timer that the last request has replaced.
                if events & select.POLLOUT:
                    self.send()
                if events & ~select.POLLOUT and not self.receive():
                    return

    # Requests.

    def receive(self) -> bool:
        """Receive the agent's messages; return False if it has exited or hung up."""
        fds_bytes = socket.CMSG_LEN(MESSAGE_FDS_MAX * 4)
        try:
            data, ancillary, _flags, _address = self.control.recvmsg(
                RECEIVE_BYTES, fds_bytes, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        for _level, _kind, payload in ancillary:
            self.received_fds.extend(memoryview(payload[: len(payload) // 4 * 4]).cast("i"))
        if not data:
            return False
        self.received += data
        while len(self.received) >= 4:
            size = int.from_bytes(self.received[:4], "little")
            if len(self.received) < 4 + size:
                break
            request = marshal.loads(bytes(self.received[4 : 4 + size]))  # noqa: S302 (our agent's)
            del self.received[: 4 + size]
            self.handle_request(request)
        return True

    def handle_request(self, request: tuple[Any, ...]) -> None:
        kind = request[0]
        self.requested += kind in ("spawn", "adopt")
        if kind == "spawn":
            self.spawn(*request[1:])
        elif kind == "adopt":
            self.adopt(*request[1:])
        elif kind == "signal":
            for worker in self.leaders(request[1]):
                send_signal(worker.pid, request[2])
        elif kind == "kill":
            for worker in self.leaders(request[1]):
                self.kill_tree(worker.pid)
        elif kind == "deadline":
            self.watch_deadline(*request[1:])
        elif kind == "clear":
            self.clearing, self.clearing_number = request[1:]
            self.send_event("clearing", self.clearing_number)
            self.clear_leftovers()
            self.reap()
        elif kind == "inherit":
            self.inherited = request[1]

    def leaders(self, key: int) -> list[LeaderProcess]:
        """Return the worker with this key, if its leader still runs."""
        return [worker for worker in self.workers.values() if worker.key == key]

    def spawn(self, key: int, targets: list[int], *how: Any) -> None:
        fds = self.received_fds[: len(targets)]
        del self.received_fds[: len(targets)]
        error_pipe: list[int] = []
        try:
            if len(fds) < len(targets):  # The kernel drops descriptors beyond this process's limit.
                raise OSError(EMFILE, os.strerror(EMFILE))
            error_pipe.extend(os.pipe())
            pid = self.fork()
        except OSError as error:
            for fd in error_pipe:
                os.close(fd)
            self.send_event("spawn_failed", key, error.errno, error.strerror)
        else:
            error_in, error_out = error_pipe
            if pid == 0:
                os.close(error_in)
                self.become_worker(dict(zip(targets, fds, strict=True)), error_out, *how)
            os.close(error_out)
            self.watch_worker(LeaderProcess(key, pid, error_in))
            self.send_event("spawned", key, pid)
        finally:
            for fd in fds:
                os.close(fd)

    def adopt(self, key: int, pid: int) -> None:
        fds = self.received_fds[:2]
        del self.received_fds[:2]
        try:
            if len(fds) < 2:
                raise OSError(EMFILE, os.strerror(EMFILE))
            # If the orphan has exited meanwhile, the keeper reports its exit, unless it was reaped.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            self.watch_worker(LeaderProcess(key, pid, fds.pop(0)))
            self.send_event("spawned", key, pid)
            os.write(fds[0], self.pid.to_bytes(8, "little"))
        except BrokenPipeError:
            pass  # It has exited, and will be reaped soon.
        except ChildProcessError as error:
            self.send_event("spawn_failed", key, error.errno, "it was killed before it began")
        except OSError as error:
            self.send_event("spawn_failed", key, error.errno, error.strerror)
        finally:
            for fd in fds:
                os.close(fd)

    def watch_worker(self, worker: LeaderProcess) -> None:
        self.workers[worker.pid] = worker
        try:
            exit_fd = os.pidfd_open(worker.pid)
        except (AttributeError, OSError):
            return  # It will still be reaped, but not in order.
        worker.exit_fd = exit_fd
        self.exits.register(exit_fd, select.EPOLLIN)

    def watch_deadline(self, number: int, count: int) -> None:
        for fd in self.deadline_fds:
            if fd >= 0:
                self.poll.unregister(fd)
        fds = self.received_fds[:count]  # The kernel drops descriptors beyond this process's limit.
        del self.received_fds[:count]
        before = (*self.deadline_fds, self.held_fd)
        first, last, self.held_fd = (*fds, -1, -1, -1)[:3]
        self.deadline_fds = first, last
        self.deadline_number = number
        for fd in before:
            if fd >= 0:
                os.close(fd)
        for fd in self.deadline_fds:
            if fd >= 0:
                self.poll.register(fd, select.POLLIN)

    def expire(self, fd: int) -> None:
        """Kill the workers and their leftover processes, unless the agent has just extended the timer."""
        try:
            os.read(fd, 8)
        except BlockingIOError:
            return
        first, last = self.deadline_fds
        if fd == first and last >= 0 and is_starved(self.agent):
            return
        self.send_event("expired", self.deadline_number, time.monotonic_ns())
        helpers = [pid for pid, worker in self.workers.items() if worker.key < 0]
        kept = {*helpers, *(pid for one in helpers for pid in descendants_of(one))}
        for pid in descendants_of(self.pid):
            if pid not in kept:
                send_signal(pid, signal.SIGKILL)

    def fork(self) -> int:
        """Fork with all signals blocked, so that no handler of the keeper runs in a worker."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def become_worker(
        self,
        fds: dict[int, int],
        error_out: int,
        argv: list[str] | None,
        env: dict[str, str],
        cwd: str,
        call: Any,
        cpus: list[int],
    ) -> None:
        """Turn the forked child into the worker. Never returns."""
        step = "prepare"
        status = 127
        try:
            # Not a session of its own: the kernel may share out the CPUs by session.
            os.setpgid(0, 0)
            self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.pid:
                os._exit(status)  # The keeper died before the death signal was set.
            signal.set_wakeup_fd(-1)
            self.drop_own_fds()
            error_out = self.place_fds(fds, error_out)
            self.restore_signals()
            step = f"working directory {cwd}"
            os.chdir(cwd)
            if cpus:
                step = f"bind to CPUs {cpus}"
                os.sched_setaffinity(0, cpus)
            if argv is None:
                os.environ.clear()
                os.environ.update(env)
                assert self.run_call is not None
                os.close(error_out)
                error_out = -1
                status = 1
                status = self.run_call(call)
            else:
                step = argv[0]
                os.execvpe(argv[0], argv, env)  # noqa: S606 (no shell is the point)
        except BaseException as error:  # noqa: BLE001 (the only place that can report it)
            errno = error.errno or 0 if isinstance(error, OSError) else 0
            if errno == EINVAL and step == "prepare":
                errno = EMFILE  # No descriptor number is free.
            if argv and step == argv[0] and errno in NOT_EXECUTABLE:
                status = 126
            if error_out >= 0:
                text = f"{errno} {step}" if errno else f"0 {step}: {error!r}"
                os.write(error_out, text.encode(errors="replace")[:4096])
        finally:
            os._exit(status)

    def drop_own_fds(self) -> None:
        """Close the keeper's own descriptors: a child that runs a call does not exec."""
        self.control.close()
        self.exits.close()
        own = [self.wake_in, self.wake_out, self.agent_fd, *self.deadline_fds, self.held_fd]
        for worker in self.workers.values():
            own += [worker.error_fd, worker.exit_fd]
        for fd in own:
            if fd >= 0:
                os.close(fd)

    def place_fds(self, fds: dict[int, int], error_out: int) -> int:
        """Give each descriptor its number in the worker; return the new number of the error pipe."""
        above = max([*fds, *fds.values(), error_out, 2]) + 1
        # First move them out of each other's way, then to their numbers.
        parked = {
            target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for target, fd in fds.items()
        }
        parked_error = fcntl.fcntl(error_out, fcntl.F_DUPFD_CLOEXEC, above)
        for fd in {error_out, *fds.values()}:
            os.close(fd)
        for target, fd in parked.items():
            os.dup2(fd, target, inheritable=True)
            os.close(fd)
        return parked_error

    def restore_signals(self) -> None:
        """Give the worker the signal dispositions with which the agent was started."""
        for number, disposition in self.dispositions.items():
            ignored = disposition == signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        if self.run_call is not None:
            self.forget_python_handlers()
        else:
            # Python ignores these two; a program expects the system's default.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def forget_python_handlers(self) -> None:
        """Drop the handlers of the parent process; Ctrl-C works as in any Python."""
        for number in range(1, signal.NSIG):
            try:
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # The C library reserves these numbers.
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # Endings.

    def reap(self) -> None:
        """Reap every exited child: report workers, forget adopted processes."""
        try:
            while os.read(self.wake_in, 4096):
                pass
        except BlockingIOError:
            pass
        before = len(self.workers)
        # `P_ALL` would return them in the order of their starts.
        for exit_fd, _ in self.exits.poll(0):
            self.reap_one(os.P_PIDFD, exit_fd)
        while self.reap_one(os.P_ALL, 0):
            pass
        if before and not self.workers and not self.has_children():
            self.add_event("childless", self.requested)
        self.send()
        helpers = {pid for pid, worker in self.workers.items() if worker.key < 0}
        if self.clearing and len(self.workers) == len(helpers):
            if helpers.issuperset(children_of(self.pid)):
                self.clearing = 0
                self.send_event("empty", self.clearing_number)
            elif self.clearing == signal.SIGKILL:
                self.clear_leftovers()  # The orphans of killed processes are now our children.

    def reap_one(self, which: int, number: int) -> bool:
        try:
            ended = os.waitid(which, number, os.WEXITED | os.WNOHANG)
        except OSError:  # There is no such child, or the kernel has no pidfds.
            return False
        if ended is None:
            return False
        worker = self.workers.pop(ended.si_pid, None)
        if worker is not None:
            if worker.exit_fd >= 0:
                self.exits.unregister(worker.exit_fd)  # A newly forked child may have a copy.
                os.close(worker.exit_fd)
            how = (ended.si_code, ended.si_status, worker.start_error(), time.monotonic_ns())
            self.add_event("exited", worker.key, worker.pid, *how)
        return True

    def has_children(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def clear_leftovers(self) -> None:
        """Signal everything below the keeper, except running workers and their descendants."""
        kept = {*self.workers, *(pid for one in self.workers for pid in descendants_of(one))}
        for pid in descendants_of(self.pid):
            if pid not in kept:
                send_signal(pid, self.clearing)

    def kill_tree(self, leader: int) -> None:
        """SIGKILL a worker and its descendants; the leader first, so that it starts no more processes."""
        below = descendants_of(leader)
        send_signal(leader, signal.SIGKILL)
        for pid in below:
            send_signal(pid, signal.SIGKILL)

    def shut_down(self) -> None:
        poll = select.poll()
        poll.register(self.wake_in, select.POLLIN)
        self.clearing = signal.SIGKILL
        while self.has_children():
            for pid in descendants_of(self.pid):
                send_signal(pid, signal.SIGKILL)
            self.reap()
            if self.has_children() and not poll.poll(SHUTDOWN_MS_MAX):
                break
        for folder in self.inherited:
            try:
                remove_tree(folder)
            except OSError:
                pass  # It was removed already, or is not this user's.

    # Events.

    def send_event(self, *event: Any) -> None:
        self.add_event(*event)
        self.send()

    def add_event(self, *event: Any) -> None:
        """Queue an event; the next `send_event` or `send` sends it."""
        body = marshal.dumps(event)
        self.unsent += len(body).to_bytes(4, "little") + body

    def send(self) -> None:
        """Send as much as fits, without waiting: the agent may be waiting for the keeper to receive."""
        try:
            while self.unsent:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                del self.unsent[: self.control.send(self.unsent, flags)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # The end of the requests shows that the agent has exited.


def serve(control_fd: int, run_call: Callable[[Any], int] | None = None) -> None:
    """Run as the keeper of this control socket; return when its work is done."""
    try:
        keeper = KeeperProgram(control_fd, run_call)
    except OSError:
        os._exit(1)  # Too few descriptors; the agent reports it.
    try:
        keeper.serve()
    finally:
        keeper.shut_down()
        keeper.control.close()


def main() -> None:
    """Run as the program: the control socket is descriptor 3."""
    os.closerange(4, 1 << 16)
    gc.disable()  # The keeper creates no cycles, and a collection after a fork copies the whole heap.
    load_prctl()(15, b"hf-keeper", 0, 0, 0)  # PR_SET_NAME, for `ps` and `top`.
    serve(3)
    os._exit(0)  # Faster than the interpreter's exit, which has nothing to clean up.


if __name__ == "__main__":
    main()
