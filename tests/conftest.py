"""Every test must leave this process without additional processes, threads or descriptors.

The idea is from dask's `pytest_resourceleaks`. A check takes about a millisecond. A new process or thread may be
about to exit, so the check waits up to `PATIENCE_S` for it; only a test that leaks waits that long. The check kills
leaked processes, so that the next tests do not fail too.

Processes are found by a variable in their environment, not by their parent, because the init process adopts
processes that a test left behind.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import hypothesis
import pytest

from holdfast.processes.workers import pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chaos.machine_network import MachineNetwork
    from real_etcd import Etcd

PATIENCE_S = 30.0
POLL_S = 0.01
BEGINNING_LOOKS = 100  # Checks of a program that is just starting, a millisecond apart.
MARK = "HOLDFAST_TESTS"
HOME = pytest.StashKey[str]()
# Daemon threads may belong to pytest or torch, but Holdfast's threads have names.
OUR_THREADS = "holdfast"
# Descriptors that Python and libraries open once, on first use, and keep.
KEPT_OPEN = ("/dev/null", "/dev/urandom", "/dev/random")

_foreign: set[int] = set()  # Processes that are not ours, so that each is checked only once.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write the current behaviour of the machines into the transcripts, instead of comparing",
    )
    parser.addoption(
        "--screenshots",
        default="",
        metavar="FOLDER",
        help="have the tests of the dashboard write the documentation's pictures there",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Mark every process started from here on, reset its signals, and set no deadline for examples.

    The processes do not get the home of the user who runs the tests, because agents keep a token there. Under `nohup`,
    or in the background of a shell, some signals are ignored, and all jobs that the tests start would inherit that.
    """
    os.environ[MARK] = str(os.getpid())
    os.environ["HOME"] = config.stash[HOME] = tempfile.mkdtemp(prefix="holdfast-tests-home-")
    os.environ["HOLDFAST_RUNTIME_DIR"] = config.stash[HOME]
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # Some CI systems set them.
        os.environ.pop(name, None)
    for one in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(one) == signal.SIG_IGN:
            interrupt = one == signal.SIGINT
            signal.signal(one, signal.default_int_handler if interrupt else signal.SIG_DFL)
    # Other programs may use the machine, so the duration of an example has no meaning. Each run tries the same
    # examples, so that a failure is due to the change; `exploring` searches for new examples.
    unhurried = hypothesis.settings(
        deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.register_profile("exploring", unhurried)
    hypothesis.settings.register_profile("steady", unhurried, derandomize=True)
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or "steady")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home of the tests."""
    shutil.rmtree(config.stash[HOME])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the pages of killed agents, as the next agent would, because there may be none."""
    if not hasattr(session.config, "workerinput"):  # Not in the processes that xdist started.
        pages.SWEPT_AGE_S = 0.0
        pages._sweep(pages.SHARED_MEMORY)


class Snapshot:
    """The processes, threads and descriptors of this process at one moment."""

    def __init__(self) -> None:
        self.processes = _processes()
        self.threads = {one for one in threading.enumerate() if _matters(one)}
        self.descriptors = _descriptors()

    def beyond(self, before: Snapshot) -> list[str]:
        """Return a description of everything that did not exist before."""
        trackers, tracker_fds = _multiprocessing_servants()
        return [
            *(
                f"process {pid}: {_command_line(pid)}"
                for pid in sorted(self.processes - before.processes - trackers)
            ),
            *(f"thread {one.name}" for one in self.threads - before.threads),
            *(
                f"descriptor {fd}: {target}"
                for fd, target in sorted(self.descriptors.items() - before.descriptors.items())
                if target not in KEPT_OPEN and fd not in tracker_fds
            ),
        ]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks a process, a thread or a descriptor."""
    before = Snapshot()
    yield
    leaked = Snapshot().beyond(before)
    if not leaked:
        return
    deadline = time.monotonic() + PATIENCE_S
    while leaked and time.monotonic() < deadline:
        gc.collect()  # A file in a reference cycle, such as that of a traceback, is not a leak.
        time.sleep(POLL_S)
        leaked = Snapshot().beyond(before)
    if leaked:
        _kill(Snapshot().processes - before.processes - _multiprocessing_servants()[0])
        pytest.fail("the test left behind: " + "; ".join(leaked), pytrace=False)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # It has exited meanwhile.


def _matters(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith(OUR_THREADS)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # The descriptor of the listing itself.
    return found


def _processes() -> set[int]:
    """Return our children, including zombies, and all marked processes."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as children:
                found.update(map(int, children.read().split()))
        except FileNotFoundError:
            continue  # The thread has ended.
    wanted = f"{MARK}={os.getpid()}".encode()
    there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    _foreign.intersection_update(there)
    _foreign.add(os.getpid())
    for pid in there - _foreign - found:
        try:
            variables = _environment(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            variables = []
        if wanted in variables:
            found.add(pid)
        else:
            _foreign.add(pid)
    return found


def _environment(pid: int) -> list[bytes]:
    """Return the variables of a process. For a moment at the start of a program there are none."""
    variables = [b""]
    for _ in range(BEGINNING_LOOKS):
        with open(f"/proc/{pid}/environ", "rb") as environ:
            variables = environ.read().split(b"\0")
        if variables != [b""] or not _has_memory(pid):
            break
        time.sleep(0.001)
    return variables


def _has_memory(pid: int) -> bool:
    """Whether a process is a running program, not a kernel thread or a zombie."""
    with open(f"/proc/{pid}/statm", "rb") as sizes:
        return not sizes.read().startswith(b"0 ")


def _multiprocessing_servants() -> tuple[set[int], set[int]]:
    """Return the processes and descriptors that `multiprocessing` keeps until the program ends."""
    pids: set[int] = set()
    fds: set[int] = set()
    for module, name, pid_name, fd_name in (
        ("multiprocessing.resource_tracker", "_resource_tracker", "_pid", "_fd"),
        ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid", "_forkserver_alive_fd"),
    ):
        servant = getattr(sys.modules.get(module), name, None)
        if getattr(servant, pid_name, None) is not None:
            pids.add(getattr(servant, pid_name))
            fds.add(getattr(servant, fd_name))
    return pids, fds


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            return words.read().replace(b"\0", b" ").decode(errors="replace").strip() or "(ended)"
    except OSError:
        return "(gone)"


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[MachineNetwork]:
    """Machines that each have their own network: three, or the `MACHINES` of the test's module."""
    from chaos.machine_network import MachineNetwork, missing

    reason = missing()
    if reason:
        pytest.skip(reason)
    made = MachineNetwork(getattr(request.module, "MACHINES", 3))
    yield made
    made.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd for the tests of one file."""
    from real_etcd import running_etcd

    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def port() -> Iterator[int]:
    """A port to serve on, which the kernel assigns to no other process meanwhile, at any address.

    If it were reserved at only one address, a connection could use it at another address, and the test could not
    bind it.
    """
    from holdfast.etcd.runner import hold_port

    with hold_port("::" if socket.has_dualstack_ipv6() else "0.0.0.0") as held:
        yield int(held.getsockname()[1])
