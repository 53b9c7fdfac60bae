"""The zygote: a Python that imports modules once and is forked for each worker.

The zygote is not the parent of the workers. For each batch it forks a process that forks the workers
and exits. The workers are then orphans, and the keeper adopts them. A worker waits until the keeper
lets it begin, and only then becomes what ``python [flags] ...`` would be. So workers survive the
zygote, and the keeper reports their exits like those of any other worker.

The zygote is a separate program, which any interpreter of the workers can run: it imports nothing of
`holdfast`. A worker exits by returning from this file's top level, or by an exception that leaves it,
so the interpreter itself does its usual work at exit.

Both sides send length-prefixed `marshal` tuples, in version 2 because the interpreters may differ. The
agent's requests, by their first item:

``preload modules kind what path``
    The first request: the modules to import, and how the workers will start, which determines the
    `sys.path` for the imports. If ``path`` is not None, it is the `sys.path` instead.
``worker serial targets argv kind what args env cwd cpus``
    One worker of the next batch. The message carries a descriptor for each number in ``targets``,
    the pipe for its start error, and the pipe at which it waits.
``fork``
    Fork the batch.

Events: ``importing module``, ``unimportable module why``, ``threads module names native`` and
``device module path`` while it imports; ``ready pid``; ``forked serial pid``, or ``not_forked
serial`` if a limit forbade the fork. `zygote/warm_start.py` is the agent's side.
"""

from __future__ import annotations

import _socket as socket
import fcntl
import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any, NoReturn

    from holdfast.processes.zygote import child
else:
    # Load it from this file's folder: Holdfast need not be on this interpreter's path.
    from importlib.util import module_from_spec, spec_from_file_location

    _place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
    _spec = spec_from_file_location("holdfast_zygote_child", _place)
    child = module_from_spec(_spec)
    _spec.loader.exec_module(child)

CONTROL_FD = 3
# Descriptors below this number stay free for the workers' descriptors, while modules open their own
# files. A function with a dozen queues needs fewer; a worker that needs more starts cold.
RESERVED_END = 64
MESSAGE_FDS_MAX = 253  # The kernel's limit for one message.
MARSHAL_VERSION = 2
PR_SET_PDEATHSIG = 1
SIGKILL = 9
# The exit status of a worker that cannot start; the keeper uses the same.
CANNOT_START = 127
# The device files of accelerators. A process that has one open must not be forked.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/xpu", "/dev/accel", "/dev/davinci")
# How long threads that are being stopped may remain visible.
THREADS_EXIT_S = 0.2


class WorkerRequest:
    """A requested worker."""

    def __init__(self, request: tuple[Any, ...], fds: list[int]) -> None:
        _, self.serial, targets, *how = request
        self.argv, self.kind, self.what, self.args, self.env, self.cwd, self.cpus = how
        *given, self.error_fd, self.go_fd = fds
        self.fds = dict(zip(targets, given))  # noqa: B905 (older interpreters; both were counted)

    def all_fds(self) -> list[int]:
        return [*self.fds.values(), self.error_fd, self.go_fd]


