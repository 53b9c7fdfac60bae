"""The console: which messages it shows, and that printing never blocks the program."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import subprocess
import sys

import pytest

from holdfast import console
from holdfast.core.phases import NodePhase
from holdfast.core.session import SessionTimeouts
from holdfast.errors import EnvironmentProblem
from holdfast.membership import threaded
from holdfast.rendezvous.coordinator_handler import CoordinatorAccess
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from real_coordinators import Coordinator, eventually, fault, member, node, started, until


def test_levels_choose_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("holdfast"), "hasHandlers", lambda: False)
    for level, shown in (("DEBUG", 4), ("info", 3), ("", 2), ("nonsense", 2), ("ERROR", 1)):
        monkeypatch.setenv("LOGLEVEL", level)
        for say in (console.debug, console.info, console.warning, console.error):
            say("a line")
        assert capsys.readouterr().err == "[holdfast] a line\n" * shown


def test_only_unknown_log_levels_cause_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in ("", "debug", "Warn", "CRITICAL", "NOTSET"):
        monkeypatch.setenv("LOGLEVEL", level)
        console.check_level()
    assert caplog.messages == []
    monkeypatch.setenv("LOGLEVEL", "FOO")
    console.check_level()
    assert caplog.messages == [
        "LOGLEVEL: 'FOO' is ignored; accepted: DEBUG, INFO, WARNING, ERROR, CRITICAL"
    ]


def test_a_program_that_has_set_up_logging_gets_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="holdfast"):
        console.info("told")
    assert [(one.name, one.levelname, one.message) for one in caplog.records] == [
        ("holdfast", "INFO", "told")
    ]


def test_console_line_has_no_control_characters(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("holdfast"), "hasHandlers", lambda: False)
    console.notice("n1 said \x1b]0;mine\x07\n[holdfast] the job succeeded")
    assert capfd.readouterr().err == (
        "[holdfast] n1 said \\x1b]0;mine\\x07 [holdfast] the job succeeded\n"
    )
    error = EnvironmentProblem("n1 said \x1b[2J\nno", hint="\u202e")
    assert str(error) == "n1 said \\x1b[2J no (\\u202e)"


def test_full_console_does_not_block() -> None:
    """No process reads the pipe: lines are dropped, and the program continues to its end."""
    read, write = os.pipe()
    os.write(write, bytes(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)))
    program = "from holdfast import console; [console.error('lost') for _ in range(3)]; print('on')"
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=write, stdout=subprocess.PIPE, timeout=60
    )
    assert done.stdout == b"on\n"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_line_longer_than_the_free_buffer_does_not_block(letter: str, encoding: str) -> None:
    """The next message begins on a new line."""
    read, write = os.pipe()
    size = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    os.write(write, bytes(size - 8192))
    program = (
        "import os; from holdfast import console; "
        f"console.error({letter!r} * 100_000); os.read({read}, {size}); console.error('short')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": encoding}, stderr=write, pass_fds=[read], timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert os.read(read, size) == b"\n[holdfast] short\n"
    os.close(read)
    os.close(write)


def test_a_long_line_is_written_whole() -> None:
    program = "from holdfast import console; console.error('\xe4x' * 100_000)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stderr.decode() == "[holdfast] " + "\xe4x" * 100_000 + "\n"


@pytest.mark.parametrize("closing", ["import os; os.close(2)", "import sys; sys.stderr = None"])
def test_missing_console_is_not_an_error(closing: str) -> None:
    program = f"{closing}\nfrom holdfast import console; console.error('lost'); print('on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout == b"on\n"


def test_exception_is_described_in_one_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert console.describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert console.describe(Mute()) == "Mute"
    assert len(console.describe(OSError("x" * 100_000))) < 2 * console.PROBLEM_CHARS_MAX


@pytest.mark.parametrize("on_lost", ["run", "stop"])
def test_lost_coordinator_is_reported_until_it_reconnects(
    on_lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages name the loss, the state of the workers, the remaining time, and a remedy."""
    lines: list[str] = []
    monkeypatch.setattr(console, "notice", lines.append)
    timeouts = SessionTimeouts(unreachable_s=60.0, needs_answers=on_lost == "stop")
    with Coordinator("--endpoint=localhost:0") as first:
        one = node(first.port, "a", nodes=1, timeouts=timeouts, advice="that helps")
        with started(one):
            until(one, member)
            one.report(NodePhase.RUNNING, 0)
            first.end(signal.SIGKILL)
            eventually(lambda: len(lines) == 2)
            runs = "the workers of generation 0 keep running"
            if on_lost == "stop":
                runs = (
                    "this node stops the workers of generation 0 "
                    r"unless it reconnects within \d\.\d s \(on_lost=stop\)"
                )
            assert re.fullmatch(
                rf"lost the connection to the coordinator at 127\.0\.0\.1:{first.port}, last message at "
                rf"\d\d:\d\d:\d\d \(.+\); {runs}",
                lines[0],
            ), lines
            assert re.fullmatch(
                r"this node retries for \d\d s more \(coordinator_timeout=60\), then stops "
                "its workers and exits; that helps",
                lines[1],
            ), lines
            with Coordinator(f"--endpoint=localhost:{first.port}"):
                eventually(lambda: len(lines) == 3)
                assert lines[2] == f"reconnected to the coordinator at 127.0.0.1:{first.port}"


def test_coordinator_that_stays_lost_is_reported_periodically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(console, "notice", lines.append)
    monkeypatch.setattr(threaded, "OUTAGE_NOTICE_S", 0.1)
    monkeypatch.setattr(threaded, "OUTAGE_REMIND_S", 0.1)
    with Coordinator("--endpoint=localhost:0") as first:
        one = node(first.port, "a", nodes=1, timeouts=SessionTimeouts(unreachable_s=1.0))
        with started(one):
            until(one, member)
            first.end(signal.SIGKILL)
            fault(one)
            assert 2 <= len(lines[2:]) <= 3
            for line in lines[2:]:
                assert re.fullmatch(
                    r"still no connection to the coordinator at .+ \(.+\): this node exits in \d s",
                    line,
                )


@pytest.mark.parametrize(
    ("endpoint", "config", "advice"),
    [
        ("node0:29400", {}, "--ha"),
        ("node0:29400", {"is_host": "0"}, "holdfast coordinator"),
        ("localhost:29400", {}, ""),
    ],
)
def test_lost_coordinator_message_has_a_matching_hint(
    endpoint: str, config: dict[str, str], advice: str
) -> None:
    access = CoordinatorAccess(RendezvousParameters("c10d", endpoint, "job", 1, 2, **config))
    received = access.advice(endpoint.partition(":")[0])
    assert advice in received
    assert bool(received) is bool(advice)
