"""A job whose state lies in a `RendezvousBackend`: read it, change it, and win or try again.

Every change is made to a copy and offered with the token of what it was made from. If another node
was faster, the change is made again, to what that one left, after a pause that is random and grows:
many nodes that arrive at once take turns instead of all trying for ever. What the change is, is the
caller's matter.

The state is msgpack with a mark before it. Nothing that came from the backend is ever executed.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.core.job import Job
from holdfast.rendezvous.backend import STATE_BYTES_MAX, RendezvousBackend, Token
from holdfast.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"holdfast job 1\n"
BACKOFF_S_MIN = 0.002
BACKOFF_S_MAX = 1.0

_decoder = msgspec.msgpack.Decoder(Job)
_encoder = msgspec.msgpack.Encoder()


class LostEveryRace(RendezvousTimeoutError):
    """Other nodes were faster at each attempt; the backend answered every time."""


class SharedJob:
    """The job of one run id, in a backend that others use at the same time."""

    def __init__(self, backend: RendezvousBackend, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id

    def update(
        self,
        change: Callable[[Job], bool],
        *,
        may_go_on: Callable[[], bool],
        pause: Callable[[float], object],
    ) -> Job:
        """Let `change` change the job until that is what is stored; return the job as it is then.

        `change` returns whether there is anything to store. It is called again after each lost
        race, on another copy. Raises `LostEveryRace` if each attempt was lost until
        `may_go_on` said no.
        """
        backoff = BACKOFF_S_MIN
        while True:
            stored = self._get()
            if stored is None:
                job, token = Job(run_id=self._run_id), None
            else:
                job, token = self._decode(stored[0]), stored[1]
            if not change(job):
                return job
            state = encode(job)
            if len(state) > STATE_BYTES_MAX and job.report:  # What happened is in the failure too.
                job.report = b""
                state = encode(job)
            answer = self._set(state, token)
            if answer is not None and answer[2]:
                return job
            if not may_go_on():
                raise LostEveryRace(
                    f"the state of the job {self._run_id!r} could not be written in time: other "
                    f"nodes were faster at each attempt ({self._backend.name})"
                )
            # What the loser was shown will be old after the pause, so it is read again.
            pause(random.uniform(0, backoff))  # noqa: S311 (it only spreads the attempts)
            backoff = min(BACKOFF_S_MAX, backoff * 2)

    def _get(self) -> tuple[bytes, Token] | None:
        answer = self._ask(self._backend.get_state)
        return None if answer is None else self._checked(answer, 2)

    def _set(self, state: bytes, token: Token | None) -> tuple[bytes, Token, bool] | None:
        if len(state) > STATE_BYTES_MAX:
            raise RendezvousStateError(
                f"the state of the job {self._run_id!r} has {len(state)} bytes; the limit is "
                f"{STATE_BYTES_MAX}"
            )
        answer = self._ask(lambda: self._backend.set_state(state, token))
        return None if answer is None else self._checked(answer, 3)

    def _checked(self, answer: Any, length: int) -> Any:
        if not isinstance(answer, tuple) or len(answer) != length:
            raise RendezvousStateError(
                f"the rendezvous backend {self._backend.name!r} returned {type(answer).__name__} "
                f"where a tuple of {length} or None was due"
            )
        return answer

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RendezvousError:
            raise
        except Exception as problem:
            # A backend may be anybody's; whatever it raises must not end the thread that asks.
            what = " ".join(f"{type(problem).__name__}: {problem}".split())
            raise RendezvousConnectionError(
                f"the rendezvous backend {self._backend.name!r} failed: {what}"
            ) from problem

    def _decode(self, state: bytes) -> Job:
        try:
            job = decode(state)
        except ValueError as problem:
            raise RendezvousStateError(
                f"what {self._backend.name!r} has stored for the job {self._run_id!r} cannot be "
                f"read: {problem}",
                hint="another program or version uses the same place; choose another --rdzv-id",
            ) from None
        if job.run_id != self._run_id:
            raise RendezvousStateError(
                f"{self._backend.name!r} has the job {job.run_id!r} stored where {self._run_id!r} "
                "should be"
            )
        return job


def encode(job: Job) -> bytes:
    """Return the job as bytes to store."""
    return MARK + _encoder.encode(job)


def decode(state: bytes) -> Job:
    """Return the job that was stored; raise `ValueError` in words if it is none of ours."""
    if len(state) > STATE_BYTES_MAX:
        raise ValueError(f"it has {len(state)} bytes, above the limit of {STATE_BYTES_MAX}")
    if not state.startswith(MARK):
        raise ValueError("it does not begin as a job of this version of Holdfast's does")
    try:
        return _decoder.decode(memoryview(state)[len(MARK) :])
    except msgspec.MsgspecError as problem:
        raise ValueError(str(problem)) from None
