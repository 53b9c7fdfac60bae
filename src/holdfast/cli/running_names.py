"""The names of jobs and nodes that shell completion offers.

A person waits for them while typing, so this asks the agents on this machine directly, with a time limit, and
imports no asyncio. It connects to no other machine. The shell may expand the names, and nodes choose their own, so
only names of harmless characters are offered.
"""

from __future__ import annotations

import re
import select
import socket
import time
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

    from holdfast.wire import messages

T = TypeVar("T", bound="msgspec.Struct")

LIMIT_S = 0.4
"""How long the agents have to reply to each of at most two questions."""
AGENTS_MAX = 64
NAMES_MAX = 200
HARMLESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")

JOB_FLAGS = ("--rdzv-id", "--rdzv_id", "--run-id", "--run_id")
NODE_FLAGS = ("--node",)
ELSEWHERE_FLAGS = (
    "--rdzv-backend", "--rdzv_backend", "--rdzv-endpoint", "--rdzv_endpoint", "--ha",
)  # fmt: skip
VALUE_FLAGS = frozenset(
    {
        *JOB_FLAGS, *NODE_FLAGS, *ELSEWHERE_FLAGS, "--rdzv-conf", "--rdzv_conf", "--rank", "--tail",
        "--grep", "--reason", "--grace", "--port", "--host", "--log-dir", "--log_dir",
    }
)  # fmt: skip
"""The flags of these commands that take a value."""
OPERANDS = {"ps": "", "dump": "", "dashboard": "[JOB]"}
NAMED = ("ps", "status", "top", "dashboard", "logs", "events", "dump", "restart", "drain", "undrain", "stop")  # fmt: skip
"""The commands that take the name of a job."""


def offered_names(words: list[str], begun: str) -> list[str]:
    """Return the jobs or nodes that begin with the word at the cursor; `words` are those before it."""
    command, *before = words
    if command not in NAMED:
        return []
    operands: list[str] = []
    flag = job = ""
    for word in before:
        if flag:
            job, flag = (word if flag in JOB_FLAGS else job), ""
        elif word in ELSEWHERE_FLAGS:
            return []
        elif word in VALUE_FLAGS:
            flag = word
        elif not word.startswith("-"):
            operands.append(word)
    kinds = OPERANDS.get(command, COMMANDS[command].operands).split()
    expected = kinds[len(operands)] if len(operands) < len(kinds) else ""
    if flag:
        expected = "NODE" if flag in NODE_FLAGS else "[JOB]" if flag in JOB_FLAGS else ""
    if not expected or begun.startswith("-"):
        return []
    for kind, operand in zip(kinds, operands, strict=False):
        job = operand if kind == "[JOB]" else job
    names = node_names(job) if expected == "NODE" else job_names()
    fitting = {one for one in names if one.startswith(begun) and HARMLESS.fullmatch(one)}
    return sorted(fitting)[:NAMES_MAX]


def job_names() -> list[str]:
    """Return the jobs that have an agent of this user on this machine."""
    return [here.run_id for _, here in local_agents()]


def node_names(job: str) -> list[str]:
    """Return the nodes of the jobs on this machine, or of the one with this name or beginning."""
    from holdfast.wire import messages

    agents = {here.run_id: path for path, here in local_agents() if here.run_id.startswith(job)}
    chosen = {agents[job]: job} if job in agents else {path: one for one, path in agents.items()}
    body = messages.pack(messages.StatusQuery())
    found = _ask(chosen, messages.STATUS, messages.JobSummaries, body)
    return [node.node for _, reply in found for one in reply.jobs for node in one.nodes]


def local_agents() -> list[tuple[str, messages.AgentIdentity]]:
    """Return the agents of this user on this machine that respond in time, each with its socket."""
    from holdfast.defaults import PROTOCOL_VERSION
    from holdfast.net.runtime_dir import agent_sockets, version_of
    from holdfast.wire import messages

    paths = [one for one in agent_sockets() if version_of(one) == str(PROTOCOL_VERSION)]
    return _ask(dict.fromkeys(paths[:AGENTS_MAX], ""), messages.HERE, messages.AgentIdentity)


def _ask(
    chosen: Mapping[str, str], what: str, kind: type[T], body: bytes = b""
) -> list[tuple[str, T]]:
    """Query agents at their sockets, each about the given job; return the replies that arrive in time."""
    from holdfast.wire import messages
    from holdfast.wire.frames import FrameReader, encode_frame
    from holdfast.wire.wire_errors import WireError
    from holdfast.wire.wire_limits import STATUS_FRAME_BYTES_MAX

    deadline = time.monotonic() + LIMIT_S
    waiting: dict[int, tuple[str, socket.socket, FrameReader]] = {}
    replies: list[tuple[str, T]] = []
    poll = select.poll()
    try:
        for path, run_id in chosen.items():
            query = messages.Query(id=1, what=what, run_id=run_id, body=body)
            agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting[agent.fileno()] = (path, agent, FrameReader(STATUS_FRAME_BYTES_MAX))
            try:
                agent.connect(path)
                agent.send(encode_frame(query))
            except OSError:  # It has exited, or its queue is full.
                waiting.pop(agent.fileno())[1].close()
            else:
                poll.register(agent, select.POLLIN)
        while waiting and (rest_s := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(rest_s * 1000):
                path, agent, reader = waiting[number]
                try:
                    data = agent.recv(65536)
                    found = [messages.decode(one) for one in reader.feed(data)]
                    replies += [
                        (path, messages.unpack(kind, one.body))
                        for one in found
                        if isinstance(one, messages.Reply) and one.body
                    ]
                except (OSError, WireError):
                    data, found = b"", []
                if found or not data:
                    poll.unregister(number)
                    waiting.pop(number)[1].close()
    finally:
        for _, agent, _ in waiting.values():
            agent.close()
    return replies
