"""Real jobs with several nodes on this machine: agents are started, killed, stopped and added.

Every worker reports its start through one named pipe; nothing here sleeps in the hope that something has happened.
`Cluster` always ends all its agents with the test.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import textwrap
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.etcd.runner import hold_port
from real_jobs import HOLDFAST, PATIENCE_S, SCRIPT_HEAD, Watched, WorkerMessages, children

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Self

# `started` reports that the worker started, with the values that the agents agreed on. It is called immediately,
# unless the script calls it later itself. `obey` waits for an order: to exit with success (SIGUSR1), or to fail
# (SIGUSR2). An order that arrives before `obey` is not lost.
TEAM_HEAD = (
    SCRIPT_HEAD
    + """
E = os.environ
AGENT, NODE, NODES = E["AGENT"], int(E["GROUP_RANK"]), int(E["GROUP_WORLD_SIZE"])
NUMBER = int(E["HOLDFAST_GENERATION"])
ORDERS = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, ORDERS)
def obey():
    if signal.sigwaitinfo(ORDERS).si_signo == signal.SIGUSR2:  # SIGINT ends this one.
        raise RuntimeError(f"{AGENT} was told to fail")
def started():
    send(f"{AGENT} {E['RANK']} {E['WORLD_SIZE']} {NODE} {NODES} {NUMBER} {GENERATION} "
         f"{E['MASTER_ADDR']}:{E['MASTER_PORT']}")
"""
)
STARTED = "started()\n"
FOREVER = "forever()"
OBEY = "obey()"

# Short times, for tests that do not depend on the defaults. The second is only for tests of silence: on a busy
# machine, after such a short time, a healthy node may seem silent too.
QUICK = "settle=0.2"
SILENCE_S = 2.0
SOON_SILENT = "keep_alive_interval=0.2,keep_alive_max_attempt=10"
# A round forms only when the maximum of nodes has joined, so no node runs alone because another is late.
TOGETHER = "settle=60"
POLL_S = 0.01


class Start(NamedTuple):
    """A worker's report of its start."""

    agent: str
    rank: int
    world: int
    node: int
    nodes: int
    generation: int
    restarts: int
    master_endpoint: str
    pid: int

    def finish(self) -> None:
        """Order a worker in `obey` to exit with success."""
        os.kill(self.pid, signal.SIGUSR1)

    def fail(self) -> None:
        """Order a worker in `obey` to fail."""
        os.kill(self.pid, signal.SIGUSR2)


def fail_all(starts: Iterable[Start]) -> None:
    """Order workers to fail. The agent may already have stopped the later ones because of the first failure."""
    for start in starts:
        with suppress(ProcessLookupError):
            start.fail()


def finish_all(starts: Iterable[Start]) -> None:
    """Order workers to exit with success."""
    for start in starts:
        start.finish()


