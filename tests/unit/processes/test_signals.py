from __future__ import annotations

import select
import signal
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import UsageError
from holdfast.processes.signals import (
    SignalException,
    SignalWatch,
    parse_signal,
    parse_signals,
    signal_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
TAKEN = (USR1, USR2, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """Fail a test that changes a signal's handler or the wake-up descriptor."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    wakeup = signal.set_wakeup_fd(-1)
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number, action in before.items():
        if after[number] != action:
            signal.signal(number, action)
    assert after == before
    assert wakeup == -1


def send(number: int) -> None:
    """Send this process a signal, and let Python's handler run."""
    signal.raise_signal(number)


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def taken(watch: SignalWatch) -> list[int]:
    """Take all signals one by one; the descriptor stays readable until the last."""
    arrived = []
    while is_readable(watch.fileno()):
        one = watch.take()
        if one is None:
            break
        arrived.append(one)
    assert watch.take() is None
    return arrived


def test_signal_names_match_the_standard_library() -> None:
    assert [signal_name(number) for number in range(1, signal.NSIG)] == [
        signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        for number in range(1, signal.NSIG)
    ]
    for name, one in signal.Signals.__members__.items():
        spellings = (name, name.removeprefix("SIG").lower(), str(int(one)))
        assert [parse_signal(text, flag="--stop-signal") for text in spellings] == [one] * 3


@pytest.mark.parametrize("name", ["SIG_IGN", "IGN", "SIG", "", "0", "-15", "99", "\u0661\u0665x"])
def test_invalid_signal_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="--stop-signal"):
        parse_signal(name, flag="--stop-signal")


@pytest.mark.parametrize("name", ["SIGKILL", "STOP", "9"])
def test_unhandleable_signal_is_rejected(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"^--signals-to-handle: no process can handle SIG(KILL|STOP);"
    ):
        parse_signals(f"SIGTERM,{name}")


def test_signals_are_collected_in_order_and_wake_the_loop() -> None:
    with SignalWatch(TAKEN) as watch:
        assert taken(watch) == []
        assert not is_readable(watch.fileno())
        for number in (USR1, USR2, USR1):
            send(number)
        assert is_readable(watch.fileno())
        assert taken(watch) == [USR1, USR2, USR1]
        assert not is_readable(watch.fileno())
        assert taken(watch) == []


def test_ignored_signal_stays_ignored() -> None:
    """Under nohup, for example, the end of the terminal must not end the job."""
    before = signal.signal(USR1, signal.SIG_IGN)
    try:
        with SignalWatch(TAKEN) as watch:
            send(USR1)
            send(USR2)
            assert taken(watch) == [USR2]
        assert signal.getsignal(USR1) is signal.SIG_IGN
    finally:
        signal.signal(USR1, before)


def test_outside_the_main_thread_signals_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def watch_there(signals: tuple[signal.Signals, ...]) -> None:
        with SignalWatch(signals) as watch:
            seen.append((taken(watch), is_readable(watch.fileno()), signal.getsignal(USR1)))

    caplog.set_level("INFO")
    for signals in (TAKEN, ()):
        thread = threading.Thread(target=watch_there, args=(signals,))
        thread.start()
        thread.join()
    assert seen == [([], False, signal.SIG_DFL)] * 2
    assert caplog.text.count("not in the main thread") == 1


def test_pending_signal_raises_at_once() -> None:
    with SignalWatch(TAKEN) as watch:
        send(USR1)
        send(USR2)
        entered = False
        with pytest.raises(SignalException) as caught, watch.raising():
            entered = True
        assert not entered
        assert caught.value.sigval is USR1
        assert taken(watch) == [USR2]


def test_only_one_signal_raises() -> None:
    """A second signal must not interrupt the cleanup that follows."""

    def be_interrupted(watch: SignalWatch) -> None:
        with watch.raising():
            try:
                send(USR1)
            finally:
                send(USR2)

    with SignalWatch(TAKEN) as watch:
        with pytest.raises(SignalException) as caught:
            be_interrupted(watch)
        assert caught.value.sigval is USR1
        assert taken(watch) == [USR2]


def test_signal_whose_exception_python_ignored_raises_again() -> None:
    class Thing:
        pass

    def wait(watch: SignalWatch) -> None:
        with watch.raising():
            things.clear()
            threading.Event().wait(60)

    things = [Thing()]
    reference = weakref.ref(things[0], lambda _: send(USR1))
    hook = sys.unraisablehook
    with SignalWatch(TAKEN) as watch, pytest.raises(SignalException):
        wait(watch)
    assert reference() is None
    assert sys.unraisablehook is hook
