from __future__ import annotations

import errno
import os
import py_compile
import select
import signal
import subprocess
import sys
import textwrap
from _socket import MSG_PEEK
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.processes.keeper import client
from holdfast.processes.keeper.client import (
    Empty,
    Event,
    Exited,
    Keeper,
    KeeperLost,
    Spawned,
    SpawnFailed,
)
from holdfast.processes.keeper.main import children_of
from real_jobs import News, Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

PATIENCE_S = 60
PYTHON = (sys.executable, "-I", "-S", "-c")
# A worker that ends when it is told to: it waits for the end of its standard input.
WAITS = "import sys; sys.stdin.read()"
IGNORES = """
import signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
while True:
    signal.pause()
"""
# A daemon that is hard to find: forked twice, in a session of its own, deaf to SIGTERM.
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
# Tells which signals this process ignores and blocks, as the kernel has them.
TELLS_SIGNALS = """
for line in open('/proc/self/status'):
    if line.startswith(('SigIgn', 'SigBlk')):
        print(int(line.split()[1], 16))
"""
# Tells which descriptors this process has, without opening one to find out.
TELLS_FDS = """
import os
def there(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print(*[fd for fd in range(1000) if there(fd)])
"""


class Kept:
    """A keeper, the events it sent, and what its workers wrote."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.events: list[Event] = []
        self.outputs: dict[int, int] = {}
        self.inputs: dict[int, int] = {}

    def spawn(
        self,
        key: int,
        argv: Sequence[str] | None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        fds: Mapping[int, int] | None = None,
        call: Any = None,
        cpus: Sequence[int] = (),
    ) -> None:
        """Ask for a worker whose standard streams are pipes of ours."""
        self.outputs[key], out = os.pipe()
        stdin, self.inputs[key] = os.pipe()
        self.keeper.spawn(
            key,
            argv,
            env=dict(os.environ if env is None else env),
            cwd=cwd,
            fds={0: stdin, 1: out, 2: out, **(fds or {})},
            call=call,
            cpus=cpus,
        )
        os.close(out)
        os.close(stdin)

    def python(self, key: int, code: str, **how: Any) -> None:
        self.spawn(key, [*PYTHON, code], **how)

    def said(self, key: int = 0) -> str:
        """Return all that a worker and its children wrote, once they closed the stream."""
        with open(self.outputs.pop(key)) as stream:
            return stream.read()

    def line(self, key: int = 0) -> str:
        """Return the next line a worker writes."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self.outputs[key], 1)
            assert piece, f"the worker ended: {line!r}"
            line += piece
        return line.decode()

    def until(self, kind: type[Event], count: int = 1) -> list[Any]:
        """Wait until as many events of a kind have come, and return them all."""
        while sum(isinstance(event, kind) for event in self.events) < count:
            ready, _, _ = select.select([self.keeper.fileno()], [], [], PATIENCE_S)
            assert ready, f"no {kind.__name__} came, but {self.events}"
            self.events += self.keeper.receive()
        return [event for event in self.events if isinstance(event, kind)]

    def exited(self, key: int = 0) -> Exited:
        """Wait until a worker has exited."""
        while True:
            for event in self.events:
                if isinstance(event, Exited) and event.key == key:
                    return event
            self.until(Exited, sum(isinstance(event, Exited) for event in self.events) + 1)

    def outcome(self, key: int = 0) -> tuple[int, tuple[int, str] | None]:
        exited = self.exited(key)
        return exited.exitcode, exited.error

    def pids(self, count: int) -> dict[int, int]:
        return {event.key: event.pid for event in self.until(Spawned, count)}

    def close(self) -> None:
        self.keeper.close()
        for fd in (*self.outputs.values(), *self.inputs.values()):
            os.close(fd)


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """Begin with the default actions, even where these tests are run under nohup."""
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


