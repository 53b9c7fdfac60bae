"""The command `holdfast`: runs a subcommand and returns its exit code.

Only this module chooses exit codes: a subcommand raises, and this module prints one line and maps the
error to a code. To keep the start fast, this module imports everything else when it needs it
(docs/internals/decisions/0029-start-up-time.md).

===========================================  ==============================================
how it ended                                 exit code
===========================================  ==============================================
every worker succeeded                       0
a worker failed                              the exit code of the first worker that failed
a signal ended that worker                   128 + the signal's number
a signal stopped this command                128 + the signal's number (130 for Ctrl-C)
a user stopped the job, `holdfast stop`      143, the code for SIGTERM
the command line is invalid                  2
the script is missing, or cannot be started  127, or 126
the environment or a plug-in is at fault     78
a bug in Holdfast                            70
===========================================  ==============================================

With `--exit-code-compat`, every failure except an invalid command line exits with 1.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import os
import sys
from _thread import RLock

from holdfast.errors import (
    EnvironmentProblem,
    HoldfastError,
    PluginError,
    UsageError,
    find_shortage,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from typing import Any, NoReturn, TextIO

    from holdfast.cli.commands import Command

COMPAT_FAILURE = 1
USAGE = 2
BUG = 70
INTERRUPTED = 130
STARTS_NOTHING = {
    "-h",
    "--help",
    "--dry-run",
    "--dry_run",
    "--print-completion",
    "--print_completion",
}
# The garbage collector runs after this many new objects. A start creates several thousand, which stay alive.
GARBAGE_MIN = 10_000
# Modules that others import, and that a plain job does not use before its workers run. A package precedes its
# modules.
POSTPONED = (
    "argparse", "array", "ctypes", "dataclasses", "hmac", "importlib.metadata", "json", "re", "resource", "runpy", "selectors", "string", "struct", "subprocess", "tempfile",
    "termios", "threading", "tokenize", "traceback", "typing",
    "holdfast.agent.blocked_workers", "holdfast.cli.parser", "holdfast.core.blame", "holdfast.core.job_settings", "holdfast.core.stopping",
    "holdfast.launcher.dashboard_process", "holdfast.launcher.preload", "holdfast.net.peer_user", "holdfast.numa",
    "holdfast.numa.binding", "holdfast.numa.visible_devices", "holdfast.observe.events",
    "holdfast.observe.events.destinations", "holdfast.observe.events.event_recorder", "holdfast.observe.health",
    "holdfast.observe.health.health_server", "holdfast.observe.health.loop_probe", "holdfast.observe.standalone",
    "holdfast.observe.timeline", "holdfast.processes.failures.error_file", "holdfast.processes.failures.failure",
    "holdfast.processes.failures.tracebacks", "holdfast.processes.logs.follower", "holdfast.processes.logs.lines",
    "holdfast.processes.stacks", "holdfast.processes.zygote",
    "holdfast.processes.zygote.warm_start", "holdfast.store", "holdfast.store.collectives",
    "holdfast.store.memory_store", "holdfast.store.tcp", "holdfast.store.tcp.embedded", "holdfast.timers",
    "holdfast.timers.reaper", "holdfast.timers.worker_timers", "holdfast.wire", "holdfast.wire.store_proof",
)  # fmt: skip


class Stopped(KeyboardInterrupt):
    """A signal ended this command before an agent could handle it."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class PostponedModule(type(sys)):  # type: ignore[misc]
    """A module that is found and executed when one of its names is used for the first time.

    The main thread must execute `threading`, because `threading` considers the thread that executes it to be
    the main thread. No other thread can execute it first, since other threads are created with `threading`.
    """

    TYPE_CHECKING = False  # So `typing` need not be executed for this name.
    _lock: Any = RLock()
    _is_executed = False

    def __getattr__(self, name: str) -> Any:
        with PostponedModule._lock:  # Another thread waits until the module is complete.
            if self.__spec__ is None:
                self._find()
            # The import statement looks for `__path__`, which only a package has.
            is_used = name != "__path__" or "__path__" in self.__dict__
            if is_used and not self._is_executed:
                self._execute()
        return type(sys).__getattribute__(self, name)

    def _execute(self) -> None:
        loader: Any = self.__loader__
        self._is_executed = True
        try:
            # The loader of an extension or a frozen module creates the module itself.
            made = loader.create_module(self.__spec__)
            if made is not None:
                made.__spec__ = self.__spec__
            loader.exec_module(made or self)
        except BaseException:  # Also from a signal handler; the next use executes it again.
            self._is_executed = False
            raise
        self.__dict__.update(vars(made or self))
        self.__class__ = type(sys)  # type: ignore[assignment]

    def _find(self) -> None:
        package = self.__name__.rpartition(".")[0]
        path = __import__(package, fromlist=["__path__"]).__path__ if package else None
        found = (finder.find_spec(self.__name__, path) for finder in sys.meta_path)
        spec = next(spec for spec in found if spec is not None)
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        self.__loader__, self.__file__ = spec.loader, spec.origin
        self.__spec__ = spec


