"""A simulated coordinator process: `core.coordinator_machine` and the links to it.

The code that runs in production makes all decisions. This module only replaces the server around
it, which keeps the newest link of each incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.coordinator_machine import (
    ConnectionClosed,
    RecordFound,
    RequestReceived,
    StatusReceived,
)
from holdfast.core.machine import TICK
from holdfast.core.protocol import Heartbeat, Status, View
from simulator.agent import Agent
from simulator.process import Process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from holdfast.core.protocol import Ack, Request
    from holdfast.core.rounds import Job
    from holdfast.core.saved_jobs import SavedJob
    from simulator.ledger import JobTruth
    from simulator.simulated_network import Link
    from simulator.world import World

GRACE_S = 0.2
SILENCE_S = 5.0


KEEPS_STATE_SHARE = 0.5
HURRIES_SHARE = 0.3
FINDS_RECORDS_SHARE = 0.7


class Coordinator(Process):
    """One coordinator process, from its start to its end.

    In some worlds the coordinator keeps a state file, and its successor on the endpoint reads it. In the
    others the successor starts without state. Some successors are started by an agent that restarted. Such
    a successor does not know that it has a predecessor, so it does not wait for nodes unless it finds the record
    of the job. Some find none: the host is another one, or the file is gone. A coordinator that took over from
    another one has a later position in the endpoint list.
    """

    def __init__(
        self,
        world: World,
        number: int,
        rng: Random,
        *,
        keeps_state: bool | None = None,
        endpoint_index: int = 0,
        saved_jobs: Sequence[SavedJob] | None = None,
        records: Sequence[SavedJob] = (),
    ) -> None:
        super().__init__(world, f"coordinator {number}", rng)
        self.keeps_state = rng.random() < KEEPS_STATE_SHARE if keeps_state is None else keeps_state
        """Whether a successor starts with this coordinator's state."""
        hurries = rng.random() < HURRIES_SHARE
        self.number = number
        self.endpoint_index = endpoint_index
        self.links: dict[tuple[str, str, int], Link] = {}
        self.machine = world.machines.coordinator(
            self.clock,
            silence_s=SILENCE_S,
            grace_s=GRACE_S,
            follows_another=number > 1 and not hurries,
            endpoint_index=endpoint_index,
            saved_jobs=saved_jobs,
            fence_floor=int(world.now * 1000),
            strict=True,
            name=f"coordinator-{number}",
            rounds=world.machines.rounds,
        )
        self.machine.decisions = []
        self._records = {one.run_id: one for one in records if one.awaited}
        self.recalled: dict[str, tuple[float, SavedJob]] = {}
        """The records that it found, and when."""
        self._successor_finds_records = rng.random() < FINDS_RECORDS_SHARE
        world.note(self, "starts")

    def receive(self, delivery: tuple[Link, Status | Heartbeat]) -> None:
        """Process a message. If this process has exited, close the link instead."""
        link, message = delivery
        if not self.alive:
            self.world.network.close_from_coordinator(link)
            return
        if self.paused:
            self._backlog.append((self.receive, delivery))
            return
        world = self.world
        world.steps += 1
        now = self.offset + world.now * self.rate
        if type(message) is Heartbeat:
            peer = (message.run_id, message.node, message.incarnation)
            answers = self.machine.handle(now, message)
            if self.links.get(peer) is link and len(answers) == 1:
                world.network.send_down(link, answers[0])
                if type(answers[0]) is View:
                    world.view_sent(self, answers[0])
                return
            self._took(link, peer)
            self._decided()
            self._send(answers)
            self.arm(self.machine.next_deadline(now))
            return
        assert isinstance(message, Status)
        peer = (message.run_id, message.info.node, message.info.incarnation)
        self._took(link, peer)
        record = self._records.pop(message.run_id, None)
        if record is not None:
            self.recalled[message.run_id] = world.now, record
            self.machine.handle(now, RecordFound(record))
        answers = self.machine.handle(now, StatusReceived(message, link.agent.address))
        self._decided()
        self._send(answers)
        self.arm(self.machine.next_deadline(now))

    def _decided(self) -> None:
        """Record the new states of jobs."""
        decisions, self.machine.decisions = self.machine.decisions or [], []
        for event, job in decisions:
            self.world.decided(self, job, event if isinstance(event, Status) else None)

    def _took(self, link: Link, peer: tuple[str, str, int]) -> None:
        current = self.links.get(peer)
        if current is None or current.id < link.id:
            self.links[peer] = link
            link.peers.append(peer)

    def _send(self, answers: list[View | Ack]) -> None:
        world = self.world
        for answer in answers:
            if type(answer) is View:
                world.view_sent(self, answer)
            link = self.links.get((answer.run_id, answer.node, answer.incarnation))
            if link is not None:
                world.network.send_down(link, answer)

    def tick(self) -> None:
        now = self.clock
        answers = self.machine.handle(now, TICK)
        self._decided()
        self._send(answers)
        self.arm(self.machine.next_deadline(now))

    def link_closed(self, link: Link) -> None:
        now = self.clock
        for peer in link.peers:
            if self.links.get(peer) is link:
                del self.links[peer]
                self.machine.handle(now, ConnectionClosed(*peer))
        link.peers = []
        self.arm(self.machine.next_deadline(now))

    def send_request(self, run_id: str, request: Request) -> None:
        """Process a request from a user."""
        if not self.alive or self.paused:
            return
        self.world.note(self, "receives a request: {0}", request)
        now = self.clock
        answers = self.machine.handle(now, RequestReceived(run_id, request))
        self._decided()
        self._send(answers)
        self.arm(self.machine.next_deadline(now))

    def job(self, run_id: str) -> Job | None:
        rounds = self.machine.jobs.get(run_id)
        return rounds.job if rounds is not None else None

    def knows_end_of(self, job: JobTruth) -> bool:
        known = self.job(job.run_id)
        return known is not None and known.outcome is not None

    def new_agent(self, job: JobTruth, node: str, host: str, rng: Random) -> Agent:
        return Agent(self.world, job, node, host, rng)

    def cut(self, _agent: Agent) -> None:
        """Do nothing: the coordinator notices a cut when messages stop."""

    def restart_as(self, number: int, rng: Random) -> Coordinator:
        self.host_up = True  # From now on, the host refuses messages to the old process.
        saved_jobs = self.machine.saved_jobs() if self.keeps_state else None
        return Coordinator(
            self.world,
            number,
            rng,
            keeps_state=self.keeps_state,
            endpoint_index=self.endpoint_index,
            saved_jobs=saved_jobs,
            records=()
            if self.keeps_state or not self._successor_finds_records
            else [*self._records.values(), *self.machine.saved_jobs()],
        )

    def die(self, *, host_too: bool) -> None:
        """Exit without a message. If the host dies too, nothing closes the connections."""
        self.world.note(self, "dies with its host" if host_too else "is killed")
        self.host_up = not host_too
        self.alive = False
        links = {link.id: link for link in self.links.values()}
        for link in links.values():
            self.world.network.close_from_coordinator(link)
        self.links = {}