def ended(pid: int) -> bool:
    """Whether a process is gone, or is only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def signals_of(bits: int) -> set[int]:
    # Without the two the C library keeps for itself.
    return {number for number in signal.valid_signals() if bits >> (number - 1) & 1}


def run_program(tmp_path: Path, code: str) -> str:
    """Run a program of its own that uses keepers, and return what it wrote."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, path], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    return done.stdout


# Starting.


@pytest.mark.parametrize("code", [0, 1, 7, 127, 255])
def test_exit_codes(kept: Kept, code: int) -> None:
    kept.spawn(0, ["sh", "-c", f"exit {code}"])
    assert kept.outcome() == (code, None)


def test_descriptors_that_swap_their_numbers(kept: Kept) -> None:
    one, two = os.pipe(), os.pipe()
    code = f"import os; os.write({one[1]}, b'to two'); os.write({two[1]}, b'to one')"
    kept.python(0, code, fds={one[1]: two[1], two[1]: one[1]})
    for (read, write), said in ((one, "to one"), (two, "to two")):
        os.close(write)
        with open(read) as stream:
            assert stream.read() == said


def test_no_more_descriptors_can_be_passed_than_the_keeper_takes(kept: Kept) -> None:
    with open(os.devnull) as null:
        too_many = {100 + number: null.fileno() for number in range(300)}
        with pytest.raises(UsageError, match="300 file descriptors"):
            kept.keeper.spawn(0, ["true"], env={}, cwd="/", fds=too_many)
        as_many = {100 + number: null.fileno() for number in range(240)}
        kept.python(1, TELLS_FDS, fds=as_many)
    assert kept.said(1).split() == [*"012", *map(str, as_many)]


def test_the_program_is_looked_up_in_the_workers_own_path(kept: Kept, tmp_path: Path) -> None:
    script = tmp_path / "only-here"
    script.write_text("#!/bin/sh\necho found\n")
    script.chmod(0o755)
    kept.spawn(0, ["only-here"], env={"PATH": str(tmp_path)})
    assert kept.said() == "found\n"


class Role(StrEnum):
    TRAINER = "trainer"


class Kind(str, Enum):  # noqa: UP042 (that is the point)
    """As it was written before there was `StrEnum`."""

    GPU = "gpu"


def test_words_and_variables_of_other_kinds_arrive_as_text(kept: Kept, tmp_path: Path) -> None:
    env: Any = {"PATH": os.environ["PATH"], "ROLE": Role.TRAINER, Kind.GPU: 8, "RAW": b"\xff"}
    words: Any = ["sh", "-c", "printf %s, $ROLE $gpu $RAW $1 $2 $3", "sh", tmp_path, Kind.GPU, 7]
    kept.spawn(0, words, env=env)
    with open(kept.outputs.pop(0), "rb") as stream:
        assert stream.read() == os.fsencode(f"trainer,8,\udcff,{tmp_path},gpu,7,")


def test_many_at_once_whose_events_are_read_only_afterwards(kept: Kept) -> None:
    """More requests and events than the socket between the two holds."""
    count = 350
    with open(os.devnull, "r+b") as null:
        fds = {number: null.fileno() for number in range(3)}
        env = {"PATH": os.environ["PATH"], "ROOM": "." * 4000}
        for key in range(count):
            kept.keeper.spawn(key, ["true"], env=env, cwd="/", fds=fds)
    assert {event.key for event in kept.until(Exited, count)} == set(range(count))
    assert {event.exitcode for event in kept.until(Exited)} == {0}


def test_a_large_environment(kept: Kept) -> None:
    env = {f"LARGE_{number}": "x" * 100_000 for number in range(10)}
    kept.python(
        0, "import os; print(sum(len(os.environ[f'LARGE_{n}']) for n in range(10)))", env=env
    )
    assert kept.said() == "1000000\n"
    kept.python(1, "pass", env={"TOO_LARGE": "x" * 300_000})
    assert kept.outcome(1) == (127, (errno.E2BIG, PYTHON[0]))