def postpone(*names: str) -> None:
    """Execute these modules at their first use, not at their first import."""
    os.register_at_fork(after_in_child=PostponedModule._lock._at_fork_reinit)
    for name in names:
        if name not in sys.modules:
            one = sys.modules[name] = PostponedModule(name)
            _add_to_package(one)


def _add_to_package(module: PostponedModule) -> None:
    """If the module's package is postponed too, set its `__path__`, so that imports do not execute it."""
    name, _, last = module.__name__.rpartition(".")
    package = sys.modules.get(name)
    if type(package) is PostponedModule:
        root, *folders = name.split(".")
        package.__path__ = ["/".join((sys.modules[root].__path__[0], *folders))]
        setattr(package, last, module)


def bind_postponed() -> None:
    """Set postponed modules as attributes of their packages.

    `import importlib.metadata`, as in a plug-in, does not: it only finds the module, and binds `importlib`.
    """
    for name in POSTPONED:
        package, _, last = name.rpartition(".")
        if package in sys.modules and name in sys.modules:
            setattr(sys.modules[package], last, sys.modules[name])


class EarlyAndLateSignals:
    """Handles signals while no agent does.

    Before the agent runs, a signal stops the command cleanly. After the agent has run, during clean-up, a
    signal has no effect, but pressing Ctrl-C twice exits immediately. While the agent runs, a signal that it
    does not handle has its default action.
    """

    SIGNALS = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT)

    def __init__(self) -> None:
        self.is_late = False
        self._interrupts_left = 2

    def begin(self) -> None:
        for one in self.SIGNALS:
            if _signal.getsignal(one) is not _signal.SIG_IGN:
                _signal.signal(one, self._handle)

    def _handle(self, signum: int, _frame: object) -> None:
        watch = getattr(sys.modules.get("holdfast.processes.signals"), "SignalWatch", None)
        if watch is not None and watch.entered:
            _signal.signal(
                signum,
                _signal.default_int_handler if signum == _signal.SIGINT else _signal.SIG_DFL,
            )
            os.kill(os.getpid(), signum)
        elif self.is_late or (watch is not None and watch.was_entered):
            self._interrupts_left -= signum == _signal.SIGINT
            if not self._interrupts_left:
                os._exit(INTERRUPTED)
        else:
            self.is_late = True
            raise Stopped(signum)


def entry(*first: str) -> NoReturn:
    """Run the command `holdfast`, with these arguments first, and exit with its exit code."""
    run_and_exit(lambda: dispatch([*first, *sys.argv[1:]]))


def run_and_exit(command: Callable[[], int]) -> NoReturn:
    """Run a command as this process's only task, and exit with its exit code."""
    gc.set_threshold(GARBAGE_MIN)
    postpone(*POSTPONED)
    import faulthandler

    try:
        faulthandler.enable()  # A crash shows the stacks of all threads.
    except (OSError, RuntimeError, ValueError):
        pass  # No standard error.
    signals = EarlyAndLateSignals()
    try:
        signals.begin()
        from holdfast.processes.keeper import keeper_client

        keeper_client.adopt_orphans()
        code = command()
        signals.is_late = True
    except Stopped as end:
        code = 128 + end.signum
    except KeyboardInterrupt:
        code = INTERRUPTED
    import atexit

    # Run the exit functions of plug-ins, but skip the slow teardown of the interpreter.
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def dispatch(argv: list[str]) -> int:
    """Run the command that the first argument names, and return its exit code; never raises."""
    if argv and argv[0] in ("-V", "--version"):
        from holdfast import __version__

        _write(sys.stdout, f"holdfast {__version__}\n")
        return 0
    if argv and argv[0] == "run":
        return run_command(argv[1:])
    from holdfast.cli.commands import COMMANDS, overview

    if not argv or argv[0] in ("-h", "--help", "help"):
        _write(sys.stdout, overview())
        return 0
    name, *words = argv
    if name in COMMANDS:
        return _exit_code(name, lambda: _execute(COMMANDS[name], words))
    from holdfast.cli.parser import suggestion

    hint = suggestion(name, ["--version"] if name.startswith("-") else [*COMMANDS])
    if name.endswith(".py") or (name.startswith("-") and not hint):
        hint = f"did you mean holdfast run {name}?"
    hint = hint or f"commands: {', '.join(COMMANDS)}"
    _write(sys.stderr, _error_line("holdfast", f"{name!r} is not a command; {hint}"))
    return USAGE


