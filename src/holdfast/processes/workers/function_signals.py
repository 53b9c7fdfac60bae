"""Signals that stop a function raise an exception in it, so that its `finally` blocks run.

Python runs a signal handler in the main thread, between two bytecode instructions. A native call delays
it; a collective that another worker has left can take minutes. So a second thread watches: if the
handler does not run for a while, the signal takes its default action. This applies to the function's own
process; in its forks, the signals take their default actions immediately.

Python ignores an exception that is raised while it runs `__del__` or a callback of a weak reference. If a
signal arrives just then, it is sent again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.processes.signals import (
    AGAIN_S,
    DEFAULT_SIGNALS,
    SIGNALS_ENV,
    SignalException,
    describe_signal,
    parse_signals,
)

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import NoReturn

# How long the main thread may be in a native call before the signal ends the process.
NATIVE_CALL_S_MAX = 2.0
AGAIN = 128  # Added to the number of a signal in the pipe.


class RaisedSignals:
    """Makes signals raise `SignalException` in the main thread of this process."""

    def __init__(self) -> None:
        self._began = threading.Event()
        self._signals: list[int] = []
        self._pipe = -1

    def begin(self) -> None:
        """Begin, for the signals of `TORCHELASTIC_SIGNALS_TO_HANDLE` that have no handler."""
        for one in _signals_to_handle():
            if signal.getsignal(one) == signal.SIG_DFL:  # SIGINT has a handler, which raises too.
                self._signals.append(one)
                signal.signal(one, self._raise)
        if not self._signals:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._pipe, self._hook = write, sys.unraisablehook
        sys.unraisablehook = self._unraisable
        os.register_at_fork(after_in_child=self._end)
        watch = threading.Thread(
            target=self._watch, args=(read,), name="holdfast-signals", daemon=True
        )
        watch.start()

    def _raise(self, signum: int, _frame: FrameType | None) -> None:
        self._began.set()
        raise SignalException(f"worker {os.getpid()} received {describe_signal(signum)}", signum)

    def _unraisable(self, ignored: UnraisableHookArgs) -> None:
        """Have a signal sent again whose exception Python ignored."""
        if not isinstance(ignored.exc_value, SignalException):
            self._hook(ignored)
            return
        try:
            os.write(self._pipe, bytes([AGAIN + ignored.exc_value.sigval]))
        except OSError:
            pass  # The function has closed our descriptor.

    def _watch(self, read: int) -> None:
        while True:
            try:
                came = os.read(read, 64)
            except OSError:
                return  # The function has closed our descriptor.
            for number in came:
                if number > AGAIN:
                    time.sleep(AGAIN_S)
                    os.kill(os.getpid(), number - AGAIN)
                elif number in self._signals and not self._began.wait(NATIVE_CALL_S_MAX):
                    ctypes.CDLL(None).signal(number, 0)  # `signal.signal` needs the main thread.
                    os.kill(os.getpid(), number)

    def _end(self) -> None:
        signal.set_wakeup_fd(-1)
        for one in self._signals:
            if signal.getsignal(one) == self._raise:
                signal.signal(one, signal.SIG_DFL)


def die_of(signum: int) -> NoReturn:
    """Exit by the default action of a signal."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # The signal was blocked.


def _signals_to_handle() -> tuple[int, ...]:
    try:
        return parse_signals(os.environ.get(SIGNALS_ENV, DEFAULT_SIGNALS))
    except UsageError:
        return parse_signals(DEFAULT_SIGNALS)
