"""Jobs over many nodes: several agents on one machine, and the starts of all their workers.

A worker writes its node and world size into a FIFO when it reaches its first line. A change is
complete when the *last* worker of every expected node has started with the expected world size.
Restart counts are ignored: with torchrun they differ between the nodes of one round.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.launching import WORKERS, BenchmarkError, descendants_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from benchmarks.launching import Lab

START_S_MAX = 90.0  # Sixteen agents of torchrun on two cores take about fifteen seconds.
END_S_MAX = 5.0  # After this, a process that received a signal to exit is killed.
OUTPUT_CHARS_MAX = 3000
ESTABLISHED, LISTENING = "01", "0A"  # States of a socket in /proc/net/tcp.


class Start(NamedTuple):
    """A worker reached its first line."""

    node: int
    pid: int
    reached_ns: int
    world: int
    rank: int
    restarts: int


class NotReached(Exception):
    """The expected state was not reached: time ran out, or an agent exited."""


class NodeAgent:
    """One launcher process: a node of the job."""

    def __init__(self, node: int, command: Sequence[str], env: Mapping[str, str], folder: Path):
        self.node = node
        self._output = folder / f"node-{node}"
        self.started_ns = time.monotonic_ns()
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        """The process id of the launcher."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def kill(self) -> int:
        """SIGKILL the agent and all its processes, as if its machine failed; return when, in ns."""
        below = descendants_of(self.pid)
        at_ns = time.monotonic_ns()
        for pid in (self.pid, *below):
            send(pid, signal.SIGKILL)
        return at_ns

    def send(self, number: int) -> int:
        """Send a signal only to the launcher; return when, in ns."""
        at_ns = time.monotonic_ns()
        send(self.pid, number)
        return at_ns

    def output(self) -> str:
        """Return its console output, the launcher's and its workers'."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, within_s: float) -> int | None:
        """Return the exit code, or None if it still runs after that time."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.poll(max(0.0, within_s) * 1000)
        return self.code


