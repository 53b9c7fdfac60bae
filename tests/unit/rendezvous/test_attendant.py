"""The thread between an agent and a backend, with backends that fail, hang and come back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.protocol import JobSettings, NodeInfo
from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.rendezvous.backend import Attendant, RendezvousBackend, SharedJob
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousError
from holdfast.rendezvous.participant import Participant, PolledStanding
from holdfast.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 30.0


class Moody(RendezvousBackend):
    """A backend that answers as `mood` says: well, with an error, or not at all."""

    name = "moody"

    def __init__(self) -> None:
        self.inner = C10dRendezvousBackend(MemoryStore(), "job")
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.asked = threading.Semaphore(0)

    def get_state(self) -> Any:
        self.asked.release()
        self.go_on.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return self.inner.get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return self.inner.set_state(state, token)


@pytest.fixture
def backend() -> Moody:
    return Moody()


@pytest.fixture
def participant() -> Participant:
    return Participant(
        0.0,
        run_id="job",
        info=NodeInfo(node="a", incarnation=0),
        settings=JobSettings(min_nodes=1, max_nodes=1),
        interval_s=0.05,
        lost_after_s=LONG_S,
        new_incarnation=lambda: 1,
    )


@pytest.fixture
def make(
    backend: Moody, participant: Participant
) -> Iterator[Callable[..., Attendant[PolledStanding]]]:
    made: list[Attendant[PolledStanding]] = []

    def create(patience_s: float = LONG_S) -> Attendant[PolledStanding]:
        made.append(
            Attendant(
                SharedJob(backend, "job"),
                participant,
                name="holdfast-test",
                attempt_s=5.0,
                patience_s=patience_s,
            )
        )
        return made[-1]

    yield create
    backend.go_on.set()
    for one in made:
        assert one.stop(LONG_S)


def has_seat(standing: PolledStanding) -> bool:
    return standing.seat is not None


def test_no_thread_before_anything_is_asked_for(
    make: Callable[..., Attendant[PolledStanding]],
) -> None:
    attendant = make()
    assert not attendant.is_running
    attendant.ask()
    assert attendant.is_running
    assert attendant.stop(LONG_S)
    assert not attendant.is_running


def test_what_is_asked_for_is_done(
    make: Callable[..., Attendant[PolledStanding]], participant: Participant
) -> None:
    attendant = make()
    number = attendant.ask(participant.ask_round)
    standing, is_done = attendant.wait(number, has_seat, LONG_S)
    assert is_done
    assert standing.in_job
    assert attendant.last_seen().in_job


def test_an_answer_is_newer_than_the_question(
    make: Callable[..., Attendant[PolledStanding]], participant: Participant
) -> None:
    attendant = make()
    attendant.wait(attendant.ask(participant.ask_round), has_seat, LONG_S)
    number = attendant.ask(participant.ask_leave)
    standing, is_done = attendant.wait(number, lambda _: True, LONG_S)
    assert is_done
    assert not standing.in_job


def test_the_counter_moves_while_nothing_is_asked(
    make: Callable[..., Attendant[PolledStanding]], participant: Participant, backend: Moody
) -> None:
    from holdfast.rendezvous.backend import decode

    attendant = make()
    attendant.wait(attendant.ask(participant.ask_round), has_seat, LONG_S)
    beats: set[int] = set()
    while len(beats) < 3:
        backend.asked.acquire()
        found = backend.inner.get_state()
        assert found is not None
        beats.add(decode(found[0]).nodes["a"].beat)


def test_a_wait_ends_when_its_time_is_over(make: Callable[..., Attendant[PolledStanding]]) -> None:
    attendant = make()
    _, is_done = attendant.wait(attendant.ask(), has_seat, 0.01)
    assert not is_done


def test_a_backend_that_hangs_does_not_hold_the_agent_up(
    make: Callable[..., Attendant[PolledStanding]], backend: Moody
) -> None:
    backend.go_on.clear()
    attendant = make()
    _, is_done = attendant.wait(attendant.ask(), lambda _: True, 0.01)
    assert not is_done
    assert not attendant.stop(0.01)


def test_a_backend_that_never_answered_is_told_of_at_once(
    make: Callable[..., Attendant[PolledStanding]], backend: Moody
) -> None:
    backend.error = OSError("no route")
    attendant = make()
    with pytest.raises(RendezvousConnectionError, match="'moody' failed: OSError: no route"):
        attendant.wait(attendant.ask(), lambda standing: standing.in_job, LONG_S)


def test_one_that_answered_before_may_be_away_for_a_while(
    make: Callable[..., Attendant[PolledStanding]], participant: Participant, backend: Moody
) -> None:
    attendant = make()
    attendant.wait(attendant.ask(participant.ask_round), has_seat, LONG_S)
    backend.error = OSError("no route")
    for _ in range(3):
        backend.asked.acquire()
    assert attendant.last_seen().in_job
    backend.error = None
    number = attendant.ask()
    assert attendant.wait(number, lambda _: True, LONG_S)[1]


def test_but_not_for_ever(
    make: Callable[..., Attendant[PolledStanding]], participant: Participant, backend: Moody
) -> None:
    attendant = make(patience_s=0.05)
    attendant.wait(attendant.ask(participant.ask_round), has_seat, LONG_S)
    backend.error = OSError("no route")
    number = attendant.ask()
    with pytest.raises(
        RendezvousConnectionError, match=r"no contact to the other nodes for .*no ro"
    ):
        attendant.wait(number, lambda standing: standing.closed, LONG_S)
    with pytest.raises(RendezvousConnectionError):
        attendant.last_seen()


def test_our_own_mistake_does_not_end_the_thread_without_a_word(
    make: Callable[..., Attendant[PolledStanding]],
    participant: Participant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attendant = make()
    attendant.wait(attendant.ask(), lambda _: True, LONG_S)
    monkeypatch.setattr(participant, "step", lambda now, job: 1 / 0)
    number = attendant.ask()
    with pytest.raises(RendezvousError, match="ZeroDivisionError: division by zero"):
        attendant.wait(number, lambda standing: standing.closed, LONG_S)
    assert attendant.is_running