class ZygoteProgram:
    """Imports, then forks. `serve` returns only in the workers."""

    def __init__(self, control_fd: int) -> None:
        self.control = socket.socket(fileno=reserve_descriptors(control_fd))
        self.interpreter = child.Interpreter()
        self.interpreter.command_line.show([sys.executable, "zygote of agent", sys.argv[1]])
        child.set_name("hf-zygote")
        self.received = bytearray()
        self.received_fds: list[int] = []
        self.batch: list[WorkerRequest] = []

    # Importing.

    def preload(self, modules: list[str], kind: str, what: str, path: list[str] | None) -> None:
        """Import the modules, as a worker with this command line would."""
        own_path = list(sys.path)
        if path is None:
            self.interpreter.set_path0(kind, what)
        else:
            sys.path[:] = path
        sys.argv = [what if kind == "script" else f"-{kind}"]
        seen = ObservedState()
        for module in modules:
            self.send_event("importing", module)
            recorded = child.record_reads(module)
            try:
                __import__(module)
            except BaseException as error:  # noqa: BLE001 (workers that need it fail with it)
                self.send_event("unimportable", module, described(error))
            finally:
                recorded()
            for event in seen.changes(module):
                self.send_event(*event)
        if path is not None:
            sys.path[:] = own_path
        child.flush_streams()

    # Requests and events.

    def serve(self) -> Callable[[], object]:
        """Fork workers until the agent exits. Returns in each worker the function to call."""
        self.interpreter.prepare_for_forks()
        self.send_event("ready", os.getpid())
        while True:
            request = self.receive()
            if request[0] == "worker":
                self.take_worker(request)
            elif request[0] == "fork":
                worker = self.fork_batch()
                if worker is not None:
                    return self.become_worker_of(worker)

    def receive(self) -> Any:
        """Return the next request; end the process when the agent has exited."""
        while True:
            size = int.from_bytes(self.received[:4], "little")
            if len(self.received) >= 4 and len(self.received) >= 4 + size:
                request = marshal.loads(bytes(self.received[4 : 4 + size]))  # noqa: S302 (our agent's)
                del self.received[: 4 + size]
                return request
            try:
                data, ancillary, _flags, _address = self.control.recvmsg(
                    1 << 18, socket.CMSG_LEN(MESSAGE_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError:
                data, ancillary = b"", []
            if not data:
                os._exit(0)
            for _level, _kind, payload in ancillary:
                self.received_fds.extend(memoryview(payload[: len(payload) // 4 * 4]).cast("i"))
            self.received += data

    def take_worker(self, request: tuple[Any, ...]) -> None:
        count = len(request[2]) + 2
        fds = self.received_fds[:count]
        del self.received_fds[:count]
        if len(fds) == count and min(fds) >= RESERVED_END:
            self.batch.append(WorkerRequest(request, fds))
        else:  # The kernel drops descriptors beyond the limit, and a module may have closed one.
            close_all(fds)
            self.send_event("not_forked", request[1])

    def send_event(self, *event: Any) -> None:
        body = marshal.dumps(event, MARSHAL_VERSION)
        try:
            self.control.sendall(len(body).to_bytes(4, "little") + body, socket.MSG_NOSIGNAL)
        except OSError:
            os._exit(0)

    # Forking.

    def fork_batch(self) -> WorkerRequest | None:
        """Fork the workers of the batch and report each. In a worker, return that worker."""
        batch, self.batch = self.batch, []
        try:
            pids_in, pids_out = os.pipe()
        except OSError:
            for worker in batch:
                self.send_event("not_forked", worker.serial)
                close_all(worker.all_fds())
            return None
        forker = fork_if_possible()
        if forker == 0:
            worker = fork_each(batch, pids_out)
            os.close(pids_in)
            os.close(pids_out)
            self.control.close()
            for other in batch:
                if other is not worker:
                    close_all(other.all_fds())
            return worker
        if forker > 0:
            reap(forker)  # From now on the workers are the keeper's children.
        os.close(pids_out)
        os.set_blocking(pids_in, False)
        try:
            pids = [int(word) for word in os.read(pids_in, 1 << 16).split()]
        except BlockingIOError:
            pids = []  # The forker was killed, but its workers still have the other end.
        os.close(pids_in)
        for worker, pid in zip(batch, [*pids, *[-1] * len(batch)]):  # noqa: B905
            self.send_event(
                *(("forked", worker.serial, pid) if pid > 0 else ("not_forked", worker.serial))
            )
            close_all(worker.all_fds())
        return None

    def become_worker_of(self, worker: WorkerRequest) -> Callable[[], object]:
        """Turn the forked process into the worker, once the keeper lets it begin."""
        step = "prepare"
        try:
            os.setpgid(0, 0)
            keeper = os.read(worker.go_fd, 8)
            child.libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
            if os.getppid() != int.from_bytes(keeper, "little"):
                os._exit(CANNOT_START)  # The worker is not needed now, or the keeper has exited.
            os.close(worker.go_fd)
            for fd in range(CONTROL_FD, RESERVED_END):
                if fd not in worker.fds:
                    os.closerange(fd, fd + 1)  # Ignores a descriptor that a module has closed.
            for target, fd in worker.fds.items():
                os.dup2(fd, target, inheritable=True)
            close_all(worker.fds.values())
            step = f"working directory {worker.cwd}"
            os.chdir(worker.cwd)
            if worker.cpus:
                step = f"bind to CPUs {worker.cpus}"
                os.sched_setaffinity(0, worker.cpus)
            step = "prepare"
            start = (worker.argv, worker.kind, worker.what, worker.args, worker.env)
            program = self.interpreter.renew(*start)
            os.close(worker.error_fd)
        except BaseException as error:  # noqa: BLE001 (the only place that can report it)
            report_start_error(worker.error_fd, step, error)
        return program


# What modules did at import.


class ObservedState:
    """The state of this process so far, so that each problem is reported once."""

    def __init__(self) -> None:
        self.threads = python_threads()
        self.native = 0
        self.devices = set(open_devices())

    def changes(self, module: str) -> list[tuple[Any, ...]]:
        """Return the events that an import caused."""
        events: list[tuple[Any, ...]] = []
        threads = python_threads()
        native = native_threads(len(threads))
        if threads - self.threads or native > self.native:
            names = sorted(threads - self.threads)
            events.append(("threads", module, names, max(0, native - self.native)))
        devices = set(open_devices())
        if cuda_is_initialized(sys.modules):
            devices.add("CUDA")
        if devices - self.devices:
            events.append(("device", module, min(devices - self.devices)))
        self.threads, self.native, self.devices = threads, native, devices
        return events


def python_threads() -> set[str]:
    """Return the names of all Python threads except the main thread."""
    threading = sys.modules.get("threading")
    if threading is None:
        return set()
    first = threading.main_thread()
    return {thread.name for thread in threading.enumerate() if thread is not first}


def native_threads(of_python: int, tasks: str = "/proc/self/task") -> int:
    """Return the number of other threads that a fork does not stop.

    OpenBLAS, in numpy and torch, stops its own threads at a fork.
    """
    known = 1 + of_python
    if len(os.listdir(tasks)) <= known:
        return 0
    trial = fork()
    if trial == 0:
        os._exit(0)
    reap(trial)
    deadline = time.monotonic() + THREADS_EXIT_S
    while len(os.listdir(tasks)) > known and time.monotonic() < deadline:
        time.sleep(0.005)
    return max(0, len(os.listdir(tasks)) - known)


def open_devices(folder: str = "/proc/self/fd", devices: tuple[str, ...] = DEVICES) -> list[str]:
    """Return the device files of accelerators that this process has open."""
    found = []
    for name in os.listdir(folder):
        try:
            path = os.readlink(f"{folder}/{name}")
        except OSError:
            continue  # The descriptor of the listing itself.
        if path.startswith(devices):
            found.append(path)
    return found


def cuda_is_initialized(modules: dict[str, ModuleType]) -> bool:
    """Whether torch, if it is loaded, has begun to use a GPU."""
    try:
        return bool(modules["torch"].cuda.is_initialized())
    except Exception:  # noqa: BLE001 (another module of that name, or a torch without CUDA)
        return False


def described(error: BaseException) -> str:
    """Return an exception in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 (`str` of an exception may raise)
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# Forks and descriptors.


def fork() -> int:
    """Fork, without Python's warning about threads: the agent has reported them."""
    if sys.version_info < (3, 12):
        return os.fork()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def fork_if_possible() -> int:
    """Fork; return -1 if a limit or a lack of memory prevents it."""
    try:
        return fork()
    except OSError:
        return -1


def fork_each(batch: list[WorkerRequest], pids_fd: int) -> WorkerRequest:
    """Fork each worker, send its process id, and exit. In a worker, return that worker."""
    for worker in batch:
        pid = fork_if_possible()
        if pid == 0:
            return worker
        os.write(pids_fd, b"%d " % pid)
    os._exit(0)


def reap(pid: int) -> None:
    """Wait for a child to exit."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # A module lets the kernel reap all children; the call has still waited.


def close_all(fds: Iterable[int]) -> None:
    """Close each of these descriptors."""
    for fd in fds:
        os.close(fd)


def reserve_descriptors(control_fd: int) -> int:
    """Reserve the numbers of the workers' descriptors; return the new number of the socket."""
    moved = fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, RESERVED_END)
    null = os.open(os.devnull, os.O_RDONLY)
    for number in range(CONTROL_FD, RESERVED_END):
        if number != null:
            os.dup2(null, number, inheritable=False)
    return moved


def report_start_error(error_fd: int, step: str, error: BaseException) -> NoReturn:
    """Report why this process cannot become the worker, and exit."""
    errno = error.errno or 0 if isinstance(error, OSError) else 0
    text = f"{errno} {step}" if errno else f"0 {step}: {error!r}"
    try:
        os.write(error_fd, text.encode(errors="replace")[:4096])
    finally:
        os._exit(CANNOT_START)


def main() -> Callable[[], object]:
    """Run as the zygote. In each worker, return the function that the top level of this file calls."""
    zygote = ZygoteProgram(CONTROL_FD)
    zygote.preload(*zygote.receive()[1:])
    return zygote.serve()


if __name__ == "__main__":
    _program = main()
    try:
        _program()
    except BaseException as _error:
        if not isinstance(_error, SystemExit):
            child.hide_frames(__file__, child.__file__)
        raise