def test_a_program_that_cannot_be_executed_is_told_with_its_errno(
    kept: Kept, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    kept.spawn(0, ["/nowhere/to/be/found"])
    kept.spawn(1, ["not-in-the-path"])
    kept.spawn(2, [str(plain)])
    assert kept.outcome(0) == (127, (errno.ENOENT, "/nowhere/to/be/found"))
    assert kept.outcome(1) == (127, (errno.ENOENT, "not-in-the-path"))
    assert kept.outcome(2) == (126, (errno.EACCES, str(plain)))
    plain.chmod(0o755)
    kept.spawn(3, [str(plain)])
    assert kept.outcome(3) == (126, (errno.ENOEXEC, str(plain)))


def test_a_keeper_without_descriptors_left_says_so_and_goes_on(tmp_path: Path) -> None:
    said = run_program(
        tmp_path,
        """
        import os, resource, select
        from holdfast.processes.keeper.client import Exited, Keeper, Spawned, SpawnFailed
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
        keeper = Keeper.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        events = []
        def until(done):
            while not done():
                select.select([keeper.fileno()], [], [])
                events.extend(keeper.receive())
        def keys(*kinds):
            return {event.key for event in events if isinstance(event, kinds)}
        fds = dict.fromkeys(range(3), os.open(os.devnull, os.O_RDWR))
        for key in range(50):
            keeper.spawn(key, ["sleep", "1000"], env=os.environ, cwd="/", fds=fds)
        until(lambda: len(keys(Spawned, SpawnFailed)) == 50)
        print(len(keys(SpawnFailed, Exited)) > 10, len(keys(Spawned) - keys(Exited)) > 10)
        for key in keys(Spawned):
            keeper.kill_tree(key)
        until(lambda: keys(Exited) == keys(Spawned))
        keeper.spawn(99, ["true"], env=os.environ, cwd="/", fds=fds)
        until(lambda: 99 in keys(Exited))
        print(events[-1].exitcode)
        keeper.close()
        """,
    )
    assert said == "True True\n0\n"


# What a worker inherits.


def test_a_worker_has_no_descriptors_but_its_own(kept: Kept) -> None:
    with open(os.devnull) as null:
        os.set_inheritable(null.fileno(), True)  # noqa: FBT003 (a program around us may be careless)
        late = Kept(Keeper.start())
        for one in (kept, late):
            one.python(0, WAITS)
            one.python(1, TELLS_FDS, fds={9: null.fileno()})
            assert one.said(1) == "0 1 2 9\n"
        late.close()


def test_commands_have_the_default_actions_and_an_empty_mask(kept: Kept) -> None:
    """Python ignores SIGPIPE in itself; `yes | head` in a worker must end all the same."""
    own = dict.fromkeys([signal.SIGPIPE, signal.SIGXFSZ])
    ignored = {
        number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN
    }
    kept.python(0, TELLS_SIGNALS)
    # The interpreter that tells ignores the two for itself.
    told = [signals_of(int(line)) for line in kept.said().split()]
    assert told == [set(), ignored | set(own)]
    kept.spawn(1, ["sh", "-c", "grep -E 'SigBlk|SigIgn' /proc/self/status"])
    told = [signals_of(int(line.split()[1], 16)) for line in kept.said(1).splitlines()]
    assert told == [set(), ignored - set(own)]


def test_the_mask_is_empty_whatever_the_agent_blocks(kept: Kept) -> None:
    blocked = {signal.SIGUSR1, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        late = Kept(Keeper.start())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    late.spawn(0, ["grep", "SigBlk", "/proc/self/status"])
    assert int(late.said().split()[1], 16) == 0
    late.close()


AGENT_THAT_TELLS = """
    import os, select, sys
    from holdfast.processes.keeper.client import Exited, Keeper
    def ignored():
        for line in open('/proc/self/status'):
            if line.startswith('SigIgn'):
                os.write(1, line.split()[1].encode())
    def call(_):
        ignored()
        return 0
    keeper = Keeper.fork(call) if sys.argv[-1:] == ['fork'] else Keeper.start()
    argv = None if sys.argv[-1:] == ['fork'] else ['grep', 'SigIgn', '/proc/self/status']
    keeper.spawn(0, argv, env=os.environ, cwd='/', fds={0: 0, 1: 1, 2: 2})
    while not any(isinstance(event, Exited) for event in keeper.receive()):
        select.select([keeper.fileno()], [], [])
    keeper.close()
"""


@pytest.mark.parametrize("how", ["command", "fork"])
@pytest.mark.parametrize("names", ["HUP", "INT QUIT", "TERM USR1", "CHLD"])
def test_ignored_signals_stay_ignored_in_workers(tmp_path: Path, names: str, how: str) -> None:
    """As under nohup, and for what a shell starts in the background."""
    program = tmp_path / "agent.py"
    program.write_text(textwrap.dedent(AGENT_THAT_TELLS))
    shell = f'trap "" {names}; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, program, how], capture_output=True, text=True
    )
    told = signals_of(int(done.stdout.split()[-1], 16))
    # Nobody who waits for children can have SIGCHLD ignored, so that one is not passed on.
    expected = {signal.Signals[f"SIG{name}"] for name in names.split()} - {signal.SIGCHLD}
    assert told - {signal.SIGPIPE, signal.SIGXFSZ} == expected
    assert ({signal.SIGPIPE, signal.SIGXFSZ} <= told) == (how == "fork")


# Signals.


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_right_after_the_start_is_not_lost(kept: Kept, signum: signal.Signals) -> None:
    """The keeper ignores these itself; its forked child must not, not even for a moment."""
    for key in range(10):
        kept.spawn(key, ["sleep", "1000"])
        kept.keeper.signal(key, signum)
    assert {event.exitcode for event in kept.until(Exited, 10)} == {-signum}


def test_only_the_leader_gets_the_signal(kept: Kept) -> None:
    kept.spawn(0, ["sh", "-c", "sleep 1000 & trap 'kill $!; exit 5' TERM; echo $!; wait"])
    child = int(kept.line())
    watched = Watched(child)
    kept.keeper.signal(0, signal.SIGTERM)
    assert kept.outcome() == (5, None)
    watched.all_gone()


def test_kill_tree_kills_all_below_one_worker(kept: Kept) -> None:
    for key in range(2):
        kept.spawn(key, ["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $!; wait"])
    pids, children = kept.pids(2), [int(kept.line(key)) for key in range(2)]
    killed = Watched(pids[0], children[0])
    kept.keeper.kill_tree(0)
    assert kept.outcome(0) == (-signal.SIGKILL, None)
    killed.all_gone()
    assert not ended(pids[1])
    assert not ended(children[1])


# What workers leave.


def test_leftovers_are_asked_and_may_take_their_time(kept: Kept, tmp_path: Path) -> None:
    news = News(tmp_path)
    kept.python(
        0,
        f"""
import os, signal, time
def tell(word):
    with open({str(news.path)!r}, "w") as news: news.write(word + "\\n")
def leave(*_):
    tell("asked")
    os.read(0, 1)
    os._exit(0)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, leave)
    tell("here")
    while True: time.sleep(0.1)  # A signal just before it sleeps does not wake it.
""",
    )
    kept.exited()
    assert news.next() == ["here"]
    kept.keeper.signal_leftovers(signal.SIGTERM)
    assert news.next() == ["asked"]
    assert kept.keeper.receive() == []
    os.close(kept.inputs.pop(0))
    kept.until(Empty)
    news.close()


def test_sweeping_finds_what_is_forked_meanwhile(kept: Kept) -> None:
    """A chain of processes that each fork the next and end: no single look sees them all."""
    kept.python(
        0,
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while os.fork() == 0: os.write(1, b'on\\n')\n",
    )
    kept.line()
    kept.exited()
    kept.keeper.sweep()
    kept.until(Empty)
    assert children_of(kept.keeper.pid) == []


def test_running_workers_and_their_children_are_no_leftovers(kept: Kept) -> None:
    kept.spawn(0, ["sh", "-c", "sleep 1000 & echo $!; wait"])
    child = int(kept.line())
    kept.python(1, LEAVES_DAEMON)
    daemon = Watched(int(kept.line(1)))
    kept.exited(1)
    kept.keeper.sweep()
    daemon.all_gone()
    worker = kept.pids(2)[0]
    assert not ended(child)
    assert not ended(worker)
    kept.keeper.kill_tree(0)
    kept.until(Empty)
    assert ended(child)


# Ending.


def test_closing_kills_all(kept: Kept) -> None:
    kept.spawn(0, ["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $!; wait"])
    kept.python(1, LEAVES_DAEMON)
    everyone = Watched(
        *kept.pids(2).values(), int(kept.line(0)), int(kept.line(1)), kept.keeper.pid
    )
    kept.keeper.close()
    everyone.gone_already()
    kept.keeper.close()


def test_closing_does_not_wait_for_a_copy_of_the_socket(kept: Kept) -> None:
    """A program may fork while it has a keeper, and its child then has the socket too."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    kept.keeper.close()
    assert ended(kept.keeper.pid)
    os.close(read)
    os.close(write)
    os.waitpid(pid, 0)


def test_a_keeper_that_does_not_end_is_killed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CLOSE_MS_MAX", 50)
    kept.python(0, WAITS)
    everyone = Watched(*kept.pids(1).values(), kept.keeper.pid)
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    kept.keeper.close()
    everyone.all_gone()


def test_closing_in_a_forked_copy_changes_nothing(kept: Kept) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            kept.keeper.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    kept.spawn(0, ["true"])
    assert kept.outcome() == (0, None)


def test_a_killed_keeper_takes_the_workers_with_it(kept: Kept) -> None:
    for key in range(3):
        kept.python(key, IGNORES)
        kept.line(key)
    workers = Watched(*kept.pids(3).values())
    os.kill(kept.keeper.pid, signal.SIGKILL)
    workers.all_gone()
    assert kept.until(KeeperLost) == [KeeperLost()]
    assert kept.keeper.lost
    kept.keeper.sweep()
    kept.keeper.signal(0, signal.SIGTERM)
    kept.spawn(3, ["true"])
    assert kept.keeper.receive() == []


def test_what_a_keeper_told_before_it_was_killed_comes_before_its_loss(kept: Kept) -> None:
    kept.spawn(0, ["sh", "-c", "exit 4"])
    while kept.keeper._control.recv(1 << 16, MSG_PEEK).count(b"exited") < 1:
        select.select([], [], [], 0.001)
    gone = Watched(kept.keeper.pid)
    os.kill(kept.keeper.pid, signal.SIGKILL)
    gone.all_gone()
    assert [type(event) for event in kept.keeper.receive()] == [Spawned, Exited, KeeperLost]
    assert kept.keeper.receive() == []


def test_a_keeper_that_is_stopped_does_not_answer_and_can_be_killed(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.spawn(0, ["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $!; wait"])
    child = int(kept.line())
    everyone = Watched(*kept.pids(1).values(), child, kept.keeper.pid)
    kept.keeper.sweep()
    assert kept.keeper.responds()
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    monkeypatch.setattr(client, "RESPONSE_MS_MAX", 20)
    kept.keeper.sweep()
    assert not kept.keeper.responds()
    kept.keeper.kill()
    everyone.all_gone()
    assert kept.until(KeeperLost) == [KeeperLost()]
    assert not kept.keeper.responds()


def test_a_late_answer_to_one_clearing_is_none_to_the_next(kept: Kept) -> None:
    kept.keeper.sweep()
    while b"empty" not in kept.keeper._control.recv(1 << 16, MSG_PEEK):
        select.select([], [], [], 0.001)
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    kept.keeper.sweep()
    assert kept.keeper.receive() == []
    os.kill(kept.keeper.pid, signal.SIGCONT)
    assert kept.until(Empty) == [Empty()]


@pytest.mark.parametrize("how", ["start", "fork"])
def test_a_copy_of_the_socket_does_not_hide_the_agents_death(tmp_path: Path, how: str) -> None:
    """A program may fork on its own, and what it forked outlives it with all its descriptors."""
    news = News(tmp_path)
    program = tmp_path / "agent.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, signal, time
        from holdfast.processes.keeper.client import Keeper
        keeper = Keeper.start() if {how!r} == "start" else Keeper.fork(lambda _: time.sleep(1000))
        argv = ["sleep", "1000"] if {how!r} == "start" else None
        keeper.spawn(0, argv, env=os.environ, cwd="/", fds={{0: 0, 1: 1, 2: 2}})
        while not (events := keeper.receive()):
            time.sleep(0.001)
        copy = os.fork()
        if copy:
            with open({str(news.path)!r}, "w") as news:
                news.write(f"{{copy}} {{events[0].pid}} {{keeper.pid}}\\n")
        signal.pause()
        """)
    )
    agent = subprocess.Popen([sys.executable, program])
    copy, worker, keeper = map(int, news.next())
    kept, copied = Watched(worker, keeper), Watched(copy)
    agent.kill()
    agent.wait()
    kept.all_gone()
    os.kill(copy, signal.SIGKILL)
    copied.all_gone()
    news.close()


