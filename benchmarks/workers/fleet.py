"""A fleet of agents' connections on one coordinator: how long a round takes, and a restart.

    fleet.py AGENTS LIMIT_S [PAUSE_S [TOKEN]]

The coordinator has its own process. All agents are in this one: the real handshake, the real
machine of a node's membership and heartbeats every second, but no asyncio and no workers, so this
process uses little CPU. Both processes share the machine's cores. Prints one line of JSON, with the
coordinator's own CPU time.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from holdfast.coordinator.server import CoordinatorServer
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Ack, Failure, Heartbeat, NodeInfo, View
from holdfast.core.session import Connected, Send, Session, SessionTimeouts, StatusChanged
from holdfast.net.listening import try_bind
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.handshake import ClientHandshake
from holdfast.wire.messages import decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.wire.frames import Seal

RUN_ID = "fleet"
# The defaults of a job.
SILENCE_S, GRACE_S, BEAT_S = 5.0, 0.2, 1.0
RESTARTS = 3
PAUSE_S = 1.5  # Before each restart, unless given: a heartbeat and a half.
# How many connect at a time: agents of real hosts do not share an interpreter.
IN_FLIGHT = 64
READ_BYTES = 1 << 16
CALL = b"\xa4call"  # Present in an acknowledgement that is a roll call.
WATCH = b"\xa5watch"
PR_SET_PDEATHSIG = 1  # The coordinator does not outlive this process.


class FleetAgent:
    """One connection, and the machine behind it."""

    __slots__ = (
        "beat", "generation", "handshake", "in_seal", "link", "membership", "on_other", "out_seal", "reader",
    )  # fmt: skip

    def __init__(self, number: int, port: int, settings: JobSettings, token: bytes | None) -> None:
        self.membership = Session(
            time.monotonic(),
            run_id=RUN_ID,
            info=NodeInfo(node=f"agent-{number}", incarnation=1, ports=(2, 3)),
            settings=settings,
            timeouts=SessionTimeouts(),
            draw=random.random,
        )
        self.handshake = ClientHandshake(token, run_id=RUN_ID, host="127.0.0.1", port=port)
        self.out_seal: Seal | None = None
        self.in_seal: Seal | None = None
        self.reader = FrameReader(tag_bytes=None)
        self.generation = -1
        self.beat = b""
        self.on_other: Callable[[FleetAgent, bytes], None] | None = None
        """Receives messages that are not for the machine."""
        self.link = socket.socket()

    def connect(self, port: int) -> None:
        self.link.connect(("127.0.0.1", port))
        self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link.sendall(self.handshake.start())
        self.link.setblocking(False)  # noqa: FBT003 (the name says it)

    def read(self) -> bool:
        """Handle received data; return whether the agent learned of a new generation."""
        data = self.link.recv(READ_BYTES)
        if not data:
            raise SystemExit("the coordinator closed a connection")
        before = self.generation
        for body in self.reader.feed(data):
            if not self.handshake.done:
                self.link.send(self.handshake.receive(body))
                self.reader.tag_bytes = self.handshake.tag_bytes
                if self.handshake.done:
                    self.out_seal, self.in_seal = self.handshake.seals or (None, None)
                    self._perform(Connected())
                continue
            seal = self.in_seal
            if seal is not None:
                body = seal.open(body)  # noqa: PLW2901 (it is the same, without its tag)
            if self.on_other is not None and WATCH in body[:16]:
                self.on_other(self, body)
                continue
            if b"\xa4view" not in body[:16]:  # Most acknowledgements change nothing here.
                if CALL in body:
                    self._perform(decode(body))  # type: ignore[arg-type]
                continue
            view = decode(body)
            assert isinstance(view, View)
            self._perform(view)
            if view.role is NodeRole.MEMBER and view.generation > self.generation:
                self.generation = view.generation
                self._perform(StatusChanged(NodePhase.RUNNING, view.generation))
        return self.generation > before

    def send(self, frame: bytes) -> None:
        seal = self.out_seal
        self.link.send(frame if seal is None else seal.seal(frame))

    def fail(self) -> None:
        node = self.membership.status.info.node
        failure = Failure(node=node, rank=0, exitcode=-9, summary="killed", sudden=True)
        self._perform(StatusChanged(NodePhase.FAILED, self.generation, failure))

    def _perform(self, event: Connected | StatusChanged | View | Ack) -> None:
        for effect in self.membership.handle(time.monotonic(), event):
            if isinstance(effect, Send):
                self.send(encode_frame(effect.message))
        status, view = self.membership.status, self.membership.view
        self.beat = encode_frame(
            Heartbeat(
                run_id=RUN_ID,
                node=status.info.node,
                incarnation=status.info.incarnation,
                seq=status.seq,
                term=view.term if view else 0,
                revision=view.revision if view else 0,
            )
        )


class Fleet:
    """All agents, driven by one loop."""

    def __init__(self, port: int, count: int, deadline: float, token: bytes | None) -> None:
        settings = JobSettings(min_nodes=count, max_nodes=count, max_restarts=RESTARTS)
        self.agents = [FleetAgent(number, port, settings, token) for number in range(count)]
        self._port = port
        self._deadline = deadline
        self._poll = select.epoll()
        self._by_fd: dict[int, FleetAgent] = {}
        self._beats: deque[tuple[float, FleetAgent]] = deque()
        self._agents_notified: dict[int, int] = {}
        self._handshakes = 0  # Handshakes that are done.

    def form(self) -> float:
        """Connect all agents; return when the last one learned that it is a member."""
        for agent in self.agents:
            agent.connect(self._port)
            self._by_fd[agent.link.fileno()] = agent
            self._poll.register(agent.link, select.EPOLLIN)
            self._beats.append((time.monotonic() + BEAT_S, agent))
            while len(self._by_fd) - self._handshakes >= IN_FLIGHT:
                self._step(0.1)
        return self.wait_for_generation(0)

    def wait_for_generation(self, generation: int) -> float:
        """Wait until all agents have learned of a generation; return the time."""
        while self._agents_notified.get(generation, 0) < len(self.agents):
            self._step(0.1)
        return time.monotonic()

    def idle_for(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            self._step(until - time.monotonic())

    def _step(self, wait_s: float) -> None:
        now = time.monotonic()
        if now > self._deadline:
            raise TimeoutError
        while self._beats and self._beats[0][0] <= now:
            _, agent = self._beats.popleft()
            if agent.beat:
                agent.send(agent.beat)
            self._beats.append((now + BEAT_S, agent))
        wait_s = min(wait_s, self._beats[0][0] - now)
        for fd, _ in self._poll.poll(max(0.0, wait_s)):
            agent = self._by_fd[fd]
            was_done = agent.handshake.done
            if agent.read():
                notified = self._agents_notified
                notified[agent.generation] = notified.get(agent.generation, 0) + 1
            self._handshakes += agent.handshake.done and not was_done


def measure(fleet: Fleet, server: int, pause_s: float) -> dict[str, object]:
    cpu_s, began = cpu_s_of(server), time.monotonic()
    formed_s = fleet.form() - began
    formed_cpu_s = cpu_s_of(server) - cpu_s
    restarts_s, restarts_cpu_s = [], []
    for generation in range(1, RESTARTS + 1):
        fleet.idle_for(pause_s)
        cpu_s, began = cpu_s_of(server), time.monotonic()
        fleet.agents[generation * len(fleet.agents) // (RESTARTS + 1)].fail()
        restarts_s.append(fleet.wait_for_generation(generation) - began)
        restarts_cpu_s.append(cpu_s_of(server) - cpu_s)
    return {
        "formed_s": formed_s,
        "formed_cpu_s": formed_cpu_s,
        "restarts_s": restarts_s,
        "restarts_cpu_s": restarts_cpu_s,
    }


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process that has one thread."""
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as stat:
        return int(stat.read().split()[0]) / 1e9


def serve(listener: socket.socket, token: bytes | None) -> None:
    async def forever() -> None:
        server = CoordinatorServer(listener, silence_s=SILENCE_S, grace_s=GRACE_S, token=token)
        await asyncio.Event().wait()
        del server

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(forever())


def main() -> None:
    count, limit_s = int(sys.argv[1]), float(sys.argv[2])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else PAUSE_S
    token = sys.argv[4].encode() if len(sys.argv) > 4 else None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = try_bind("127.0.0.1", 0, is_host=True)
    assert listener is not None
    port = listener.getsockname()[1]
    server = os.fork()
    if server == 0:
        try:
            serve(listener, token)
        finally:
            os._exit(1)
    listener.close()
    gc.disable()  # This process should do little else.
    try:
        fleet = Fleet(port, count, time.monotonic() + limit_s, token)
        found: object = measure(fleet, server, pause_s)
    except TimeoutError:
        found = None
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
