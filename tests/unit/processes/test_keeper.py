"""The keeper as a real process: what workers inherit, what is killed, and what is reported."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from _socket import MSG_PEEK
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import UsageError
from holdfast.processes.keeper import keeper_program
from holdfast.processes.keeper.deadline import WorkersDeadline
from holdfast.processes.keeper.keeper_client import (
    DescendantsExited,
    Event,
    Exited,
    Expired,
    Keeper,
    KeeperDied,
    Spawned,
    SpawnFailed,
)
from holdfast.processes.keeper.keeper_program import children_of
from holdfast.processes.procfs import has_ended
from real_jobs import Watched, WorkerMessages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

PATIENCE_S = 60
PYTHON = (sys.executable, "-I", "-S", "-c")
# A worker that exits when its standard input closes.
WAITS = "import sys; sys.stdin.read()"
# A shell with a child in its own session; the shell writes the child's process id.
FAMILY = ["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $!; wait"]
# A daemon that is hard to find: forked twice, in its own session, ignoring SIGTERM.
LEAVES_DAEMON = """
import os, signal
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(write, str(os.getpid()).encode())
        while True:
            signal.pause()
    os._exit(0)
os.wait()
print(os.read(read, 100).decode(), flush=True)
"""
# Writes which descriptors this process has, without opening one to find out.
WRITES_FDS = """
import os
def there(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print(*[fd for fd in range(1000) if there(fd)])
"""


class Kept:
    """A keeper, the events that it sent, and the output of its workers."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.events: list[Event] = []
        self.outputs: dict[int, int] = {}
        self.inputs: dict[int, int] = {}

    def spawn(self, key: int, argv: Sequence[str] | None, **how: Any) -> None:
        """Request a worker whose standard streams are pipes of the test."""
        self.outputs[key], out = os.pipe()
        stdin, self.inputs[key] = os.pipe()
        fds = {0: stdin, 1: out, 2: out, **how.pop("fds", {})}
        self.keeper.spawn(key, argv, **{"env": dict(os.environ), "cwd": "/", "fds": fds, **how})
        os.close(out)
        os.close(stdin)

    def python(self, key: int, code: str, **how: Any) -> None:
        self.spawn(key, [*PYTHON, code], **how)

    def output(self, key: int = 0) -> str:
        """Return everything that a worker and its children wrote, when they have closed the stream."""
        with open(self.outputs.pop(key), errors="surrogateescape") as stream:
            return stream.read()

    def number(self, key: int = 0) -> int:
        """Return the number that a worker writes as its next line."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self.outputs[key], 1)
            assert piece, f"the worker exited: {line!r}"
            line += piece
        return int(line)

    def until(self, kind: type[Event], count: int = 1) -> list[Any]:
        """Wait until this many events of a kind have arrived, and return all of them."""
        while True:
            # Before waiting: `is_gone` may have read the events already.
            self.events += self.keeper.receive()
            found = [event for event in self.events if isinstance(event, kind)]
            if len(found) >= count:
                return found
            ready, _, _ = select.select([self.keeper.fileno()], [], [], PATIENCE_S)
            assert ready, f"no {kind.__name__} arrived, but {self.events}"

    def outcome(self, key: int = 0) -> tuple[int, tuple[int, str] | None]:
        """Wait until a worker has exited."""
        count = 0
        while not (exits := [one for one in self.until(Exited, count) if one.key == key]):
            count += 1
        return exits[0].exitcode, exits[0].error

    def pids(self, count: int) -> dict[int, int]:
        return {event.key: event.pid for event in self.until(Spawned, count)}

    def close(self) -> None:
        self.keeper.close()
        for fd in (*self.outputs.values(), *self.inputs.values()):
            os.close(fd)


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """Begin with the default actions, even if the tests run under nohup."""
    ignored = [
        number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in set(ignored) - {signal.SIGPIPE, signal.SIGXFSZ}:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept(Keeper.start())
    yield made
    made.close()


def signals_of(bits: str) -> set[int]:
    # Without the two signals that the C library reserves.
    return {number for number in signal.valid_signals() if int(bits, 16) >> (number - 1) & 1}


def test_descriptors_may_swap_numbers_and_have_a_limit(kept: Kept) -> None:
    one, two = os.pipe(), os.pipe()
    code = f"import os; os.write({one[1]}, b'to two'); os.write({two[1]}, b'to one')"
    kept.python(0, code, fds={one[1]: two[1], two[1]: one[1]})
    for (read, write), output in ((one, "to one"), (two, "to two")):
        os.close(write)
        with open(read) as stream:
            assert stream.read() == output
    with open(os.devnull) as null:
        with pytest.raises(UsageError):
            kept.keeper.spawn(0, ["true"], env={}, cwd="/", fds=dict.fromkeys(range(300), 0))
        as_many = {100 + number: null.fileno() for number in range(240)}
        kept.python(1, WRITES_FDS, fds=as_many)
    assert kept.output(1).split() == [*"012", *map(str, as_many)]


def test_events_of_many_workers_can_be_read_late(kept: Kept) -> None:
    """There are more requests and events than the socket can hold."""
    with open(os.devnull, "r+b") as null:
        fds = {number: null.fileno() for number in range(3)}
        env = {"PATH": os.environ["PATH"], "ROOM": "." * 4000}
        for key in range(350):
            kept.keeper.spawn(key, ["true"], env=env, cwd="/", fds=fds)
    assert {event.key for event in kept.until(Exited, 350)} == set(range(350))
    assert {event.exitcode for event in kept.until(Exited)} == {0}


def test_exits_are_reported_in_order_even_if_read_late(kept: Kept) -> None:
    keys = range(5)
    for key in keys:
        kept.spawn(key, ["sleep", "1000"])
    pids = kept.pids(len(keys))
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    order = [3, 0, 4, 1, 2]
    for key in order:
        worker = Watched(pids[key])
        os.kill(pids[key], signal.SIGKILL)
        worker.wait_until_exited()
    os.kill(kept.keeper.pid, signal.SIGCONT)
    exits = kept.until(Exited, len(keys))
    assert [one.key for one in exits] == order
    assert sorted(one.at_ns for one in exits) == [one.at_ns for one in exits]


def test_unstartable_worker_reports_why(kept: Kept, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    kept.spawn(0, ["not-in-the-path"])
    kept.spawn(1, [str(plain)])
    kept.spawn(2, ["true"], cwd="/nowhere")
    kept.python(3, "pass", env={"TOO_LARGE": "x" * 300_000})
    kept.python(4, "print(len(__import__('os').environ['X']))", env={"X": "x" * 100_000})
    assert kept.outcome(0) == (127, (errno.ENOENT, "not-in-the-path"))
    assert kept.outcome(1) == (126, (errno.EACCES, str(plain)))
    exitcode, error = kept.outcome(2)
    assert (exitcode, error and error[0]) == (127, errno.ENOENT)
    assert kept.outcome(3) == (127, (errno.E2BIG, PYTHON[0]))
    assert kept.output(4) == "100000\n"
    plain.chmod(0o755)
    kept.spawn(5, [str(plain)])
    assert kept.outcome(5) == (126, (errno.ENOEXEC, str(plain)))


def test_worker_has_only_its_own_descriptors(kept: Kept) -> None:
    with open(os.devnull) as null:
        os.set_inheritable(null.fileno(), True)  # noqa: FBT003 (a program around us may be careless)
        late = Kept(Keeper.start())
        for one in (kept, late):
            one.python(0, WAITS)
            one.python(1, WRITES_FDS, fds={9: null.fileno()})
            assert one.output(1) == "0 1 2 9\n"
        late.close()


def test_commands_have_the_default_actions_and_an_empty_mask() -> None:
    """Python ignores SIGPIPE, but `yes | head` in a worker must end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        kept = Kept(Keeper.start())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    kept.spawn(0, ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"])
    assert [signals_of(line.split()[1]) for line in kept.output().splitlines()] == [set(), set()]
    kept.close()


@pytest.mark.parametrize("signum", keeper_program.IGNORED_SIGNALS)
def test_the_keeper_ignores_signals_that_its_workers_get_from_the_start(
    kept: Kept, signum: signal.Signals
) -> None:
    """Its forked child must not ignore them, not even for a moment."""
    kept.spawn(10, ["true"])
    kept.outcome(10)
    os.kill(kept.keeper.pid, signum)
    for key in range(10):
        kept.spawn(key, ["sleep", "1000"])
        kept.keeper.signal(key, signum)
    assert {event.exitcode for event in kept.until(Exited, 11)} == {0, -signum}


def test_kill_tree_kills_all_below_one_worker(kept: Kept) -> None:
    for key in range(2):
        kept.spawn(key, FAMILY)
    pids, children = kept.pids(2), [kept.number(key) for key in range(2)]
    killed = Watched(pids[0], children[0])
    kept.keeper.kill_tree(0)
    assert kept.outcome(0) == (-signal.SIGKILL, None)
    killed.wait_until_exited()
    assert not has_ended(pids[1])
    assert not has_ended(children[1])


def test_sweep_finds_processes_forked_meanwhile(kept: Kept) -> None:
    """In a chain of processes, each forks the next and exits, so no single scan sees them all."""
    chain = (
        "import os\nif os.fork() == 0:\n os.setsid()\n while os.fork() == 0: os.write(1, b'1\\n')"
    )
    kept.python(0, chain)
    kept.number()
    kept.outcome()
    kept.keeper.sweep()
    kept.until(DescendantsExited)
    assert children_of(kept.keeper.pid) == []


def test_running_workers_and_their_children_are_not_leftovers(kept: Kept) -> None:
    kept.spawn(0, FAMILY)
    child = kept.number()
    kept.python(1, LEAVES_DAEMON)
    daemon = Watched(kept.number(1))
    kept.outcome(1)
    kept.keeper.sweep()
    daemon.wait_until_exited()
    kept.spawn(2, ["true"])  # Its events arrive after the sweep.
    assert kept.outcome(2) == (0, None)
    assert not has_ended(child)
    assert not has_ended(kept.pids(2)[0])
    kept.keeper.kill_tree(0)
    kept.until(DescendantsExited)
    assert has_ended(child)


def test_keeper_reports_that_it_is_childless(kept: Kept) -> None:
    assert kept.keeper.is_childless
    kept.python(0, WAITS)
    assert not kept.keeper.is_childless
    kept.python(1, "")
    kept.outcome(1)
    assert not kept.keeper.is_childless
    os.close(kept.inputs.pop(0))
    kept.outcome(0)  # Both events arrive together.
    assert kept.keeper.is_childless
    kept.python(2, "")
    assert not kept.keeper.is_childless


def test_keeper_with_leftovers_reports_only_on_request(kept: Kept) -> None:
    kept.python(0, LEAVES_DAEMON)
    kept.outcome(0)
    assert not kept.keeper.is_childless
    kept.keeper.sweep()
    kept.until(DescendantsExited)


def test_close_kills_all_processes_below_the_keeper(kept: Kept) -> None:
    kept.spawn(0, FAMILY)
    kept.python(1, LEAVES_DAEMON)
    pids = kept.pids(2).values()
    everyone = Watched(*pids, kept.number(0), kept.number(1), kept.keeper.pid)
    kept.keeper.close()
    everyone.assert_exited()
    kept.keeper.close()


def test_workers_of_a_killed_keeper_die_and_its_loss_is_reported_last(kept: Kept) -> None:
    kept.spawn(0, ["sh", "-c", "exit 4"])
    while kept.keeper._control.recv(1 << 16, MSG_PEEK).count(b"exited") < 1:
        select.select([], [], [], 0.001)
    kept.spawn(1, ["sh", "-c", "trap '' TERM; echo 1; exec sleep 1000"])
    kept.number(1)
    worker = Watched(kept.pids(2)[1])
    # A descendant of a worker must not have the keeper's socket, which would hide the loss.
    kept.python(2, LEAVES_DAEMON)
    daemon = kept.number(2)
    assert not kept.keeper.is_gone()
    kept.outcome(2)
    os.kill(kept.keeper.pid, signal.SIGKILL)
    worker.wait_until_exited()
    kept.until(KeeperDied)
    assert kept.events[-1] == KeeperDied()
    assert kept.outcome(0) == (4, None)
    assert kept.keeper.lost
    assert kept.keeper.is_gone()
    assert not has_ended(daemon)
    os.kill(daemon, signal.SIGKILL)
    kept.keeper.sweep()
    kept.spawn(3, ["true"])
    assert kept.keeper.receive() == []


def test_late_response_to_a_sweep_does_not_answer_the_next(kept: Kept) -> None:
    kept.keeper.sweep()
    while b"empty" not in kept.keeper._control.recv(1 << 16, MSG_PEEK):
        select.select([], [], [], 0.001)
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    kept.keeper.sweep()
    assert kept.keeper.receive() == []
    os.kill(kept.keeper.pid, signal.SIGCONT)
    assert kept.until(DescendantsExited) == [DescendantsExited()]


@pytest.mark.parametrize("how", ["start", "fork"])
def test_a_copy_of_the_socket_does_not_hide_the_agents_death(tmp_path: Path, how: str) -> None:
    """A program may fork by itself; the fork outlives it, and keeps all its descriptors."""
    messages = WorkerMessages(tmp_path)
    program = tmp_path / "agent.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, signal, time
        from holdfast.processes.keeper.keeper_client import Keeper
        keeper = Keeper.start() if {how!r} == "start" else Keeper.fork(lambda _: time.sleep(1000))
        argv = ["sleep", "1000"] if {how!r} == "start" else None
        keeper.spawn(0, argv, env=os.environ, cwd="/", fds={{0: 0, 1: 1, 2: 2}})
        while not (events := keeper.receive()):
            time.sleep(0.001)
        copy = os.fork()
        if copy:
            with open({str(messages.path)!r}, "w") as messages:
                messages.write(f"{{copy}} {{events[0].pid}} {{keeper.pid}}\\n")
        signal.pause()
        """)
    )
    agent = subprocess.Popen([sys.executable, program])
    copy, worker, keeper = map(int, messages.next())
    kept, copied = Watched(worker, keeper), Watched(copy)
    agent.kill()
    agent.wait()
    kept.wait_until_exited()
    os.kill(copy, signal.SIGKILL)
    copied.wait_until_exited()
    messages.close()


def test_a_keeper_is_killed_only_by_its_owner_and_only_while_it_runs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(keeper_program, "send_signal", lambda pid, _: killed.append(pid))
    for name, value in (("_owner", os.getppid()), ("lost", True)):  # A forked child has its copy.
        with monkeypatch.context() as patch:
            patch.setattr(kept.keeper, name, value)
            kept.keeper.kill()
    assert killed == []


def test_forked_keeper_runs_calls_with_the_agents_memory_and_none_of_its_own_descriptors() -> None:
    secret = os.urandom(8).hex()

    def call(number: int) -> int:
        if number:
            return len(os.read(0, 1))
        fds = " ".join(sorted(set(os.listdir("/proc/self/fd"))))
        os.write(1, f"{secret} {os.environ['WHO']} {os.getcwd()} {fds}".encode())
        return 5

    ours = set(os.listdir("/proc/self/fd"))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        kept = Kept(Keeper.fork(call))  # It notices exits although this process blocks the signal.
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for key in range(1, 4):  # The keeper forks each while it has the previous ones.
        kept.spawn(key, None, call=key)
    kept.spawn(0, None, env={"WHO": "me"}, call=0)
    assert kept.outcome() == (5, None)
    output, who, cwd, *fds = kept.output().split()
    assert (output, who, cwd) == (secret, "me", "/")
    assert len(set(fds) - ours) <= 1, "more than the listing's own"
    kept.close()


def test_helper_is_not_a_leftover_and_exits_with_the_keeper(kept: Kept) -> None:
    family = "import os, sys; os.fork(); print(os.getpid(), flush=True); sys.stdin.read()"
    for key in (-1, -2):
        kept.python(key, family)
    first, second = ([kept.number(key) for _ in range(2)] for key in (-1, -2))
    kept.spawn(0, ["true"])
    kept.outcome()
    kept.keeper.signal_leftovers(signal.SIGTERM)
    kept.until(DescendantsExited)
    kept.keeper.sweep()
    kept.until(DescendantsExited, 2)
    assert not [pid for pid in (*first, *second) if has_ended(pid)]
    gone = Watched(*first)
    kept.keeper.kill_tree(-1)
    assert kept.outcome(-1) == (-signal.SIGKILL, None)
    gone.wait_until_exited()
    gone = Watched(*second)
    kept.keeper.close()
    gone.assert_exited()


# Leaves an orphan that waits at descriptor 4 to begin, and has an error for descriptor 5.
LEAVES_ORPHAN = """
import os
pid = os.fork()
if pid == 0:
    keeper = int.from_bytes(os.read(4, 8), "little")
    os.write(5, ERROR)
    os._exit(3 if keeper == os.getppid() else 4)
print(pid, flush=True)
"""


@pytest.mark.parametrize("victim", [False, True])
@pytest.mark.parametrize(("text", "error"), [(b"", None), (b"2 working", (2, "working"))])
def test_orphan_becomes_a_worker_unless_it_exited(
    kept: Kept, text: bytes, error: tuple[int, str] | None, victim: bool
) -> None:
    (go_in, go_out), (error_in, error_out) = os.pipe(), os.pipe()
    kept.python(0, LEAVES_ORPHAN.replace("ERROR", repr(text)), fds={4: go_in, 5: error_out})
    kept.outcome()
    pid = kept.number()
    if victim:
        gone = Watched(pid)
        os.kill(pid, signal.SIGKILL)
        gone.wait_until_exited()
        kept.keeper.sweep()
        kept.until(DescendantsExited)  # By now it is reaped.
    kept.keeper.adopt(1, pid, error_in, go_out)
    for fd in (go_in, go_out, error_in, error_out):
        os.close(fd)
    if victim:
        (failed,) = kept.until(SpawnFailed)
        assert (failed.key, failed.errno) == (1, errno.ECHILD)
    else:
        assert kept.outcome(1) == (3, error)
        assert kept.pids(2)[1] == pid


PARENT = """
import os, subprocess, threading
first = subprocess.Popen(["sleep", "1000"])
def start():
    second = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["MESSAGES"], "w") as messages:
        messages.write(f"{first.pid} {second.pid}\\n")
    threading.Event().wait()
threading.Thread(target=start).start()
"""


def without_listing(path: str, mode: str) -> object:
    if path.endswith("/children"):
        raise FileNotFoundError(path)
    return open(path, mode)


def test_children_of_every_thread_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = WorkerMessages(tmp_path)
    env = {**os.environ, "MESSAGES": str(messages.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=env)
    children = {int(word) for word in messages.next()}
    assert set(children_of(parent.pid)) == children
    assert {parent.pid, *children} <= set(keeper_program.descendants_of(os.getpid()))
    listdir, exists = os.listdir, os.path.exists
    monkeypatch.setattr(os, "listdir", lambda path: [str(1 << 30), *listdir(path)])
    assert set(children_of(parent.pid)) == children, "although a thread exited meanwhile"
    monkeypatch.setattr(os.path, "exists", lambda path: exists(path) and "children" not in path)
    monkeypatch.setattr(keeper_program, "open", without_listing, raising=False)
    assert set(children_of(parent.pid)) == children, "although the kernel lists no children"
    monkeypatch.undo()
    assert children_of(1 << 30) == []
    for pid in (*children, parent.pid):
        os.kill(pid, signal.SIGKILL)
    parent.wait()
    messages.close()


def test_deadline_kills_workers_but_not_helpers(kept: Kept) -> None:
    deadline = WorkersDeadline()
    deadline.begin()
    try:
        kept.keeper.watch(deadline.timer_fds)
        kept.spawn(0, FAMILY)
        kept.python(-1, WAITS)
        family = Watched(kept.number(), kept.pids(2)[0])
        deadline.renew(time.monotonic() + 60, 0.0)
        deadline.renew(time.monotonic(), 0.0)
        deadline.renew(time.monotonic() + 60, 0.0)  # Too late.
        kept.until(Expired)
        family.wait_until_exited()
        assert kept.outcome() == (-signal.SIGKILL, None)
        os.close(kept.inputs.pop(-1))  # The helper exits by itself.
        assert kept.outcome(-1) == (0, None)
    finally:
        deadline.close()


def test_deadline_of_an_earlier_generation_does_not_apply(kept: Kept) -> None:
    deadline = WorkersDeadline()
    deadline.renew(time.monotonic(), 0.0)
    deadline.begin()
    try:
        kept.keeper.watch(deadline.timer_fds)
        select.select([kept.keeper.fileno()], [], [], PATIENCE_S)  # Wait for the expiry.
        deadline.end()
        deadline.renew(None, 0.0)
        deadline.begin()
        kept.keeper.watch(deadline.timer_fds)
        kept.python(0, "")
        assert kept.outcome() == (0, None)
        assert not any(isinstance(event, Expired) for event in kept.events)
    finally:
        deadline.close()


def test_deadline_spares_a_starved_agent_for_the_extra_time(kept: Kept) -> None:
    """This process plays the agent: a busy thread makes it ready to run, all the time."""
    deadline, is_over = WorkersDeadline(), threading.Event()

    def be_busy() -> None:
        while not is_over.is_set():
            pass

    busy = threading.Thread(target=be_busy)
    deadline.begin()
    try:
        kept.keeper.watch(deadline.timer_fds)
        kept.python(0, WAITS)
        kept.pids(1)
        busy.start()
        deadline.renew(time.monotonic(), 600.0)
        kept.python(1, "")
        assert kept.outcome(1) == (0, None)  # By then the keeper has seen the timer.
        assert not any(isinstance(event, Expired) for event in kept.events)
        deadline.renew(time.monotonic(), 0.0)
        kept.until(Expired)
        assert kept.outcome(0) == (-signal.SIGKILL, None)
    finally:
        is_over.set()
        busy.join()
        deadline.close()


def test_deadline_grants_no_extra_time_to_an_agent_that_waits(kept: Kept) -> None:
    deadline = WorkersDeadline()
    deadline.begin()
    try:
        kept.keeper.watch(deadline.timer_fds)
        kept.python(0, WAITS)
        kept.pids(1)
        deadline.renew(time.monotonic() + 0.05, 600.0)
        select.select([kept.keeper.fileno()], [], [], PATIENCE_S)
        kept.until(Expired)
        assert kept.outcome(0) == (-signal.SIGKILL, None)
    finally:
        deadline.close()


def test_keeper_that_gets_a_new_timer_as_the_old_one_expires_continues(kept: Kept) -> None:
    deadline = WorkersDeadline()
    deadline.begin()
    try:
        kept.keeper.watch(deadline.timer_fds)
        kept.python(0, "")
        assert kept.outcome() == (0, None)
        os.kill(kept.keeper.pid, signal.SIGSTOP)
        deadline.renew(time.monotonic(), 0.0)
        kept.keeper.watch(deadline.timer_fds)
        os.kill(kept.keeper.pid, signal.SIGCONT)
        kept.until(Expired)
    finally:
        deadline.close()


def test_port_is_held_until_the_workers_exit(kept: Kept) -> None:
    deadline = WorkersDeadline()
    deadline.begin()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            where = listener.getsockname()
            kept.keeper.watch(deadline.timer_fds, listener.fileno())
            kept.python(0, WAITS)
            worker = Watched(kept.pids(1)[0])
        socket.create_connection(where).close()
        kept.keeper.close()
        worker.assert_exited()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
    finally:
        deadline.close()
