from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.rounds import Job
from holdfast.elastic._impl.c10d_backend import C10dRendezvousBackend
from holdfast.rendezvous import backend as shared_job
from holdfast.rendezvous.backend import (
    MARK,
    STATE_BYTES_MAX,
    LostEveryRace,
    RendezvousBackend,
    SharedJob,
    decode,
    encode,
)
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable


def memory_backend() -> C10dRendezvousBackend:
    return C10dRendezvousBackend(MemoryStore(), "job")


def update(
    shared: SharedJob, change: Callable[[Job], bool], attempts: int = 100, pauses: Any = None
) -> Job:
    left = [attempts]

    def may_go_on() -> bool:
        left[0] -= 1
        return left[0] > 0

    return shared.update(
        change, may_go_on=may_go_on, pause=(pauses if pauses is not None else []).append
    )


def bump(job: Job) -> bool:
    job.revision += 1
    return True


def test_a_job_begins_empty_and_changes_are_kept() -> None:
    backend = memory_backend()
    assert update(SharedJob(backend, "job"), bump).revision == 1
    assert update(SharedJob(backend, "job"), bump).revision == 2


def test_nothing_is_written_that_did_not_change() -> None:
    backend = memory_backend()
    assert update(SharedJob(backend, "job"), lambda _: False).revision == 0
    assert backend.get_state() is None


def test_a_report_that_makes_the_state_too_large_is_left_out() -> None:
    def grow(job: Job) -> bool:
        job.why, job.report = "why", b"x" * STATE_BYTES_MAX
        return True

    backend = memory_backend()
    update(SharedJob(backend, "job"), grow)
    stored = backend.get_state()
    assert stored is not None
    job = decode(stored[0])
    assert (job.why, job.report) == ("why", b"")


class Contended(RendezvousBackend):
    """Another node is faster, `races` times."""

    name = "contended"

    def __init__(self, races: int) -> None:
        self.inner = memory_backend()
        self.races = races

    def get_state(self) -> Any:
        return self.inner.get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if self.races > 0:
            self.races -= 1
            update(SharedJob(self.inner, "job"), bump)
        return self.inner.set_state(state, token)


def test_a_lost_race_is_run_again_on_what_the_winner_left() -> None:
    pauses: list[float] = []
    job = update(SharedJob(Contended(3), "job"), bump, pauses=pauses)
    assert job.revision == 4
    assert len(pauses) == 3


def test_pauses_grow_and_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    pauses: list[float] = []
    update(SharedJob(Contended(12), "job"), bump, pauses=pauses)
    assert pauses[0] == shared_job.BACKOFF_S_MIN
    assert pauses == sorted(pauses)
    assert pauses[-1] == shared_job.BACKOFF_S_MAX


def test_who_loses_every_race_is_told_so() -> None:
    with pytest.raises(LostEveryRace, match="'job' could not be written in time"):
        update(SharedJob(Contended(100), "job"), bump, attempts=5)


class Vanishing(Contended):
    """The state is gone when it is to be replaced."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if self.races > 0:
            self.races -= 1
            self.inner = memory_backend()
        return self.inner.set_state(state, token)


def test_a_state_that_vanished_is_begun_anew() -> None:
    backend = Vanishing(0)
    update(SharedJob(backend, "job"), bump)
    update(SharedJob(backend, "job"), bump)
    backend.races = 1
    assert update(SharedJob(backend, "job"), bump).revision == 1


class Odd(RendezvousBackend):
    name = "odd"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get_state(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return self.answer


def test_whatever_a_backend_raises_is_a_rendezvous_error() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"'odd' failed: KeyError: 'no\\nway'$"):
        update(SharedJob(Odd(KeyError("no\nway")), "job"), bump)
    own = RendezvousStateError("own words")
    with pytest.raises(RendezvousStateError, match=r"^own words$"):
        update(SharedJob(Odd(own), "job"), bump)


@pytest.mark.parametrize("answer", [b"state", (b"state",), [b"state", 1], (1, 2, 3)])
def test_an_answer_of_another_shape_is_refused(answer: Any) -> None:
    with pytest.raises(RendezvousStateError, match="where a tuple of 2 or None was due"):
        update(SharedJob(Odd(answer), "job"), bump)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (b"", "does not begin"),
        (pickle.dumps({"round": 1}), "does not begin"),
        (MARK, "Input data was truncated"),
        (MARK + b"\xc1", "malformed|invalid"),
        (MARK + msgspec.msgpack.encode({}), "missing required field"),
        (MARK + msgspec.msgpack.encode({"run_id": "job", "term": "x"}), "Expected `int`"),
        (MARK + msgspec.msgpack.encode({"run_id": "job"}) + b"\x00", "trailing"),
        (bytes(STATE_BYTES_MAX + 1), "above the limit"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_state_that_is_none_of_ours_is_told_of(state: bytes, why: str) -> None:
    with pytest.raises(RendezvousStateError, match=rf"^what 'odd' has stored .*({why})"):
        update(SharedJob(Odd((state, 1)), "job"), bump)


def test_the_state_of_another_job_is_refused() -> None:
    with pytest.raises(RendezvousStateError, match="has the job 'other' stored where 'job' should"):
        update(SharedJob(Odd((encode(Job(run_id="other")), 1)), "job"), bump)


def test_a_state_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = memory_backend()
    monkeypatch.setattr(shared_job, "STATE_BYTES_MAX", 10)
    with pytest.raises(RendezvousStateError, match="the limit is 10"):
        update(SharedJob(backend, "job"), bump)
    assert backend.get_state() is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_job_or_a_value_error(content: bytes) -> None:
    for state in (content, MARK + content):
        try:
            assert isinstance(decode(state), Job)
        except ValueError:
            continue
