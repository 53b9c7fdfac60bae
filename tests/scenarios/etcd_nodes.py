"""Player of the machines on etcd: nodes of one job, each an `EtcdSession`, on one `SimEtcd`.

A node's requests wait until etcd performs them; the answers, and the changes that watches report, wait until
the node handles them. After every input all of these are processed, except those on hold::

    new min=2 max=3 restarts=1 nodes=abc     a job's settings, and nodes that join one by one
    new min=1 max=2 nodes=ab presence=1      ... with presences
    confirmed a b / closed a b               an event of a's connection to the presence of b
    refused a b / inconclusive a b           ... or the outcome of an attempt
    join a / add a                           a node, with or without opening its session
    open a / drop a / leave a / crash a      its session; crash ends it without a message
    reports a failed / repeat a              a status in another phase; the last status again
    heartbeat a / heartbeat a 2              a heartbeat; one that asks for patience
    manual a / automatic a                   whether the node reacts to views by itself
    candidate a / resigns a                  whether it is willing to lead
    rejoins a 55                             it rejoins as this incarnation
    rejoins a 55 b                           ... with this id
    hold a requests,answers,changes          put these on hold; `release a` continues
    performs a 1 / answers a 1 / receives a  process one of these by hand; the index starts at 0
    loses a unreachable done                 its first request fails, after it was performed or not
    late a                                   perform the last lost request
    watch a 0 ends unreachable               end a watch, by the order of starting
    lease of nodes/a/1 ends / pass 5         end a lease; let time pass and leases expire
    wait 5                                   let time pass with heartbeats and ticks
    put shared/call 7 / delete job / full / room / compact
    keys / job                               print stored keys

A line may have several inputs, separated by `; `.

In the output, `a -> request` means that etcd performs the request, and `a <- answer` that the node handles
the answer. The last line has each node's session, its leadership, and the number of waiting items.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import msgspec
from many_nodes import SETTINGS, described, fields, number

from fake_node import RUN, a_job_of, a_node
from holdfast.core.etcd.calls import (
    Answer,
    Change,
    Compare,
    Delete,
    Get,
    Grant,
    Granted,
    KeepAlive,
    KeptAlive,
    KeysChanged,
    Op,
    Problem,
    ProblemKind,
    Put,
    ReportUnreadable,
    Request,
    RequestAnswered,
    Revoke,
    SendRequest,
    StartWatch,
    StopWatch,
    Txn,
    TxnDone,
    WatchEnded,
)
from holdfast.core.etcd.etcd_session import (
    DeliverMessage,
    DropRequested,
    EtcdSession,
    LeaveRequested,
    MessageSubmitted,
    OpenRequested,
    ReportClosed,
    ReportLeft,
    ReportMissing,
    ReportOpened,
    SessionEvent,
)
from holdfast.core.etcd.keys import (
    MARK,
    JobKeys,
    JobRecord,
    NodeRecord,
    Presence,
    get_prefix,
    unpack,
)
from holdfast.core.etcd.leader import LeaderState
from holdfast.core.etcd.witness import (
    ConnectPresence,
    DropPresence,
    PresenceClosed,
    PresenceConfirmed,
    PresenceInconclusive,
    PresenceRefused,
)
from holdfast.core.job_settings import JobSettings
from holdfast.core.machine import TICK, InvalidEvent
from holdfast.core.phases import NodePhase, NodeRole
from holdfast.core.protocol import Ack, Status, View
from simulator.etcd_model import SimEtcd

if TYPE_CHECKING:
    from holdfast.core.rounds import Job

PREFIX = "/jobs"
LEASE_S = 5.0
STEPS_MAX = 10_000
KEYS = JobKeys(PREFIX, RUN)
QUEUES = ("requests", "answers", "changes")
PRESENCE_EVENTS: dict[str, Any] = {
    "confirmed": PresenceConfirmed,
    "closed": PresenceClosed,
    "refused": PresenceRefused,
    "inconclusive": PresenceInconclusive,
}


class EtcdNode:
    """One node: its session, and the messages between it and etcd."""

    def __init__(self, player: EtcdPlayer, name: str, incarnation: int) -> None:
        self.node = a_node(name, player.settings, incarnation)
        self.session = EtcdSession(
            run_id=RUN,
            info=self.node.info,
            prefix=PREFIX,
            lease_s=LEASE_S,
            presence=Presence("", incarnation, f"{incarnation:032x}")
            if player.has_presences
            else None,
            strict=True,
        )
        self.connections: dict[str, int] = {}  # Presence connections to other nodes.
        self.is_automatic = True
        self.held: set[str] = set()
        self.requests: list[SendRequest] = []
        self.answers: list[RequestAnswered] = []
        self.changes: list[KeysChanged | WatchEnded] = []
        self.lost: list[SendRequest] = []
        self.watches: dict[int, int] = {}  # The numbers of etcd, by those of the node.
        self._player = player

    def happens(self, event: SessionEvent) -> None:
        player = self._player
        player.events.add(type(event))
        try:
            effects = self.session.handle(player.now, event)
        except InvalidEvent as error:
            self._log(f"InvalidEvent: {error}")
            return
        player.states.add(self.session.state)
        for effect in effects:
            player.effects.add(type(effect))
            match effect:
                case SendRequest():
                    self.requests.append(effect)
                case StartWatch():
                    self._watch(effect)
                case StopWatch(number):
                    self._player.etcd.unsubscribe(self.watches.pop(number, -1))
                case ConnectPresence(number, presence):
                    other = presence.address.partition(".")[0]
                    self._log(f"connects to {other}")
                    self.connections[other] = number
                case DropPresence(number):
                    other = next(name for name, one in self.connections.items() if one == number)
                    self._log(f"disconnects from {other}")
                    del self.connections[other]
                case ReportOpened():
                    self._log("session opened")
                    if self.is_automatic:
                        self.report()
                case ReportClosed(why, permanent):
                    self._log(f"session closed{' for good' if permanent else ''}: {why}")
                case DeliverMessage(View() as view):
                    self._log(f"view {view.term}.{view.revision}: {described(view)} ({view.why})")
                    if self.is_automatic:
                        self._follow(view)
                case DeliverMessage(Ack() as ack):
                    patience = f", patience {ack.patience}" if ack.patience else ""
                    self._log(f"ack of status {ack.seq} of {ack.incarnation}{patience}")
                case ReportMissing(machines):
                    self._log(f"missing: {machines}" if machines else "none are missing")
                case ReportLeft():
                    self._log("has left")
                case ReportUnreadable(key, _node, why):
                    self._log(f"ignores {short(key)}: {why}")

    def _log(self, text: str) -> None:
        self._player.log.append(f"{self.node.name}: {text}")

    def _watch(self, watch: StartWatch) -> None:
        def saw(_revision: int, changes: tuple[Change, ...]) -> None:
            self.changes.append(KeysChanged(watch.number, changes))

        found = self._player.etcd.subscribe(watch.key, watch.end, watch.start_revision, saw)
        if isinstance(found, Problem):
            self.changes.append(WatchEnded(watch.number, found))
        else:
            self.watches[watch.number] = found

    def report(self, status: Status | None = None) -> None:
        self.happens(MessageSubmitted(status or self.node.status()))

    def _follow(self, view: View) -> None:
        if not self.node.receive(view):
            return
        if view.role is NodeRole.FENCED:
            self.node.rejoin(self.node.info.incarnation + 100)
            self.report()
        elif self.node.apply():
            self.report()

    # Requests, answers and changes.

    def perform(self, index: int = 0) -> None:
        sent = self.requests.pop(index)
        self._player.log.append(f"{self.node.name} -> {request_text(sent.request)}")
        answer = self._player.etcd.perform(self._player.now, sent.request)
        self.answers.append(RequestAnswered(sent.number, answer))

    def take_answer(self, index: int = 0) -> None:
        answered = self.answers.pop(index)
        self._player.log.append(f"{self.node.name} <- {answer_text(answered.answer)}")
        self.happens(answered)

    def take_change(self) -> None:
        self.happens(self.changes.pop(0))

    def lose(self, kind: str, *, done: bool) -> None:
        sent = self.requests.pop(0)
        self.lost.append(sent)
        if done:
            self._player.etcd.perform(self._player.now, sent.request)
        problem = Problem(ProblemKind(kind), f"it is {kind}")
        self._player.log.append(f"{self.node.name} <- {answer_text(problem)}")
        self.happens(RequestAnswered(sent.number, problem))

    def end_watch(self, index: int, kind: str) -> None:
        number = [*self.watches][index]
        self._player.etcd.unsubscribe(self.watches.pop(number))
        self.happens(WatchEnded(number, Problem(ProblemKind(kind), f"it is {kind}")))

    def step(self) -> bool:
        """Process the first item that is not on hold; return whether there was one."""
        for name, waiting, move in (
            ("requests", self.requests, self.perform),
            ("answers", self.answers, self.take_answer),
            ("changes", self.changes, self.take_change),
        ):
            if waiting and name not in self.held:
                move()
                return True
        return False

    def state(self) -> str:
        leadership = self.session.leadership
        words = [f"{self.node.name} {self.session.state.value}"]
        if leadership.state is not LeaderState.FOLLOWING:
            words.append(f"{leadership.state.value} {leadership.election.term}")
        elif leadership.election.is_campaigning:
            words.append("campaigning")
        if self.requests or self.answers or self.changes:
            counts = [len(self.requests), len(self.answers), len(self.changes)]
            words.append("({}/{}/{} wait)".format(*counts))
        return " ".join(words)


class EtcdPlayer:
    """One etcd and the nodes of one job."""

    def __init__(self) -> None:
        self.events: set[type] = set()
        self.effects: set[type] = set()
        self.states: set[object] = set()
        self.begin(a_job_of(2, 2, max_restarts=1))

    def begin(self, settings: JobSettings) -> None:
        self.etcd = SimEtcd()
        self.now = 0.0
        self.settings = settings
        self.nodes: dict[str, EtcdNode] = {}
        self.log: list[str] = []
        self.born = 0
        self.has_presences = False

    def play(self, line: str) -> list[str]:
        self.log = []
        for part in line.split("; "):
            answer = self.play_one(*shlex.split(part))
            if answer:
                return answer
        return [*self.log, self.state()]

    def play_one(self, verb: str, *words: str) -> list[str]:
        if verb == "new":
            given = fields([*words])
            names, presence = given.pop("nodes", ""), given.pop("presence", "")
            known: dict[str, Any] = {SETTINGS[name]: number(text) for name, text in given.items()}
            least, most = int(known.pop("min_nodes")), int(known.pop("max_nodes"))
            self.begin(a_job_of(least, most, **known))
            self.has_presences = bool(presence)
            for name in names:
                self.join(name)
            self.log = []
        elif verb in ("keys", "job"):
            return self.keys() or ["no keys"] if verb == "keys" else [self.job()]
        else:
            self.do(verb, [*words])
            self.run()
        return []

    def state(self) -> str:
        return "; ".join(node.state() for node in self.nodes.values()) or "no nodes"

    def do(self, verb: str, words: list[str]) -> None:
        match [verb, *words]:
            case ["add" | "join", name]:
                self.join(name) if verb == "join" else self.add(name)
            case ["full" | "room"]:
                self.etcd.full = verb == "full"
            case ["compact"]:
                for _ in range(3):
                    self.etcd.perform(self.now, Txn((), (Put(b"/elsewhere", b""),)))
                self.etcd.compact(self.etcd.revision)
            case ["put", key, value]:
                self.etcd.perform(
                    self.now, Txn((), (Put(KEYS.root + key.encode(), value.encode()),))
                )
            case ["copy", key]:
                found = self.read(KEYS.root + key.encode())
                self.etcd.perform(self.now, Txn((), (Put(found.key, found.value, found.lease),)))
            case ["delete", key]:
                self.etcd.perform(self.now, Txn((), (Delete(KEYS.root + key.encode()),)))
            case ["lease", "of", key, "ends"]:
                self.etcd._end(self.read(KEYS.root + key.encode()).lease)
            case ["pass", seconds]:
                self.now += float(seconds)
                self.etcd.expire(self.now)
            case ["wait", seconds]:
                self.wait(float(seconds))
            case _:
                self.do_to(self.nodes[words[0]], verb, words[1:])

    def do_to(self, node: EtcdNode, verb: str, words: list[str]) -> None:
        match [verb, *words]:
            case ["open"]:
                node.happens(OpenRequested())
            case ["drop"]:
                node.happens(DropRequested())
            case ["leave"]:
                node.happens(LeaveRequested())
            case ["crash"]:
                for number in node.watches.values():
                    self.etcd.unsubscribe(number)
                del self.nodes[node.node.name]
            case ["tick", seconds]:
                self.now += float(seconds)
                node.happens(TICK)
            case ["heartbeat", *patience]:
                beat = msgspec.structs.replace(
                    node.node.heartbeat(), patience=int(patience[0]) if patience else 0
                )
                node.happens(MessageSubmitted(beat))
            case ["repeat"]:
                node.report(node.node.last_status())
            case ["reports"]:
                node.report()
            case ["reports", "failed"]:
                node.report(node.node.fail())
            case ["reports", phase]:
                node.node.phase = NodePhase(phase)
                node.report()
            case ["rejoins", incarnation, *new_id]:
                node.node.new_id = "".join(new_id)
                node.node.rejoin(int(incarnation))
                node.report()
            case ["at", address]:
                node.session.address = address
                node.node.info = msgspec.structs.replace(node.node.info, address="")
            case ["portions", ops]:
                node.session.leadership.ops_max = int(ops)
            case ["confirmed" | "closed" | "refused" | "inconclusive", other]:
                number = (
                    node.connections[other] if verb == "confirmed" else node.connections.pop(other)
                )
                node.happens(PRESENCE_EVENTS[verb](number))
            case ["manual" | "automatic"]:
                node.is_automatic = verb == "automatic"
            case ["candidate" | "resigns"]:
                node.session.leadership.election.is_candidate = verb == "candidate"
            case ["hold", names]:
                node.held = {*names.split(",")}
                assert node.held <= {*QUEUES}
            case ["release"]:
                node.held = set()
            case ["performs", *index]:
                node.perform(*map(int, index))
            case ["answers", *index]:
                node.take_answer(*map(int, index))
            case ["receives"]:
                node.take_change()
            case ["merges", "changes"]:
                number = node.changes[0].number
                merged = [one for each in node.changes for one in each.changes]  # type: ignore[union-attr]
                node.changes[:] = [KeysChanged(number, tuple(merged))]
            case ["loses", kind, *done]:
                node.lose(kind, done=bool(done))
            case ["late"]:
                request = node.lost.pop(0).request
                answer = self.etcd.perform(self.now, request)
                self.log.append(f"late -> {request_text(request)} -> {answer_text(answer)}")
            case ["watch", index, "ends", kind]:
                node.end_watch(int(index), kind)
            case _:
                raise AssertionError(f"unknown input: {verb!r} {words}")

    # Nodes and time.

    def add(self, name: str) -> EtcdNode:
        self.born += 1
        self.nodes[name] = EtcdNode(self, name, self.born)
        return self.nodes[name]

    def join(self, name: str) -> None:
        self.add(name).happens(OpenRequested())
        self.run()

    def run(self) -> None:
        """Process all items that are not on hold."""
        for _ in range(STEPS_MAX):
            if not sum(node.step() for node in [*self.nodes.values()]):
                return
        raise AssertionError("the player does not terminate")

    def wait(self, seconds: float) -> None:
        """Let time pass with heartbeats, which are not logged."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for node in [*self.nodes.values()]:
                if node.session.is_up and "requests" not in node.held:
                    before = len(self.log)
                    node.happens(MessageSubmitted(node.node.heartbeat()))
                    self.run()
                    if len(self.log) == before + 3:  # A request, its answer, an ack.
                        del self.log[before:]
            self.etcd.expire(self.now)
            for node in [*self.nodes.values()]:
                node.happens(TICK)
            self.run()

    # Stored keys.

    def read(self, key: bytes):  # type: ignore[no-untyped-def]
        done = self.etcd.perform(self.now, Txn((), (Get(key),)))
        assert isinstance(done, TxnDone)
        return done.results[0][0]

    def keys(self) -> list[str]:
        done = self.etcd.perform(self.now, Txn((), (get_prefix(KEYS.root),)))
        assert isinstance(done, TxnDone)
        return [f"{short(one.key)}: {value_text(one.key, one.value)}" for one in done.results[0]]

    def job(self) -> str:
        return value_text(KEYS.job, self.read(KEYS.job).value)


