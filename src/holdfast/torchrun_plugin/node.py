"""This node as torchrun's agent needs it: in one round after the other, with all nodes of each.

torchrun's agent looks after its membership only while its workers run. While it waits for other
nodes, to agree on ranks or at the end, it does not look: a node that went meanwhile would keep it
waiting until a timeout, and then end it. So whoever waits here is told when the round is over:
before a round is handed out all its nodes must have come (`next_rendezvous`), and calls to its
store end with it (`RoundKeys`).
"""

from __future__ import annotations

import time
from concurrent import futures
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.coordinator.agent_connection import CoordinatorConnection
from holdfast.coordinator.kv import SLACK_S, KeyValueStore
from holdfast.core.protocol import Failure, JobOutcome, NodePhase, NodeRole
from holdfast.rendezvous.coordinator import CoordinatorHandler
from holdfast.rendezvous.errors import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.wire.limits import STORE_KEYS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from datetime import timedelta

    from holdfast.coordinator.agent_connection import AgentConnection
    from holdfast.core.protocol import View
    from holdfast.rendezvous.handler import RendezvousInfo
    from holdfast.wire.messages import StoreResult

LOOK_S = 0.1
"""How often somebody who waits looks whether the round is over; torchrun's agent does the same."""

SAY_AGAIN_S = 5.0
"""How often a node that waits for the others repeats that it is there, since a coordinator that was
replaced knows nothing of it."""

ALL_HERE = "all"


class RoundOver(Exception):
    """The round in which something was waited for is no more; the text says why."""


class PluginNode(CoordinatorHandler):
    """A node of a job whose agents are torchrun's."""

    round: View | None = None
    """The round it is in, as it was when it began."""
    is_done = False
    """Whether its workers of that round all ended well."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a new round, and all others of that round too."""
        self.is_done = False
        while True:
            info = super().next_rendezvous()
            assert self.round is not None
            try:
                self._await_all(self.round)
            except RoundOver as over:
                console.info(f"generation {self.round.generation} did not begin: {over}")
                continue
            console.notice(
                f"generation {self.round.generation}: node {info.rank} of {info.world_size}, "
                f"round {self.round.round} ({self.round.why})"
            )
            return info

    def info_of(self, view: View) -> RendezvousInfo:
        """Return a member's view as TorchElastic's agents know rounds, and keep it."""
        self.round = view
        return super().info_of(view)

    def fate(self) -> str:
        """Return why the round of this node is over; nothing while it lasts, or ended well."""
        view = self._view()
        if view is None or self.round is None or self.ended_well():
            return ""
        stays = view.role is NodeRole.MEMBER and view.generation == self.round.generation
        return "" if stays else view.why or f"this node is {view.role.value} now"

    def ended_well(self) -> bool:
        """Return whether the job is over because all workers of all nodes are done."""
        view = self._view()
        return view is not None and view.outcome is JobOutcome.SUCCEEDED

    def say_done(self) -> None:
        """Tell that all workers of this node ended well."""
        assert self.round is not None
        self.is_done = True
        self.enter().report(NodePhase.SUCCEEDED, self.round.generation)

    def say_failed(self, failure: Failure) -> None:
        """Tell that this node's workers failed for good, which ends the job."""
        if self.round is not None:
            self.enter().report(NodePhase.FAILED, self.round.generation, failure)

    def stay_while_needed(self) -> None:
        """Wait for the end of the job if its nodes or their workers depend on this process."""
        if not (self.enter().hosting or self.serves_workers):
            return
        while not self.is_closed() and not self.fate():
            time.sleep(LOOK_S)

    def _await_all(self, view: View) -> None:
        """Wait until every node of a round is here; raise `RoundOver` if that cannot be any more.

        The first node waits for all others, and they for its word that all are here.
        """
        if view.size == 1:
            return
        scope = f"arrivals/{view.round_term}/{view.round}/{view.generation}"
        deadline = time.monotonic() + self.join_timeout_s
        awaited = [[ALL_HERE]]
        if view.rank == 0:
            ranks = [str(rank) for rank in range(1, view.size)]
            awaited = [
                ranks[at : at + STORE_KEYS_MAX] for at in range(0, len(ranks), STORE_KEYS_MAX)
            ]
        while awaited:
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise RendezvousTimeoutError(
                    f"not all {view.size} nodes of round {view.round} came within "
                    f"{self.join_timeout_s:g} s (join_timeout): those that run have to stop their "
                    "workers first, and all have to be started by torchrun"
                )
            keys = RoundKeys(self, scope, min(rest, SAY_AGAIN_S))
            try:
                keys.set(str(view.rank), "")
                keys.wait(awaited[0])
            except TimeoutError:
                continue
            except ConnectionError as error:
                raise RendezvousConnectionError(str(error)) from None
            del awaited[0]
        if view.rank == 0:
            RoundKeys(self, scope, self.join_timeout_s).set(ALL_HERE, "")

    def _is_new_round(self, connection: AgentConnection, view: View) -> bool:
        if view.role is NodeRole.STANDBY and not self._stood_by:
            console.notice("the round is full: standing by to replace a node")
        return super()._is_new_round(connection, view)


class RoundKeys(KeyValueStore):
    """The keys of a round, for as long as it lasts; then a call raises `RoundOver`."""

    def __init__(self, node: PluginNode, scope: str, timeout_s: float) -> None:
        connection = node.enter()
        assert isinstance(connection, CoordinatorConnection)
        super().__init__(connection, scope, timeout_s)
        self._node = node

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values, or all is done: then there is nothing to wait for."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        answer = self._begin("wait", keys, timeout_s=limit_s)
        if self._look_on(answer, limit_s, self._node.ended_well):
            self._outcome(answer, keys, limit_s)

    def _outcome(
        self,
        answer: Future[StoreResult],
        keys: Sequence[str],
        limit_s: float | None = None,
    ) -> StoreResult:
        limit_s = self._timeout_s if limit_s is None else limit_s
        if self._look_on(answer, limit_s):
            return super()._outcome(answer, keys, limit_s)
        problem = self._connection.problem()
        if problem:
            raise ConnectionError(problem)
        raise TimeoutError(f"no answer within {limit_s:g} s about: {', '.join(keys)}")

    def _look_on(
        self,
        answer: Future[StoreResult],
        limit_s: float,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for an answer, and for nothing else; return whether it came."""
        deadline = time.monotonic() + limit_s + SLACK_S
        while not answer.done():
            rest = deadline - time.monotonic()
            fate = self._node.fate()
            if fate or rest <= 0 or is_enough():
                self._connection.forget_call(answer)
                if fate:
                    raise RoundOver(fate)
                return False
            futures.wait([answer], min(rest, LOOK_S))
        return True
