"""Makes a forked Python process look like a new one to the program that it runs.

The effects of imports stay, because a new interpreter that imports the modules would have them too:
signal handlers, variables, entries of `sys.path`. Everything that belongs to one start is renewed:
arguments, environment, streams, `__main__`.

The zygote loads this file by its path. Neither imports any other part of `holdfast`.
"""

from __future__ import annotations

import ctypes
import gc
import io
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any, ClassVar

PR_SET_NAME = 15
PR_SET_MM, PR_SET_MM_ARG_END = 35, 9
NAME_BYTES_MAX = 15  # The kernel's limit for a process's name.
libc = ctypes.CDLL(None, use_errno=True)


class Interpreter:
    """The state of this interpreter before the imports for the workers."""

    def __init__(self) -> None:
        # The directory of the zygote program itself; nothing may be imported from it.
        if not has_safe_path():
            del sys.path[0]
        self.path0: str | None = None
        self.command_line = CommandLine()
        self.streams = [
            StandardStream(name, fd) for fd, name in enumerate(("stdin", "stdout", "stderr"))
        ]
        self.environment = dict(os.environ)
        self.collects = True

    def set_path0(self, kind: str, what: str) -> None:
        """Set the first entry of `sys.path`, as the interpreter does for a script or a module."""
        if self.path0 is not None and self.path0 in sys.path:
            sys.path.remove(self.path0)
        self.path0 = None
        if kind == "script" and is_importable(what):
            self.path0 = absolute_path(what)
        elif not has_safe_path():
            self.path0 = path0_of(kind, what)
        if self.path0 is not None:
            sys.path.insert(0, self.path0)

    def prepare_for_forks(self) -> None:
        """Prepare for forks: keep the garbage collector from copying all shared memory."""
        self.collects = gc.isenabled()
        gc.disable()
        gc.freeze()

    def renew(
        self, argv: list[str], kind: str, what: str, args: list[str], env: dict[str, str]
    ) -> Callable[[], object]:
        """Make this process look like a new interpreter; return the function that runs its program."""
        self.put_environment(env)
        watch_environment()
        for stream in self.streams:
            try:
                stream.renew()
            except (AttributeError, ValueError):
                pass  # A module has detached the stream; the module's own object still writes there.
        self.command_line.show(argv)
        set_name(os.path.basename(argv[0]))
        sys.orig_argv = list(argv)
        sys.argv = [what if kind == "script" else f"-{kind}", *args]
        self.set_path0(kind, what)
        sys.path_importer_cache.clear()  # There may be new files.
        sys.modules["__main__"] = new_main()
        reseed_numpy()
        reseed_torch()
        renew_multiprocessing()
        if self.collects:
            gc.enable()
        return program_of(kind, what)

    def put_environment(self, env: dict[str, str]) -> None:
        """Set the worker's environment, plus the variables that the modules set on import."""
        made = {
            name: os.environ.get(name)
            for name in {*os.environ, *self.environment}
            if os.environ.get(name) != self.environment.get(name)
            if env.get(name) == self.environment.get(name)
        }
        os.environ.clear()
        os.environ.update(env)
        for name, value in made.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# Variables that modules have read on import. Setting them later has no effect there.

reads: dict[str, tuple[str, str | None]] = {}
"""Each variable with the module that read it first, and its value at that time."""

# C libraries read these when they are loaded; Python cannot observe that.
READ_BY_LIBRARIES = {
    "numpy": ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    "torch": ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "OMP_PROC_BIND"),
}
INSTALLED = ("/site-packages/", "/dist-packages/", os.path.dirname(os.__file__) + os.sep)


class RecordingEnviron(os._Environ):  # type: ignore[type-arg]
    """An environment that records which variables a module reads."""

    module = ""
    listed: ClassVar[set[str]] = set()  # Variables that a module only listed.

    def __getitem__(self, name: str) -> str:
        value: str | None = None
        try:
            value = super().__getitem__(name)
        finally:
            if name in self.listed:
                self.listed.discard(name)
            elif isinstance(name, str):
                reads.setdefault(name, (self.module, value))
        return value

    def __iter__(self) -> Any:
        for name in super().__iter__():
            self.listed.add(name)
            yield name


