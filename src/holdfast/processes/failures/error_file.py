"""`@record`: a worker writes the exception that ends it to a file for the agent.

`TORCHELASTIC_ERROR_FILE` names the file. It contains one JSON object::

    {"message": {"message": "<type>: <text>",
                 "extraInfo": {"py_callstack": "<traceback>",
                               "timestamp": "<epoch seconds>",
                               "timestamp_ns": "<epoch nanoseconds>"}}}

`timestamp_ns` is Holdfast's; the rest is TorchElastic's format. The file appears complete or not at
all: it is written under another name and renamed.

This runs inside the user's program. It imports almost nothing, and reports its own errors in one
line on standard error, so that they never hide the user's exception.

It does not judge failures (`failures/failure.py` does). It records neither `SystemExit` nor
`KeyboardInterrupt`: those are intended.
"""

from __future__ import annotations

import faulthandler
import json
import os
import stat
import sys
import time
import traceback
from functools import wraps

from holdfast import console

TYPE_CHECKING = False  # `typing` has this name too, but its import takes longer than this module's.
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

# The agent reads error files up to this size. A larger file is a mistake, and would fill the agent's
# memory.
ERROR_FILE_CHARS_MAX = 16 * 1024 * 1024

# The limit for a message, and for a traceback, that a worker writes. JSON needs up to 12 bytes for a
# character, so two texts of this length stay below ERROR_FILE_CHARS_MAX.
TEXT_CHARS_MAX = 512 * 1024


