"""A forked interpreter against a new one, for each way to start Python."""

from __future__ import annotations

import json
import os
import py_compile
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from zygotes import Harness, Outcome

if TYPE_CHECKING:
    from pathlib import Path

# Prints everything that a program can find out about how it was started.
TELL = """
import ctypes, gc, json, os, re, signal, sys, threading, warnings
def about(stream):
    buffer = stream.buffer
    raw = getattr(buffer, "raw", buffer)
    return [
        stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.mode,
        stream.name, stream.isatty(), stream.newlines, stream.seekable(), stream.fileno(),
        repr(stream), type(buffer).__name__, raw.name, raw.mode, raw.closefd, repr(raw),
    ]
def there(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
def read(path):
    with open(path) as stream:
        return stream.read()
def status(*names):
    return [line for line in read("/proc/self/status").splitlines() if line.startswith(names)]
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
death_signal = ctypes.c_int()
libc.prctl(2, ctypes.byref(death_signal), 0, 0, 0)
values = dict(
    fds=[fd for fd in range(300) if there(fd)],
    main=[*globals()][: [*globals()].index("ctypes")],
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, flags=repr(sys.flags),
    options=[sys.warnoptions, repr(sys._xoptions)], executable=sys.executable,
    name=__name__, file=globals().get("__file__"), doc=__doc__,
    spec=re.sub(' at 0x[0-9a-f]+', '', repr(__spec__)),
    package=__package__, loader=repr(__loader__).partition(" at 0x")[0],
    cached=globals().get("__cached__"), notes=globals().get("__annotations__"),
    builtins=repr(__builtins__), main_is_this=sys.modules["__main__"].__dict__ is globals(),
    streams=[about(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    same=[sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    handlers=[repr(signal.getsignal(n)).partition(" at 0x")[0] for n in range(1, signal.NSIG)],
    kernel=status("SigBlk", "SigIgn", "SigCgt", "Threads", "Umask"),
    mask=[*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    groups=[os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()], parent=os.getppid(),
    env=dict(os.environ), c_env={k: str(libc.getenv(k.encode())) for k in ("RANK", "PATH", "GONE")},
    cwd=os.getcwd(), threads=[t.name for t in threading.enumerate()],
    native=threading.main_thread().native_id == os.getpid(),
    gc=[gc.isenabled(), gc.get_threshold(), gc.get_debug()], filters=repr(warnings.filters),
    hooks=[sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getrecursionlimit()],
    comm=read("/proc/self/comm"), death=death_signal.value,
    cmdline=read("/proc/self/cmdline").rstrip(chr(0)).split(chr(0)),
)
print(json.dumps(values))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with the same program in every form that Python runs."""
    for name in ("tell.py", "pack/inner.py", "pack/__main__.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TELL)
    (tmp_path / "pack/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("pack/inner.py")
    py_compile.compile(str(tmp_path / "tell.py"), cfile=str(tmp_path / "compiled.pyc"))
    py_compile.compile(str(tmp_path / "tell.py"), cfile=str(tmp_path / "odd_name"))
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", TELL)
    return tmp_path


def reported(outcome: Outcome) -> Any:
    assert (outcome.exitcode, outcome.err) == (0, ""), outcome
    return json.loads(outcome.out)


@pytest.mark.parametrize(
    "words",
    [
        ["tell.py"], ["tell.py", "--flag", "a b", "", "é"], ["./tell.py"],
        ["pack/../tell.py", "1"], ["{folder}/tell.py"], ["link.py"], ["compiled.pyc", "1"],
        ["odd_name"], ["folder", "1"], ["./folder/"], ["archive.zip", "1"],
        ["-m", "tell", "-x", "y"], ["-m", "pack"], ["-mpack.inner", "1"], ["-c", TELL, "-x", "y"],
        ["-u", "tell.py"], ["-u", "-m", "tell"], ["-O", "-B", "tell.py"], ["-I", "tell.py"],
        ["-I", "folder"], ["-P", "-m", "json.tool", "--help"], ["-sE", "-c", TELL],
        ["-S", "tell.py"], ["-X", "dev", "-W", "error", "tell.py"], ["-Xutf8=0", "tell.py"],
    ],
    ids=lambda words: " ".join(words).replace(TELL, "TELL")[:40],
)  # fmt: skip
def test_forked_interpreter_looks_like_a_new_one(folder: Path, words: list[str]) -> None:
    words = [word.format(folder=folder) if word != TELL else word for word in words]
    env = {**os.environ, "RANK": "3"}
    with Harness(*words, cwd=folder, env=env, modules=["json"]) as harness:
        fresh, forked = harness.both(env={**env, "RANK": "4", "MORE": "é"})
        if "json.tool" in words:
            assert fresh == forked
        else:
            assert reported(forked) == reported(fresh)


def test_effects_of_imports_are_kept(tmp_path: Path) -> None:
    (tmp_path / "does.py").write_text(
        "import atexit, os, signal, sys, warnings\n"
        "os.environ['DOES'] = 'yes'; os.environ['CHANGED'] = 'by it'; del os.environ['REMOVED']\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('handled'))\n"
        "sys.path.append('/of/does'); warnings.simplefilter('ignore')\n"
        "atexit.register(print, 'at exit'); stream = sys.stderr; sys.does = True\n"
    )
    (tmp_path / "uses.py").write_text(
        "import does, os, signal, sys, warnings\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(os.environ['DOES'], os.environ['CHANGED'], os.environ.get('REMOVED'))\n"
        "print(sys.path[0], sys.path[-1], does.stream is sys.stderr)\n"
        "warnings.warn('unheard')\n"
        "print('to its stream', file=does.stream)\n"
    )
    env = {**os.environ, "CHANGED": "before", "REMOVED": "not yet"}
    with Harness("uses.py", cwd=tmp_path, modules=["does"], env=env) as harness:
        fresh, forked = harness.both()
        assert forked == fresh
        assert "at exit" in forked.out
        assert "handled" in forked.out
        other = harness.run(env={**env, "CHANGED": "otherwise"})
        assert "yes otherwise None" in other.out


@pytest.mark.torch
@pytest.mark.parametrize(
    ("module", "draw", "seed"),
    [
        ("numpy.random", "numpy.random.rand()", "numpy.random.seed(7)"),
        ("torch", "torch.rand(1).item()", "torch.manual_seed(7)"),
    ],
)
def test_random_state_differs_per_worker_unless_seeded(
    tmp_path: Path, module: str, draw: str, seed: str
) -> None:
    program = f"import {module}; print({draw})"
    with Harness("-c", program, cwd=tmp_path, modules=[module]) as harness:
        assert len({harness.run().out for _ in range(3)}) == 3
    (tmp_path / "seeds.py").write_text(f"import {module}; {seed}")
    with Harness("-c", f"import seeds; {program}", cwd=tmp_path, modules=["seeds"]) as harness:
        fresh, forked = harness.both()
        assert forked == fresh