class Nodes:
    """One job: its endpoint, its agents, and the starts of their workers."""

    def __init__(
        self,
        lab: Lab,
        launcher: str,
        nnodes: str,
        *,
        workers: int = 1,
        flags: Sequence[str] = (),
        conf: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        script: str = "node_worker.py",
    ) -> None:
        self._lab = lab
        self._launcher = launcher
        self._nnodes = nnodes
        self._workers = workers
        self._flags = [*flags]
        if conf:
            self._flags += ["--rdzv-conf", ",".join(f"{key}={one}" for key, one in conf.items())]
        self._script = str(WORKERS / script)
        self.folder = Path(tempfile.mkdtemp(dir=lab.folder))
        self.port = free_port()
        self.agents: list[NodeAgent] = []
        self.starts: list[Start] = []
        self._rest = b""
        os.mkfifo(self.folder / "starts")
        os.mkfifo(self.folder / "gate")
        # Open for writing too: it then never reports an end between two writers.
        self._fifo = os.open(self.folder / "starts", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._gate = os.open(self.folder / "gate", os.O_RDWR | os.O_CLOEXEC)
        self._env = {
            **lab.env,
            **(env or {}),
            "BENCH_STARTS": str(self.folder / "starts"),
            "BENCH_GATE": str(self.folder / "gate"),
        }

    def add(self, *flags: str, env: Mapping[str, str] | None = None) -> NodeAgent:
        """Start one more agent; these flags override those of the job."""
        node = len(self.agents)
        head = [self._lab.program(self._launcher)]
        command = [
            *(head if self._launcher == "torchrun" else [*head, "run"]),
            *("--nnodes", self._nnodes),
            *("--nproc-per-node", str(self._workers)),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}"),
            *("--rdzv-id", "bench"),
            *("--local-addr", "127.0.0.1"),
            *self._flags,
            *flags,
            self._script,
        ]
        whole = {**self._env, **(env or {}), "BENCH_NODE": str(node)}
        agent = NodeAgent(node, command, whole, self.folder)
        self.agents.append(agent)
        return agent

    def start(self, count: int) -> list[NodeAgent]:
        """Start several agents at once."""
        return [self.add() for _ in range(count)]

    def wait_for(
        self,
        agents: Sequence[NodeAgent],
        *,
        world: int | None = None,
        since_ns: int = 0,
        within_s: float = START_S_MAX,
    ) -> list[Start]:
        """Return the starts that complete a change: each worker of each of these agents.

        Raise `NotReached` if time runs out or one of the agents exits.
        """
        expected = world if world is not None else len(agents) * self._workers
        nodes = {agent.node for agent in agents}
        poll = select.poll()
        for fd in (self._fifo, *(agent.pidfd for agent in agents)):
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + within_s
        while True:
            self.take()
            found = [
                start
                for start in self.starts
                if start.node in nodes and start.reached_ns > since_ns and start.world == expected
            ]
            if all(sum(one.node == node for one in found) >= self._workers for node in nodes):
                return found
            left_s = deadline - time.monotonic()
            what = f"{len(found)} of {len(nodes) * self._workers} workers started"
            if left_s <= 0:
                raise NotReached(f"{what} within {within_s:g} s")
            poll.poll(left_s * 1000)
            for agent in agents:
                if agent.code is not None:
                    raise NotReached(f"{what}; agent {agent.node} exited with {agent.code}")

    def formed(
        self, count: int, *, since_ns: int = 0, within_s: float = START_S_MAX
    ) -> list[Start]:
        """Wait until the first `count` agents run their workers in one world; raise on timeout."""
        try:
            return self.wait_for(self.agents[:count], since_ns=since_ns, within_s=within_s)
        except NotReached as problem:
            raise BenchmarkError(f"{self._launcher}: {problem}{self.output_ends()}") from None

    def take(self) -> None:
        """Read the starts that have arrived."""
        try:
            data = self._rest + os.read(self._fifo, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = data.split(b"\n")
        self.starts += [Start(*map(int, line.split())) for line in lines]

    def latest(self, agent: NodeAgent) -> Start:
        """Return the newest start of a worker of this agent."""
        return max((one for one in self.starts if one.node == agent.node), key=lambda one: one[2])

    def release_workers(self) -> None:
        """Let all workers exit."""
        os.write(self._gate, bytes(len(self.agents) * self._workers))

    def host(self) -> NodeAgent:
        """Return the agent that listens on the endpoint."""
        listening = sockets(LISTENING, self.port)
        for agent in self.agents:
            if listening & open_files(agent.pid):
                return agent
        raise BenchmarkError(f"{self._launcher}: no agent listens on port {self.port}")

    def has_connected(self, agent: NodeAgent) -> bool:
        """Whether an agent has a connection to the endpoint."""
        return bool(sockets(ESTABLISHED, self.port, of_peer=True) & open_files(agent.pid))

    def output_ends(self) -> str:
        """Return the end of all agents' output, for an error message."""
        each = [
            f"\n--- agent {one.node}:\n{one.output()[-OUTPUT_CHARS_MAX:]}" for one in self.agents
        ]
        return "".join(each)

    def close(self) -> None:
        """Stop all agents, kill those that do not exit, and remove all files."""
        for agent in self.agents:
            agent.send(signal.SIGCONT)
            agent.send(signal.SIGTERM)
        deadline = time.monotonic() + END_S_MAX
        for agent in self.agents:
            if agent.wait(deadline - time.monotonic()) is None:
                agent.kill()
                agent.process.wait()
            os.close(agent.pidfd)
        os.close(self._fifo)
        os.close(self._gate)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """Return a free port, by binding and closing it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def free_pairs(count: int) -> list[int]:
    """Return free ports, each of which is followed by another free port."""
    pairs: list[int] = []
    with ExitStack() as held:
        while len(pairs) < count:
            port = free_port()
            try:
                for one in (port, port + 1):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", one))
            except (OSError, OverflowError):
                continue
            pairs.append(port)
    return pairs


def sockets(state: str, port: int, *, of_peer: bool = False) -> set[str]:
    """Return the sockets with this port, as the kernel names them among open files."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            address = words[2 if of_peer else 1]
            if words[3] == state and int(address.rpartition(":")[2], 16) == port:
                found.add(f"socket:[{words[9]}]")
    return found


def open_files(pid: int) -> set[str]:
    """Return the targets of a process's descriptors; nothing if it has exited."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found.add(os.readlink(link))
        except FileNotFoundError:
            continue  # It was closed meanwhile.
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have exited."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
