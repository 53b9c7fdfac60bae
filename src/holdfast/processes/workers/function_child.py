"""Python functions as workers: how the call reaches the worker, and how its value returns.

`spawn`       A new interpreter for each worker, which imports what the call needs.
`forkserver`  One new interpreter that imports it once and is forked for each worker.
`fork`        The calling process itself is forked; nothing is pickled on the way in.

The first two use `multiprocessing`'s preparation of a new interpreter (`__main__`, `sys.path`)
and its pickler, so queues, locks and pipes can be arguments as they can for `Process`. Pickles
travel only between the agent and its own children, over private pipes.

A signal that stops a worker raises in the function (`function_signals.py`).

The worker sends its value as one pickle over a pipe. A worker that exits with code 0 without a
value did not return, and counts as failed. A worker that has returned stays until all workers of its
node have returned (`await_peers`).
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.processes.failures.error_file import record, recording, without_own_frames
from holdfast.processes.signals import SignalException
from holdfast.processes.workers.function_signals import RaisedSignals, die_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The descriptors of a `spawn` worker, and of the forkserver. A forkserver's worker has the same
# numbers. So the server keeps them free while it imports the user's modules, which may open files.
CALL_FD = CONTROL_FD = 3
RESULT_FD = PREPARATION_FD = 4
TRACKER_FD = 5
PEERS_FD = 6
ARGUMENTS_FD = 7  # The first of the descriptors that the arguments need.

# The largest return value, in bytes of its pickle. The agent holds the values of all its workers at
# once; use a file or shared memory for larger data.
RESULT_BYTES_MAX = 256 << 20


# How long a worker waits for its native threads, the time between two checks, and how many must find all idle.
NATIVE_THREADS_S_MAX = 2.0
IDLE_CHECK_S = 0.001
IDLE_CHECKS = 3


class PassedFd:
    """A descriptor among a call's arguments, with its number in the worker."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        return self.fd


class Packed:
    """A pickled call, and the descriptors that it needs. `multiprocessing` adds the descriptors."""

    DupFd = PassedFd

    def __init__(self) -> None:
        self.data = b""
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Add a descriptor that the worker needs, and return its number in the worker.

        `multiprocessing` calls this while pickling.
        """
        self.fds.append(fd)
        return ARGUMENTS_FD + len(self.fds) - 1

    def passed_fds(self, result_fd: int, peers_fd: int, tracker_fd: int) -> dict[int, int]:
        """Return the worker's descriptors: from the number in the worker to the number here."""
        tracker = {TRACKER_FD: tracker_fd} if tracker_fd >= 0 else {}
        arguments = dict(enumerate(self.fds, ARGUMENTS_FD))
        return {RESULT_FD: result_fd, PEERS_FD: peers_fd, **tracker, **arguments}


def pack_preparation(name: str) -> bytes:
    """Pickle the data that makes a new interpreter look like this one to the user's modules."""
    from multiprocessing import spawn

    data = spawn.get_preparation_data(name)
    if not os.path.isfile(str(data.get("init_main_from_path"))):
        # The program was read from a pipe, so there is no file to import.
        data.pop("init_main_from_path", None)
    return _pickle_for_child(data, Packed())


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Packed:
    """Pickle a call for a worker that does not share this memory."""
    packed = Packed()
    if _needs_value_pickling(fn):
        packed.data = _pickle_by_value(fn, args)
        return packed
    try:
        packed.data = _pickle_for_child((fn, args), packed)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
        raise UsageError(
            f"cannot send {_name_of(fn)} to a new worker process: {error}",
            hint="define it at the top level of a module, or use start_method='fork'",
        ) from error
    return packed


def _pickle_for_child(value: object, packed: Packed) -> bytes:
    """Pickle a value, including objects that `multiprocessing` pickles only for its own children."""
    from multiprocessing import context, reduction

    buffer = io.BytesIO()
    context.set_spawning_popen(packed)  # type: ignore[arg-type]
    try:
        reduction.dump(value, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue()


def _needs_value_pickling(fn: Callable[..., Any]) -> bool:
    """Whether the function exists only in this interactive session, and no file defines it."""
    main = sys.modules.get("__main__")
    has_file = os.path.isfile(getattr(main, "__file__", None) or "")
    interactive = not has_file and getattr(main, "__spec__", None) is None
    return interactive and getattr(fn, "__module__", None) == "__main__"


def _pickle_by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            f"{_name_of(fn)} is defined in this interactive session, which a new worker process "
            "cannot import",
            hint="put it in a module, use start_method='fork', or install cloudpickle",
        ) from None
    data: bytes = cloudpickle.dumps((fn, args))
    return data


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


# In the worker.


