"""The pulse: a question wakes the loop, an answer reaches the asker, and silence is measured."""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.observe.health.loop_probe import FRESH_S, LoopProbe

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pulse() -> Iterator[LoopProbe]:
    one = LoopProbe()
    yield one
    one.close()


def is_readable(pulse: LoopProbe, wait_ms: float = 0) -> bool:
    poll = select.poll()
    poll.register(pulse.fileno(), select.POLLIN)
    return bool(poll.poll(wait_ms))


def test_nobody_asks_so_the_loop_is_left_alone(pulse: LoopProbe) -> None:
    assert not is_readable(pulse)
    pulse.answer()
    assert not is_readable(pulse)
    assert pulse.silent_s() == 0.0


def test_a_question_wakes_the_loop_and_its_answer_reaches_the_asker(pulse: LoopProbe) -> None:
    heard: list[bool] = []
    asker = threading.Thread(target=lambda: heard.append(pulse.ask(60)))
    asker.start()
    assert is_readable(pulse, 30_000)
    pulse.answer()
    asker.join()
    assert heard == [True]
    assert not is_readable(pulse)
    assert pulse.silent_s() == 0.0


def test_one_answer_serves_all_who_ask(pulse: LoopProbe) -> None:
    heard: list[bool] = []
    askers = [threading.Thread(target=lambda: heard.append(pulse.ask(60))) for _ in range(8)]
    for asker in askers:
        asker.start()
    while any(asker.is_alive() for asker in askers):
        if is_readable(pulse, 100):
            pulse.answer()
    assert heard == [True] * 8


def test_a_silent_loop_is_silent_since_the_first_question(pulse: LoopProbe) -> None:
    before = time.monotonic()
    assert not pulse.ask(0.01)
    after = time.monotonic()
    assert not pulse.ask(0.01)
    assert pulse.silent_s() >= time.monotonic() - after
    assert pulse.silent_s() <= time.monotonic() - before
    pulse.answer()
    assert pulse.silent_s() == 0.0


def test_an_old_answer_is_none_for_a_new_question(pulse: LoopProbe) -> None:
    pulse.answer()
    assert not pulse.ask(0.01)


def test_the_time_of_life_stands_still_while_the_loop_is_silent(
    pulse: LoopProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(pulse, "_answered_at", now - 2 * FRESH_S)
    monkeypatch.setattr(pulse, "_asked_at", now - 100)
    limits: list[float] = []
    monkeypatch.setattr(pulse, "ask", limits.append)
    assert time.time() - pulse.alive_time() >= 100
    # Probes come one after the other: the second does not wait as long as the first once more.
    assert limits == [0.0]
    pulse.answer()
    assert time.time() - pulse.alive_time() < 100


def test_a_fresh_answer_spares_the_loop_a_question(pulse: LoopProbe) -> None:
    pulse._answered_at = time.monotonic() + 3600  # So that no slow machine makes it old.
    pulse.alive_time()
    assert not is_readable(pulse)


def test_a_loop_that_waits_elsewhere_need_not_answer(pulse: LoopProbe) -> None:
    assert not pulse.ask(0.01)
    with pulse.away("rendezvous"):
        assert pulse.whereabouts() == "rendezvous"
        assert pulse.ask(60)
        assert pulse.silent_s() == 0.0
    assert pulse.whereabouts() == ""
    assert pulse.silent_s() == 0.0
    assert not pulse.ask(0.01)


def test_who_asks_meanwhile_hears_that_the_loop_goes_away(pulse: LoopProbe) -> None:
    heard: list[bool] = []
    asker = threading.Thread(target=lambda: heard.append(pulse.ask(60)))
    asker.start()
    assert is_readable(pulse, 30_000)
    with pulse.away("rendezvous"):
        asker.join()
    assert heard == [True]


def test_a_closed_pulse_ends_every_wait() -> None:
    pulse = LoopProbe()
    heard: list[bool] = []
    asker = threading.Thread(target=lambda: heard.append(pulse.ask(60)))
    asker.start()
    assert is_readable(pulse, 30_000)
    pulse.close()
    asker.join()
    assert heard == [False]
    assert pulse.fileno() == -1
    assert not pulse.ask(60)
    pulse.answer()
    pulse.close()
