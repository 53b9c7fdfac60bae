"""A node of a job whose agents are torchrun's, and the keys of its rounds.

torchrun's agent checks its membership only while its workers run. It does not check while it waits
for other nodes in the store of a round, so calls to that store raise once the round is over
(`RoundKeys`). `rendezvous.membership_handler` handles the rest.
"""

from __future__ import annotations

import os
import time
from concurrent import futures
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.core.phases import JobOutcome, NodePhase
from holdfast.membership.coordinator import CoordinatorMembership
from holdfast.membership.coordinator_store import SLACK_S, CoordinatorStore
from holdfast.rendezvous.coordinator_handler import CoordinatorAccess
from holdfast.rendezvous.membership_handler import MembershipHandler, RoundOver
from holdfast.wire.handshake import FILE_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import timedelta

    from holdfast.core.protocol import Failure, View
    from holdfast.rendezvous.handler import RendezvousInfo
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters
    from holdfast.wire.messages import StoreResult

CHECK_S = 0.1
"""How often a waiting call checks whether the round is over, as torchrun's agent does."""


class PluginNode(MembershipHandler):
    """A node of a job whose agents are torchrun's."""

    announce = staticmethod(console.notice)
    is_done = False
    """Whether all workers of this node succeeded in the current round."""

    def __init__(self, params: RendezvousParameters) -> None:
        access = CoordinatorAccess(params)
        super().__init__(access)
        # torchrun passes its environment to its workers, so remove these variables until `shutdown`.
        here = (name for name in (VARIABLE, FILE_VARIABLE) if name in os.environ)
        self._token_variables = {name: os.environ.pop(name) for name in here}
        access.environ = self._token_variables

    def shutdown(self) -> bool:
        """Leave the job, and release the handler's resources."""
        for name, value in self._token_variables.items():
            os.environ.setdefault(name, value)
        return super().shutdown()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a new round, and all other members of that round too."""
        self.is_done = False
        return super().next_rendezvous()

    def why_over(self, round_: View) -> str:
        """Return why a round is over; an empty text while it lasts, or if it succeeded."""
        return "" if self.ended_well() else super().why_over(round_)

    def ended_well(self) -> bool:
        """Return whether the job is over because all workers of all nodes succeeded."""
        view = self._newest_view()
        return view is not None and view.outcome is JobOutcome.SUCCEEDED

    def report_done(self) -> None:
        """Report that all workers of this node succeeded."""
        assert self.round is not None
        self.is_done = True
        self.enter().report(NodePhase.SUCCEEDED, self.round.generation)

    def report_failed(self, failure: Failure) -> None:
        """Report that this node's workers failed for good, which ends the job."""
        if self.round is not None:
            self.enter().report(NodePhase.FAILED, self.round.generation, failure)

    def wait_while_needed(self) -> None:
        """Wait for the end of the job if its nodes or their workers depend on this process."""
        if not (self.enter().hosting or self.serves_workers):
            return
        while self.round is not None and not self.is_closed() and not self.why_over(self.round):
            time.sleep(CHECK_S)


class RoundKeys(CoordinatorStore):
    """The keys of a round. Once the round is over, a call raises `RoundOver`."""

    def __init__(self, node: PluginNode, scope: str, timeout_s: float) -> None:
        membership = node.enter()
        assert isinstance(membership, CoordinatorMembership)
        super().__init__(membership, scope, timeout_s)
        self._node = node

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values, or the job has succeeded."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        answer = self._begin("wait", keys, timeout_s=limit_s)
        if self._await(answer, limit_s, self._node.ended_well):
            self._outcome(answer, keys, limit_s)

    def _outcome(
        self,
        answer: Future[StoreResult],
        keys: Sequence[str],
        limit_s: float | None = None,
    ) -> StoreResult:
        limit_s = self._timeout_s if limit_s is None else limit_s
        if self._await(answer, limit_s):
            return super()._outcome(answer, keys, limit_s)
        problem = self._connection.problem()
        if problem:
            raise ConnectionError(problem)
        raise TimeoutError(f"no response within {limit_s:g} s for the keys: {', '.join(keys)}")

    def _await(
        self,
        answer: Future[StoreResult],
        limit_s: float,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for an answer; return whether it arrived."""
        deadline = time.monotonic() + limit_s + SLACK_S
        while not answer.done():
            rest = deadline - time.monotonic()
            round_ = self._node.round
            over = self._node.why_over(round_) if round_ is not None else ""
            if over or rest <= 0 or is_enough():
                self._connection.forget_call(answer)
                if over:
                    raise RoundOver(over)
                return False
            futures.wait([answer], min(rest, CHECK_S))
        return True