class Agent:
    """One `holdfast run` of a cluster, or its coordinator."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: Path) -> None:
        self.name = name
        self.process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def freeze(self) -> None:
        """Stop the agent until SIGCONT, and wait until all its threads have stopped."""
        self.signal(signal.SIGSTOP)
        if self.process.returncode is None:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """SIGKILL the agent, its keeper and its workers at once, like a machine that fails."""
        self.freeze()  # So that it does not notice the exit of another process.
        for one in (signal.SIGSTOP, signal.SIGKILL):
            for pid in [*descendants(self.pid), self.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, one)
        self.process.wait(PATIENCE_S)

    def end(self) -> tuple[int, str]:
        """Wait until the agent exits; return its exit code and its output."""
        code = self.process.wait(PATIENCE_S)
        return code, self.output()

    def output(self) -> str:
        """Return the output of the agent so far."""
        return self._errors.read_text()

    def wait_for_output(self, text: str, times: int = 1) -> str:
        """Wait until the agent has printed this text `times` times; return its output."""
        deadline = time.monotonic() + PATIENCE_S
        while (output := self.output()).count(text) < times:
            assert self.process.poll() is None, f"exited with {self.process.returncode}: {output}"
            assert time.monotonic() < deadline, f"{text!r} was not printed: {output}"
            time.sleep(POLL_S)
        return output


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


class Cluster:
    """Agents of one job at one endpoint."""

    def __init__(
        self,
        folder: Path,
        script: str = FOREVER,
        *flags: str,
        nnodes: str = "2:3",
        run_id: str = "job",
        port: int | None = None,
        host: str = "127.0.0.1",
        backend: str = "c10d",
        endpoint: str = "",
        conf: str = QUICK,
    ) -> None:
        self.folder = folder
        self.host = host
        self._endpoint = endpoint
        self.workers: list[Watched] = []
        self._backend = backend
        self._conf = conf
        self._held = ExitStack()
        if port is None:  # The kernel assigns it to no other process, but agents can bind it.
            port = int(self._held.enter_context(hold_port(host)).getsockname()[1])
        self.port = port
        self.agents: dict[str, Agent] = {}
        self.messages = WorkerMessages(folder)
        self.run_id = run_id
        self._nnodes = nnodes
        self._flags = flags
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._script = folder / "train.py"
        begin = "" if STARTED in script else STARTED
        self._script.write_text(TEAM_HEAD + begin + textwrap.dedent(script))

    @property
    def endpoint(self) -> str:
        """The endpoint of the agents: host and port, unless the backend has another kind."""
        if self._endpoint:
            return self._endpoint
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(
        self,
        name: str,
        *flags: str,
        conf: str = "",
        env: Mapping[str, str] | None = None,
        before: tuple[str, ...] = (),
        program: str = "",
    ) -> Agent:
        """Start an agent; `before` is a prefix of the command, such as `ip netns exec`."""
        conf = ",".join(filter(None, (self._conf, conf)))
        command = [
            *before, *HOLDFAST, "run",
            "--nnodes", self._nnodes,
            "--rdzv-backend", self._backend,
            "--rdzv-endpoint", self.endpoint,
            "--rdzv-id", self.run_id,
            *(["--rdzv-conf", conf] if conf else []),
            *self._flags, *flags,
            program or str(self._script),
        ]  # fmt: skip
        return self._run(
            name, command, {"MESSAGES": str(self.messages.path), "AGENT": name, **(env or {})}
        )

    def start_all(self, *names: str, conf: str = "") -> None:
        """Start several agents with the same options."""
        for name in names:
            self.start(name, conf=conf)

    def start_coordinator(
        self, name: str, conf: str = "", env: Mapping[str, str] | None = None
    ) -> Agent:
        """Start a separate coordinator, and wait until it is reachable."""
        conf = ",".join(filter(None, (self._conf, conf)))
        command = [*HOLDFAST, "coordinator", "--endpoint", self.endpoint, "--rdzv-conf", conf]
        agent = self._run(name, command, env or {})
        self.await_coordinator(agent)
        return agent

    def start_host(self, name: str, *flags: str, conf: str = "") -> Agent:
        """Start the agent that coordinates, and wait until it is reachable."""
        agent = self.start(name, *flags, conf=conf)
        self.await_coordinator(agent)
        return agent

    def await_coordinator(self, agent: Agent) -> None:
        """Wait until this agent listens on the endpoint."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection((self.host, self.port), PATIENCE_S).close()
            except ConnectionRefusedError:
                assert agent.process.poll() is None, agent.output()
                assert time.monotonic() < deadline, f"no agent listens on {self.endpoint}"
                time.sleep(POLL_S)
            else:
                return

    def _run(self, name: str, command: list[str], env: Mapping[str, str]) -> Agent:
        assert name not in self.agents, f"an agent {name!r} was started before"
        errors = self.folder / f"{name}.err"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdout=stderr,
                stderr=stderr,
                text=True,
                env={**os.environ, "TMPDIR": str(self._temporary), **env},
                cwd=self.folder,
            )
        agent = Agent(name, process, errors)
        self.agents[name] = agent
        return agent

    def generation(self, workers: int) -> dict[str, Start]:
        """Wait until each of these agents has started workers of one generation; return the starts by agent.

        Reports of older generations in between are skipped.
        """
        by_rank = self.ranks(workers)
        starts = {start.agent: start for start in by_rank}
        assert len(starts) == workers, f"two workers of one agent: {by_rank}"
        return starts

    def form(self, *names: str, conf: str = "") -> dict[str, Start]:
        """Start agents with one worker each; return the starts of their first generation."""
        self.start_all(*names, conf=conf)
        return self.generation(len(names))

    def form_at_host(self, host: str, *names: str) -> dict[str, Start]:
        """Start the agent that coordinates, then others; return the starts of their first generation."""
        self.start_host(host)
        self.start_all(*names)
        return self.generation(1 + len(names))

    def ranks(self, workers: int) -> list[Start]:
        """Wait until this many workers of one generation have started; return them by rank."""
        seen: dict[int, dict[int, Start]] = {}
        while True:
            start = self.next_start()
            members = seen.setdefault(start.generation, {})
            assert start.rank not in members, f"two workers have the rank of {start}: {members}"
            members[start.rank] = start
            if len(members) == workers and start.generation == max(seen):
                check_agreement(members)
                return [members[rank] for rank in range(workers)]

    def outputs(self) -> dict[str, str]:
        """Return the output of each agent so far."""
        return {name: agent.output() for name, agent in self.agents.items()}

    def next_start(self) -> Start:
        agent, rank, world, node, nodes, generation, restarts, master_endpoint, pid = (
            self.messages.next(self.outputs)
        )
        self.workers.append(Watched(int(pid)))
        return Start(
            agent,
            int(rank),
            int(world),
            int(node),
            int(nodes),
            int(generation),
            int(restarts),
            master_endpoint,
            int(pid),
        )

    def end(self) -> dict[str, tuple[int, str]]:
        """Wait until all agents exit; fail if one left a worker or a bound port."""
        ends = {name: agent.end() for name, agent in self.agents.items()}
        for worker in self.workers:
            worker.assert_exited()
        self.check_port_is_free()
        return ends

    def codes(self) -> dict[str, int]:
        """Wait as `end` does; return only the exit codes."""
        return {name: code for name, (code, _) in self.end().items()}

    def finish(self, starts: Mapping[str, Start]) -> dict[str, int]:
        """Order these workers to exit with success; return the exit codes of all agents."""
        finish_all(starts.values())
        return self.codes()

    def is_quiet(self) -> bool:
        """Whether no worker has reported a start that the test has not read."""
        return self.messages.is_quiet()

    def check_port_is_free(self) -> None:
        """Fail if a process listens on the endpoint, unless the backend has another kind of endpoint."""
        if self._endpoint:
            return
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((self.host, self.port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.process.poll() is None:
                agent.kill()
        for worker in self.workers:
            worker.wait_until_exited()
        self.messages.close()
        self._held.close()


def check_agreement(starts: dict[int, Start]) -> None:
    """Fail unless all workers of a generation have the same values and different ranks."""
    every = list(starts.values())
    for what in ("world", "nodes", "generation", "restarts", "master_endpoint"):
        assert len({getattr(start, what) for start in every}) == 1, every
    assert sorted(start.rank for start in every) == list(range(every[0].world)), every


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now; the agent that binds it coordinates.

    It is not one that the kernel gives to other programs, which could take it meanwhile.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port


@contextmanager
def reserved_port_pairs(count: int) -> Iterator[list[int]]:
    """Reserve this many ports and the port after each, for programs that need both."""
    with ExitStack() as held:
        pairs: list[int] = []
        while len(pairs) < count:
            first = hold_port()
            port: int = first.getsockname()[1]
            second = socket.socket()
            second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                first.close()
                second.close()
                continue
            held.enter_context(first)
            held.enter_context(second)
            pairs.append(port)
        yield pairs