def test_a_program_that_dies_of_broken_pipes_outlives_its_keeper(tmp_path: Path) -> None:
    said = run_program(
        tmp_path,
        """
        import os, signal
        from holdfast.processes.keeper.client import Keeper
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        keeper = Keeper.start()
        os.kill(keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
        keeper.sweep()
        keeper.close()
        print("here")
        """,
    )
    assert said == "here\n"


def test_the_loss_is_seen_while_something_of_a_worker_lives_on(kept: Kept) -> None:
    """Nothing that a worker starts has the keeper's socket, which would hide the loss."""
    kept.python(0, LEAVES_DAEMON)
    daemon = int(kept.line())
    kept.exited()
    os.kill(kept.keeper.pid, signal.SIGKILL)
    kept.until(KeeperLost)
    assert not ended(daemon)
    os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_the_keeper_shrugs_signals_off(kept: Kept, number: signal.Signals) -> None:
    kept.spawn(0, ["true"])
    kept.exited()
    os.kill(kept.keeper.pid, number)
    kept.spawn(1, ["true"])
    assert kept.outcome(1) == (0, None)


# Other ways to make a keeper.


def test_a_prestarted_keeper_is_used_once() -> None:
    Keeper.prestart()
    Keeper.prestart()
    first, second = Keeper.start(), Keeper.start()
    assert first.pid != second.pid
    first.close()
    second.close()
    assert Keeper._prestarted is None


