"""Real jobs of several nodes on this machine: agents that are started, killed, stopped and joined.

Every worker tells of its start through one named pipe; nothing here sleeps in the hope that
something has happened. `Cluster` ends all its agents with the test, whatever happens.
"""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from real_jobs import HOLDFAST, PATIENCE_S, SCRIPT_HEAD, News, children

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

# Says that the worker started, with all that the agents agreed on.
TEAM_HEAD = (
    SCRIPT_HEAD
    + """
E = os.environ
AGENT, NODE, NODES = E["AGENT"], int(E["GROUP_RANK"]), int(E["GROUP_WORLD_SIZE"])
NUMBER = int(E["HOLDFAST_GENERATION"])
tell(f"{AGENT} {E['RANK']} {E['WORLD_SIZE']} {NODE} {NODES} {NUMBER} {GENERATION} "
     f"{E['MASTER_ADDR']}:{E['MASTER_PORT']}")
"""
)
FOREVER = "forever()"


class Start(NamedTuple):
    """What a worker said when it started."""

    agent: str
    rank: int
    world: int
    node: int
    nodes: int
    generation: int
    restarts: int
    meeting: str
    pid: int


class Agent:
    """One `holdfast run` of a cluster."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: Path) -> None:
        self.name = name
        self.process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL the agent, its keeper and its workers at once, as a machine that dies would."""
        family = [self.pid, *descendants(self.pid)]
        for pid in family:
            os.kill(pid, 19)  # SIGSTOP, so that none of them notices another's end.
        for pid in family:
            os.kill(pid, 9)
        self.process.wait(PATIENCE_S)

    def end(self) -> tuple[int, str]:
        """Wait for the agent to end; return its exit code and what it said."""
        code = self.process.wait(PATIENCE_S)
        return code, self.said()

    def said(self) -> str:
        """Return what the agent said so far."""
        return self._errors.read_text()


def descendants(pid: int) -> list[int]:
    """Return all processes below one."""
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
    ) -> None:
        self.folder = folder
        self.host = host
        self.port = free_port(host) if port is None else port
        self.agents: dict[str, Agent] = {}
        self.news = News(folder)
        self.run_id = run_id
        self._nnodes = nnodes
        self._flags = flags
        self._script = folder / "train.py"
        self._script.write_text(TEAM_HEAD + textwrap.dedent(script))

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(
        self,
        name: str,
        *flags: str,
        conf: str = "",
        env: Mapping[str, str] | None = None,
        before: tuple[str, ...] = (),
    ) -> Agent:
        """Start an agent; `before` goes in front of the command, such as `ip netns exec`."""
        errors = self.folder / f"{name}.err"
        command = [
            *before, *HOLDFAST, "run",
            "--nnodes", self._nnodes,
            "--rdzv-backend", "c10d",
            "--rdzv-endpoint", self.endpoint,
            "--rdzv-id", self.run_id,
            *(["--rdzv-conf", conf] if conf else []),
            *self._flags, *flags,
            str(self._script),
        ]  # fmt: skip
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
                env={
                    **os.environ, "NEWS": str(self.news.path), "AGENT": name, **(env or {}),
                },  # fmt: skip
                cwd=self.folder,
            )
        agent = Agent(name, process, errors)
        self.agents[name] = agent
        return agent

    def generation(self, workers: int) -> dict[str, Start]:
        """Wait until so many workers of one generation have started; return them by agent.

        Starts of older generations that are told in between are passed over.
        """
        seen: dict[int, dict[str, Start]] = {}
        while True:
            start = self.next_start()
            mates = seen.setdefault(start.generation, {})
            assert start.agent not in mates, f"{start} started twice"
            mates[start.agent] = start
            if len(mates) == workers and start.generation == max(seen):
                check_agreement(mates)
                return mates

    def next_start(self) -> Start:
        agent, rank, world, node, nodes, generation, restarts, meeting, pid = self.news.next()
        numbers = map(int, (rank, world, node, nodes, generation, restarts))
        return Start(agent, *numbers, meeting, int(pid))

    def end(self) -> dict[str, tuple[int, str]]:
        """Wait for all agents to end."""
        return {name: agent.end() for name, agent in self.agents.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.process.poll() is None:
                for pid in [*descendants(agent.pid), agent.pid]:
                    os.kill(pid, 9)
            agent.process.wait(PATIENCE_S)
        self.news.close()


def check_agreement(starts: dict[str, Start]) -> None:
    """Fail unless all workers of a generation were told the same, and each another rank."""
    every = list(starts.values())
    for what in ("world", "nodes", "generation", "restarts", "meeting"):
        assert len({getattr(start, what) for start in every}) == 1, every
    assert sorted(start.rank for start in every) == list(range(every[0].world)), every


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port nobody has now; agents find out by binding it who coordinates."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
