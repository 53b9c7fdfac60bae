"""The command `holdfast`: picks the verb, and turns every way a verb can end into an exit code.

The one thing to know: exit codes are made here and nowhere else. The verbs raise; this module
says the one line and picks the code. A verb's module is imported only when that verb is used.

===========================================  ==============================================
how it ended                                 exit code
===========================================  ==============================================
every worker succeeded                       0
a worker failed                              the code of the first that failed
a signal ended that worker                   128 + the signal's number
a signal stopped this command                128 + the signal's number (130 for Ctrl-C)
the command line is wrong                    2
the script is missing, or cannot be started  127, or 126
this machine lacks or refuses something      78
a bug in Holdfast                            70
===========================================  ==============================================

With `--exit-code-compat` every failure but a wrong command line is 1.
"""

from __future__ import annotations

import os
import sys

from holdfast.errors import HoldfastError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from holdfast.processes.failures.failure import ChildFailedError

COMPAT_FAILURE = 1
USAGE = 2
BUG = 70
INTERRUPTED = 130

OVERVIEW = """\
usage: holdfast VERB ...

An elastic, fault-tolerant launcher and supervisor for distributed jobs.

Verbs:
  run          start workers on this machine and watch over them
  coordinator  let agents find each other, where none of them should coordinate
  dump         show where the workers on this machine are: their Python stacks
  story        print what happened in a job, step by step, from files of --story
  simulate     run simulated jobs and check that every invariant holds

Flags:
  --version    show the version and exit
  -h, --help   show this and exit

holdfast VERB --help tells more about a verb.
"""


def entry() -> NoReturn:
    """Be the command `holdfast`: end this process with its exit code."""
    be_command(lambda: dispatch(sys.argv[1:]))


def be_command(command: Callable[[], int]) -> NoReturn:
    """Make this process nothing but a command of ours: run it, and end with its exit code."""
    from holdfast.processes.keeper import client

    client.adopt_orphans()
    try:
        code = command()
    except KeyboardInterrupt:
        code = INTERRUPTED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process without the interpreter's slow dismantling; there is nothing to keep.

    What plug-ins registered to run at exit still runs.
    """
    import atexit

    atexit._run_exitfuncs()
    os._exit(_flushed(code))


def dispatch(argv: list[str]) -> int:
    """Run the verb that the first argument names."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        return _write(sys.stdout, OVERVIEW)
    if argv[0] in ("-V", "--version"):
        from holdfast import __version__

        return _write(sys.stdout, f"holdfast {__version__}\n")
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        hint = ""
        if verb.startswith("-") or verb.endswith(".py"):
            hint = f"; did you mean holdfast run {verb}?"
        known = ", ".join(VERBS)
        _write(sys.stderr, f"holdfast: error: {verb!r} is not a verb; verbs: {known}{hint}\n")
        return USAGE
    return VERBS[verb](rest)


def run_command(argv: list[str]) -> int:
    """Run `holdfast run` with these arguments and return its exit code; never raises."""
    from holdfast.processes.keeper import client

    compat = False
    try:
        if not {"-h", "--help"} & set(argv):
            client.Keeper.prestart()  # It gets ready while the rest is imported and checked.
        from holdfast.cli.run import execute, parse_command

        args = parse_command(argv)
        compat = args.exit_code_compat
        execute(args)
    except SystemExit as end:
        return _code_of(end)
    except KeyboardInterrupt:
        _write(sys.stderr, "holdfast run: interrupted\n")
        return _compatible(INTERRUPTED, compat)
    except Exception as error:  # noqa: BLE001 (the last place before the shell)
        return _compatible(_report(error, compat), compat)
    finally:
        client.Keeper.discard_prestarted()
    return 0


def coordinator_command(argv: list[str]) -> int:
    """Run `holdfast coordinator` with these arguments and return its exit code; never raises."""
    try:
        from holdfast.cli.coordinator import execute, parse_args

        execute(parse_args(argv))
    except SystemExit as end:
        return _code_of(end)
    except KeyboardInterrupt:
        _write(sys.stderr, "holdfast coordinator: interrupted\n")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the last place before the shell)
        return _report(error, compat=False, verb="coordinator")
    return 0


def dump_command(argv: list[str]) -> int:
    """Run `holdfast dump` with these arguments and return its exit code; never raises."""
    try:
        from holdfast.cli.dump import execute, parse_args

        execute(parse_args(argv))
    except SystemExit as end:
        return _code_of(end)
    except BrokenPipeError:
        return 0  # Whoever read it has seen enough.
    except KeyboardInterrupt:
        _write(sys.stderr, "holdfast dump: interrupted\n")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the last place before the shell)
        return _report(error, compat=False, verb="dump")
    return 0


def story_command(argv: list[str]) -> int:
    """Run `holdfast story` with these arguments and return its exit code; never raises."""
    try:
        from holdfast.cli.story import execute, parse_args

        execute(parse_args(argv))
    except SystemExit as end:
        return _code_of(end)
    except BrokenPipeError:
        return 0  # Whoever read it has seen enough.
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the last place before the shell)
        return _report(error, compat=False, verb="story")
    return 0


def simulate_command(argv: list[str]) -> int:
    """Run `holdfast simulate` with these arguments and return its exit code."""
    from holdfast.cli.simulate import command

    return command(argv)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "run": run_command,
    "coordinator": coordinator_command,
    "dump": dump_command,
    "story": story_command,
    "simulate": simulate_command,
}


def _report(error: Exception, compat: bool, verb: str = "run") -> int:
    """Tell the person why a verb did not succeed, and return the exit code that says it."""
    if isinstance(error, HoldfastError):
        _write(sys.stderr, f"holdfast {verb}: error: {error}\n")
        return error.exit_code
    from holdfast.processes.failures.failure import ChildFailedError
    from holdfast.processes.signals import SignalException, in_words

    if isinstance(error, ChildFailedError):
        return _failure_exit(error, compat)
    if isinstance(error, SignalException):
        _write(sys.stderr, f"holdfast {verb}: stopped by {in_words(error.sigval)}\n")
        return 128 + error.sigval
    import traceback

    story = "".join(traceback.format_exception(error))
    bug = "this is a bug in Holdfast; please report it"
    _write(sys.stderr, f"{story}holdfast {verb}: error: {bug}\n")
    return BUG


def _failure_exit(error: ChildFailedError, compat: bool) -> int:
    """Say which worker failed first and how, and return the exit code that passes it on."""
    from holdfast.processes.failures.failure import exit_status

    _write(sys.stderr, f"{error}\n")
    # A worker's own 2 is not a wrong command line, so compatibility turns it into 1 as well.
    return COMPAT_FAILURE if compat else exit_status(error)


def _compatible(code: int, compat: bool) -> int:
    return COMPAT_FAILURE if compat and code not in (0, USAGE) else code


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    _write(sys.stderr, f"{end.code}\n")
    return COMPAT_FAILURE


def _write(stream: object, text: str) -> int:
    """Write text to a stream whose reader may be gone; a missing reader is no failure."""
    try:
        stream.write(text)  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        pass  # The pipe is closed, or there is no console: nobody is there to be told.
    return 0


def _flushed(code: int) -> int:
    """Flush the streams now, so that the interpreter's own flush at exit has nothing to fail on."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            # What is still buffered goes nowhere; the exit code stays what the job earned.
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            except OSError:
                pass
    return code
