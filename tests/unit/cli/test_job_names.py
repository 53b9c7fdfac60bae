"""Names that people type: prefixes of jobs and nodes, numbers of nodes, and what completion offers."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from holdfast.cli import running_names
from holdfast.cli.commands import COMMANDS
from holdfast.cli.completion_command import parser_of
from holdfast.cli.running_names import NAMED, VALUE_FLAGS, offered_names
from holdfast.control.discovery import JobChoice, find_job
from holdfast.control.name_matching import match_name, match_node
from holdfast.core.rounds import Job
from holdfast.core.shared_state import encode
from holdfast.errors import UsageError
from holdfast.net.runtime_dir import socket_of
from holdfast.rendezvous.file_backend import STATE_NAME, FileRendezvousBackend
from holdfast.store.file_store import SharedFolder, file_name
from holdfast.wire import messages
from holdfast.wire.frames import FrameReader, encode_frame
from holdfast.wire.messages import JobSummary, NodeSummary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "found"), [("train", "train"), ("train-", "train-2"), ("n", "night"), ("x", "")]
)
def test_exact_name_or_unique_prefix_is_found(text: str, found: str) -> None:
    assert match_name(text, ["train", "train-2", "night"], "jobs") == found


def test_ambiguous_prefix_lists_the_candidates_in_one_line() -> None:
    with pytest.raises(UsageError) as caught:
        match_name("tr", ["train-2", "night", "train", "tr\x1b[2J"], "jobs")
    text = str(caught.value)
    assert text == "'tr' could be one of 3 jobs: tr\\x1b[2J, train, train-2"


JOB = JobSummary(
    run_id="job",
    nodes=[
        NodeSummary(node="gpu1", host="gpu1.rack", rank=1),
        NodeSummary(node="gpu1-2", host="gpu1.rack", rank=0),
        NodeSummary(node="gpu7", host="gpu7.rack", rank=2),
        NodeSummary(node="10", host="ten", rank=3),
        NodeSummary(node="spare", host="cpu.rack"),
    ],
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu1", "gpu1"),  # Not all nodes that begin with it.
        ("gpu1.rack", "gpu1.rack"),  # The host, with both nodes.
        ("gpu1.r", "gpu1.rack"),
        ("gpu1-", "gpu1-2"),
        ("gpu7", "gpu7"),
        ("sp", "spare"),
        ("cpu", "cpu.rack"),
        ("0", "gpu1-2"),
        ("2", "gpu7"),
        ("10", "10"),  # A name, not a number.
        ("1", "gpu1"),  # A number, not the beginning of `10`.
        ("4", "4"),  # The job decides; it refuses unknown nodes.
        ("unknown", "unknown"),
        ("\u00b2", "\u00b2"),
    ],
)
def test_node_is_found_by_name_host_number_or_prefix(text: str, found: str) -> None:
    assert match_node(text, JOB) == found


def test_prefix_of_several_nodes_is_refused() -> None:
    with pytest.raises(UsageError, match="one of 3 nodes: gpu1, gpu1-2, gpu7"):
        match_node("gp", JOB)


def test_job_in_a_folder_is_found_by_prefix(tmp_path: Path) -> None:
    for run_id in ("train", "train-2", "night"):
        folder = SharedFolder(str(tmp_path / file_name(run_id)))
        backend = FileRendezvousBackend(os.path.join(folder.path, STATE_NAME), folder=folder)
        assert backend.set_state(encode(Job(run_id=run_id)))

    def found(run_id: str) -> str:
        choice = JobChoice(backend="file", endpoint=str(tmp_path), run_id=run_id)
        location, _ = asyncio.run(find_job(choice))
        return getattr(location, "run_id", "")

    assert [found(one) for one in ("train", "train-", "ni", "x")] == [
        "train", "train-2", "night", "x",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="train, train-2"):
        found("tr")


# Completion.


def test_every_flag_that_takes_a_value_is_known() -> None:
    flags = set()
    for name in NAMED:
        actions = parser_of(COMMANDS[name])._actions
        flags |= {flag for one in actions if one.nargs != 0 for flag in one.option_strings}
    assert {flag for flag in flags if flag.startswith("--")} - {"--agent-pid"} == VALUE_FLAGS


class FakeAgent:
    """An agent's socket that replies to queries in a thread, until it is closed."""

    def __init__(self, pid: int, run_id: str, *nodes: str) -> None:
        self.run_id, self.nodes = run_id, nodes
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(socket_of(pid))
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client:
                reader = FrameReader(1 << 20)
                queries: list[bytes] = []
                while not queries and (data := client.recv(4096)):
                    queries += map(bytes, reader.feed(data))
                for query in map(messages.decode, queries):
                    assert isinstance(query, messages.Query)
                    reply = messages.Reply(id=query.id, body=self.answer(query))
                    with suppress(BrokenPipeError):
                        client.sendall(encode_frame(reply))

    def answer(self, query: messages.Query) -> bytes:
        if query.what == messages.HERE:
            return messages.pack(messages.AgentIdentity(run_id=self.run_id, node=self.nodes[0]))
        assert query.run_id == self.run_id
        job = JobSummary(run_id=self.run_id, nodes=[NodeSummary(node=one) for one in self.nodes])
        return messages.pack(messages.JobSummaries(jobs=[job]))

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Agents of two jobs, and one that has exited."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", folder)
        monkeypatch.setattr(running_names, "LIMIT_S", 60.0)
        with socket.socket(socket.AF_UNIX) as exited:
            exited.bind(socket_of(2))
        live = [
            FakeAgent(3, "train-1142", "gpu1", "gpu2", "$(reboot)", "--stop"),
            FakeAgent(4, "night", "cpu1"),
            FakeAgent(5, "night", "cpu1"),
        ]
        try:
            yield
        finally:
            for one in live:
                one.close()


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("status |", ["night", "train-1142"]),
        ("status --watch t|", ["train-1142"]),
        ("dashboard --port 0 n|", ["night"]),
        ("dump --run-id |", ["night", "train-1142"]),
        ("drain |", ["cpu1", "gpu1", "gpu2"]),
        ("drain g|", ["gpu1", "gpu2"]),
        ("drain gpu1 |", ["night", "train-1142"]),
        ("drain --rdzv-id ni |", ["cpu1"]),
        ("logs train-1142 --node |", ["gpu1", "gpu2"]),
        ("logs train-1142 |", []),
        ("logs --grep |", []),
        ("logs --rdzv-endpoint head |", []),
        ("status -|", []),
        ("run |", []),
    ],
)
@pytest.mark.usefixtures("agents")
def test_completion_offers_jobs_and_nodes(typed: str, names: list[str]) -> None:
    *before, begun = typed.removesuffix("|").split(" ")
    assert offered_names(before, begun) == names


@pytest.mark.usefixtures("agents")
def test_completion_does_not_wait_for_an_agent_that_does_not_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 0.0])  # The time is over once the first reply has arrived.
    monkeypatch.setattr("holdfast.cli.running_names.time.monotonic", lambda: next(now, 61.0))
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(socket_of(1))
        frozen.listen()
        assert offered_names(["status"], "")