def call_and_return(
    fn: Callable[..., Any], args: tuple[Any, ...], result_fd: int, peers_fd: int
) -> None:
    """Call the function, send back its value, and wait for the other workers; exceptions pass through."""
    try:
        value = record(fn)(*args)
    except SystemExit as leaving:
        if leaving.code is not None:
            raise
        value = None  # `sys.exit()` means what `sys.exit(0)` does.
    data = b""
    with recording():
        data = pack_value(value, _name_of(fn))
    assert data
    with open(result_fd, "wb") as result:
        result.write(data)
    _flush_streams()
    await_peers(peers_fd)


def await_peers(fd: int) -> None:
    """Wait until all workers of this node have returned, as in TorchElastic.

    Until then, a worker may serve its peers, for example with a store.
    """
    try:
        os.write(fd, b"r")
        os.read(fd, 1)
    except OSError:
        pass  # The agent has exited, or the function has closed the descriptor.
    else:
        os.close(fd)


def await_native_threads() -> None:
    """Wait until the threads that Python does not know have nothing to do, with a limit.

    If such a thread needs the interpreter after that has begun to exit, the process may abort. A thread of
    PyTorch's gloo does, if it releases the last tensor of a collective too late.
    """
    deadline, idle = time.monotonic() + NATIVE_THREADS_S_MAX, 0
    # A thread that waits for the interpreter looks idle while this one has it, but hardly several times.
    while idle < IDLE_CHECKS and time.monotonic() < deadline:
        states = [_state_of(thread) for thread in os.listdir("/proc/self/task")]
        if len(states) <= threading.active_count():
            return
        # This thread is running too.
        idle = idle + 1 if sum(state in ("R", "D") for state in states) <= 1 else 0
        time.sleep(IDLE_CHECK_S)


def _state_of(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/stat", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""  # It has ended.


def pack_value(value: object, name: str) -> bytes:
    """Pickle what a function returned."""
    try:
        data = pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"cannot send back the return value of {name}: {error}") from error
    if len(data) > RESULT_BYTES_MAX:
        raise ValueError(
            f"the return value of {name} has {len(data)} bytes, but the limit is {RESULT_BYTES_MAX}; "
            "write the data to a file, and return its path"
        )
    return data


