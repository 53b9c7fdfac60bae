"""The thread that goes to a `RendezvousBackend` on a handler's behalf, and keeps its node alive.

A backend may be anybody's and may block for ever, in code that no signal gets out of. So only this
thread ever calls it; the agent's thread asks, and waits for answers no longer than it wants to.

What is done at a look is the node's matter (`Looking`): `participant`'s for agents that ask for
rounds, `teammate`'s for those that are told.

A backend cannot tell of changes, so this is a place that has to look again and again: often while a
round is forming, else about ten times a second, and more rarely the more nodes there are.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from holdfast import messages
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousError
from holdfast.rendezvous.shared_job import LostEveryRace

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.job import Job
    from holdfast.rendezvous.shared_job import SharedJob

LOOK_S_MIN = 0.005
LOOK_S_MAX = 0.1
LOOK_S_PER_NODE = 0.004
"""Each look reads the whole state, which grows with the nodes; and so do those who look."""


class Seen(Protocol):
    """What a look brought, as far as it bears on when to look again."""

    @property
    def present(self) -> int:
        """How many nodes there are."""

    @property
    def rests(self) -> bool:
        """Whether nothing more is to be looked for until something is asked for."""

    @property
    def hurries(self) -> bool:
        """Whether something is likely to happen soon."""

    @property
    def mark(self) -> object:
        """What differs after a change that others are likely to follow."""


Standing = TypeVar("Standing", bound=Seen)


class Looking(Protocol[Standing]):
    """A node that looks at the state."""

    standing: Standing

    def step(self, now: float, job: Job) -> tuple[Any, bool]:
        """Change the job; return what `keep` wants to know, and whether to store the job."""

    def keep(self, now: float, job: Job, said: Any, /) -> Standing:
        """Take in the job as it is stored."""

    def next_deadline(self, now: float) -> float | None:
        """Return when to look again at the latest, if it matters."""


class Attendant(Generic[Standing]):
    """Does in its own thread what is asked for; starts it when something first is."""

    def __init__(
        self,
        shared: SharedJob,
        node: Looking[Standing],
        *,
        name: str,
        attempt_s: float,
        patience_s: float,
        on_look: Callable[[Standing, RendezvousError | None], None] | None = None,
    ) -> None:
        self._shared = shared
        self._node = node
        self._on_look = on_look
        self._name = name
        self._attempt_s = attempt_s
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._requests: list[Callable[[], None]] = []
        self._asked = 0
        self._answered = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._standing = node.standing
        self._problem: RendezvousError | None = None
        self._contact_at: float | None = None
        self._look_s = LOOK_S_MIN
        self.is_looking = False
        """Whether the thread is at the backend just now; it may hang there."""

    # For the thread of the agent.

    @property
    def is_running(self) -> bool:
        """Whether anything was asked for yet, and the end was not."""
        return self._thread is not None and not self._stopping.is_set()

    def ask(self, request: Callable[[], None] | None = None) -> int:
        """Have a request made to the node, and a look taken; return its number."""
        with self._changed:
            self._asked += 1
            if request is not None:
                self._requests.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._asked

    def wait(
        self, number: int, enough: Callable[[Standing], object], timeout_s: float
    ) -> tuple[Standing, bool]:
        """Wait until a look after request `number` shows what is enough, or the time is over.

        Raises what keeps the backend from answering, once that has lasted too long to wait for.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._answered >= number and enough(self._standing):
                    return self._standing, True
                self.raise_problem()
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping.is_set():
                    return self._standing, False
                # Problems become worse by time alone, so there is something to see now and then.
                self._changed.wait(min(left, self._patience_s))

    def last_seen(self) -> Standing:
        """Return how the node stood at the last look, and raise a problem that lasts."""
        with self._changed:
            self.raise_problem()
            return self._standing

    def raise_problem(self) -> None:
        """Raise what is wrong with the backend, unless it may still pass."""
        problem = self._problem
        now = time.monotonic()
        if problem is None or self._contact_at is None:
            if problem is not None:
                raise problem
            return
        away_s = now - self._contact_at
        if not isinstance(problem, RendezvousConnectionError):
            raise problem
        if away_s >= self._patience_s:
            raise RendezvousConnectionError(
                f"no contact to the other nodes for {away_s:.0f} s: {problem}"
            )

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it is gone."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    # The thread itself.

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                requests, self._requests = self._requests, []
                number = self._asked
            for request in requests:
                request()
                self._look_s = LOOK_S_MIN
            before = self._standing
            self.is_looking = True
            standing, problem = self._look()
            self.is_looking = False
            if self._on_look is not None:
                self._on_look(standing, problem)
            with self._changed:
                self._standing, self._answered = standing, number
                self._take_problem(problem)
                self._changed.notify_all()
                if standing.mark != before.mark:
                    self._look_s = LOOK_S_MIN
                pause_s = self._pause_s(standing)
                if not self._requests and not self._stopping.is_set():
                    self._changed.wait(pause_s)

    def _look(self) -> tuple[Standing, RendezvousError | None]:
        said: list[Any] = []
        give_up_at = time.monotonic() + self._attempt_s

        def change(job: Job) -> bool:
            what, is_new = self._node.step(time.monotonic(), job)
            said[:] = [what]
            return is_new

        try:
            job = self._shared.update(
                change,
                may_go_on=lambda: time.monotonic() < give_up_at and not self._stopping.is_set(),
                pause=self._stopping.wait,
            )
            now = time.monotonic()
            return self._node.keep(now, job, said[0]), None
        except LostEveryRace as problem:
            messages.debug(problem.message)  # Nothing is broken; the next look tries again.
            return self._node.standing, None
        except RendezvousError as problem:
            return self._node.standing, problem
        except Exception as problem:  # noqa: BLE001 (it must not end the thread without a word)
            unexpected = RendezvousError(f"{type(problem).__name__}: {problem}")
            unexpected.__cause__ = problem
            return self._node.standing, unexpected

    def _take_problem(self, problem: RendezvousError | None) -> None:
        if problem is None:
            self._contact_at = time.monotonic()
        elif self._problem is None and self._may_pass(problem):
            messages.warning(f"{problem.message}; trying again")
        self._problem = problem

    def _may_pass(self, problem: RendezvousError) -> bool:
        return self._contact_at is not None or isinstance(problem, RendezvousConnectionError)

    def _pause_s(self, standing: Standing) -> float | None:
        """Return how long to wait before the next look; None until something is asked for."""
        if self._problem is None and standing.rests:
            return None
        longest = LOOK_S_MAX + LOOK_S_PER_NODE * standing.present
        pause_s = min(self._look_s, longest) if standing.hurries else longest
        if self._problem is not None:
            pause_s = longest
        self._look_s = min(longest, self._look_s * 1.5)
        now = time.monotonic()
        due = self._node.next_deadline(now)
        if due is not None and self._problem is None:
            pause_s = min(pause_s, max(LOOK_S_MIN, due - now))
        return pause_s