def test_a_forked_copy_does_not_take_a_prestarted_keeper() -> None:
    Keeper.prestart()
    assert Keeper._prestarted is not None
    prestarted = Keeper._prestarted.pid
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            own = Keeper.start()
            status = int(own.pid == prestarted)
            own.close()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    taken = Keeper.start()
    assert taken.pid == prestarted
    taken.close()


def test_an_interpreter_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EnvironmentProblem, match="could not start /nowhere/python"):
        Keeper.start()
    with open(os.devnull) as null, pytest.raises(EnvironmentProblem, match="/nowhere/python"):
        Keeper.run_program(["/nowhere/python"], null.fileno())


def forked(run_call: Callable[[Any], int]) -> Kept:
    return Kept(Keeper.fork(run_call))


def test_a_forked_keeper_runs_calls_with_our_memory() -> None:
    secret = os.urandom(8).hex()

    def call(number: int) -> int:
        os.write(1, f"{secret} {os.environ['WHO']} {os.getcwd()}".encode())
        return number

    kept = forked(call)
    kept.spawn(0, None, env={"WHO": "me"}, call=5)
    assert kept.outcome() == (5, None)
    assert kept.said() == f"{secret} me /"
    kept.close()


def test_a_forked_keepers_worker_has_none_of_its_descriptors() -> None:
    def tell(_: object) -> int:
        os.write(1, "\n".join(sorted(set(os.listdir("/proc/self/fd")))).encode())
        return 0

    ours = set(map(int, os.listdir("/proc/self/fd")))
    kept = forked(lambda which: tell(which) if which else len(os.read(0, 1)))
    for key in range(3):  # Each is forked while the keeper knows the ones before.
        kept.spawn(key, None, call=0)
    kept.spawn(3, None, call=1)
    assert kept.outcome(3) == (0, None)
    theirs = set(map(int, kept.said(3).split()))
    assert len(theirs - ours) <= 1, "more than the listing's own"
    kept.close()


