"""Players of the machines for several nodes: rounds, coordinator, session, coordinated supervision.

Rounds: the player has nodes that apply each view, so the inputs are short::

    new min=2 max=3 restarts=1           a job's settings, and a coordinator without nodes
    join a host=h1 workers=2             an agent joins; if `a` exists, as a new incarnation
    join a yields=1                      a node that yields to another with its id
    claims a term=4 round=3 rank=0 of=2 generation=5      a member of an earlier coordinator's round
    status a / repeat a / heartbeat a    a new status; the last one again; a heartbeat
    succeeds a / fails a hopeless / reports a text / ready a / leaves a / closes a / stuck a why
    rejoin a                             a fenced node rejoins as a new incarnation, or with the id it was given
    join a reserved_on=m1                the id is generated, and reserved by the machine m1
    unreachable a / reachable a          views to it are lost from now on / delivered again
    slow a / stopped a                   its workers take long to stop / have exited now
    lost a / lost a+b / wait over / wait over late / close stopped why / new coordinator
    wait over a                          the wait of the contender `a` is over
    settled                              the longest settle time is over
    exclusion over / quiet               an exclusion is over; a `QUIET_S` period is over
    request r1 drain a / request r1 stop via=a     an operator's request, directly or in a status

The output has the views, each with its node (`a/1` is the first incarnation of `a`, if there is a newer
one), and the job. The inputs of the other players are `now Event words`, or as their classes say.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import msgspec
from transcripts import Clock, read_fact, write_fact

from fake_node import RUN, FakeNode, a_job_of, a_node
from holdfast.core import session as ms
from holdfast.core import supervision
from holdfast.core.coordinator_machine import (
    CALLS_MAX,
    ConnectionClosed,
    CoordinatorEvent,
    CoordinatorMachine,
    JobCloseRequested,
    RecordFound,
    RequestReceived,
    StatusReceived,
)
from holdfast.core.machine import TICK, Event, InvalidEvent
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole
from holdfast.core.protocol import (
    Ack,
    Failure,
    Heartbeat,
    NodeInfo,
    Request,
    RequestAnswer,
    Status,
    View,
)
from holdfast.core.ranks import RankOrder
from holdfast.core.rounds import (
    CloseRequested,
    Job,
    NodeLost,
    NodesLost,
    Rounds,
    WaitEnded,
    WaitKind,
    drained_nodes,
)
from holdfast.core.session import Session
from holdfast.core.supervision import CoordinatedSupervision, SupervisionSettings

if TYPE_CHECKING:
    from holdfast.core.rounds import JobEvent, JobPhase

SETTINGS = {
    "min": "min_nodes",
    "max": "max_nodes",
    "restarts": "max_restarts",
    "settle": "settle_s",
}
ABOUT_NODES = {"workers": "local_world_size", "fixed": "fixed_rank", "stops": "self_fencing"}


def fields(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class RoundsPlayer:
    def __init__(self) -> None:
        self.passed: set[tuple[JobPhase, JobPhase]] = set()
        self.roles: set[NodeRole] = set()

    def play(self, line: str) -> list[str]:
        verb, *words = shlex.split(line)
        if verb == "new" and words != ["coordinator"]:
            known: dict[str, Any] = {
                SETTINGS.get(name, name): number(text) for name, text in fields(words).items()
            }
            if "order" in known:
                known["order"] = RankOrder(known["order"])
            least, most = int(known.pop("min_nodes")), int(known.pop("max_nodes"))
            self.settings = a_job_of(least, most, **known)
            self.nodes: dict[str, list[FakeNode]] = {}
            self.unreachable: set[str] = set()
            verb, words = "new", ["coordinator"]
        if verb == "new":
            self.rounds = Rounds(Job(run_id=RUN))
            return [self._state()]
        if verb in ("unreachable", "reachable"):
            change = self.unreachable.add if verb == "unreachable" else self.unreachable.discard
            change(words[0])
            return [self._state()]
        if verb == "slow":
            self._node(words[0]).slow = True
            return [self._state()]
        if verb == "heartbeat":
            node = self._node(words[0])
            view = self.rounds.missing_view(node.heartbeat())
            seq = self.rounds.seq_of(node.name, node.info.incarnation)
            known_to = (
                "" if seq == node.seq else [f"{words[0]}: known with status {seq}, not {node.seq}"]
            )
            return [*known_to, *map(self._sent, [view] if view else []), self._state()]
        return self._give(self._event(verb, words))

    def _give(self, event: JobEvent) -> list[str]:
        before = self.rounds.job.phase
        happened: list[str] = []
        self.stopped: list[FakeNode] = []
        answers = self.rounds.job.answers
        try:
            happened += map(self._sent, self.rounds.handle(0.0, event))
            while self.stopped:
                happened += map(self._sent, self.rounds.handle(0.0, self.stopped.pop(0).status()))
        except InvalidEvent as error:
            happened.append(f"InvalidEvent: {error}")
        self.rounds.check()
        self.passed.add((before, self.rounds.job.phase))
        for one in self.rounds.job.answers.values():
            if one.id not in answers:
                happened.append(
                    f"{one.id} is {one.refusal or 'granted'}{one.why and f': {one.why}'}"
                )
        return [*happened, self._state()]

    def _node(self, name: str) -> FakeNode:
        name, _, which = name.partition("/")
        return self.nodes[name][int(which) - 1 if which else -1]

    def _event(self, verb: str, words: list[str]) -> JobEvent:
        if verb == "wait":
            seq = self.rounds.job.wait_seq
            if words == ["over", "stopping"]:
                return WaitEnded(self.rounds.job.generation, WaitKind.STOPPING)
            if words[-1] in self.nodes:
                return WaitEnded(self._node(words[-1]).info.incarnation, WaitKind.CONTENDING)
            return WaitEnded(seq - 1 if words == ["over", "late"] else seq)
        if verb == "settled":
            return WaitEnded(self.rounds.job.settle_seq, WaitKind.SETTLING)
        if verb == "exclusion":
            exclusions = self.rounds.job.exclusions.values()
            return WaitEnded(
                next(one.until for one in exclusions if one.until >= 0), WaitKind.EXCLUDED
            )
        if verb == "quiet":
            return WaitEnded(self.rounds.job.quiet, WaitKind.QUIET)
        if verb == "close":
            return CloseRequested(JobOutcome(words[0]), " ".join(words[1:]))
        if verb == "request":
            return self._request(words)
        name, *rest = words
        if verb in ("join", "claims"):
            return self._join(name, fields(rest)).status()
        if verb == "lost":
            nodes = [self._node(each) for each in name.split("+")]
            why = " ".join(rest) or "silence"
            lost = tuple(NodeLost(node.name, node.info.incarnation, why) for node in nodes)
            return lost[0] if len(lost) == 1 else NodesLost(lost)
        node = self._node(name)
        match verb:
            case "repeat":
                return node.last_status()
            case "status":
                pass
            case "succeeds":
                return node.succeed()
            case "fails":
                return node.fail(retryable="hopeless" not in rest, sudden="suddenly" in rest)
            case "reports":
                node.report = " ".join(rest).encode()
            case "leaves":
                return node.leave()
            case "closes":
                node.phase = NodePhase.CLOSING
            case "ready":
                node.phase, node.has_workers = NodePhase.READY, False
            case "stuck":
                return msgspec.structs.replace(node.status(), stuck=" ".join(rest))
            case "stopped":
                node.slow = node.has_workers = False
                node.apply()
            case "rejoin":
                node, incarnation = msgspec.structs.replace(node), self._incarnation()
                node.rejoin(incarnation)
                self.nodes.setdefault(node.name, []).append(node)
            case _:
                raise AssertionError(f"unknown input: {verb!r}")
        return node.status()

    def _request(self, words: list[str]) -> JobEvent:
        (one, action), rest = words[:2], [word for word in words[2:] if "=" not in word]
        about: dict[str, Any] = {n: number(t) for n, t in fields(words[2 + len(rest) :]).items()}
        via = about.pop("via", "")
        request = Request(id=one, action=action, node="".join(rest), who="ann@login", **about)
        if not via:
            return request
        node = self._node(via) if via in self.nodes else self._join(via, {})
        return msgspec.structs.replace(node.status(), request=request)

    def _incarnation(self) -> int:
        return 1 + sum(map(len, self.nodes.values()))

    def _join(self, name: str, words: dict[str, str]) -> FakeNode:
        asked = {SETTINGS[n]: number(words.pop(n)) for n in ("min", "max") if n in words}
        settings = self.settings._replace(**asked)  # type: ignore[arg-type]
        claim = {
            {"of": "size"}.get(n, n): int(words.pop(n))
            for n in ("term", "round", "rank", "of", "generation", "restarts")
            if n in words
        }
        run = words.pop("run", RUN)
        about = {ABOUT_NODES.get(n, n): number(text) for n, text in words.items()}
        node = a_node(name, settings, self._incarnation(), **about)
        node = msgspec.structs.replace(node, run_id=run, **claim)
        if node.rank >= 0:
            node.role, node.phase, node.has_workers = NodeRole.MEMBER, NodePhase.RUNNING, True
            node.round_term, node.assigned_generation = node.term, node.generation
        self.nodes.setdefault(name, []).append(node)
        return node

    # The output.

    def _sent(self, view: View) -> str:
        self.roles.add(view.role)
        named = self.nodes[view.node]
        which = [node.info.incarnation for node in named].index(view.incarnation)
        node = named[which]
        name = view.node if node is named[-1] else f"{view.node}/{which + 1}"
        text = f"{name}: {described(view)} ({view.why})"
        if view.answered is not None:
            text += f", answer {view.answered.id}: {view.answered.refusal or 'granted'}"
        if view.node in self.unreachable:
            return f"{text}, not delivered"
        if not node.receive(view):
            return f"{text}, ignored as older"
        if node.apply() and stops(node):
            self.stopped.append(node)
        return text

    def _state(self) -> str:
        job = self.rounds.job
        parts = [f"{job.phase.value} in term {job.term}"]
        if job.round >= 0:
            parts.append(f"round {job.round} of {' '.join(info.node for info in job.members)}")
            parts.append(f"generation {job.generation}")
        members = {info.incarnation for info in job.members}
        others = [n.info.node for n in job.nodes.values() if n.info.incarnation not in members]
        if others:
            parts.append(f"others {' '.join(others)}")
        if job.succeeded:
            parts.append(f"succeeded {' '.join(sorted(job.succeeded))}")
        if job.settings:
            parts.append(f"{job.restarts} of {job.settings.max_restarts} restarts used")
        if drained_nodes(job):
            parts.append(f"drained {' '.join(drained_nodes(job))}")
        if job.departed:
            parts.append(f"departed {' '.join(n.info.node for n in job.departed.values())}")
        waits = {wait.ended.kind: wait.delay_s for wait in self.rounds.waits}
        if WaitKind.EXCLUDED in waits:
            delayed = (node for node, one in job.exclusions.items() if one.until >= 0)
            parts.append(f"excludes {' '.join(delayed)} for {waits[WaitKind.EXCLUDED]:g} s")
        if WaitKind.CONTENDING in waits:
            delay_s = waits[WaitKind.CONTENDING]
            parts.append(f"a contender waits {delay_s:g} s")
        step_s = waits.get(WaitKind.STEP, waits.get(WaitKind.STOPPING))
        parts.append("does not wait" if step_s is None else f"waits {step_s:g} s")
        return ", ".join(parts)


def stops(node: FakeNode) -> bool:
    """Whether a node is in the job and must report that it has no workers."""
    is_included = node.role in (NodeRole.MEMBER, NodeRole.WAITING, NodeRole.STANDBY)
    return is_included and not node.has_workers


def described(view: View) -> str:
    """Return a view as text, without its reason."""
    match view.role:
        case NodeRole.MEMBER:
            text = f"member rank {view.rank} of {view.size}, round {view.round}"
            text += f", generation {view.generation}"
            text += "" if view.start else ", not to start yet"
            text += ", after a failure" if view.after_failure else ""
            text += f", {view.slow}" if view.slow else ""
            if view.world_size != view.size:
                text += f", workers from {view.first_rank} of {view.world_size}"
            return text + (f", restart {view.restarts}" if view.restarts else "")
        case NodeRole.WAITING:
            wait_reason = f", {view.wait_reason}" if view.wait_reason else ""
            failure = ", after a failure" if view.after_failure else ""
            return f"waiting, {view.present} of {view.needed} nodes{wait_reason}{failure}"
        case NodeRole.CLOSED:
            text = f"closed, {view.outcome.value if view.outcome else '?'}"
            text += f", report {view.report.decode()!r}" if view.report else ""
            return text + ("" if view.final else ", not final")
        case _:
            text = str(view.role.value) + (", drained" if view.drained else "")
            return text + (f", rejoin as {view.new_id}" if view.new_id else "")


class CoordinatorPlayer:
    """`new min=2 max=2 restarts=1 jobs=3 nodes=9 keep=60`, then `now verb node`.

    `a@other` is a node of another job, and `a/2` another agent with the id `a`.

    Verbs are those of rounds (join, status, repeat, heartbeat, fails, succeeds, leaves), and
    `disconnected a`, `tick`, `close job outcome why`, `request id job action node`. `new coordinator` starts a
    successor without state; with `saved` it has the saved jobs, in the agent of `host`; with `record` it does not
    know that it is a successor, and finds the records of the jobs; with `endpoint=1` it took over at another endpoint. A node joins `from` an address (by default its own), and with `reaches` over
    one of the coordinator's addresses. Nodes apply each view; with `unreachable=a`, a gets no messages. The
    output has the answers, the jobs and the next deadline.
    """

    machine: CoordinatorMachine

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            follows = words[0] == "coordinator"
            saved_jobs = self.machine.saved_jobs() if "saved" in words else None
            records = self.machine.saved_jobs() if "record" in words else ()
            if not follows:
                given: dict[str, Any] = {
                    n: number(text) for n, text in fields(words).items() if n != "host"
                }
                least, most = int(given.pop("min")), int(given.pop("max"))
                self.limits: dict[str, Any] = {
                    name: given.pop(short)
                    for short, name in (
                        ("jobs", "jobs_max"),
                        ("nodes", "nodes_max"),
                        ("keep", "closed_job_keep_s"),
                        ("recover", "recover_s"),
                    )
                    if short in given
                }
                self.settings = a_job_of(
                    least, most, **{SETTINGS[name]: value for name, value in given.items()}
                )
                self.nodes: dict[str, FakeNode] = {}
                self.links: dict[str, tuple[str, str]] = {}
                self.clock = Clock()
            host = fields([word for word in words if word.startswith("host=")]).get("host", "")
            endpoint_index = fields([word for word in words if word.startswith("endpoint=")]).get(
                "endpoint", "0"
            )
            self.machine = CoordinatorMachine(
                self.clock.now,
                silence_s=5.0,
                grace_s=0.2,
                follows_another=follows and not records,
                endpoint_index=int(endpoint_index),
                saved_jobs=saved_jobs,
                host=host,
                strict=True,
                **self.limits,
            )
            for one in records:
                self.machine.handle(self.clock.now, RecordFound(one))
            return [self._state()]
        now = self.clock.read(first)
        unreachable = [word for word in words if word.startswith("unreachable=")]
        self.unreachable = fields(unreachable).get("unreachable", "")
        self.stopped: list[FakeNode] = []
        event = self._event(*words)
        lines = [self._answer(one) for one in self.machine.handle(now, event)]
        if isinstance(event, RequestReceived):
            answer = self.machine.answer_to(event.run_id, event.request.id)
            why = answer.why and f": {answer.why}"
            lines.append(f"{answer.id} is {answer.refusal or 'granted'}{why}")
        while self.stopped:
            node = self.stopped.pop(0)
            event = self._received(node.status())
            views = [one for one in self.machine.handle(now, event) if isinstance(one, View)]
            lines += map(self._answer, views)
        return [*lines, self._state()]

    def _event(self, verb: str, name: str = "", *more: str) -> CoordinatorEvent:
        if verb == "tick":
            return TICK
        if verb == "close":
            return JobCloseRequested(name, JobOutcome(more[0]), " ".join(more[1:]))
        if verb == "request":  # An id, a job, an action and perhaps a node.
            run_id, action, *node_ids = more
            request = Request(id=name, action=action, node="".join(node_ids), who="ann@login")
            return RequestReceived(run_id, request)
        if verb == "join":
            short, _, run = name.partition("@")
            short = short.partition("/")[0]
            known = fields([*more])
            term = int(known.pop("term", "0"))
            link = known.pop("from", f"{short}.seen"), known.pop("reaches", "")
            about = {ABOUT_NODES.get(key, key): number(text) for key, text in known.items()}
            node = a_node(short, self.settings, len(self.nodes) + 1, address="", **about)
            self.nodes[name] = msgspec.structs.replace(node, run_id=run or RUN, term=term)
            self.links[f"{short}@{run or RUN}"] = link
        node = self.nodes[name]
        match verb:
            case "heartbeat":
                return node.heartbeat()
            case "disconnected":
                return ConnectionClosed(node.run_id, node.name, node.info.incarnation)
            case "join" | "status":
                status = node.status()
            case "repeat":
                status = node.last_status()
            case "fails":
                status = node.fail()
            case "succeeds":
                status = node.succeed()
            case "leaves":
                status = node.leave()
            case _:
                raise AssertionError(f"unknown input: {verb!r}")
        return self._received(status)

    def _received(self, status: Status) -> StatusReceived:
        return StatusReceived(status, *self.links[f"{status.info.node}@{status.run_id}"])

    def _answer(self, answer: View | Ack) -> str:
        run = "" if answer.run_id == RUN else f"@{answer.run_id}"
        incarnations = {node.info.incarnation: name for name, node in self.nodes.items()}
        name = incarnations.get(answer.incarnation, f"{answer.node}{run}")
        node = self.nodes[name]
        if isinstance(answer, Ack):
            if answer.call and answer.node != self.unreachable:
                node.call = answer.call
            call = answer.call % CALLS_MAX  # Without the term.
            return f"{name}: ack {answer.seq}" + (f", roll call {call}" * (call > 0))
        if (
            answer.node != self.unreachable
            and node.receive(answer)
            and node.apply()
            and stops(node)
        ):
            self.stopped.append(node)
        master = f" at {answer.master_addr}" if answer.master_addr else ""
        return f"{name}: {described(answer)}{master} ({answer.why})"

    def _state(self) -> str:
        deadline = self.machine.next_deadline(self.clock.now)
        jobs = [
            f"{run_id} {rounds.job.phase.value} with {' '.join(rounds.job.nodes) or 'no nodes'}"
            for run_id, rounds in self.machine.jobs.items()
        ]
        due = "no deadline" if deadline is None else f"next at {round(deadline, 3):g}"
        return "; ".join([*(jobs or ["no job"]), due])


class SessionPlayer:
    """`new heartbeat=1 silence=5 unreachable=60 first=600`, then `now what`: see `_event`."""

    def __init__(self) -> None:
        self.links: set[tuple[ms.ConnectionState, ms.ConnectionState]] = set()
        self.effects: set[type] = set()

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            given: dict[str, Any] = {n: float(text) for n, text in fields(words).items()}
            self.draw = given.pop("draw", 1.0)
            names = {"first": "first_contact_s"}
            self.machine = Session(
                0.0,
                run_id=RUN,
                info=NodeInfo(node="a", incarnation=1),
                settings=a_job_of(2, 3),
                timeouts=ms.SessionTimeouts(
                    **{names.get(n, f"{n}_s"): value for n, value in given.items()}
                ),
                draw=lambda: self.draw,
            )
            self.clock = Clock()
            return [self._state()]
        now = self.clock.read(first)
        before = self.machine.connection
        effects = self.machine.handle(now, self._event(*words))
        self.links.add((before, self.machine.connection))
        self.effects |= {type(effect) for effect in effects}
        return [*map(self._done, effects), self._state()]

    def _event(self, verb: str, *words: str) -> ms.SessionEvent:
        given = fields([word for word in words if "=" in word])
        match verb:
            case "tick":
                return TICK
            case "connected":
                return ms.Connected(endpoint_index=int(given.get("endpoint", "0")))
            case "disconnected":
                return ms.Disconnected(" ".join(words))
            case "rejoined":
                return ms.Rejoined(int(words[0]), *words[1:])
            case "stuck":
                return ms.LoopStuck(" ".join(words))
            case "resumed":
                return ms.LoopResumed()
            case "request":
                return ms.RequestMade(Request(id=words[0], action="restart", who="ann@login"))
            case "ack":
                incarnation = int(given.get("of", self.machine.status.info.incarnation))
                call = int(given.get("call", "0"))
                seq = int(words[0])
                return Ack(
                    run_id=RUN,
                    node="a",
                    incarnation=incarnation,
                    seq=seq,
                    call=call,
                    sent_at=float(given.get("sent", "0")),
                    patience=int(given.get("patience", "0")),
                )
            case "status":
                phase = NodePhase(words[0])
                failure = Failure(node="a", summary="oh") if phase is NodePhase.FAILED else None
                return ms.StatusChanged(
                    phase, int(words[1]), failure, report=given.get("report", "").encode()
                )
            case "view":
                return self._view(NodeRole(words[0]), given, final="final" in words)
        raise AssertionError(f"unknown input: {verb!r}")

    def _view(self, role: NodeRole, given: dict[str, str], *, final: bool) -> View:
        answered = given.pop("answered", "")
        numbers: dict[str, Any] = {name: int(text) for name, text in given.items() if name != "of"}
        if answered:
            numbers["answered"] = RequestAnswer(id=answered)
        term, revision = numbers.pop("term", 1), numbers.pop("revision")
        incarnation = int(given.get("of", self.machine.status.info.incarnation))
        return View(
            run_id=RUN,
            node="a",
            incarnation=incarnation,
            term=term,
            revision=revision,
            role=role,
            round_term=term if role is NodeRole.MEMBER else 0,
            final=final,
            **numbers,
        )

    def _done(self, effect: ms.SessionEffect) -> str:
        match effect:
            case ms.Connect():
                return "connect"
            case ms.Disconnect(why):
                return f"disconnect: {why}"
            case ms.DeliverView(view):
                return f"deliver view {view.role.value} {view.term}.{view.revision}"
            case ms.GiveUp(unreachable_s, why):
                return f"give up after {unreachable_s:g} s: {why or 'no contact'}"
            case ms.Send(Heartbeat(seq=seq, term=term, revision=revision, call=call) as beat):
                called = f", roll call {call}" if call else ""
                patience = f", patience {beat.patience}" if beat.patience else ""
                return f"send a heartbeat: status {seq}, view {term}.{revision}{called}{patience}"
            case ms.Send(Status() as status):
                words = [f"send status {status.seq}: {status.phase.value} {status.generation}"]
                words.append(f"incarnation {status.info.incarnation}, term {status.term}")
                if status.round_term:
                    words.append(
                        f"rank {status.rank} of {status.size} in round "
                        f"{status.round_term}.{status.round}, assigned {status.assigned_generation}"
                    )
                if status.restarts:
                    words.append(f"restarts {status.restarts}")
                if status.failure:
                    words.append(f"failure {status.failure.summary!r}")
                if status.report:
                    words.append(f"report {status.report.decode()!r}")
                if status.stuck:
                    words.append(f"stuck: {status.stuck}")
                if status.request:
                    words.append(f"request {status.request.id}")
                if status.drained:
                    words.append("drained")
                return ", ".join(words)
        raise AssertionError(effect)

    def _state(self) -> str:
        deadline = self.machine.next_deadline(self.clock.now)
        at = f" at endpoint {self.machine.endpoint_index}" if self.machine.endpoint_index else ""
        return f"{self.machine.connection.value}{at}, next at {round(deadline, 3):g}"


class CoordinatedPlayer:
    """`new workers=2 restarts=1`, then `1 view member generation=0` or `1 Event field=value`."""

    def __init__(self) -> None:
        self.handled: set[tuple[supervision.State, type]] = set()

    def play(self, line: str) -> list[str]:
        first, *words = shlex.split(line)
        if first == "new":
            given = fields(words)
            limit_s = float(given["exit_barrier"]) if "exit_barrier" in given else None
            self.machine = CoordinatedSupervision(
                SupervisionSettings(limit_s),
                local_world_size=int(given["workers"]),
                max_restarts=int(given["restarts"]),
                join_timeout_s=float(given["join_timeout"]) if "join_timeout" in given else None,
            )
            self.clock = Clock()
            self.revision = 0
            return [self._state()]
        event = self._event(words[0], words[1:])
        self.handled.add((self.machine.state, type(event)))
        try:
            effects = self.machine.handle(self.clock.read(first), event)
            happened = [write_fact(effect) for effect in effects]
        except InvalidEvent as error:
            happened = [f"InvalidEvent: {error}"]
        self.machine.check()
        return [*happened, self._state()]

    def _event(self, name: str, words: list[str]) -> Event:
        if name == "view":
            self.revision += 1
            given: dict[str, Any] = dict(fields([word for word in words[1:] if "=" in word]))
            outcome = given.pop("outcome", "")
            return supervision.ViewReceived(
                View(
                    run_id=RUN,
                    node="a",
                    incarnation=1,
                    term=1,
                    revision=self.revision,
                    role=NodeRole(words[0]),
                    start="hold" not in words,
                    final="final" in words,
                    outcome=JobOutcome(outcome) if outcome else None,
                    **{key: int(text) for key, text in given.items()},  # type: ignore[arg-type]
                )
            )
        if name == "Tick":
            return TICK
        kind: type[Event] = getattr(supervision, name)
        return read_fact(kind, words)

    def _state(self) -> str:
        machine = self.machine
        parts = [f"generation {machine.generation}"]
        if machine.running:
            parts.append(f"running {' '.join(map(str, sorted(machine.running)))}")
        view = machine.view
        parts.append(f"view {described(view)}" if view else "no view")
        return f"{machine.state.value}: {', '.join(parts)}"