class WatchedEnviron(os._Environ):  # type: ignore[type-arg]
    """An environment that warns if a program sets a variable that a module has already read."""

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name, value)
        warn_if_late(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        warn_if_late(name, None)


def record_reads(module: str) -> Callable[[], None]:
    """Record which variables a module reads, until the caller calls the returned function."""
    environ: Any = os.environ
    before = {name for name in READ_BY_LIBRARIES if name in sys.modules}
    plain, environ.__class__ = environ.__class__, RecordingEnviron
    RecordingEnviron.module = module
    RecordingEnviron.listed.clear()

    def end() -> None:
        environ.__class__ = plain
        for library in READ_BY_LIBRARIES.keys() & sys.modules.keys() - before:
            for name in READ_BY_LIBRARIES[library]:
                reads.setdefault(name, (module, environ.get(name)))

    return end


def watch_environment() -> None:
    """Watch for late settings, but only in rank 0 of generation 0: one warning per job is enough."""
    environ: Any = os.environ
    first = environ.get("RANK", "0") == "0" and environ.get("HOLDFAST_GENERATION", "0") == "0"
    if reads and first and type(environ) is os._Environ:
        environ.__class__ = WatchedEnviron


def warn_if_late(name: str, value: str | None) -> None:
    """Warn that a module read a variable before the program set it, if the value differs."""
    module, seen = reads.get(name, ("", value))
    if value == seen:
        return
    caller = sys._getframe(2)
    while caller.f_back is not None and "_collections_abc" in caller.f_code.co_filename:
        caller = caller.f_back
    if any(part in caller.f_code.co_filename for part in INSTALLED):
        return  # The library sets the variable itself, and knows when it reads it.
    del reads[name]
    sys.stderr.write(
        f"holdfast: the script sets {name} too late for {module}, which --preload has already imported: "
        f"export {name} before `holdfast run`, or remove {module} from --preload\n"
    )


class StandardStream:
    """One of the standard streams, and how to renew it when its descriptor has another file."""

    def __init__(self, name: str, fd: int) -> None:
        self.stream = getattr(sys, name)
        self.name = name
        self.fd = fd
        self.made = self.settings()

    def settings(self) -> dict[str, Any]:
        names = ("encoding", "errors", "line_buffering", "write_through")
        return {name: getattr(self.stream, name, None) for name in names}

    def renew(self) -> None:
        """Do what a new interpreter does for this descriptor, with the existing objects.

        Modules may hold references to them: a logging handler, a wrapper with colours.
        """
        if self.stream is None:
            return
        now, made = self.settings(), self.made
        buffer: Any = self.stream.buffer
        raw: Any = io.FileIO(self.fd, "rb" if self.fd == 0 else "wb", closefd=False)
        raw.name = f"<{self.name}>"
        tty = raw.isatty()
        if hasattr(buffer, "raw"):
            buffer.__init__(raw, buffer_size(self.fd, tty=tty))
        else:
            buffer = raw
        unbuffered = made["write_through"]  # By -u, or its variable.
        lines = not unbuffered and (tty or self.fd == 2)
        self.stream.__init__(buffer, made["encoding"], made["errors"], "\n", lines, unbuffered)
        chosen = {name: value for name, value in now.items() if value != made[name]}
        if chosen:  # By a module.
            self.stream.reconfigure(**chosen)


def buffer_size(fd: int, *, tty: bool) -> int:
    """Return the buffer size that `open` would choose for a descriptor."""
    size = getattr(os.fstat(fd), "st_blksize", 0)
    return size if size > 1 and not tty else io.DEFAULT_BUFFER_SIZE


def flush_streams() -> None:
    """Flush the buffers; otherwise each fork would write them again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 (a module's own stream, a closed one, a full disk)
            pass


def set_name(name: str) -> None:
    """Set the kernel's name of this process, which `top` shows."""
    libc.prctl(PR_SET_NAME, os.fsencode(name)[:NAME_BYTES_MAX], 0, 0, 0)


class CommandLine:
    """The memory with this program's arguments, which `ps` shows."""

    def __init__(self) -> None:
        self.start = self.size = 0
        try:
            with open("/proc/self/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            self.start = int(fields[45])
            self.size = max(0, int(fields[46]) - self.start)
        except (OSError, IndexError, ValueError):
            pass  # Not readable: `show` then changes nothing.

    def show(self, words: Iterable[str]) -> None:
        if self.start and self.size:
            line = b"".join(os.fsencode(word) + b"\0" for word in words)[: self.size - 1]
            ctypes.memmove(self.start, line.ljust(self.size, b"\0"), self.size)
            # Usually only root may do this. Without it, the line ends with empty words.
            end = self.start + max(1, len(line))
            libc.prctl(PR_SET_MM, PR_SET_MM_ARG_END, ctypes.c_ulong(end), 0, 0)


def renew_multiprocessing() -> None:
    """Correct the working directory that `multiprocessing` recorded.

    Also forget the pid of its resource tracker, which is not a child of this process.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.path.abspath(os.getcwd())
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:
        tracker._resource_tracker._pid = None


def reseed_numpy() -> None:
    """Give numpy's global generator a new state, as a new interpreter would.

    If a module has seeded it, keep the state; all workers then share it.
    """
    mtrand = sys.modules.get("numpy.random.mtrand")
    try:
        if mtrand is not None and mtrand._rand._bit_generator._seed_seq is not None:
            mtrand._rand.seed()
    except Exception:  # noqa: BLE001 (parts of numpy that may change their names)
        pass


def reseed_torch() -> None:
    """Give torch's CPU generator a new state, unless a module has seeded it.

    torch seeds it at random on import, with 53 bits. A seed of at most 32 bits comes from a module.
    """
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.default_generator.initial_seed() >> 32:
            torch.default_generator.seed()
    except Exception:  # noqa: BLE001 (another module of that name, or parts that may change)
        pass


# Programs, as the interpreter starts them.


def has_safe_path() -> bool:
    """Whether flags keep the directory of a script off `sys.path`."""
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def path0_of(kind: str, what: str) -> str:
    """Return the first entry of `sys.path` for a program."""
    if kind == "m":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(what)) if kind == "script" else ""


def absolute_path(path: str) -> str:
    """Return the absolute path of a script; any other path unchanged."""
    return path if os.path.isabs(path) else f"{os.getcwd()}/{path}"


def is_importable(path: str) -> bool:
    """Whether a script is a directory or an archive that contains a `__main__`."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def new_main() -> ModuleType:
    """Return a `__main__` as the interpreter creates it, before anything runs in it."""
    from importlib.machinery import BuiltinImporter

    main = type(sys)("__main__")
    for name, value in sys.modules["__main__"].__dict__.items():
        if name.startswith("__") and name not in ("__doc__", "__file__", "__cached__"):
            main.__dict__[name] = {} if name == "__annotations__" else value
    main.__loader__ = BuiltinImporter
    return main


def program_of(kind: str, what: str) -> Callable[[], object]:
    """Return a function that runs a program in the new `__main__`."""
    if kind == "c":
        return lambda: run_text(what)
    if kind == "m" or is_importable(what):
        import runpy

        run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda: run_module(what) if kind == "m" else run_module("__main__", False)  # noqa: FBT003
    return lambda: run_file(what)


def run_text(text: str) -> None:
    """Run the text of `-c`."""
    if sys.version_info >= (3, 14):
        import textwrap

        text = textwrap.dedent(text)
    code = compile(text, "<string>", "exec", dont_inherit=True)
    exec(code, sys.modules["__main__"].__dict__)  # noqa: S102 (it is the worker's program)


def run_file(path: str) -> None:
    """Run a script, from source or compiled."""
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader
    from importlib.util import MAGIC_NUMBER

    whole = absolute_path(path)
    try:
        with open(whole, "rb") as stream:
            source = stream.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.orig_argv[0]}: can't open file {whole!r}: {why}\n")
        sys.exit(2)
    main = sys.modules["__main__"]
    compiled = path.endswith(".pyc") or source[:2] == MAGIC_NUMBER[:2]
    main.__file__ = whole
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    kind: Any = SourcelessFileLoader if compiled else SourceFileLoader
    main.__loader__ = kind("__main__", whole)
    if compiled:
        if source[:4] != MAGIC_NUMBER:
            raise RuntimeError("Bad magic number in .pyc file")
        code = marshal.loads(source[16:])  # noqa: S302 (it is the program)
    else:
        code = compile(source, whole, "exec", dont_inherit=True)
    del source
    exec(code, main.__dict__)  # noqa: S102 (it is the worker's program)


def hide_frames(*files: str) -> None:
    """Omit the leading frames of these files from the traceback of an exception that ends this process."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return

    def show(kind: type[BaseException], error: BaseException, tb: Any) -> None:
        while tb is not None and tb.tb_frame.f_code.co_filename in files:
            tb = tb.tb_next
        sys.last_traceback = tb
        hook(kind, error.with_traceback(tb), tb)

    sys.excepthook = show