# As text.


def short(key: bytes) -> str:
    return key.removeprefix(KEYS.root).decode()


def request_text(request: Request) -> str:
    match request:
        case Grant(ttl_s):
            return f"grant {ttl_s} s"
        case KeepAlive(lease):
            return f"renew {lease}"
        case Revoke(lease):
            return f"revoke {lease}"
        case Txn(compare, success, failure):
            text = ", ".join(map(op_text, success))
            if compare:
                text = f"if {' and '.join(map(compare_text, compare))}: {text}"
            return text + (f" else {', '.join(map(op_text, failure))}" if failure else "")


def compare_text(compare: Compare) -> str:
    return f"{short(compare.key)} {compare.field.value}={compare.equals!r}"


def op_text(op: Op) -> str:
    key = short(op.key) + ("*" if not isinstance(op, Put) and op.end else "")
    if isinstance(op, Put):
        return f"put {key} ({value_text(op.key, op.value)})"
    return f"{'get' if isinstance(op, Get) else 'delete'} {key}"


def value_text(key: bytes, value: bytes) -> str:
    if key == KEYS.job and (record := unpack(JobRecord, value)):
        return job_text(record.job)
    if key.startswith(KEYS.nodes) and (node := unpack(NodeRecord, value)):
        status = node.status
        text = f"status {status.seq} {status.phase.value} {status.generation}"
        return text + (f", call {node.roll_call}" if node.roll_call else "")
    if key.startswith(KEYS.views) and (view := unpack(View, value)):
        return f"{view.term}.{view.revision} {described(view)}"
    return value.removeprefix(MARK + b" ").decode(errors="replace").replace("\n", " at ")


def job_text(job: Job) -> str:
    text = f"{job.phase.value} in term {job.term}, nodes {' '.join(job.nodes) or 'none'}"
    if job.round >= 0:
        members = " ".join(info.node for info in job.members)
        text += f", round {job.round} of {members}, generation {job.generation}"
    return text + f", {job.restarts} restarts" + (f" ({job.why})" if job.why else "")


def answer_text(answer: Answer) -> str:
    match answer:
        case Granted(lease, _):
            return f"lease {lease}"
        case KeptAlive(ttl_s):
            return f"{ttl_s} s" if ttl_s else "lease gone"
        case TxnDone(revision, succeeded):
            return f"{'done' if succeeded else 'not done'} at {revision}"
        case Problem(kind, why):
            return f"{kind.value}: {why}"
        case _:
            return "revoked"
