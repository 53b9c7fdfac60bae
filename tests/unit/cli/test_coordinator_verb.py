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

from certificates import make_ca
from holdfast.cli import coordinator as verb
from holdfast.cli import main
from holdfast.core.protocol import NodePhase
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.process import hold_port
from holdfast.net import addresses
from holdfast.net.addresses import Address
from real_coordinators import VERB, Coordinator, RawClient, member, node, started, until

if TYPE_CHECKING:
    from pathlib import Path

HOLDFAST = [sys.executable, "-m", "holdfast", "coordinator"]
LOOPBACK = "--endpoint=127.0.0.1:0"


def run(*words: str) -> None:
    verb.execute(verb.parse_args(words))


def test_it_says_where_it_is_and_what_becomes_of_jobs() -> None:
    with Coordinator(LOOPBACK) as coordinator:
        with started(first := node(coordinator.port, "a", nodes=1)):
            until(first, member)
            first.report(NodePhase.FAILED, 0)
            until(first, lambda view: view.generation == 1)
            first.report(NodePhase.SUCCEEDED, 1)
            until(first, lambda view: view.final)
        said, errors = coordinator.end(signal.SIGTERM)
    assert said.splitlines() == [
        f"coordinating at 127.0.0.1:{coordinator.port}, with no token",
        "job 'job': active, round 0, generation 0: all nodes are here",
        "job 'job': active, round 0, generation 1: a worker on a failed",
        "job 'job': closed, round 0, generation 1: all workers succeeded",
    ]
    assert "SignalException: stopped by SIGTERM" in errors


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from a file\n")
    path.chmod(0o600)
    cases = (
        (Coordinator(LOOPBACK, HOLDFAST_TOKEN="said"), b"said"),
        (Coordinator(LOOPBACK, f"--rdzv-conf=token_file={path}"), b"from a file"),
    )
    for started_one, token in cases:
        with started_one as coordinator:
            RawClient(coordinator.port, token=token).shake_hands().socket.close()
            said, errors = coordinator.end(signal.SIGTERM)
        assert said.startswith(f"coordinating at 127.0.0.1:{coordinator.port}, with a token\n")
        assert token.decode() not in said + errors


def test_only_a_coordinator_for_everybody_needs_a_token() -> None:
    with Coordinator("--endpoint=0.0.0.0:0") as coordinator:
        _, errors = coordinator.end(signal.SIGTERM)
        assert errors.count("has no token: whoever reaches the port") == 1
    with Coordinator(LOOPBACK) as coordinator:
        _, errors = coordinator.end(signal.SIGTERM)
        assert "has no token" not in errors


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("127.0.0.1", ""),
        ("192.0.2.1", "--endpoint: head is 192.0.2.1, not this machine; agents must get here by"),
        ("", "--endpoint: head cannot be resolved here: Name or service not known; agents must"),
        ("never", "--endpoint: head cannot be resolved here: no answer within 0.01 s; agents must"),
    ],
)
def test_a_name_that_is_not_this_machine_s_is_warned_of(
    found: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def find(_host: str, port: int) -> list[Address]:
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        if found == "never":
            await asyncio.Event().wait()
        return [Address(socket.AF_INET, (found, port))]

    monkeypatch.setattr(addresses, "resolve_async", find)
    if found == "never":
        monkeypatch.setattr(verb, "RESOLVE_S", 0.01)
    asyncio.run(verb.warn_of_name("head", 1))
    assert [line[: len(said)] for line in caplog.messages] == ([said] if said else [])


def test_it_serves_before_it_knows_whose_name_it_was_given() -> None:
    with Coordinator("--endpoint=192.0.2.1:0") as coordinator:
        RawClient(coordinator.port).shake_hands().socket.close()
        _, errors = coordinator.end(signal.SIGTERM)
        assert "192.0.2.1 is no address of this machine" in errors


def test_all_are_told_that_it_goes() -> None:
    with (
        Coordinator(LOOPBACK) as coordinator,
        RawClient(coordinator.port).shake_hands() as client,
    ):
        coordinator.end(signal.SIGTERM)
        assert getattr(client.hear(), "why", "") == "the coordinator is going away"


def test_nobody_reads_what_it_says_and_it_goes_on() -> None:
    """Its standard output is a pipe that is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    ready, tell = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", VERB, LOOPBACK, f"--ready-fd={tell}"],
        stdout=writing, stderr=subprocess.DEVNULL, pass_fds=[tell],
    ) as process:  # fmt: skip
        os.close(writing)
        os.close(tell)
        with os.fdopen(ready) as pipe:
            port = int(pipe.readline())
        with started(one := node(port, "a", nodes=1)):
            until(one, member)
        process.terminate()
    os.close(reading)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--endpoint=:x"], "--endpoint: ':x' has 'x' for a port"),
        (["--rdzv-conf=tls_cert"], "tls_cert"),
        (["--rdzv-conf=tls_cert=/a"], "tls_cert needs tls_key"),
        (["--rdzv-conf=keep_alive_interval=soon"], "keep_alive_interval"),
        ([LOOPBACK, "--ready-fd=1000"], "--ready-fd: 1000 cannot be written to"),
    ],
)
def test_wrong_settings_are_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(*words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tls_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tls_cert and tls_key"):
        run(LOOPBACK, f"--rdzv-conf=tls_ca={make_ca(tmp_path).cert}")


def test_a_busy_port_is_an_environment_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port {port} is in use by pid"):
            run(f"--endpoint=127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--endpint=x"], "--endpint=x: "),
        (["extra"], "extra: "),
        (["--ready-fd=x"], "--ready-fd: invalid int value"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        verb.parse_args(words)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


# As a command.


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.dispatch(["coordinator", "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: holdfast coordinator [flags]" in text
    assert "examples:" in text
    assert main.dispatch([]) == 0
    assert "  coordinator " in capsys.readouterr().out


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it(signum: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [*HOLDFAST, LOOPBACK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [], 20)
        process.send_signal(signum)
        said, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert said.startswith("coordinating at 127.0.0.1:")
    assert errors.startswith(f"holdfast coordinator: stopped by {signum.name}")
    assert errors.count("\n") == 1


def test_errors_have_their_exit_codes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, code in ((f"--endpoint=127.0.0.1:{port}", 78), ("--rdzv-conf=x", 2)):
            done = subprocess.run([*HOLDFAST, words], capture_output=True, text=True, timeout=20)
            assert done.returncode == code
            assert done.stderr.startswith("holdfast coordinator: error: ")
            assert done.stderr.count("\n") == 1


def test_the_default_is_what_torchrun_users_know() -> None:
    args = verb.parse_args([])
    assert (args.endpoint, verb.DEFAULT_PORT) == ("localhost", 29400)
    with hold_port() as held:
        port = held.getsockname()[1]
        with Coordinator(f"--endpoint=localhost:{port}") as coordinator:
            assert coordinator.port == port