def call_in_fork(call: Callable[[], None]) -> int:
    """Run a call in this forked child; return the exit status with which the interpreter would exit."""
    status = died_of = 0
    _detach_from_parent()
    try:
        RaisedSignals().begin()
        call()
    except SystemExit as leaving:
        status = _exit_status(leaving.code)
    except SignalException as stop:
        died_of = stop.sigval
    except BaseException as error:  # noqa: BLE001 (the last place that sees it)
        import traceback

        traceback.print_exception(type(error), error, without_own_frames(error.__traceback__))
        status = 1
        died_of = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    _finalize_interpreter()
    if died_of:
        die_of(died_of)
    return status


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _detach_from_parent() -> None:
    """Drop what a forked child must not share: children, connections, replaced streams.

    This also drops the exit handlers of the parent.
    """
    from holdfast.processes.logs.specs import is_descriptor

    atexit._clear()
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        if not is_descriptor(getattr(sys, name), fd):
            # In a notebook, for example, nothing reads the child's copy of the stream.
            stream = open(fd, "w", buffering=1, errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    if "multiprocessing.util" in sys.modules:
        # As `multiprocessing` does in its own children.
        from multiprocessing import process, util

        process._children = set()  # type: ignore[attr-defined]
        util._finalizer_registry.clear()  # type: ignore[attr-defined]
        util._run_after_forkers()  # type: ignore[attr-defined]
        atexit.register(util._exit_function)  # type: ignore[attr-defined]


def _finalize_interpreter() -> None:
    """Do what `os._exit` skips in a forked child, in the interpreter's order.

    It joins threads, then runs exit handlers (`multiprocessing` flushes its queues in one), then
    flushes everything that they have written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush_streams()


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # It is closed, or has no reader.


def prepare(preparation: bytes) -> None:
    """Make this new interpreter look like the agent's to the user's modules."""
    from multiprocessing import process, spawn

    # While this is set, `multiprocessing` rejects a script that starts processes at import: such a
    # script would start itself forever.
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(pickle.loads(preparation))  # noqa: S301 (our agent's)
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]


def main() -> None:
    """Run as a `spawn` worker: read the call from a descriptor, write its value to another."""
    sys.excepthook = _show_without_own_frames
    with open(CALL_FD, "rb") as stream:
        preparation, data, has_tracker = pickle.load(stream)  # noqa: S301 (our agent's)
    if has_tracker:
        use_tracker(TRACKER_FD)
    try:
        RaisedSignals().begin()
        with recording():
            prepare(preparation)
        fn, args = pickle.loads(data)  # noqa: S301 (our agent's)
        call_and_return(fn, args, RESULT_FD, PEERS_FD)
    except SignalException as stop:
        _finalize_interpreter()
        die_of(stop.sigval)
    finally:
        await_native_threads()  # A forked worker needs no such wait: its interpreter does not exit.


def _show_without_own_frames(kind: type[BaseException], error: BaseException, tb: Any) -> None:
    part = without_own_frames(tb and tb.tb_next) or tb  # Without the frame of `-c`.
    sys.__excepthook__(kind, error.with_traceback(part), part)


def serve_forks() -> None:
    """Run as the `forkserver`: import once, then act as a keeper that forks a worker for each call."""
    from holdfast.processes.keeper import keeper_program

    # This keeper reads its control socket only after the imports, which may hang. So it also needs the
    # death signal, which is tied to the parent's thread; that thread waits for the first worker.
    prctl = keeper_program.load_prctl()
    prctl(keeper_program.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Descriptors that the agent's program left inheritable.
    os.closerange(PREPARATION_FD + 1, 1 << 16)
    with open(PREPARATION_FD, "rb") as stream:
        agent, preparation, modules, end_fd = pickle.load(stream)  # noqa: S301 (our agent's)
    if os.getppid() != agent:
        os._exit(1)  # The parent ended before the signal was requested.
    reserved = range(RESULT_FD, end_fd)
    import_error = None
    try:
        reserve_fds(reserved)
        prepare(preparation)
        preload(modules)
    except BaseException as error:  # noqa: BLE001 (each worker fails with it)
        error.add_note("(raised while the fork server imported the main module and the preloads)")
        import_error = error
    _flush_streams()  # Otherwise each worker would write the buffered output again.
    prctl(keeper_program.PR_SET_PDEATHSIG, 0, 0, 0, 0)
    keeper_program.serve(CONTROL_FD, lambda call: run_packed(call, reserved, import_error))


def reserve_fds(numbers: range) -> None:
    """Occupy these descriptors, so that later files get others."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number in numbers:
        if number != null:
            os.dup2(null, number, inheritable=False)
    if null not in numbers:
        os.close(null)


def preload(modules: list[str]) -> None:
    """Import what the workers will need."""
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            pass  # As in `multiprocessing`: the worker imports a module whose preload failed.


def run_packed(
    call: tuple[bytes, list[int]], reserved: range, import_error: BaseException | None
) -> int:
    """Run one pickled call in a child of the forkserver. If there is an `import_error`, raise it instead."""

    def unpack_and_call() -> None:
        if import_error is not None:
            with recording():
                fail_with(import_error)
        data, passed = call
        for fd in reserved:
            if fd not in passed:
                os.close(fd)
        if TRACKER_FD in passed:
            use_tracker(TRACKER_FD)
        fn, args = pickle.loads(data)  # noqa: S301 (our agent's)
        call_and_return(fn, args, RESULT_FD, PEERS_FD)

    return call_in_fork(unpack_and_call)


def fail_with(error: BaseException) -> None:
    """Raise the exception of the process from which this one was forked."""
    raise error


def interpreter_command(entry: str) -> list[str]:
    """Return the command of a new interpreter that runs one function of this module.

    The directory of this package goes to the end of `sys.path`: the agent may have found it through a path entry of
    its own. The working directory is left out, because other users may be able to write to it; `prepare` adds it
    again if this program has it.
    """
    from multiprocessing import spawn

    home = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    program = (
        f"import sys; sys.path = [one for one in sys.path if one] + [{home!r}]; "
        f"from holdfast.processes.workers.function_child import {entry}; {entry}()"
    )
    executable = os.fsdecode(spawn.get_executable() or sys.executable)
    return [executable, *interpreter_flags(), "-c", program]


def interpreter_flags() -> list[str]:
    """Return the flags with which this interpreter was started, such as -O or -X dev."""
    from multiprocessing import util

    flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def preload_modules() -> list[str]:
    """Return the modules of `multiprocessing.set_forkserver_preload`, except `__main__`."""
    from multiprocessing import forkserver

    modules = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    return [module for module in modules if module != "__main__"]


def tracker_fd() -> int:
    """Return the descriptor of `multiprocessing`'s resource tracker; -1 if none runs."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    fd = getattr(tracker, "_resource_tracker", None)
    return fd._fd if fd is not None and fd._fd is not None else -1


def use_tracker(fd: int) -> None:
    """Use the agent's resource tracker. This worker's own tracker would exit with the worker, and
    destroy objects that other workers share.
    """
    from multiprocessing import resource_tracker

    tracker: Any = resource_tracker._resource_tracker
    tracker._fd, tracker._pid = fd, None
