"""The program that workers run: its command line, and the checks that it can start.

The checks run before the launcher starts any worker. A misspelt script therefore causes one error line
and the exit code that a shell would return, not N failed workers. There is no check of a module (`-m`):
importlib can run code of the package while it searches for the module.
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
"""The exit codes of a shell for a program that does not exist, or is not executable."""


def get_use_env(args: Namespace) -> bool:
    """Return whether workers receive their local rank only in the environment.

    Only a caller that adds the deprecated flag `--use-env` to the parser can turn this off. Workers then
    also receive `--local-rank=N` as an argument.
    """
    return bool(getattr(args, "use_env", True))


def worker_command(args: Namespace) -> tuple[Callable[..., None] | str, list[str]]:
    """Return the function or program that each worker runs, and its arguments."""
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
    """Return the modules of `--preload`. Raise `UsageError` if the workers cannot be forked.

    The launch resolves `auto`.
    """
    flag = "--preload"
    text = getattr(args, "preload", "")
    modules = parse_modules(text, source=source_of(text, flag))
    if modules and args.run_path:
        if args.start_method != "spawn":
            how = f"conflicts with --start-method {args.start_method}"
            reject(text, flag, how, "--start-method spawn, which is as fast with --preload")
    elif modules and args.no_python:
        raise UsageError(
            f"{source_of(text, flag)}: conflicts with --no-python: "
            "only Python workers can be forked from a process that has imported modules"
        )
    return modules


def interpreter() -> str:
    """Return the workers' Python interpreter: `PYTHON_EXEC`, or the current one."""
    return os.environ.get(PYTHON_ENV) or sys.executable


def check_can_start(args: Namespace) -> None:
    """Raise `CannotStart` if workers cannot start with this command line."""
    script: str = args.training_script
    if args.run_path:
        _check_script(script)
    elif args.no_python:
        _check_program(script, script)
    else:
        _check_program(interpreter(), PYTHON_ENV if os.environ.get(PYTHON_ENV) else "Python")
        # A single - reads the script from stdin; -c is an option of the interpreter.
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


def _check_program(program: str, label: str) -> None:
    """Reject a program that is not executable. A program without a slash is looked up in PATH."""
    if os.sep in program:
        candidates = [program]
    else:
        candidates = [os.path.join(folder, program) for folder in os.get_exec_path()]
    found = [path for path in candidates if program and os.path.exists(path)]
    if not found:
        where = "" if os.sep in program else " in PATH"
        _refuse(program, f"no such program{where}", MISSING, label)
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        what = "is a directory" if os.path.isdir(found[0]) else "is not executable"
        _refuse(program, f"the program {what}", UNUSABLE, label)


def _refuse(path: str, problem: str, code: int, label: str = "") -> NoReturn:
    prefix = f"{label}: " if label and label != path else ""
    raise CannotStart(f"{prefix}{path!r}: {problem}", exit_code=code)
