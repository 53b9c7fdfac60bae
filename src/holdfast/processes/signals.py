"""Signals: their names, their meaning in words, and their delivery to the agent's loop.

A handler only wakes the loop, which then takes the signal as an event. The previous handlers are
restored when the loop ends.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import Self

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
SIGNALS_ENV = "TORCHELASTIC_SIGNALS_TO_HANDLE"
UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
PENDING_MAX = 64
AGAIN_S = 0.05  # Until a signal is sent again; by then Python has left the hook, where it ignores exceptions too.
# If a signal has two names, the usual one is first.
NAMES: dict[str, int] = {
    name: int(number)
    for name, number in sorted(vars(signal).items())
    if name.startswith("SIG") and name[3] != "_"
}

MEANINGS: dict[int, str] = {
    signal.SIGABRT: "aborted itself",
    signal.SIGBUS: "bus error: bad memory access, or a mapped file that shrank",
    signal.SIGFPE: "arithmetic error",
    signal.SIGHUP: "terminal closed",
    signal.SIGILL: "illegal instruction",
    signal.SIGINT: "interrupted",
    signal.SIGKILL: "often the kernel's out-of-memory killer, or someone's kill -9",
    signal.SIGPIPE: "wrote to a closed pipe",
    signal.SIGQUIT: "quit",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGSYS: "forbidden system call",
    signal.SIGTERM: "termination request",
    signal.SIGTRAP: "trace trap",
    signal.SIGXCPU: "CPU time limit reached",
    signal.SIGXFSZ: "file size limit reached",
}


class SignalException(Exception):
    """A signal stopped this agent, this coordinator, or the function that this worker runs."""

    def __init__(self, msg: str, sigval: int) -> None:
        super().__init__(msg)
        self.sigval = as_enum(sigval)


def as_enum(signum: int) -> signal.Signals:
    """Return a signal as an enum member, as user code expects."""
    return signal.Signals(signum)


def signal_name(signum: int) -> str:
    """Return a signal's name, such as `SIGTERM`, or `signal 50` if it has none."""
    return next((name for name, one in NAMES.items() if one == signum), f"signal {signum}")


def describe_signal(signum: int) -> str:
    """Return the name with its meaning: `SIGSEGV (segmentation fault)`."""
    meaning = MEANINGS.get(signum)
    return f"{signal_name(signum)} ({meaning})" if meaning else signal_name(signum)


def parse_signal(name: str, *, flag: str) -> int:
    """Parse a name such as `SIGTERM`, `TERM` or `15`; return the signal's number."""
    text = name.strip().upper()
    if text.isdecimal():
        found = int(text) if int(text) in NAMES.values() else None
    else:
        found = NAMES.get(text if text.startswith("SIG") else f"SIG{text}")
    if found is None:
        raise UsageError(
            f"{flag}: {name!r} is not a signal; accepted: names such as SIGTERM or SIGUSR1"
        )
    return found


def parse_signals(names: str, *, flag: str = "--signals-to-handle") -> tuple[int, ...]:
    """Parse a list such as `SIGTERM,SIGINT`; reject signals that no process can handle."""
    found: dict[int, None] = {}  # Each signal once, because its handler is restored once.
    for name in names.split(","):
        if not name.strip():
            continue
        one = parse_signal(name, flag=flag)
        if one in UNCATCHABLE:
            raise UsageError(
                f"{flag}: no process can handle {signal_name(one)}; remove it from the list"
            )
        found[one] = None
    return tuple(found)


class SignalWatch:
    """Collects signals while it is entered. Each signal makes a descriptor readable.

    Outside the main thread Python cannot handle signals. Then the watch stays empty, and the calling
    program handles the signals. A signal that is ignored when the watch begins stays ignored, as
    `nohup` requires.

    Python ignores an exception that is raised while it runs `__del__` or a callback of a weak reference. If a
    signal that raises arrives just then, it is sent again.
    """

    # For the main thread of this process: how many watches are entered, and whether any ever was.
    entered = 0
    was_entered = False

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = signals
        self._pending: list[int] = []
        self._previous: dict[int, object] = {}
        self._previous_wakeup: int | None = None
        self._read = self._write = -1
        self.raises = False

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:
            if self.signals:
                console.info("not in the main thread, so the calling program handles signals")
            return self
        for one in self.signals:
            if signal.getsignal(one) is not signal.SIG_IGN:
                self._previous[one] = signal.signal(one, self._note)
        SignalWatch.entered += 1
        SignalWatch.was_entered = True
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_wakeup is not None:
            SignalWatch.entered -= 1
            sys.unraisablehook = self._hook
            signal.set_wakeup_fd(self._previous_wakeup)
            self._previous_wakeup = None
            for one, handler in self._previous.items():
                # None means a handler that was not set from Python and cannot be restored.
                signal.signal(one, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
            self._previous.clear()
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def take(self) -> int | None:
        """Return the oldest signal that was not taken yet; None if there is none.

        The descriptor stays readable while there are more.
        """
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass
        if not self._pending:
            return None
        one = self._pending.pop(0)
        if self._pending:
            os.write(self._write, b"\0")
        return one

    def raising(self) -> RaiseOnSignal:
        """Let a signal raise `SignalException`, which interrupts a user's handler or store."""
        return RaiseOnSignal(self)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self.raises:
            self._raise(signum)
        self._pending.append(signum)
        del self._pending[:-PENDING_MAX]

    def raise_pending(self) -> None:
        """Raise for the oldest signal that was not taken yet, if there is one."""
        if self._pending:
            self._raise(self._pending.pop(0))

    def _raise(self, one: int) -> None:
        self.raises = False  # Once: the cleanup that follows must not be interrupted.
        raise SignalException(f"agent {os.getpid()} received {describe_signal(one)}", one)

    def _unraisable(self, ignored: UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, SignalException):
            self._hook(ignored)
            return
        import threading

        self.raises = True
        number = int(ignored.exc_value.sigval)
        # Later: here Python would ignore the exception again.
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()


class RaiseOnSignal:
    """While entered, signals of a watch raise."""

    def __init__(self, watch: SignalWatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._before = self._watch.raises
        # Before the next line, so that a signal between the two raises too.
        self._watch.raises = True
        self._watch.raise_pending()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A nested context restores the outer one, unless a signal has raised.
        self._watch.raises = self._before and kind is not SignalException
