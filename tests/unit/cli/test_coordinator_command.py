from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.cli import coordinator_command
from holdfast.core.phases import NodePhase
from holdfast.errors import UsageError
from holdfast.net import async_addresses
from holdfast.net.addresses import Address
from holdfast.net.token import make_token
from holdfast.wire.messages import Goodbye
from real_coordinators import VERB, Coordinator, RawClient, member, node, started, until

if TYPE_CHECKING:
    from pathlib import Path

HOLDFAST = [sys.executable, "-m", "holdfast", "coordinator"]
LOOPBACK = "--endpoint=127.0.0.1:0"
EVERYWHERE = "--endpoint=0.0.0.0:0"
SECRET = "a token that is given"


def run(*words: str) -> None:
    coordinator_command.execute(coordinator_command.build_parser("coordinator").parse_args(words))


def test_coordinator_prints_its_endpoint_and_the_changes_of_jobs() -> None:
    with Coordinator(LOOPBACK) as coordinator:
        with started(first := node(coordinator.port, "a", nodes=1)):
            until(first, member)
            first.report(NodePhase.FAILED, 0)
            until(first, lambda view: view.generation == 1)
            first.report(NodePhase.SUCCEEDED, 1)
            until(first, lambda view: view.final)
        with RawClient(coordinator.port).complete_handshake() as client:
            out, errors = coordinator.end(signal.SIGTERM)
            assert isinstance(client.receive(), Goodbye)
    first_line, *lines = out.splitlines()
    assert f"127.0.0.1:{coordinator.port}" in first_line
    assert len(lines) == 3
    assert all(line.startswith("job 'job': ") for line in lines)
    assert "SIGTERM" in errors


def test_token_is_read_from_environment_file_or_home(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("a token from a file\n")
    path.chmod(0o600)
    own = tmp_path / ".holdfast" / "token"
    make_token(str(own))
    cases = (
        (Coordinator(EVERYWHERE, HOLDFAST_TOKEN=SECRET), SECRET.encode()),
        (Coordinator(LOOPBACK, f"--rdzv-conf=token_file={path}"), b"a token from a file"),
        (Coordinator(EVERYWHERE, HOME=str(tmp_path)), own.read_bytes().strip()),
    )
    for started_one, token in cases:
        with started_one as coordinator:
            RawClient(coordinator.port, token=token).complete_handshake().socket.close()
            out, errors = coordinator.end(signal.SIGTERM)
        assert token.decode() not in out + errors
        assert "HOLDFAST_TOKEN" not in errors
        assert "made" not in errors


def test_open_coordinator_prints_a_warning() -> None:
    with Coordinator(EVERYWHERE, "--rdzv-conf=auth=none") as coordinator:
        RawClient(coordinator.port).complete_handshake().socket.close()
        _, errors = coordinator.end(signal.SIGTERM)
    assert errors.count("auth=none") == 1


@pytest.mark.parametrize("found", ["127.0.0.1", "192.0.2.1", "", "never"])
def test_endpoint_of_another_machine_causes_a_warning(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def resolve(_host: str, port: int) -> list[Address]:
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        if found == "never":
            await asyncio.Event().wait()
        return [Address(socket.AF_INET, (found, port))]

    monkeypatch.setattr(async_addresses, "resolve_async", resolve)
    if found == "never":
        monkeypatch.setattr(coordinator_command, "RESOLVE_S", 0.01)
    asyncio.run(coordinator_command.warn_if_not_local("head", 1))
    assert [line[:16] for line in caplog.messages] == (
        [] if found == "127.0.0.1" else ["--endpoint: head"]
    )


def test_coordinator_serves_before_its_name_is_resolved() -> None:
    with Coordinator("--endpoint=192.0.2.1:0", HOLDFAST_TOKEN=SECRET) as coordinator:
        RawClient(coordinator.port, token=SECRET.encode()).complete_handshake().socket.close()
        _, errors = coordinator.end(signal.SIGTERM)
        assert "--endpoint: 192.0.2.1" in errors


def test_full_stdout_does_not_block_coordinator() -> None:
    """The coordinator's standard output is a full pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    ready, ready_write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", VERB, LOOPBACK, f"--ready-fd={ready_write}"],
        stdout=writing, stderr=subprocess.DEVNULL, pass_fds=[ready_write],
    ) as process:  # fmt: skip
        os.close(writing)
        os.close(ready_write)
        with os.fdopen(ready) as pipe:
            port = int(pipe.readline())
        with started(one := node(port, "a", nodes=1)):
            until(one, member)
        process.terminate()
    os.close(reading)


# As a command.


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_coordinator(signum: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [*HOLDFAST, LOOPBACK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [], 20)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert signum.name in errors
    assert errors.count("\n") == 1


def test_errors_have_their_exit_codes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, code, named in (
            (f"--endpoint=127.0.0.1:{port}", 78, f"pid {os.getpid()}"),
            ("--rdzv-conf=x", 2, "--rdzv-conf"),
            ("--endpint=x", 2, "--endpint"),
            ("--take-over --endpoint=head", 2, "--take-over"),
            ("--take-over --endpoint=127.0.0.1:1,head", 2, "127.0.0.1"),
            (f"--take-over --endpoint=127.0.0.1:{port},127.0.0.1:0", 2, "127.0.0.1:0"),
        ):
            done = subprocess.run(
                [*HOLDFAST, *words.split()], capture_output=True, text=True, timeout=20
            )
            assert done.returncode == code
            assert done.stderr.startswith("holdfast coordinator: error: ")
            assert named in done.stderr
            assert done.stderr.count("\n") == 1


def test_take_over_uses_the_endpoint_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [(f"192.0.2.{number}", 29400) for number in range(4)]
    args = coordinator_command.build_parser("coordinator").parse_args(
        ["--take-over", "--endpoint=as given"]
    )
    for own, place in (((2,), 2), ((0, 1, 3), 1), ((0,), None), ((), None)):
        mine = [ends[one][0] for one in own]
        monkeypatch.setattr(
            "holdfast.cli.coordinator_command.is_local", lambda one, mine=mine: one.ip in mine
        )
        if place is not None:
            assert coordinator_command._own_endpoint_index(args, ends) == place
            continue
        with pytest.raises(UsageError, match=r"^--take-over: "):
            coordinator_command._own_endpoint_index(args, ends)
