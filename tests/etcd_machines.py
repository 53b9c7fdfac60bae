"""Nodes of one job on one etcd, moved step by step by a test: `core.etcd.session` and `SimEtcd`.

Nothing happens by itself. What a node asks waits in `asked` until it is carried out, what etcd
answered in `answers`, what a watch saw in `news`; `Scene.run` moves all of that until nothing is
left but what is held back. So a test says what comes late, in another order, or not at all. Nodes
do as they are told (`fake_node`) unless they are made not to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fake_node import RUN, a_job_of, a_node
from holdfast.core.etcd.calls import (
    Get,
    KeyValue,
    Problem,
    ProblemKind,
    Put,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    TxnDone,
)
from holdfast.core.etcd.keys import JobKeys, JobRecord, NodeRecord, get_prefix, unpack
from holdfast.core.etcd.leader import LeaderState
from holdfast.core.etcd.session import (
    DeliverMessage,
    EtcdSession,
    ReportClosed,
    ReportLeft,
    ReportOpened,
)
from holdfast.core.protocol import Ack, NodeRole, Status, View
from holdfast.core.rounds import Rounds
from holdfast.testing.sim.etcd import SimEtcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.etcd.calls import Answer, Change, Request
    from holdfast.core.etcd.leader import Leadership
    from holdfast.core.etcd.session import SessionEffect
    from holdfast.core.protocol import JobSettings
    from holdfast.core.rounds import Job

PREFIX = "/jobs"
LEASE_S = 5.0
STEPS_MAX = 10_000
TWO = a_job_of(2, 2, max_restarts=1)
GONE = Problem(ProblemKind.UNREACHABLE, "the network is down")


def settled(problem: ProblemKind) -> Problem:
    """Return a problem of a kind, in words that a test can look for."""
    return Problem(problem, f"it is {problem.value}")


class NodeOnEtcd:
    """One node: what it was told, its session, and all that is under way between it and etcd."""

    def __init__(
        self, scene: Scene, name: str, settings: JobSettings, incarnation: int, *, strict: bool
    ) -> None:
        self.node = a_node(name, settings, incarnation)
        self.session = EtcdSession(
            run_id=RUN,
            info=self.node.info,
            prefix=PREFIX,
            lease_s=LEASE_S,
            strict=strict,
            rounds=scene.rounds,
        )
        self.obeys = True
        """Whether it says its status when a session opens, and does what it is told."""
        self.held: set[str] = set()
        """Of `asked`, `answers` and `news`, what is moved by hand only."""
        self.asked: list[SendRequest] = []
        self.answers: list[tuple[int, Answer]] = []
        self.news: list[tuple[int, tuple[Change, ...] | Problem]] = []
        self.heard: list[View | Ack] = []
        self.closed: list[ReportClosed] = []
        self.opened = 0
        """How many sessions it has had."""
        self.is_open = self.has_left = False
        self.sent: list[Request] = []
        """All that was carried out, in order."""
        self.watches: dict[int, int] = {}
        """The watches that are on, each with its number at etcd."""
        self._scene = scene

    @property
    def name(self) -> str:
        """Its id."""
        return self.node.name

    @property
    def leadership(self) -> Leadership:
        """Its part in leading the job."""
        return self.session.leadership

    @property
    def job(self) -> Job:
        """The job as it decides about it; it must lead."""
        assert self.leadership.lead is not None, f"{self.name} does not lead"
        return self.leadership.lead.job

    @property
    def views(self) -> list[View]:
        """What it was told, in order."""
        return [one for one in self.heard if isinstance(one, View)]

    @property
    def acks(self) -> list[int]:
        """The numbers of the statuses that were stored, in the order in which it heard of them."""
        return [one.seq for one in self.heard if isinstance(one, Ack)]

    @property
    def record(self) -> NodeRecord | None:
        """What it says of itself, as it is stored."""
        info = self.node.info
        found = self._scene.read(self.session.places.node(info.node, info.incarnation))
        return unpack(NodeRecord, found.value) if found else None

    # What the node does.

    def open(self) -> None:
        """Begin a session."""
        self.do(self.session.open())

    def drop(self) -> None:
        """End the session; what is under way goes on at etcd all the same."""
        self.is_open = False
        self.do(self.session.drop())

    def say(self, status: Status) -> None:
        """Have a status stored."""
        self.do(self.session.send(self._scene.now, status))

    def beat(self) -> None:
        """Show that it lives."""
        self.do(self.session.send(self._scene.now, self.node.beat()))

    def leave(self) -> None:
        """Go in good order, as far as etcd is concerned."""
        self.do(self.session.leave())

    def crash(self) -> None:
        """End without a word."""
        for number in self.watches.values():
            self._scene.etcd.unsubscribe(number)
        self.asked.clear()
        del self._scene.nodes[self.name]

    # What is under way.

    def carry_out(self, index: int = 0) -> Request:
        """Let etcd do what was asked; the answer is on its way then."""
        ask = self.asked.pop(index)
        self.sent.append(ask.request)
        self.answers.append((ask.number, self._scene.etcd.perform(self._scene.now, ask.request)))
        return ask.request

    def answer(self, index: int = 0) -> None:
        """Bring an answer."""
        self.do(self.session.answered(self._scene.now, *self.answers.pop(index)))

    def lose(self, problem: Problem = GONE, *, done: bool = False) -> None:
        """Say that the first request failed; with `done` it was carried out all the same."""
        ask = self.asked.pop(0)
        if done:
            self._scene.etcd.perform(self._scene.now, ask.request)
        self.do(self.session.answered(self._scene.now, ask.number, problem))

    def hear(self) -> None:
        """Bring the first of what the watches saw."""
        number, what = self.news.pop(0)
        if isinstance(what, Problem):
            self.do(self.session.watch_ended(number, what))
        else:
            self.do(self.session.changed(self._scene.now, number, what))

    def end_watch(self, problem: Problem, index: int = 0) -> None:
        """End one of its watches, the oldest if it is not said which."""
        number = [*self.watches][index]
        self._scene.etcd.unsubscribe(self.watches.pop(number))
        self.do(self.session.watch_ended(number, problem))

    def steps(self) -> list[Callable[[], object]]:
        """Return what is not held back and can be done next."""
        return [
            step
            for name, waiting, step in (
                ("asked", self.asked, self.carry_out),
                ("answers", self.answers, self.answer),
                ("news", self.news, self.hear),
            )
            if waiting and name not in self.held
        ]

    def do(self, effects: list[SessionEffect]) -> None:
        """Perform what the session wants."""
        for effect in effects:
            match effect:
                case SendRequest():
                    self.asked.append(effect)
                case StartWatch():
                    self._watch(effect)
                case StopWatch(number):
                    self._scene.etcd.unsubscribe(self.watches.pop(number, -1))
                case ReportOpened():
                    self.is_open = True
                    self.opened += 1
                    if self.obeys:
                        self.say(self.node.status())
                case ReportClosed():
                    self.is_open = False
                    self.closed.append(effect)
                case DeliverMessage(message):
                    self.heard.append(message)
                    if isinstance(message, View) and self.obeys:
                        self._obey(message)
                case ReportLeft():
                    self.has_left = True

    def _watch(self, watch: StartWatch) -> None:
        def saw(_revision: int, changes: tuple[Change, ...]) -> None:
            self.news.append((watch.number, changes))

        found = self._scene.etcd.subscribe(watch.key, watch.end, watch.start_revision, saw)
        if isinstance(found, Problem):
            self.news.append((watch.number, found))
        else:
            self.watches[watch.number] = found

    def _obey(self, view: View) -> None:
        if not self.node.hear(view):
            return
        if view.role is NodeRole.FENCED:
            self.node.begin_anew(self.node.info.incarnation + 100)
            self.say(self.node.status())
        elif self.node.follow():
            self.say(self.node.status())


class Scene:
    """One etcd, the nodes of one job, and the test's own clock."""

    def __init__(
        self,
        names: str = "",
        settings: JobSettings = TWO,
        *,
        rounds: Callable[[Job], Rounds] = Rounds,
        strict: bool = True,
    ) -> None:
        self.etcd = SimEtcd()
        self.now = 0.0
        self.places = JobKeys(PREFIX, RUN)
        self.nodes: dict[str, NodeOnEtcd] = {}
        self.settings = settings
        self.rounds = rounds
        self._strict = strict
        self._born = 0
        for name in names:
            self.join(name)

    def add(self, name: str) -> NodeOnEtcd:
        """Return a new node without a session."""
        self._born += 1
        node = NodeOnEtcd(self, name, self.settings, self._born, strict=self._strict)
        self.nodes[name] = node
        return node

    def join(self, name: str) -> NodeOnEtcd:
        """Return a new node, once nothing is left to do about it."""
        node = self.add(name)
        node.open()
        self.run()
        return node

    def run(self) -> None:
        """Move whatever is not held back until nothing is left."""
        for _ in range(STEPS_MAX):
            steps = [step for node in [*self.nodes.values()] for step in node.steps()[:1]]
            if not steps:
                return
            for step in steps:
                step()
        raise AssertionError("it never ends")

    def wait(self, seconds: float) -> None:
        """Let time pass; whoever has a session shows that it lives."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for node in [*self.nodes.values()]:
                if node.is_open and "asked" not in node.held:
                    node.beat()
            self.run()
            self.etcd.expire(self.now)
            for node in [*self.nodes.values()]:
                node.do(node.session.tick(self.now))
            self.run()

    def end_lease_of(self, node: NodeOnEtcd) -> None:
        """End the lease that a node's record is on."""
        self.end_lease_at(self.places.node(node.name, node.node.info.incarnation))

    def end_lease_at(self, key: bytes) -> None:
        """End the lease that a key is on, as if its time were over."""
        found = self.read(key)
        assert found is not None
        self.etcd._end(found.lease)  # Whose time it is does not matter here.

    # What is stored.

    def ask(self, *ops: Put | Get) -> TxnDone:
        """Do something at etcd that no node asked for."""
        answer = self.etcd.perform(self.now, Txn((), ops))
        assert isinstance(answer, TxnDone)
        return answer

    def read(self, key: bytes) -> KeyValue | None:
        """Return a key as it is stored."""
        (found,) = self.ask(Get(key)).results
        return found[0] if found else None

    @property
    def keys(self) -> list[str]:
        """What is stored of the job, by names below its own place."""
        (found,) = self.ask(get_prefix(self.places.root)).results
        return [one.key[len(self.places.root) :].decode() for one in found]

    @property
    def job(self) -> Job:
        """The job as it is stored."""
        found = self.read(self.places.job)
        assert found is not None
        record = unpack(JobRecord, found.value)
        assert record is not None
        return record.job

    @property
    def leader(self) -> NodeOnEtcd:
        """The one node that leads, as the nodes themselves know it."""
        (leader,) = [n for n in self.nodes.values() if n.leadership.post is LeaderState.LEADING]
        return leader
