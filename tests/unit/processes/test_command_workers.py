from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.logs.specs import DefaultLogsSpecs
from holdfast.processes.workers.group import (
    CommandGroup,
    GroupSpec,
    SubprocessHandler,
    replace_subprocess_handler,
)
from real_jobs import Watched, WorkerMessages

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from holdfast.processes.logs.specs import LogsSpecs
    from holdfast.processes.workers.group import RunProcsResult

PATIENCE_S = 60
WAITS = "echo ready $$ > $MESSAGES; exec sleep 1000"
# Ignores SIGTERM, and so does its child, which has its own session.
IGNORES = (
    "trap '' TERM; setsid sleep 1000 & echo child $! > $MESSAGES; echo ready $$ > $MESSAGES; wait"
)


@pytest.fixture
def messages(tmp_path: Path) -> Iterator[WorkerMessages]:
    made = WorkerMessages(tmp_path)
    yield made
    made.close()


@pytest.fixture
def replaced() -> Iterator[None]:
    replace_subprocess_handler(SubprocessHandler)
    yield
    replace_subprocess_handler(None)


def make(
    messages: WorkerMessages, *scripts: str, logs: LogsSpecs | None = None, **how: Any
) -> CommandGroup:
    folder = messages.path.parent
    spec = GroupSpec(
        "trainer",
        "sh",
        {rank: ("-c", script) for rank, script in enumerate(scripts)},
        {rank: {"MESSAGES": str(messages.path)} for rank in range(len(scripts))},
        logs or DefaultLogsSpecs(log_dir=str(folder / "logs")),
        **how,
    )
    return CommandGroup(spec)


def finished(context: CommandGroup) -> RunProcsResult:
    result = context.wait(PATIENCE_S)
    assert result is not None, "the workers did not end"
    return result


def exitcodes(result: RunProcsResult) -> dict[int, int]:
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


class Wrapping(SubprocessHandler):
    """Starts its program through another program, as some sites require."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return super()._popen(("env", "WRAPPED=yes", *args), env)


def test_custom_subprocess_handler_starts_the_workers(messages: WorkerMessages) -> None:
    assert replace_subprocess_handler(Wrapping) is None
    try:
        context = make(messages, "echo $WRAPPED $$ > $MESSAGES", "exit 0")
        context.start()
        received = messages.next()
        assert received == ["yes", str(context.pids()[0])]
        assert {type(one) for one in context.subprocess_handlers.values()} == {Wrapping}
        assert [one.local_rank_id for one in context.subprocess_handlers.values()] == [0, 1]
        assert finished(context).return_values == {0: None, 1: None}
        context.close()
    finally:
        replace_subprocess_handler(None)


@pytest.mark.usefixtures("replaced")
def test_workers_of_a_custom_handler_are_stopped_with_their_process_groups(
    messages: WorkerMessages,
) -> None:
    script = "sleep 1000 & echo child $! > $MESSAGES; echo ready $$ > $MESSAGES; exec sleep 1000"
    context = make(messages, script)
    context.start()
    everyone = Watched(*messages.take(2).values())
    context.close()
    everyone.wait_until_exited()
    assert exitcodes(context.result()) == {0: -signal.SIGTERM}


@pytest.mark.usefixtures("replaced")
def test_workers_of_a_custom_handler_die_with_the_keeper(messages: WorkerMessages) -> None:
    """They are not below the keeper, so only the agent can kill them."""
    context = make(messages, IGNORES, WAITS)
    context.start()
    everyone = Watched(*[int(messages.next()[1]) for _ in range(3)])
    assert context._keeper is not None
    os.kill(context._keeper.pid, signal.SIGKILL)
    assert exitcodes(finished(context)) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    everyone.wait_until_exited()
    context.close()