class ErrorHandler:
    """Writes the error file of this process. A subclass can write more, or to another place.

    `record` calls `set_entrypoint_fn_name` and `initialize` at the start of each call of the function,
    `record_exception` when an exception leaves it, `dump_error_file` when that exception is a `ChildFailedError`,
    and `record_success` when it returns. A handler may lack the methods that are new in PyTorch 2.14 and 2.15.
    """

    _fn_name: str | None = None

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Keep the qualified name of the function as `_fn_name`, for subclasses; None if it has none."""
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Enable the fault handler, which prints the stacks of all threads on a fatal signal."""
        try:
            faulthandler.enable(file=_real_stderr(), all_threads=True)
        except Exception as problem:  # noqa: BLE001 (optional: the worker runs without it)
            _print_error(f"cannot enable the fault handler: {describe(problem)}")

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file; do nothing if the variable is unset or empty.

        If an exception passes through several recorded functions, the innermost one writes it, because
        its time is the most exact.
        """
        path = self._get_error_file_path()
        if not path or e.__dict__.get("_holdfast_error_file") == path:
            return
        try:
            write_whole(path, error_file_content(e))
            e.__dict__["_holdfast_error_file"] = path  # A frozen dataclass rejects `setattr`.
        except Exception as problem:  # noqa: BLE001 (it must not hide the user's exception)
            _print_error(f"cannot write the error file {path}: {describe(problem)}")

    def record_success(self) -> None:
        """Do nothing; a subclass can report that the function returned. Its exceptions reach the caller."""

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:  # noqa: ARG002 (for subclasses)
        """Return the message of a worker that a signal ended, as the failure report shows it.

        A subclass can add what it knows, such as the error of a device. It runs in the launcher.
        """
        return message

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Add the exit code to the inner message of `rootcause_error`, if it has one."""
        inner = rootcause_error.get("message")
        if isinstance(inner, dict):
            inner["errorCode"] = error_code
        else:
            _print_error(
                f"cannot add the exit code {error_code} to the error file {rootcause_error_file}: "
                f"it has no message object"
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy the error file of a worker to this process's own, with the worker's exit code.

        If this process has no error file, the worker's stays unchanged.
        """
        path = self._get_error_file_path()
        if not path:
            return
        try:
            data = read_error_file(rootcause_error_file)
        except (OSError, ValueError) as problem:
            _print_error(f"cannot copy the error file {rootcause_error_file}: {describe(problem)}")
            return
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        if os.path.isfile(path):
            _print_error(f"replacing the error file {path} with {rootcause_error_file}")
        try:
            write_whole(path, json.dumps(data).encode())
        except Exception as problem:  # noqa: BLE001 (it must not hide the user's exception)
            _print_error(f"cannot write the error file {path}: {describe(problem)}")

    def _get_error_file_path(self) -> str | None:
        return os.environ.get(ERROR_FILE_VARIABLE)


def _real_stderr() -> Any:
    """Return `sys.stderr` if it is a real file, else (notebooks, captured output) descriptor 2."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2
    return sys.stderr


def get_error_handler() -> ErrorHandler:
    """Return the default handler of `record`, and the one that failure reports ask.

    To change it, replace this function, here or in `holdfast.elastic.multiprocessing.errors`.
    """
    return ErrorHandler()


_DEFAULT = get_error_handler
_TORCH_ELASTIC_PATH = "holdfast.elastic.multiprocessing.errors"


def chosen_error_handler() -> ErrorHandler:
    """Return the handler of `get_error_handler`, which the program may have replaced."""
    public = getattr(sys.modules.get(_TORCH_ELASTIC_PATH), "get_error_handler", _DEFAULT)
    return get_error_handler() if public is _DEFAULT else public()


def enriched_signal_message(message: str, error_file: str) -> str:
    """Return the message of a worker that a signal ended, with what the error handler adds; never raises."""
    try:
        handler = chosen_error_handler()
        return str(handler.maybe_enrich_signal_failure_message(message, error_file))
    except Exception as problem:  # noqa: BLE001 (it must not hide the failure)
        _print_error(f"the error handler cannot describe the signal: {describe(problem)}")
        return message


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorate the main function of a worker so that its exception reaches the failure report.

    Exceptions propagate to the caller, except that `SystemExit(0)` becomes a return of None. `fn`
    must do its work in the call: the decorator does not see what a coroutine, generator or context
    manager does later.
    """
    handler = error_handler or chosen_error_handler()

    @wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        _call_if_defined(handler, "set_entrypoint_fn_name", getattr(fn, "__qualname__", None))
        result: R | None = None
        has_returned = False
        with Recording(handler):
            result = fn(*args, **kwargs)
            has_returned = True
        if has_returned:
            _call_if_defined(handler, "record_success")
        return result

    return recorded


def _call_if_defined(handler: ErrorHandler, name: str, *args: object) -> None:
    method = getattr(handler, name, None)
    if method is not None:
        method(*args)


def recording() -> Recording:
    """Return a context that records an exception of its block as `record` does; a handler learns of no success."""
    return Recording(chosen_error_handler())


class Recording:
    """Records an exception of a block with a handler."""

    def __init__(self, handler: ErrorHandler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._handler.initialize()

    def __exit__(
        self, kind: object, e: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(e, Exception):
            _record_safely(self._handler, e)
        return isinstance(e, SystemExit) and e.code == 0


def _record_safely(handler: ErrorHandler, e: Exception) -> None:
    """Let the handler record `e`; its own errors must not replace the user's exception."""
    try:
        if _is_child_failed_error(e):
            _, failure = e.get_first_failure()  # type: ignore[attr-defined]
            if failure.error_file != "<N/A>":
                handler.dump_error_file(failure.error_file, failure.exitcode)
        else:
            handler.record_exception(e)
    except Exception as problem:  # noqa: BLE001
        _print_error(f"cannot record the exception of the worker: {describe(problem)}")


def _is_child_failed_error(e: Exception) -> bool:
    """Whether `e` is a `ChildFailedError`, Holdfast's or TorchElastic's, without importing either."""
    names = [cls.__name__ for cls in type(e).__mro__]
    return "ChildFailedError" in names and hasattr(e, "get_first_failure")


def error_file_content(e: BaseException) -> bytes:
    """Return the content of the error file for `e`, with the current time, in ASCII."""
    now_ns = time.time_ns()
    extra = {
        "py_callstack": _shortened(_callstack(e)),
        "timestamp": str(now_ns // 1_000_000_000),
        "timestamp_ns": str(now_ns),
    }
    message = {"message": _shortened(describe(e)), "extraInfo": extra}
    return json.dumps({"message": message}).encode()


def describe(e: BaseException) -> str:
    """Return `<type>: <text>`, also for an exception whose `str` raises."""
    name = type(e).__name__
    try:
        return f"{name}: {e}"
    except Exception as problem:  # noqa: BLE001
        return f"{name}: <its text is not available: {type(problem).__name__}>"


def without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without Holdfast's frames, which precede the user's code."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
    part = tb
    while part is not None:
        file = part.tb_frame.f_code.co_filename
        if not file.startswith(ours) and file != "<frozen runpy>":
            return part
        part = part.tb_next
    return tb  # All frames are ours, so show them.


def _callstack(e: BaseException) -> str:
    """Return the traceback as Python prints it, beginning with the user's own frame."""
    try:
        return "".join(traceback.format_exception(type(e), e, without_own_frames(e.__traceback__)))
    except Exception as problem:  # noqa: BLE001 (an odd exception can break its own formatting)
        return f"{describe(e)}\n<its traceback is not available: {type(problem).__name__}>\n"


def _shortened(text: str) -> str:
    """Omit the middle of a text that is longer than `TEXT_CHARS_MAX`."""
    if len(text) <= TEXT_CHARS_MAX:
        return text
    half = TEXT_CHARS_MAX // 2 - 50
    return f"{text[:half]}\n[{len(text) - 2 * half} characters omitted]\n{text[-half:]}"


def read_error_file(path: str) -> dict[str, Any]:
    """Return the object in an error file.

    Raises OSError if the file cannot be read. Raises ValueError (or `json`'s subclass of it), with the
    reason in one line, if the file is not one JSON object of at most `ERROR_FILE_CHARS_MAX`.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            content = file.read(ERROR_FILE_CHARS_MAX + 1)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if len(content) > ERROR_FILE_CHARS_MAX:
        raise ValueError(f"it is larger than {ERROR_FILE_CHARS_MAX} characters")
    if not content.strip():
        raise json.JSONDecodeError("it is empty", "", 0)
    try:
        data = json.loads(content)
    except json.JSONDecodeError as e:
        raise json.JSONDecodeError(f"it is not JSON ({e.msg})", e.doc, e.pos) from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is not a JSON object but a {type(data).__name__}")
    return data


def write_whole(path: str, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically; a new file gets this mode, less the umask. Raises OSError.

    A path that is not a regular file (`/dev/null`, a pipe) is written to and never replaced.
    """
    place = os.path.realpath(path)  # Write to the target of a symbolic link, and keep the link.
    try:
        is_special = not stat.S_ISREG(os.stat(place).st_mode)
    except FileNotFoundError:
        is_special = False
    if is_special:
        # Without O_NONBLOCK a pipe without a reader would block the worker forever.
        with open(os.open(place, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
            file.write(content)
        return
    replace_file(place, content, mode)


def replace_file(path: str, content: bytes, mode: int) -> None:
    """Write a file atomically. Whatever is at the path is replaced, even a symbolic link. Raises OSError."""
    beside = f"{path}.{os.urandom(4).hex()}.tmp"  # Nobody can guess this name and put a link there.
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        try:
            os.unlink(beside)
        except OSError:
            pass  # It does not exist.
        raise


def _print_error(text: str) -> None:
    """Print one line on standard error; never raise."""
    try:
        console.warning(" ".join(text.split()))
    except Exception:  # noqa: BLE001 (out of stack, memory or standard error)
        try:
            sys.stderr.write(f"[holdfast] {text}\n")
        except Exception:  # noqa: BLE001
            pass