def test_a_forked_keeper_hears_of_ends_though_its_maker_blocks_the_signal() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        kept = forked(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    kept.spawn(0, None, call=3)
    assert kept.outcome() == (3, None)
    kept.close()


def test_a_forked_keeper_imports_nothing(tmp_path: Path) -> None:
    """Another thread may hold the lock of a module that nobody releases in the fork."""
    said = run_program(
        tmp_path,
        """
        import os, select, sys
        from holdfast.processes.keeper.client import Exited, Keeper
        class Refuses:
            def find_spec(self, name, path=None, target=None):
                if os.getpid() != agent:
                    os.write(1, f"imports {name}\\n".encode())
        agent = os.getpid()
        sys.meta_path.insert(0, Refuses())
        keeper = Keeper.fork(int)
        keeper.spawn(0, None, env={}, cwd="/", fds={0: 0, 1: 1, 2: 2}, call=3)
        events = []
        while not any(isinstance(event, Exited) for event in events):
            select.select([keeper.fileno()], [], [])
            events += keeper.receive()
        keeper.close()
        print(events[-1].exitcode)
        """,
    )
    assert said == "3\n"


@pytest.mark.parametrize(
    ("mode", "after_a_change"), [("TIMESTAMP", False), ("UNCHECKED_HASH", True)]
)
def test_a_compiled_keeper_of_another_source_is_not_run(
    tmp_path: Path, mode: str, after_a_change: bool
) -> None:
    source, cached = str(tmp_path / "keeper.py"), str(tmp_path / "keeper.pyc")
    assert not client._is_current(cached, source)
    (tmp_path / "keeper.py").write_text("old = 1")
    py_compile.compile(source, cached, invalidation_mode=py_compile.PycInvalidationMode[mode])
    assert client._is_current(cached, source)
    (tmp_path / "keeper.py").write_text("renewed = 1")
    assert client._is_current(cached, source) == after_a_change


# Servants of the agent, and orphans that become workers.


def test_a_servant_is_no_leftover_and_keeps_nobody_waiting(kept: Kept) -> None:
    family = "import os, sys; print(os.fork() and os.getpid(), flush=True); sys.stdin.read()"
    kept.python(-7, family)
    servants = {int(kept.line(-7)), int(kept.line(-7))} - {0}
    kept.python(0, "print(1)")
    kept.exited()
    kept.keeper.signal_leftovers(signal.SIGTERM)
    kept.until(Empty)
    kept.keeper.sweep()
    kept.until(Empty, 2)
    assert servants <= set(children_of(kept.keeper.pid))
    assert not [event for event in kept.events if isinstance(event, Exited) and event.key == -7]


def test_a_servant_can_be_killed_with_all_below_it_and_ends_with_the_keeper(kept: Kept) -> None:
    family = "import os, sys; os.fork(); print(os.getpid(), flush=True); sys.stdin.read()"
    for key in (-1, -2):
        kept.python(key, family)
    first, second = ([int(kept.line(key)) for _ in range(2)] for key in (-1, -2))
    gone = Watched(*first)
    kept.keeper.kill_tree(-1)
    assert kept.outcome(-1) == (-signal.SIGKILL, None)
    gone.all_gone()
    gone = Watched(*second)
    kept.keeper.close()
    gone.gone_already()


# Leaves an orphan that waits at descriptor 4 to be let go, and tells trouble by descriptor 5.
LEAVES_ORPHAN = """
import os
pid = os.fork()
if pid == 0:
    keeper = int.from_bytes(os.read(4, 8), "little")
    os.write(5, TROUBLE)
    os._exit(3 if keeper == os.getppid() else 4)
print(pid, flush=True)
"""


def adopted(kept: Kept, trouble: bytes = b"", *, victim: bool = False) -> int:
    """Have an orphan made and adopted as worker 1; return its process id."""
    (go_in, go_out), (trouble_in, trouble_out) = os.pipe(), os.pipe()
    code = LEAVES_ORPHAN.replace("TROUBLE", repr(trouble))
    kept.python(0, code, fds={4: go_in, 5: trouble_out})
    kept.exited()
    pid = int(kept.line())
    if victim:
        gone = Watched(pid)
        os.kill(pid, signal.SIGKILL)
        gone.all_gone()
        kept.keeper.sweep()
        kept.until(Empty)  # By now it is reaped.
    kept.keeper.adopt(1, pid, trouble_in, go_out)
    for fd in (go_in, go_out, trouble_in, trouble_out):
        os.close(fd)
    return pid


@pytest.mark.parametrize(("trouble", "told"), [(b"", None), (b"2 working", (2, "working"))])
def test_an_orphan_becomes_a_worker(
    kept: Kept, trouble: bytes, told: tuple[int, str] | None
) -> None:
    pid = adopted(kept, trouble)
    assert kept.outcome(1) == (3, told)
    assert kept.pids(2)[1] == pid


def test_an_orphan_that_is_gone_cannot_be_adopted(kept: Kept) -> None:
    adopted(kept, victim=True)
    (failed,) = kept.until(SpawnFailed)
    assert failed == SpawnFailed(1, errno.ECHILD, "it was killed before it began")


def test_an_adopted_worker_is_killed_like_any_other(kept: Kept) -> None:
    (go_in, go_out), (trouble_in, trouble_out) = os.pipe(), os.pipe()
    kept.python(0, "import os, time\nif os.fork() == 0: time.sleep(1000)\n")
    kept.exited()
    (pid,) = children_of(kept.keeper.pid)
    kept.keeper.adopt(1, pid, trouble_in, go_out)
    kept.until(Spawned, 2)
    kept.keeper.signal_leftovers(signal.SIGTERM)  # It is none.
    kept.keeper.kill_tree(1)
    # Somebody else has the other end of its pipe of trouble still: that is waited for by nobody.
    assert kept.outcome(1) == (-signal.SIGKILL, None)
    kept.until(Empty)
    for fd in (go_in, go_out, trouble_in, trouble_out):
        os.close(fd)


def test_a_keeper_that_is_gone_is_seen_at_once(kept: Kept) -> None:
    kept.python(0, "pass")
    assert not kept.keeper.is_gone()
    assert kept.outcome() == (0, None), "a look takes no event away"
    gone = Watched(kept.keeper.pid)
    os.kill(kept.keeper.pid, signal.SIGKILL)
    gone.all_gone()
    assert kept.keeper.is_gone()
    kept.until(KeeperLost)
