"""Whether an agent's workers can be started warm, and as what."""

from __future__ import annotations

import os
import sys

from holdfast import messages
from holdfast.processes.keeping import inherited_environment
from holdfast.processes.python_command import parse_command
from holdfast.processes.subprocess_handler import custom_handler_factory
from holdfast.processes.warm import WarmStart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def warm_start(
    modules: Sequence[str],
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    start_method: str,
    worker_env: Mapping[str, str],
) -> WarmStart | None:
    """Return what starts such workers from a zygote; None, and a warning, if nothing can."""
    path = None
    if callable(entrypoint):
        if start_method != "spawn":
            return unusable(f"functions by start_method={start_method!r} are forked already")
        from holdfast.processes import functions

        argv = functions.interpreter_command("main")
        modules = [*modules, "holdfast.processes.functions"]
        path = list(sys.path)
    else:
        if custom_handler_factory() is not None:
            return unusable("the workers are started by a subprocess handler of the program's own")
        argv = [entrypoint, *map(str, args)]
    command = parse_command(argv)
    if command is None:
        name = os.path.basename(argv[0])
        return unusable(f"the workers run {name}, not a Python script, module or command")
    env = {**inherited_environment(), **worker_env}
    return WarmStart(command, modules, env=env, path=path)


def unusable(why: str) -> WarmStart | None:
    """Say why nothing can be forked for these workers."""
    messages.warning(f"preload has no effect: {why}")
    return None