def _execute(command: Command, words: list[str]) -> None:
    from importlib import import_module

    module = import_module(command.module)
    try:
        run = getattr(module, command.function)
        run(module.build_parser(command.name).parse_args(words))
    except BrokenPipeError:
        pass  # The reader closed the pipe.
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if not command.extra or package in ("", "holdfast"):
            raise
        hint = f"pip install 'holdfast-run[{command.extra}]'"
        raise EnvironmentProblem(f"{package} is not installed", hint=hint) from None


def run_command(argv: list[str], parse: Callable[[list[str]], Namespace] | None = None) -> int:
    """Run `holdfast run` with these arguments and return its exit code; never raises.

    `parse` may accept more flags than `holdfast run` has.
    """
    from holdfast.processes.keeper import keeper_client

    is_compat = False

    def run() -> None:
        nonlocal is_compat
        if not STARTS_NOTHING & set(argv):
            keeper_client.Keeper.prestart()  # It starts while this process imports and checks the rest.
        gc.disable()  # Modules are not garbage; scanning them slows the start by 3 %.
        try:
            from holdfast.cli.run_command import execute, read_args

            args = (parse or read_args)(argv)
            is_compat = args.exit_code_compat
            bind_postponed()
        finally:
            gc.freeze()  # So the collector does not scan them while the agent runs.
            gc.enable()
        execute(args)

    try:
        return _exit_code("run", run, lambda: is_compat)
    finally:
        keeper_client.Keeper.discard_prestarted()


def _exit_code(
    name: str, run: Callable[[], None], is_compat: Callable[[], bool] = lambda: False
) -> int:
    """Run a subcommand and return its exit code. If it fails, print the reason."""
    try:
        run()
    except SystemExit as end:
        from holdfast import plugins

        culprit = plugins.culprit_of(end)
        if culprit:
            _write(sys.stderr, _error_line(f"holdfast {name}", f"{culprit} ended this command"))
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        _write(sys.stderr, f"{end.code}\n")
        return COMPAT_FAILURE
    except UsageError as error:
        return _report(error, name)
    except Stopped as end:
        from holdfast.processes.signals import describe_signal

        _write(sys.stderr, f"holdfast {name}: stopped by {describe_signal(end.signum)}\n")
        code = 128 + end.signum
    except KeyboardInterrupt:
        _write(sys.stderr, f"holdfast {name}: interrupted\n")
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the last place before the shell)
        code = _report(error, name)
    else:
        return 0
    # A worker's exit code 2 becomes 1 too: it does not mean an invalid command line.
    return COMPAT_FAILURE if code and is_compat() else code


def _report(error: Exception, name: str) -> int:
    if isinstance(error, HoldfastError):
        is_foreign = isinstance(error, PluginError) and error.__cause__ is not None
        trace = _trace(error.__cause__) if is_foreign else ""
        _write(sys.stderr, trace + _error_line(f"holdfast {name}", str(error)))
        return error.exit_code
    shortage = find_shortage(error)
    if shortage is not None:
        return _report(shortage, name)
    from holdfast import console, plugins
    from holdfast.processes.failures.failure import ChildFailedError, exit_status
    from holdfast.processes.signals import SignalException, describe_signal

    if isinstance(error, ChildFailedError):
        report = error.for_terminal(lambda line: console.paint(line, console.RED, sys.stderr))
        _write(sys.stderr, f"{report}\n")
        return exit_status(error)
    if isinstance(error, SignalException):
        _write(sys.stderr, f"holdfast {name}: stopped by {describe_signal(error.sigval)}\n")
        return 128 + error.sigval
    culprit, others = plugins.culprit_of(error), plugins.in_use()
    what, code = "this is a bug in Holdfast; please report it", BUG
    if culprit:
        what, code = f"{culprit} failed: {console.describe(error)}", PluginError.exit_code
    elif others:
        what = f"this is a bug in Holdfast, or in {others}; please report it"
    _write(sys.stderr, _trace(error) + _error_line(f"holdfast {name}", what))
    return code


def _trace(error: BaseException | None) -> str:
    import traceback

    from holdfast.printable import visible

    return visible("".join(traceback.format_exception(error)))


def _error_line(prog: str, text: str) -> str:
    from holdfast import console

    return console.error_line(prog, text)


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream. It is not an error if the reader has closed it."""
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass  # The pipe is closed.


def _flush() -> None:
    """Flush the standard streams, so that the flush at exit cannot fail."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            # The rest of the buffer is lost; the exit code does not change.
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            except OSError:
                pass
