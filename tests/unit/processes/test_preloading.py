from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.workers.command_workers import SubprocessHandler, replace_subprocess_handler
from holdfast.processes.zygote.client import warm_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def function() -> None: ...


@pytest.mark.parametrize(
    ("entrypoint", "args", "method", "why"),
    [
        (function, [], "fork", "functions by start_method='fork' are forked already"),
        (function, [], "forkserver", "functions by start_method='forkserver' are forked already"),
        ("/bin/sh", ["x"], "spawn", "the workers run sh, not a Python script, module or command"),
        (sys.executable, ["-"], "spawn", "not a Python script, module or command"),
    ],
)
def test_what_cannot_be_forked_is_told(
    entrypoint: Callable[..., Any] | str,
    args: list[str],
    method: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warm_start(["json"], entrypoint, args, method, {}) is None
    (said,) = caplog.messages
    assert said.startswith("preload has no effect: ")
    assert said.endswith(why)


def test_a_replaced_handler_starts_workers_itself(caplog: pytest.LogCaptureFixture) -> None:
    replace_subprocess_handler(SubprocessHandler)
    try:
        assert warm_start(["json"], sys.executable, ["train.py"], "spawn", {}) is None
    finally:
        replace_subprocess_handler(None)
    (said,) = caplog.messages
    assert "a subprocess handler of the program's own" in said
