"""The program of a worker: its command line, and whether it can start.

The checks run before anything is started. So a misspelt script is one line and an exit code like the
shell's, not N failed workers. A module (`-m`) is not searched, since that can run code of its package.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.agent.spec import run_script_path
from holdfast.errors import CannotStart, UsageError
from holdfast.launcher.flag_values import parse_modules, reject, source_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from typing import NoReturn


PYTHON_ENV = "PYTHON_EXEC"
MISSING, UNUSABLE = 127, 126


def get_use_env(args: Namespace) -> bool:
    """Return whether workers get their local rank only from the environment.

    A program can add the old flag `--use-env` to the parser. Without that flag, its scripts also get
    `--local-rank=N` as an argument.
    """
    return bool(getattr(args, "use_env", True))


def worker_command(args: Namespace) -> tuple[Callable[..., None] | str, list[str]]:
    """Return what each worker runs: a function or a program, and its arguments."""
    script: str = args.training_script
    if args.run_path:
        return run_script_path, [script, *args.training_script_args]
    argv: list[str] = []
    if args.no_python:
        if args.module:
            raise UsageError("--no-python: conflicts with --module, which needs Python")
        program = script
    else:
        program = interpreter()
        argv += ["-u", "-m", script] if args.module else ["-u", script]
    if not get_use_env(args):
        argv.append("--local-rank=${local_rank}")
    return program, [*argv, *args.training_script_args]


def parse_preload(args: Namespace) -> tuple[str, ...]:
    """Return the modules of `--preload`; reject workers that cannot be forked.

    What `auto` stands for is resolved at the launch.
    """
    flag = "--preload"
    text = getattr(args, "preload", "")
    modules = parse_modules(text, source=source_of(text, flag))
    if modules and args.run_path:
        if args.start_method != "spawn":
            how = f"conflicts with --start-method {args.start_method}"
            reject(text, flag, how, "--start-method spawn, which --preload makes as fast")
    elif modules and args.no_python:
        raise UsageError(
            f"{source_of(text, flag)}: conflicts with --no-python: "
            "only Python workers can be forked from a process that has imported modules"
        )
    return modules


def interpreter() -> str:
    """Return the Python of the workers: `PYTHON_EXEC`, or the one that runs this."""
    return os.environ.get(PYTHON_ENV) or sys.executable


def check_can_start(args: Namespace) -> None:
    """Raise `CannotStart` if the workers of this command line cannot start."""
    script: str = args.training_script
    if args.run_path:
        _check_script(script)
    elif args.no_python:
        _check_program(script, script)
    else:
        _check_program(interpreter(), PYTHON_ENV if os.environ.get(PYTHON_ENV) else "Python")
        # A lone - is a script on stdin, and -c the interpreter's own option.
        if not args.module and not script.startswith("-"):
            _check_script(script)


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        _refuse(path, "no such script", MISSING)
    if not os.access(path, os.R_OK):
        _refuse(path, "the script is not readable", UNUSABLE)
    if os.path.isdir(path) and not any(
        os.path.exists(os.path.join(path, f"__main__{suffix}")) for suffix in (".py", ".pyc")
    ):
        _refuse(path, "a directory needs a __main__.py to be run", UNUSABLE)


def _check_program(program: str, called: str) -> None:
    """Reject a program that cannot be executed; one without a slash is searched in PATH."""
    if os.sep in program:
        candidates = [program]
    else:
        candidates = [os.path.join(folder, program) for folder in os.get_exec_path()]
    found = [path for path in candidates if program and os.path.exists(path)]
    if not found:
        where = "" if os.sep in program else " in PATH"
        _refuse(program, f"no such program{where}", MISSING, called)
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        what = "is a directory" if os.path.isdir(found[0]) else "is not executable"
        _refuse(program, f"the program {what}", UNUSABLE, called)


def _refuse(path: str, problem: str, code: int, called: str = "") -> NoReturn:
    prefix = f"{called}: " if called and called != path else ""
    raise CannotStart(f"{prefix}{path!r}: {problem}", exit_code=code)
