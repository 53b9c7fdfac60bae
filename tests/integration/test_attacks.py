"""Attacks on a coordinator and its nodes, as an attacker would carry them out; each must fail."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import msgspec
import pytest

from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole, RefusalReason
from holdfast.core.protocol import Ack, Failure, NodeInfo, Status, View
from holdfast.core.quotas import ADDRESS_SHARE_MAX, JOBS_MAX, NEARLY_FULL
from holdfast.core.session import SessionTimeouts
from holdfast.membership.interface import JoinRefused
from holdfast.wire.frames import HEADER_BYTES, TAG_BYTES, FrameReader, encode_frame
from holdfast.wire.messages import Message, decode, encode
from holdfast.wire.wire_errors import WireError
from holdfast.wire.wire_limits import STATUS_FRAME_BYTES_MAX
from other_users import STRANGER, listening_as
from real_coordinators import Coordinator, RawClient, fault, member, node, started, until
from real_jobs import PATIENCE_S
from real_teams import OBEY, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKEN = b"d41d8cd98f00b204e9800998ecf8427e"
EVIL = "203.0.113.66"
HASTY = SessionTimeouts(first_contact_s=1.0, unreachable_s=1.0)
SECRET = "login failed for user=prod password=hunter2"


def status(name: str, run_id: str = "job", **changes: object) -> Status:
    given: dict[str, object] = {
        "seq": 1,
        "info": NodeInfo(node=name, incarnation=sum(name.encode())),
        "settings": JobSettings(min_nodes=1, max_nodes=1, max_restarts=10**6),
    }
    return Status(run_id=run_id, **(given | changes))  # type: ignore[arg-type]


def coordinating(*flags: str, token: bytes = TOKEN) -> Coordinator:
    return Coordinator("--endpoint=127.0.0.1:0", *flags, HOLDFAST_TOKEN=token.decode())


# An attacker in the middle.


class InBetween:
    """Listens where a node connects, and relays frames, changed or not.

    `change` receives each complete frame from the coordinator, and returns the bytes to send instead.
    """

    def __init__(self, change: Callable[[bytes], list[bytes]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.tried = False
        """Whether the attack was attempted."""
        self._change = change
        self._threads = [threading.Thread(target=self._accept)]
        self._open = ExitStack()

    def serve(self, there: int) -> Self:
        self._there = there
        self._threads[0].start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._open.close()
        for one in self._threads:
            one.join(PATIENCE_S)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._there))
            for one in (client, server):
                self._open.callback(one.close)
                self._open.callback(_shut, one)
            pumps = (self._pass_on, client, server), (self._pass_back, server, client)
            for work, source, sink in pumps:
                thread = threading.Thread(target=work, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                server.sendall(data)
        except OSError:
            pass
        _shut(server)

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        reader = FrameReader(STATUS_FRAME_BYTES_MAX)
        try:
            while data := server.recv(65536):
                for one in reader.feed(data):
                    frame = one if reader.tag_bytes else framed(one)
                    reader.tag_bytes = TAG_BYTES  # All frames after the challenge are sealed.
                    instead = self._change(frame)
                    self.tried = self.tried or instead != [frame]
                    client.sendall(b"".join(instead))
        except OSError:
            pass
        _shut(client)


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # It is already closed.


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def message_in(frame: bytes) -> Message | None:
    """Return the message in a sealed frame, which can be read but not changed."""
    try:
        return decode(frame[HEADER_BYTES:-TAG_BYTES])
    except WireError:
        return None


def evil(view: View) -> View:
    return msgspec.structs.replace(view, master_addr=EVIL, master_port=6666)


def rewrite(frame: bytes) -> list[bytes]:
    view = message_in(frame)
    return [encode_frame(evil(view)), frame[-TAG_BYTES:]] if isinstance(view, View) else [frame]


def unseal(frame: bytes) -> list[bytes]:
    view = message_in(frame)
    return [encode_frame(evil(view)), bytes(TAG_BYTES)] if isinstance(view, View) else [frame]


def leave_out(frame: bytes) -> list[bytes]:
    """Drop an acknowledgement, so that the view is not the next frame."""
    return [] if isinstance(message_in(frame), Ack) else [frame]


@pytest.mark.parametrize("change", [rewrite, unseal, leave_out])
def test_attacker_in_the_middle_cannot_change_messages(
    change: Callable[[bytes], list[bytes]],
) -> None:
    """The attack fails even if `advertised_port` permits a forwarded port."""
    with ExitStack() as stack:
        relay = stack.enter_context(InBetween(change))
        forwarded = f"--rdzv-conf=advertised_port={relay.port}"
        relay.serve(stack.enter_context(coordinating(forwarded)).port)
        one = node(relay.port, "a", nodes=1, token=TOKEN, timeouts=HASTY)
        with started(one):
            fault(one)
            assert relay.tried
            assert one.view is None


class Squatter(InBetween):
    """Relays the handshake to another coordinator with the same token, and then impersonates it."""

    def __init__(self) -> None:
        self._said = 0
        super().__init__(self._take_part)

    def _take_part(self, frame: bytes) -> list[bytes]:
        self._said += 1
        if self._said % 2:  # Each connection's challenge.
            return [frame]
        view = View(
            run_id="job", node="a", incarnation=1, term=9, revision=9, role=NodeRole.MEMBER,
            round=0, generation=0, rank=0, size=1, world_size=1, master_addr=EVIL,
        )  # fmt: skip
        return [frame, encode_frame(view) + bytes(TAG_BYTES), encode_frame(view)]


@pytest.mark.parametrize("is_forwarded", [False, True])
def test_program_at_the_port_cannot_use_the_handshake_of_another_coordinator(
    is_forwarded: bool,
) -> None:
    with ExitStack() as stack:
        squatter = stack.enter_context(Squatter())
        flags = [f"--rdzv-conf=advertised_port={squatter.port}"] if is_forwarded else []
        another = stack.enter_context(coordinating(*flags))
        squatter.serve(another.port)
        info = NodeInfo(node="a", incarnation=1)
        one = node(squatter.port, "a", nodes=1, token=TOKEN, info=info, timeouts=HASTY)
        with started(one):
            received = fault(one)
            assert one.view is None
            assert squatter.tried
            if (
                not is_forwarded
            ):  # The other coordinator detects it, and its refusal is authenticated.
                assert isinstance(received, JoinRefused)
                assert str(squatter.port) in received.why
                assert str(another.port) in received.why


def test_agent_refuses_a_port_held_by_another_user_in_one_line(tmp_path: Path) -> None:
    with listening_as(STRANGER) as port:
        cluster = Cluster(tmp_path, OBEY, nnodes="1:2", port=port)
        with cluster:
            code, sent = cluster.start("a").end()
        assert code == 78
        (line,) = sent.splitlines()
        assert str(port) in line
        assert str(STRANGER) in line


# A client with the token of another job, or without a token.


def test_failure_report_is_sent_only_to_members_of_its_generation() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        settings = JobSettings(min_nodes=1, max_nodes=1)
        one = node(coordinator.port, "a", settings=settings)
        with started(one):
            until(one, member)
            failure = Failure(node="a", summary=SECRET)
            one.report(NodePhase.FAILED, 0, failure, report=SECRET.encode())
            assert until(one, lambda view: view.final).report == SECRET.encode()
        late = node(coordinator.port, "late", settings=settings)
        with started(late):
            view = until(late, lambda view: view.role is NodeRole.CLOSED)
            assert (view.final, view.outcome) == (True, JobOutcome.FAILED)
            assert b"hunter2" not in encode(view)


# A client that uses all resources.


def test_one_address_cannot_create_all_jobs() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator, ExitStack() as opened:

        def begin(run_id: str, source: str = "127.0.0.1") -> RefusalReason | None:
            client = opened.enter_context(RawClient(coordinator.port, run_id=run_id, source=source))
            client.complete_handshake().send_message(status("a", run_id))
            answer = client.receive()
            assert isinstance(answer, Ack | View)
            return answer.refusal if isinstance(answer, View) else None

        free = int(NEARLY_FULL * JOBS_MAX)
        assert free >= ADDRESS_SHARE_MAX * JOBS_MAX
        assert {begin(f"job{number}") for number in range(free)} == {None}
        assert begin("one more") is RefusalReason.TOO_MANY_JOBS
        assert begin("honest", "127.0.0.2") is None
