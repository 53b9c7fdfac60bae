"""The machine of one job: it forms rounds, starts generations, and closes the job.

::

    FORMING ── max nodes joined, or min and a settle time ──► ACTIVE ── all succeeded ──► CLOSED
       ▲                                                      │  ▲ │  ── budget spent ──► CLOSED
       └── a member is lost or leaves, fewer than min left ───┘  └─┘
    RECOVERING ── all members are back ──► ACTIVE                 a worker failed: same round,
       └── time out, some missing ──► FORMING or ACTIVE           next generation; members
                                                                  changed: new round

The rules:

1.  A round has between min and max nodes. If max nodes have joined, the round forms immediately. If
    min nodes have joined, it forms once no further node has joined for the settle time, and at the
    latest after `SETTLES_MAX` settle times, so that a flapping node cannot prevent it. `spares` nodes
    are kept as standbys.
2.  If a node joins while the round has room, the job regroups after the settle time, so several
    joiners cost one restart. If the round is full, the node becomes a standby.
3.  If a member is lost or leaves, the round ends. A standby takes over its ranks immediately;
    otherwise the survivors regroup if at least min remain; otherwise the job waits for nodes. If all
    workers of the member have succeeded, the round continues without it.
4.  Survivors keep their order and, where the size allows, their ranks (`core.ranks`).
5.  If a worker fails, all members start the next generation in the same round (`core.policy`).
6.  Generation, fence and restart count belong to the job and never decrease, under any coordinator. So
    a node that reports numbers too far ahead is refused. Only failures are charged to the budget. If
    all nodes leave on request, the restart count is reset.
7.  If the workers of all members have succeeded, the job succeeds. Until then, a failure also restarts
    workers that have succeeded.
8.  Closing is final. A job closes on success, on a failure without a restart left, or on request.
    Losing nodes, even all of them, closes nothing.
9.  A node has an id and an incarnation. A live node keeps its id. A second node with the same id is a
    contender: it joins when the first one is gone. If the first one turns out to be alive, the
    contender is refused, unless the first one yields (`NodeInfo.yields`). If the contender's id is
    generated (`NodeInfo.reserved_on`), it is not refused but gets another id: immediately, unless the
    same machine reserved the id for both, so that the first one can only be gone. A status from an incarnation
    that is out of the job changes nothing; the answer says why it is out, or that the job is over. If
    the job has failed, a node that joins later learns the outcome but not the failure.
10. Decisions carry a term and a revision; nodes ignore decisions older than the newest they have. If a
    coordinator meets nodes of an earlier coordinator, it takes a higher term than any of them knows.
    Once all members of their round have reconnected, it resumes the round unchanged. If the round has
    not started, the coordinator first waits for nodes outside it, which may still have workers.
11. One machine serves one job. Run ids keep jobs apart.
12. While any node may have workers of an earlier generation, no worker of a later generation starts on
    any node. A node has no workers once it reports so (`Status.clear`), or once it is lost. A lost node
    that fences itself may have workers until its stop deadline. Until then views say to stop and not to
    start yet, whether a failure or a loss is the reason, and which nodes are slow. A node that joins meanwhile enters the round immediately.
    The job also waits for nodes that leave.
13. If a node leaves and rejoins repeatedly, its return is delayed: not the first time, then longer
    each time (`return_delay_s`), until it has stayed for `QUIET_S`. A node is recognized by its id. A
    node with a new id takes over the record of a node that left the same host; if several nodes left
    it, the record with the most departures.
14. If an operator sends a request (`core.requests`), the job grants it or refuses it with a reason. A
    restart is the next generation of the same round; if the current generation has not started yet, its
    start is the restart. A drained node has no workers and is excluded: it is replaced, or the round
    shrinks. If the job needs a node, the node cannot be drained. If a request would change nothing, the
    answer says so. No request is charged. A request arrives directly or in a node's status; in the
    latter case the answer is in that node's view.

Use: send each `View` that `handle` returns to its node. When one of `waits` has lasted for its delay, pass
its `ended` to `handle`; `WaitTimers` measures the time. Call `missing_view` for every `Heartbeat`, to send
lost views again. `now` is only used for the story: the state contains no times. The caller measures
each wait by its own clock, from when it first saw the wait. So the state can move from one coordinator
to another.

This module contains the state of a job, which is plain data that can be stored and sent; the events; the
machine; and the views, which are computed from the state.
"""

from __future__ import annotations

import itertools
from collections import deque
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.blame import FailureTrace
from holdfast.core.bounded import (
    Count,
    Incarnation,
    Name,
    NodeCount,
    NodeRank,
    Number,
    Port,
    Report,
    RunId,
    Seconds,
    Why,
)
from holdfast.core.first_failure import first_of, with_rivals
from holdfast.core.job_settings import JobSettings, check_settings, differences
from holdfast.core.limits import (
    NODE_ID_CHARS_MAX,
    REPORTED_COUNTER_MAX,
    STORE_KEY_BYTES,
    VIEW_MEMBERS_MAX,
)
from holdfast.core.machine import Event, InvalidEvent, Story
from holdfast.core.phases import JobOutcome, NodePhase, NodeRole, RefusalReason
from holdfast.core.policy import RestartBudget, Verdict, judge
from holdfast.core.protocol import (
    ControlPort,
    Failure,
    Heartbeat,
    Member,
    NodeInfo,
    Request,
    RequestAnswer,
    Status,
    View,
    check_address,
    check_names,
    names_in,
    reason,
    sanitized_failure,
    sanitized_request,
)
from holdfast.core.ranks import NodeRanks, NodeShape, assign_ranks, order_nodes
from holdfast.core.requests import (
    GRANTED,
    Action,
    RequestRefusal,
    unknown_action,
    with_answer,
)
from holdfast.core.values import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.core.requests import Refused

NO_CLAIM = (0, -1, 0)
RETIRED_MAX = 4_096  # Beyond this, late messages from old incarnations look like new nodes.
HISTORY_LINES_MAX = 200
CAUSES_MAX = 20
STEPS_MAX = 64  # In the story of a job; a coordinator may have a thousand jobs.
RECOVER_S_MIN, RECOVER_S_MAX = 0.7, 5.0
"""How long a new coordinator waits for the nodes of an earlier round, counted from the last one that
reconnected: within these limits, twice the longest time that any node was without a coordinator. Nodes
back off (`core.session`), so after a short outage they reconnect quickly."""
SETTLES_MAX = 5
"""While nodes keep joining, a round forms after this many settle times at the latest. A higher number
admits more nodes that join one by one, and lets a flapping node delay the round for longer."""
RETURN_DELAY_S_MIN = 6.0
"""Longer than the default time to detect a lost node; otherwise lost nodes could be readmitted."""
RETURN_DELAY_S_MAX = 30.0
"""A higher value avoids restarts caused by a flapping node, but a job that needs that node waits longer."""
QUIET_S = 60.0
"""How long a node must stay, in seconds, before the job forgets its departures. They are checked at this
interval, so each is kept for one to two intervals. A higher value recognizes nodes that flap more slowly,
but delays the return of a node for a failure that is long past."""
FLAPS_MAX = 1_024
"""The number of nodes whose departures are recorded. Further nodes rejoin without delay."""
PRESENT_CHANGE_MIN = 0.1
"""Waiting nodes get a new view if the number of nodes changes by more than this share."""
REPORT_S = 10.0  # How long a failed job waits for the report of the node that failed.
CONTENDERS_MAX = 64
SILENCES_UNTIL_ALIVE = 3
"""If a node is not lost after this many silence limits, it is alive. One is not enough, because a lease
may outlast its holder."""
SILENCE_S = 5.0  # The default silence limit.
SLOW_STOP_S = 2.0  # After this long, views name the nodes whose workers have not stopped.
BLAME_S = 0.3  # How long after its report a likelier cause on another node may replace a failure.
GENERATIONS_AHEAD_MAX = 2**20
"""A node from another coordinator may be this many generations or rounds ahead. A higher value lets a
node that reports false numbers advance the job further each time it joins."""
TERMS_AHEAD_MAX = 2**36  # On etcd a term is a revision, which restarts if etcd is set up again.
FENCE_AHEAD_MAX = 2**32  # In milliseconds by another host's clock: seven weeks.
FIRST_REPORTED_MAX = REPORTED_COUNTER_MAX // 2  # While the job has no numbers to compare with.
DRAINED_MAX = 1_024  # Drained nodes, connected or not.
NO_RANKS = NodeRanks(0, 0, 0, 0)
NAMES_MAX = 3
KEY_FACTOR, KEY_MODULUS = 1_000_003, 2**61 - 1

# The state.


class JobPhase(Enum):
    """The phase of a job."""

    FORMING = "forming"
    """There is no active round; nodes are joining."""
    RECOVERING = "recovering"
    """Nodes of an earlier coordinator's round are reconnecting."""
    ACTIVE = "active"
    """There is an active round."""
    CLOSED = "closed"
    """The job is over, for good."""


class Node(msgspec.Struct):
    """A node of the job, with its last report."""

    info: NodeInfo
    seq: Number
    phase: NodePhase
    generation: Number
    failure: Failure | None = None
    claim: tuple[Count, Number, Incarnation] = NO_CLAIM
    """While the job recovers: `(round_term, round, round_key)` of the node's round under an earlier
    coordinator."""
    claimed_rank: NodeRank = -1
    claimed_size: NodeCount = 0
    claimed_generation: Number = -1
    sent_revision: Count = 0
    """The revision of the newest view that was sent to the node."""
    sent_present: NodeCount = 0
    workers: Number = -1
    """The generation whose workers the node may still have, or -1."""
    used_ports: tuple[Port, ...] = ()
    """Ports that the node still lists although a generation may have used them."""
    heartbeats: Count = 0
    """Increases while the node is alive; only used over a backend, without a coordinator."""
    control: ControlPort | None = None
    """The port at which operators reach the node's agent; only used over a backend."""
    last_request: Name = ""
    """The id of the newest request that arrived in its status."""


class RetiredNode(msgspec.Struct, frozen=True):
    """Why an incarnation is no longer in the job."""

    why: Why
    superseded: bool = False
    """Whether another agent has its node id, so that it must not rejoin."""


class ExclusionKind(Enum):
    """Why a node is excluded."""

    DRAINED = "drained"
    """An operator drained it: it has no workers until it is undrained."""
    FLAPPING = "flapping"
    """It left and rejoined too often: its return is delayed."""


class Exclusion(msgspec.Struct, frozen=True):
    """Why a node is not eligible for a round."""

    kind: ExclusionKind
    reason: Why
    until: Number = -1
    """The number of the wait that ends the exclusion; -1 if only a request ends it."""
    lasts_s: Seconds = 0.0
    """The length of that wait."""


class FlapRecord(msgspec.Struct, frozen=True):
    """How often a node left a round that needed it, and when this is forgotten.

    A node keeps its record while it is connected. After that the record passes to the next node with
    the same id, or on the same host.
    """

    host: Name
    departures: Count
    forgotten_at: Count
    """The value of `Job.quiet` at which the record is dropped."""


class Job(msgspec.Struct, kw_only=True):
    """The state of one job."""

    run_id: RunId
    settings: JobSettings | None = None
    phase: JobPhase = JobPhase.FORMING
    term: Count = 1
    revision: Count = 0
    round_term: Count = 0
    round: Number = -1
    generation: Number = -1
    released: Number = -1
    """The last generation whose workers may have started."""
    slow: Why = ""
    """The nodes that prevent the current generation from starting, if this takes long, as text."""
    restarts: Count = 0
    fence: Count = 0
    """The fence of the current generation. It increases with each generation of the run id, under any
    coordinator."""
    fence_floor: Count = 0
    """The next fence is above this number, which no earlier coordinator can have reached."""
    why: Why = ""
    members: list[NodeInfo] = []
    """The nodes of the active round by rank; if no round is active, those of the last one."""
    master_port: Port = 0
    """The port of this generation's store on the first member's host; no other generation uses it."""
    succeeded: set[str] = set()
    """Members whose workers of this generation have all succeeded."""
    nodes: dict[str, Node] = {}
    """The nodes of the job in the order in which they joined; earlier nodes run first."""
    departed: dict[int, Node] = {}
    """Incarnations that are out of the job and may still have workers."""
    retired: dict[int, RetiredNode] = {}
    exclusions: dict[str, Exclusion] = {}
    """Nodes that are not eligible for a round. Only drained nodes stay here while disconnected."""
    exclusion_seq: Count = 0
    flaps: dict[str, FlapRecord] = {}
    """The records of connected nodes and of nodes that left, the latter in the order of leaving."""
    quiet: Count = 0
    """The number of `QUIET_S` periods so far; they are counted while there are departures to forget."""
    forgotten_at: Count = 0
    """The value of `quiet` at which all departures are forgotten."""
    recover_s: Seconds = 0.0
    """How long to wait for the nodes of an earlier round; depends on how long they had no coordinator."""
    patience_s: Seconds = 0.0
    """The minimum wait while expected nodes (max nodes, or the `awaited` ones) are missing."""
    awaited: Count = 0
    """The number of members of an earlier round that are known to be running."""
    claimed: Count = 0
    """The number of nodes that have reconnected from an earlier round."""
    wait_seq: Count = 0
    waiting: bool = False
    """Whether the job waits; `wait_seq` is the number of the wait."""
    settle_seq: Count = 0
    """The number of the first wait of the current settle time."""
    coordinator_address: Name = ""
    """The address at which other hosts reach the coordinator's host, for members that connected over
    loopback."""
    silence_s: Seconds = 0.0
    """After this time without a message a node is lost."""
    outcome: JobOutcome | None = None
    failure: Failure | None = None
    report: Report = b""
    final: bool = False
    pending_requests: dict[str, Request] = {}
    """Undecided requests that arrived in a node's status, by node."""
    answers: dict[str, RequestAnswer] = {}
    """By request id, the newest last."""
    request: Name = ""
    """The id of the newest granted request."""
    request_text: Why = ""
    """That request as text."""
    stopped_by: Name = ""
    """Like `View.stopped_by`."""
    grace_s: float = -1.0
    """Like `View.grace_s`."""
    after_failure: bool = False
    """Like `View.after_failure`."""


def sanitized_job(job: Job) -> Job:
    """Return a stored job with all texts printable; raise `ValueError` if the job is invalid."""
    names = [job.run_id, job.coordinator_address, *job.succeeded]
    for info in job.members:
        names += names_in(info)
    for name, record in job.flaps.items():
        names += (name, record.host)
    for one in (*job.nodes.values(), *job.departed.values()):
        names += names_in(one.info)
        one.failure = sanitized_failure(one.failure)
    names += (*job.exclusions, *job.pending_requests, *job.answers)
    check_names(*names)
    job.exclusions = {
        node: msgspec.structs.replace(one, reason=reason(one.reason))
        for node, one in job.exclusions.items()
    }
    job.pending_requests = {
        node: sanitized_request(one) for node, one in job.pending_requests.items()
    }
    job.request_text = reason(job.request_text)
    check_address(job.coordinator_address)
    for info in (*job.members, *(one.info for one in job.nodes.values())):
        check_address(info.address)
    for incarnation, retired in job.retired.items():
        if not retired.why.isprintable():
            job.retired[incarnation] = msgspec.structs.replace(retired, why=reason(retired.why))
    job.failure = sanitized_failure(job.failure)
    job.why, job.slow = reason(job.why), reason(job.slow)
    problem = contradiction(job)
    if problem:
        raise ValueError(problem)
    return job


def contradiction(job: Job) -> str:
    """Return a contradiction within a stored job; empty if there is none."""
    if any(name != node.info.node for name, node in job.nodes.items()):
        return "a node is stored under a wrong id"
    if any(number != node.info.incarnation for number, node in job.departed.items()):
        return "a node is stored under a wrong incarnation"
    if any(one.until >= 0 and node not in job.nodes for node, one in job.exclusions.items()):
        return "the job waits for a node that is not connected"
    if len({info.node for info in job.members}) != len(job.members):
        return "a node has two ranks"
    if job.settings is None:
        if job.nodes or job.waiting or job.phase is JobPhase.ACTIVE:
            return "the job has nodes and no settings"
    else:
        check_settings(job.settings)
    return broken_invariant(job)


def broken_invariant(job: Job) -> str:
    """Return the broken invariant of a job; empty if there is none. The cost is constant."""
    settings = job.settings
    if len(job.succeeded) > len(job.members):
        return "more members succeeded than the round has"
    if job.released > job.generation:
        return "a generation started before it was decided"
    if (job.outcome is not None) != (job.phase is JobPhase.CLOSED):
        return "the job has an outcome but is not closed, or is closed without an outcome"
    if settings is None:
        return ""
    if budget_of(job).is_exceeded:
        return "the restart budget is exceeded"
    size_ok = settings.min_nodes <= len(job.members) <= settings.max_nodes
    if job.phase is JobPhase.ACTIVE and not size_ok:
        return "the round has too few or too many members"
    is_forming = job.phase is JobPhase.FORMING and job.waiting
    if is_forming and eligible_count(job) < settings.min_nodes:
        return "a round is about to form from too few nodes"
    return ""


# Events. A node's `Status` is an event, too.


class NodeLost(Event):
    """A node is lost: its observer found that it stopped responding."""

    node: str
    incarnation: int
    why: str
    is_silent: bool = True
    """Whether it was silent for long enough: a self-fencing node has stopped its workers by then."""


class NodesLost(Event):
    """Several nodes are lost at the same time. As one event they cause only one new round."""

    lost: tuple[NodeLost, ...]


class WaitKind(Enum):
    """Why a job waits."""

    STEP = "step"
    """For more nodes, the nodes of an earlier round, or a failure report, depending on the phase."""
    SETTLING = "settling"
    """For more nodes, at most `SETTLES_MAX` settle times; its number is that of the first `STEP` wait."""
    STOPPING = "stopping"
    """For workers of earlier generations to exit; its number is the generation that waits."""
    EXCLUDED = "excluded"
    """For the end of a node's exclusion; its number is `Exclusion.until`."""
    CONTENDING = "contending"
    """For the loss of a node whose id is contended; its number is the contender's incarnation."""
    QUIET = "quiet"
    """Until departures are forgotten."""


class WaitEnded(Event):
    """The wait of this kind and number is over."""

    seq: int
    kind: WaitKind = WaitKind.STEP


class CloseRequested(Event):
    """An authorized caller closes the job."""

    outcome: JobOutcome
    why: str


JobEvent = Status | NodeLost | NodesLost | WaitEnded | CloseRequested | Request


class Change(Value):
    """A change of the job, for people."""

    text: str
    why: str = ""
    is_problem: bool = False
    """Whether a failure or a loss is the reason."""
    generation: int = -1
    """The generation in which it happened: a failure or a loss ends it."""
    outcome: JobOutcome | None = None
    """How the job ended, if this is its end."""


class Wait(Value):
    """Pass `ended` to the machine once this has been in `Rounds.waits` for `delay_s`."""

    ended: WaitEnded
    delay_s: float


class WaitTimers:
    """When the waits of a job end, by the observer's clock, counted from when it first saw each wait."""

    def __init__(self) -> None:
        self._ends: dict[WaitEnded, tuple[float, str]] = {}  # The end, and the step that caused it.

    def observe(self, now: float, rounds: Rounds) -> None:
        """Note the current waits of the job."""
        waits = rounds.waits
        if waits or self._ends:
            known, cause = self._ends, rounds.story.last
            self._ends = {
                wait.ended: known.get(wait.ended) or (now + wait.delay_s, cause) for wait in waits
            }

    def ended(self, now: float) -> list[tuple[WaitEnded, str]]:
        """Return the waits that have ended by now, the earliest first, each with its cause."""
        over = [(at, ended, cause) for ended, (at, cause) in self._ends.items() if at <= now]
        return [(ended, cause) for _at, ended, cause in sorted(over, key=lambda one: one[0])]

    @property
    def next_end(self) -> float | None:
        return min((at for at, _cause in self._ends.values()), default=None)


# The machine.


class Rounds:
    """The machine of one job; its state may come from another process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank_table = RankTable(job)
        nodes = (*job.nodes.values(), *job.departed.values())
        self._with_workers = {one.info.incarnation for one in nodes if one.workers >= 0}
        # Nodes with the id of a connected node, by incarnation. They are not part of the state,
        # because they report to the next coordinator again.
        self._contenders: dict[int, Status] = {}
        # The ranks of the round before the current event. If an event forms two rounds, the first one is
        # never sent.
        self._ranks_before: tuple[dict[str, int], int] | None = None
        self.history: deque[Change] = deque(maxlen=HISTORY_LINES_MAX)
        self.changes = 0
        """The number of changes ever added to the history."""
        # The generation that the current event ended by a failure or a loss.
        self._broken_generation: int | None = None
        self.causes: deque[str] = deque(maxlen=CAUSES_MAX)
        """The causes of the restarts that this machine charged."""
        self.story = Story("rounds", node=job.run_id, steps_max=STEPS_MAX)

    def handle(self, now: float, event: JobEvent, cause: str = "") -> list[View]:
        """Handle one event; return the views to send, each to its own node."""
        phase = self.job.phase
        self._ranks_before = self._broken_generation = None
        match event:
            case Status():
                views = self._status(event)
                cause = cause or event.id
                if event.report:  # It may be large, and the story keeps the event.
                    event = msgspec.structs.replace(event, report=b"")
            case NodeLost():
                views = self._remove_lost((event,))
            case NodesLost(lost):
                views = self._remove_lost(lost)
            case WaitEnded():
                is_current = any(event == wait.ended for wait in self.waits)
                views = self._wait_ended(event) if is_current else []
            case CloseRequested(outcome, why):
                views = [] if phase is JobPhase.CLOSED else self._close(outcome, why)
            case Request():
                views = self._request(event)
            case _:
                raise InvalidEvent(f"{event!r} is not an event of a job")
        if self.job.pending_requests and self.job.phase is not JobPhase.RECOVERING:
            newer = self._decide_requests()  # These views replace those of the event itself.
            sent = {(view.node, view.incarnation) for view in newer}
            views = [one for one in views if (one.node, one.incarnation) not in sent] + newer
        if self.job.final:
            contenders, self._contenders = self._contenders, {}
            for status in contenders.values():
                views += self._status(status)
        if self._release_generation():
            self._record_change(self.job.why)
            views += self._send_members()
        self.story.record(now, phase, event, views, cause)
        return views

    @property
    def waits(self) -> list[Wait]:
        """All current waits of the job."""
        waits = self._waits_of_job()
        if self._contenders and self.job.phase is not JobPhase.CLOSED:
            delay_s = SILENCES_UNTIL_ALIVE * (self.job.silence_s or SILENCE_S)
            for one in self._contenders:
                waits.append(Wait(WaitEnded(one, WaitKind.CONTENDING), delay_s))
        return waits

    def _waits_of_job(self) -> list[Wait]:
        job = self.job
        waits: list[Wait] = []
        if job.waiting:
            step = WaitEnded(job.wait_seq)
            if job.phase is JobPhase.RECOVERING:
                short_s = max(RECOVER_S_MIN, job.recover_s)
                if any(one.info.self_fencing for one in job.nodes.values()):
                    short_s = max(short_s, job.silence_s)  # Missing nodes have no workers by then.
                long_s = max(short_s, job.patience_s)
                return [Wait(step, short_s if self._all_expected() else long_s)]
            if job.phase is JobPhase.CLOSED:
                return [Wait(step, BLAME_S if job.report else REPORT_S)]
            settle_s = self._settings.settle_s
            settling = WaitEnded(job.settle_seq, WaitKind.SETTLING)
            waits = [Wait(step, settle_s), Wait(settling, SETTLES_MAX * settle_s)]
        if job.phase is JobPhase.CLOSED:
            return []
        if is_held(job) and not job.slow:
            waits.append(Wait(WaitEnded(job.generation, WaitKind.STOPPING), SLOW_STOP_S))
        for one in job.exclusions.values():
            if one.until >= 0:
                waits.append(Wait(WaitEnded(one.until, WaitKind.EXCLUDED), one.lasts_s))
        if job.quiet < job.forgotten_at:
            waits.append(Wait(WaitEnded(job.quiet, WaitKind.QUIET), QUIET_S))
        return waits

    def missing_view(self, heartbeat: Heartbeat) -> View | None:
        """Return the view that a node lacks according to its heartbeat, or None."""
        job = self.job
        known = self._known(heartbeat.node, heartbeat.incarnation)
        if known is None or job.phase is JobPhase.RECOVERING:
            # The `Ack` tells the node to send its status first; in a recovering job, all nodes must.
            return None
        change = abs(len(job.nodes) - known.sent_present)
        waits = job.phase is JobPhase.FORMING and change > known.sent_present * PRESENT_CHANGE_MIN
        if waits or (heartbeat.term, heartbeat.revision) < (job.term, known.sent_revision):
            return self._send(known, new_revision=waits)
        return None

    def seq_of(self, node: str, incarnation: int) -> int:
        """Return the number of the newest status of an incarnation, or -1 if the job does not know it.

        The job also knows contenders, and departed nodes that may still have workers.
        """
        known = self._known(node, incarnation) or self.job.departed.get(incarnation)
        newest = known or self._contenders.get(incarnation)
        return newest.seq if newest else -1

    def knows_incarnation(self, node: str, incarnation: int) -> bool:
        """Whether an incarnation is in the job, or left it and may still have workers."""
        return self._known(node, incarnation) is not None or incarnation in self.job.departed

    def fences_itself(self, node: str, incarnation: int) -> bool:
        """Whether an incarnation stops its workers when it is disconnected, as far as the job knows it."""
        known = self._known(node, incarnation) or self.job.departed.get(incarnation)
        return known is None or known.info.self_fencing

    def check(self) -> None:
        """Assert the invariants; the cost does not grow with the job."""
        problem = broken_invariant(self.job)
        assert not problem, problem
        if self.job.phase is JobPhase.ACTIVE:
            assert len(self.rank_table.rank_of) == len(self.job.members), "a node has two ranks"

    # Statuses.

    def _status(self, status: Status) -> list[View]:
        job, info = self.job, status.info
        if status.run_id != job.run_id:
            raise InvalidEvent(f"a status of {status.run_id!r} was given to {job.run_id!r}")
        departed = job.departed.get(info.incarnation)
        if departed is not None and status.seq > departed.seq:
            departed.seq = status.seq
            self._note_clear(departed, status)
        retired = job.retired.get(info.incarnation)
        if retired is not None and job.phase is JobPhase.CLOSED and not retired.superseded:
            # There is no job to rejoin, and there may be no time for another message.
            return [self._send_outsider(info, NodeRole.CLOSED, job.why, known_term=status.term)]
        if retired is not None:
            role, refusal = NodeRole.FENCED, None
            if retired.superseded:
                role, refusal = NodeRole.REFUSED, RefusalReason.REPLACED
            later_term = status.term if status.term > job.term else 0
            return [self._send_outsider(info, role, retired.why, refusal, known_term=later_term)]
        known = job.nodes.get(info.node)
        if known is not None and known.info.incarnation == info.incarnation:
            if status.seq <= known.seq:
                return []
            self._note_request(status)
            return self._update(known, status)
        before = self._contenders.pop(info.incarnation, None)
        if before is not None and status.term <= job.term:
            # The contender knows this term from this coordinator, not from another one.
            status = msgspec.structs.replace(status, term=before.term)
        return self._introduce(status)

    def _introduce(self, status: Status, *, reviewed: bool = True) -> list[View]:
        """Admit a node that is not in the job, if possible.

        Unless `reviewed`, the caller changes the round once it has added all nodes.
        """
        job, info = self.job, status.info
        if status.phase is NodePhase.LEAVING or status.stuck:
            may_have_workers = not status.stuck and status.oldest_generation <= status.generation
            if reports_round(status) and not job.round_term and may_have_workers:
                # It was a member under an earlier coordinator: this job must wait for its workers.
                leaving = Node(info, status.seq, status.phase, status.generation)
                job.departed[info.incarnation] = leaving
                self._set_workers(leaving, status.generation)
                self._retire(info, f"{info.node} left")
            return []
        if job.phase is JobPhase.CLOSED:
            return [self._send_end(status)]
        problem = objection(job, status) or implausible_report(job, status)
        if problem:
            refusal = RefusalReason.SETTINGS
            return [
                self._send_outsider(
                    info, NodeRole.REFUSED, problem, refusal, known_term=status.term
                )
            ]
        is_outdated = not self._outranked(status) and not self._is_ahead(status)
        if job.round_term and reports_round(status) and is_outdated:
            why = f"the job continued without {info.node}"
            self._retire(info, why)
            return [self._send_outsider(info, NodeRole.FENCED, why)]
        views: list[View] = []
        broken = ""
        known = job.nodes.get(info.node)
        if known is not None:
            if needs_other_id(info, known.info):
                return [self._send_other_id(status, has_waited=False)]
            if not known.info.yields:
                return self._add_contender(status, known)
            why = f"another agent replaced {info.node} (on {info.host or 'its host'})"
            broken = why if self._remove(known, why, superseded=True) else ""
            views = [self._send_outsider(known.info, NodeRole.REFUSED, why, RefusalReason.REPLACED)]
        views += self._join(status, broken, reviewed=reviewed)
        if status.phase is NodePhase.CLOSING:
            views += self._close(JobOutcome.STOPPED, f"{info.node} closed the job")
        return views

    def _add_contender(self, status: Status, known: Node) -> list[View]:
        """Let a node wait because another connected node has its id."""
        if len(self._contenders) >= CONTENDERS_MAX:
            return self._refuse_contender(status)
        self._contenders[status.info.incarnation] = status
        # A node that knows a later term ignores this view, and stays uninformed until it is admitted.
        view = self._send_outsider(status.info, NodeRole.WAITING, "")
        return [
            msgspec.structs.replace(
                view,
                present=len(self.job.nodes),
                needed=self._settings.min_nodes,
                wait_reason=contender_waits_text(known.info),
            )
        ]

    def _refuse_contender(self, status: Status) -> list[View]:
        info = status.info
        if info.reserved_on:
            return [self._send_other_id(status, has_waited=True)]
        why = contender_refused_text(self.job.nodes[info.node].info)
        self._retire(info, why, superseded=True)
        refusal = RefusalReason.REPLACED
        return [self._send_outsider(info, NodeRole.REFUSED, why, refusal, known_term=status.term)]

    def _send_other_id(self, status: Status, *, has_waited: bool) -> View:
        """Return the view that makes a node rejoin with another id."""
        contended = [one.info.node for one in self._contenders.values()]
        self.job.revision += 1
        return view_with_other_id(self.job, status, contended, has_waited=has_waited)

    def _admit_contenders(self, broken: str) -> list[View]:
        """Admit contenders whose id is free now. `broken` is the reason to change the round, if any."""
        views: list[View] = []
        for incarnation, status in [*self._contenders.items()]:
            if status.info.node not in self.job.nodes:
                del self._contenders[incarnation]
                views += self._introduce(status, reviewed=not broken)
        return views + self._repair(broken) if broken else views

    def _update(self, known: Node, status: Status) -> list[View]:
        known.seq = status.seq
        self._note_clear(known, status)
        if status.phase is NodePhase.LEAVING:
            why = f"{known.info.node} left"
            broken = why if self._remove(known, why) else ""
            if not self.job.nodes:  # All nodes left on request.
                self.job.restarts = 0
            return self._admit_contenders(broken)
        self._note_ports(known, status.info.ports)
        if status.stuck:
            lost = NodeLost(known.info.node, known.info.incarnation, status.stuck)
            return [
                *self._remove_lost((lost,)),
                self._send_outsider(known.info, NodeRole.FENCED, status.stuck),
            ]
        known.phase, known.generation = status.phase, status.generation
        known.failure = status.failure
        if self.job.phase is JobPhase.CLOSED:
            return self._late_failure(status)
        if status.phase is NodePhase.CLOSING:
            return self._close(JobOutcome.STOPPED, f"{known.info.node} closed the job")
        views = self._apply(known, status)
        if status.unreachable_s and not views and self.job.phase is not JobPhase.RECOVERING:
            # The node was disconnected and waits for a view.
            views.append(self._send(known, new_revision=True))
        return views

    def _note_ports(self, known: Node, ports: tuple[int, ...]) -> None:
        """Note the ports that a node holds now; later generations use them."""
        if ports == known.info.ports:
            return
        known.info = msgspec.structs.replace(known.info, ports=ports)
        known.used_ports = tuple(port for port in known.used_ports if port in ports)
        node = known.info.node
        if self.rank_table.incarnation_of(node) == known.info.incarnation:
            self.job.members[self.rank_table.rank_of[node]] = known.info

    def _apply(self, known: Node, status: Status) -> list[View]:
        """Act on a member's report about the current generation."""
        job, node = self.job, known.info.node
        if (
            job.phase is not JobPhase.ACTIVE
            or status.generation != job.generation
            or self.rank_table.incarnation_of(node) != known.info.incarnation
        ):
            return []
        if status.phase is NodePhase.FAILED:
            return self._worker_failed(known, status.report)
        if status.phase is NodePhase.SUCCEEDED:
            job.succeeded.add(node)
            if len(job.succeeded) == len(job.members):
                return self._close(JobOutcome.SUCCEEDED, "all workers succeeded")
        elif status.phase is NodePhase.READY:  # The node stopped its workers on its own.
            return self._next_generation(f"{node} requested a restart")
        return []

    def _late_failure(self, status: Status) -> list[View]:
        job = self.job
        if job.final or status.failure is None or job.failure is None:
            return []
        known, reported = job.failure, status.failure
        if reported.node == known.node:
            if status.report:
                rivals = known.rivals if reported.rank == known.rank else ()
                self._record_failure(with_rivals(reported, *rivals), status.report)
            return []
        first, certain = first_of(known, reported)
        other = reported if first is known else known
        rivals = () if certain else (other.rank,)
        # If the first failure is about a peer, any node that failed without output may be that peer.
        if not certain or first.trace is FailureTrace.PEER:
            rivals += other.rivals
        if first is reported:
            self._record_failure(with_rivals(reported, *rivals), status.report)
        else:
            job.failure = with_rivals(known, *rivals)
        return []

    def _record_failure(self, failure: Failure, report: bytes) -> None:
        """Record the failure that ended the job, until a likelier cause is reported."""
        job = self.job
        job.failure, job.report, job.why = failure, report, reason(failure.summary)
        self._begin_wait()

    # Joining nodes and ended waits.

    def _join(self, status: Status, broken: str = "", *, reviewed: bool = True) -> list[View]:
        """Add a node. `broken` is the reason to change the round, if it must change anyway.

        Unless `reviewed`, the caller changes the round once it has added all nodes.
        """
        job, info = self.job, status.info
        if job.settings is None or not job.nodes:
            job.settings = status.settings  # The first node to join an empty job may change them.
            job.restarts = budget_of(job).limited().used
        node = Node(info, status.seq, status.phase, status.generation, status.failure)
        job.nodes[info.node] = node
        if status.oldest_generation <= status.generation:
            self._set_workers(node, status.generation)
        if status.drained and len(drained_nodes(job)) < DRAINED_MAX:
            drained = Exclusion(ExclusionKind.DRAINED, "drained under an earlier coordinator")
            job.exclusions = {info.node: drained, **job.exclusions}
        self._note_request(status)
        self._take_over_record(node)
        after_another = self._outranked(status)
        if after_another:
            job.term = status.term + 1
        if after_another or reports_round(status):
            job.recover_s = min(RECOVER_S_MAX, max(job.recover_s, 2 * status.unreachable_s))
        ahead = self._is_ahead(status)
        job.generation = max(job.generation, known_generation(status))
        job.fence = max(job.fence, status.fence)
        job.restarts = max(job.restarts, budget_of(job, status.restarts).limited().used)
        if reports_round(status) and not job.round_term:
            if status.assigned_generation == job.generation:
                job.master_port = status.master_port
            return self._note_claim(node, status)
        if ahead and job.phase is JobPhase.ACTIVE and reviewed:
            # The job ran in two rounds: neither may continue unchanged.
            return self._repair(f"{info.node} joined from another coordinator's round")
        if after_another and job.phase is JobPhase.FORMING and not job.round_term:
            # The node waited under an earlier coordinator, whose members may reconnect.
            job.phase = JobPhase.RECOVERING
            self._begin_wait()
        if not reviewed:
            return []
        return self._repair(broken) if broken else self._form_or_wait(node)

    def _outranked(self, status: Status) -> bool:
        """Whether a new node knows this term or a later one from another coordinator."""
        return status.term >= self.job.term

    def _is_ahead(self, status: Status) -> bool:
        """Whether a node knows a generation or fence that this job has not reached yet."""
        return known_generation(status) > self.job.generation or status.fence > self.job.fence

    def _all_expected(self) -> bool:
        """Whether all expected nodes of a recovering job have reconnected."""
        job = self.job
        max_nodes = job.settings.max_nodes if job.settings else 1
        return len(job.nodes) >= max_nodes or 0 < job.awaited <= job.claimed

    def _form_or_wait(self, newcomer: Node) -> list[View]:
        """Form a round with a new node, or wait for more nodes, or only send the node a view."""
        job = self.job
        eligible, max_nodes = self._eligible, self._settings.max_nodes
        if job.phase is JobPhase.RECOVERING:
            if not job.patience_s:
                return []
            if eligible == max_nodes:
                self._begin_wait()
            # The view says what the job waits for.
            return [self._send(newcomer, new_revision=True)]
        exclusion = job.exclusions.get(newcomer.info.node)
        if exclusion is not None:
            if exclusion.kind is ExclusionKind.DRAINED or job.phase is JobPhase.ACTIVE:
                return [self._send(newcomer, new_revision=True)]
            self._record_change(reason_for_delay(job))
            return self._send_all()
        if job.phase is JobPhase.FORMING:
            if eligible >= self._settings.min_nodes:
                if self._size(eligible) == max_nodes:
                    return self._form_round(why_formed(job))
                self._wait_for_more_nodes(is_first=eligible == self._settings.min_nodes)
        elif self._size(eligible) > len(job.members):
            if is_held(job):  # No worker runs yet, so none has to stop.
                return self._form_round(why_formed(job))
            self._wait_for_more_nodes(is_first=self._size(eligible - 1) <= len(job.members))
        return [self._send(newcomer, new_revision=True)]

    def _wait_ended(self, event: WaitEnded) -> list[View]:
        job = self.job
        if event.kind is WaitKind.STOPPING:
            return self._report_slow()
        if event.kind is WaitKind.QUIET:
            job.quiet += 1
            job.flaps = {
                node: one
                for node, one in job.flaps.items()
                if node in job.nodes or job.quiet < one.forgotten_at
            }
            return []
        if event.kind is WaitKind.CONTENDING:
            return self._refuse_contender(self._contenders.pop(event.seq))
        if event.kind is WaitKind.EXCLUDED:
            name = next(node for node, one in job.exclusions.items() if one.until == event.seq)
            self._include(name)
            return self._form_or_wait(job.nodes[name])
        job.waiting = False
        if job.phase is JobPhase.CLOSED:
            return self._finalize()
        if job.phase is JobPhase.RECOVERING:
            returned = self._complete_round()
            if returned:
                return self._resume_round(returned)
            if not claimants(job):
                return self._repair(why_formed(job))
            job.after_failure = True
            return self._repair("not all nodes reconnected after the coordinator was lost")
        if job.phase is JobPhase.FORMING:
            return self._form_round(why_formed(job))
        if self._size(self._eligible) > len(job.members):
            return self._form_round(why_formed(job))
        outside = [node for name, node in job.nodes.items() if name not in self.rank_table.rank_of]
        return [self._send(node, new_revision=True) for node in outside]  # They are standbys now.

    def _note_claim(self, node: Node, status: Status) -> list[View]:
        """Note a member of an earlier coordinator's round; resume the round once it is complete."""
        job = self.job
        node.claim = (status.round_term, status.round, status.round_key)
        node.claimed_rank, node.claimed_size = status.rank, status.size
        node.claimed_generation = max(status.generation, status.assigned_generation)
        job.claimed += 1
        job.phase = JobPhase.RECOVERING
        job.round = max(job.round, status.round)
        self._begin_wait()
        returned = self._complete_round() if len(job.nodes) >= status.size else []
        # A round that has not started may wait for workers of nodes outside it. Those nodes have
        # reconnected by the end of the wait.
        if any(one.generation == job.generation for one in returned):
            return self._resume_round(returned)
        return []

    def _complete_round(self) -> list[Node]:
        """Return the members of an earlier coordinator's round by rank, if all have reconnected."""
        returned = claimants(self.job)
        ranks = [one.claimed_rank for one in returned]
        if not returned or ranks != list(range(returned[0].claimed_size)):
            return []
        if max(one.claimed_generation for one in returned) < self.job.generation:
            return []  # A node knows a later generation, so this round is over.
        return returned

    def _resume_round(self, returned: list[Node]) -> list[View]:
        """Resume an earlier coordinator's round."""
        job = self.job
        job.members = [one.info for one in returned]
        job.round_term, job.round, _key = returned[0].claim
        job.phase, job.waiting = JobPhase.ACTIVE, False
        if any(one.generation == job.generation for one in returned):
            job.released = job.generation
            self._note_used_port()
            for one in returned:  # The other members may have started, too.
                if one.generation < job.generation:
                    self._set_workers(one, job.generation)
        self.rank_table = RankTable(job)
        for one in job.nodes.values():
            one.claim = NO_CLAIM  # The round has the ranks now.
        self._record_change("all nodes reconnected after the coordinator was lost")
        if self._size(self._eligible) > len(returned):
            self._wait_for_more_nodes(is_first=True)
        for one in returned:  # Without a coordinator the nodes could not report this.
            if one.generation == job.generation and one.phase is NodePhase.SUCCEEDED:
                job.succeeded.add(one.info.node)
        return self._apply_missed_reports(returned) or self._send_all()

    def _apply_missed_reports(self, returned: list[Node]) -> list[View]:
        job = self.job
        if len(job.succeeded) == len(job.members):
            return self._close(JobOutcome.SUCCEEDED, "all workers succeeded")
        for one in returned:
            if one.generation == job.generation and one.phase in (
                NodePhase.FAILED,
                NodePhase.READY,
            ):
                if one.phase is NodePhase.FAILED:
                    return self._worker_failed(one, b"")
                return self._next_generation(f"{one.info.node} requested a restart")
        return []

    # Rounds and generations.

    @property
    def _eligible(self) -> int:
        """The number of eligible nodes."""
        return eligible_count(self.job)

    def _size(self, eligible: int) -> int:
        """Return the size of a round if this many nodes are eligible; spares are kept if possible."""
        settings = self._settings
        wanted = max(settings.min_nodes, eligible - settings.spares)
        return min(wanted, eligible, settings.max_nodes)

    def _form_round(self, why: str) -> list[View]:
        job = self.job
        eligible = [node for name, node in job.nodes.items() if is_eligible(job, name)]
        count, max_nodes = len(eligible), self._settings.max_nodes
        self._ranks_before = self._ranks_before or previous_ranks(job, self.rank_table)
        previous, previous_size = self._ranks_before
        # A spare replaces a lost node before the round shrinks.
        size = max(self._size(count), min(previous_size, count, max_nodes))
        first = sorted(eligible, key=lambda node: node.info.node not in previous)
        infos = [node.info for node in first[:size]]
        job.members = order_nodes(infos, previous, self._settings.order)
        job.round += 1
        job.round_term = job.term
        job.phase, job.waiting = JobPhase.ACTIVE, False
        for node in eligible:
            node.claim = NO_CLAIM
        self._begin_generation(why)
        return self._send_all()

    def _next_generation(self, why: str) -> list[View]:
        """Restart all workers, in a new round if nodes wait or a succeeded member has left."""
        job = self.job
        all_eligible = all(
            self._known(info.node, info.incarnation) and is_eligible(job, info.node)
            for info in job.members
        )
        if not all_eligible or self._size(self._eligible) > len(job.members):
            return self._repair(why)
        self._begin_generation(why)
        return self._send_all()  # Standbys included: they may have to inform the next coordinator.

    def _begin_generation(self, why: str) -> None:
        job = self.job
        job.generation += 1
        job.fence = max(job.fence, job.fence_floor) + 1
        job.succeeded = set()
        job.slow = ""
        job.master_port = self._fresh_port(job.members[0])
        self._release_generation()
        self.rank_table = RankTable(job)
        self._record_change(why)

    def _fresh_port(self, first: NodeInfo) -> int:
        """Return a port of the first node that no generation has used.

        If a generation never started, the next one uses its port. A node holds two ports, and one is
        always unused: before a generation starts, the node has reported that the last one's workers
        have exited, and which ports it holds now.
        """
        known = self._known(first.node, first.incarnation)
        fresh = [port for port in first.ports if known is None or port not in known.used_ports]
        return fresh[0] if fresh else first.ports[self.job.generation % len(first.ports)]

    def _release_generation(self) -> bool:
        """Let the current generation start if it may; return whether it starts now."""
        job = self.job
        if not is_held(job) or self._with_workers:
            return False
        job.released = job.generation
        job.slow, job.after_failure = "", False
        self._expect_workers()
        return True

    def _report_slow(self) -> list[View]:
        """Send views that name the nodes for which the current generation waits."""
        self.job.slow = slow_stop_text(self.job)
        self._record_change(self.job.why)
        return self._send_all()

    def _expect_workers(self) -> None:
        for info in self.job.members:
            known = self._known(info.node, info.incarnation)
            if known is not None:
                self._set_workers(known, self.job.generation)
        self._note_used_port()

    def _note_used_port(self) -> None:
        job = self.job
        first = self._known(job.members[0].node, job.members[0].incarnation)
        if first is None or job.master_port not in first.info.ports:
            return
        if job.master_port not in first.used_ports:
            first.used_ports = (*first.used_ports, job.master_port)

    def _note_clear(self, node: Node, status: Status) -> None:
        """Note whether a node's workers have exited. A leaving node starts no more workers."""
        ended = status.phase is NodePhase.LEAVING and status.oldest_generation > status.generation
        if ended or status.oldest_generation > node.workers:
            self._set_workers(node, -1)

    def _set_workers(self, node: Node, generation: int) -> None:
        incarnation = node.info.incarnation
        node.workers = generation
        if generation >= 0:
            self._with_workers.add(incarnation)
        else:
            self._with_workers.discard(incarnation)
            self.job.departed.pop(incarnation, None)

    def _repair(self, why: str) -> list[View]:
        """Continue after the round lost a member: replace it, shrink the round, or wait for nodes."""
        if self.job.phase is JobPhase.CLOSED:
            return self._finalize()
        if self._eligible >= self._settings.min_nodes:
            return self._form_round(why)
        self.job.phase = JobPhase.FORMING
        self.job.waiting = False
        for node in self.job.nodes.values():
            node.claim = NO_CLAIM  # The node is about to stop its workers.
        self._record_change(why)
        return self._send_all()

    def _remove_lost(self, lost: tuple[NodeLost, ...]) -> list[View]:
        """Remove nodes that are lost at the same time, and form at most one new round."""
        broken = ""
        for one in lost:
            known = self._known(one.node, one.incarnation)
            gone = known or self.job.departed.get(one.incarnation)
            if gone is not None and (one.is_silent or not gone.info.self_fencing):
                self._set_workers(gone, -1)
            why = f"{one.node} was lost: {one.why}"
            generation = self.job.generation
            if known is not None and self._remove(known, why):
                broken, self._broken_generation = broken or why, generation
                self.job.after_failure = True
            self._contenders.pop(one.incarnation, None)
        return self._admit_contenders(broken)

    def _remove(self, known: Node, why: str, *, superseded: bool = False) -> bool:
        """Remove a node; return whether this breaks the round."""
        job, info = self.job, known.info
        was_member = self.rank_table.incarnation_of(info.node) == info.incarnation
        broken = job.phase is JobPhase.ACTIVE and was_member and info.node not in job.succeeded
        del job.nodes[info.node]
        self._retire(info, why, superseded=superseded)
        self._note_departure(info, broken=broken)
        if job.phase is JobPhase.CLOSED:
            awaited = job.failure is not None and job.failure.node == info.node
            return awaited and not job.report and not job.final
        if known.workers >= 0:
            job.departed[info.incarnation] = known
        if job.phase is JobPhase.FORMING and self._eligible < self._settings.min_nodes:
            job.waiting = False
        return broken

    # Nodes that leave and rejoin.

    def _note_departure(self, gone: NodeInfo, *, broken: bool) -> None:
        """Record the departure of a node that breaks the round now or broke one before."""
        job = self.job
        job.pending_requests.pop(gone.node, None)
        if not is_drained(job, gone.node):
            self._include(gone.node)
        record = job.flaps.pop(gone.node, None)
        departures, forgotten_at = 0, 0
        if record is not None and job.quiet < record.forgotten_at:
            departures, forgotten_at = record.departures, record.forgotten_at
        if broken:
            departures += 1
            job.forgotten_at = forgotten_at = job.quiet + 2
        if not job.nodes:  # Its return cannot restart other nodes.
            job.flaps, job.forgotten_at = {}, job.quiet
        elif departures:
            record = FlapRecord(gone.host, departures, forgotten_at)
            successor = self._early_successor(gone) if broken else None
            if successor is not None:
                self._assign_record(successor, record)
                return
            job.flaps[gone.node] = record
            if len(job.flaps) > FLAPS_MAX:
                absent = [node for node in job.flaps if node not in job.nodes]
                for node in absent[:-FLAPS_MAX]:
                    del job.flaps[node]

    def _early_successor(self, gone: NodeInfo) -> Node | None:
        """Return the node that replaced a lost node on its host before the loss was detected."""
        job = self.job
        if not job.waiting or not job.nodes:
            return None
        newest = next(reversed(job.nodes.values()))
        name = newest.info.node
        is_new = name not in self.rank_table.rank_of and name not in job.flaps
        return newest if is_new and gone.host and newest.info.host == gone.host else None

    def _take_over_record(self, node: Node) -> None:
        """Give a new node the record of the node that it replaces."""
        job, info = self.job, node.info
        left = info.node
        if left not in job.flaps:
            absent = [name for name in job.flaps if name not in job.nodes]
            same_host = [name for name in absent if info.host and job.flaps[name].host == info.host]
            if not same_host:
                return
            left = max(same_host, key=lambda name: job.flaps[name].departures)
        self._assign_record(node, job.flaps.pop(left))

    def _assign_record(self, node: Node, record: FlapRecord) -> None:
        """Give a connected node a record; exclude the node if the record has too many departures."""
        job, name = self.job, node.info.node
        job.flaps[name] = record
        delay_s = return_delay_s(record.departures)
        if delay_s and is_eligible(job, name):
            job.exclusion_seq += 1
            why = (
                f"{name} left and rejoined {record.departures} times recently; "
                f"delaying its return by {delay_s:g} s"
            )
            flapping = Exclusion(ExclusionKind.FLAPPING, why, job.exclusion_seq, delay_s)
            job.exclusions = {**job.exclusions, name: flapping}

    def _include(self, *nodes: str) -> None:
        """End the exclusion of nodes."""
        job = self.job
        job.exclusions = {node: one for node, one in job.exclusions.items() if node not in nodes}

    def _worker_failed(self, node: Node, report: bytes) -> list[View]:
        job, failure = self.job, node.failure
        what = failure.summary if failure else f"a worker on {node.info.node} failed"
        retryable = failure is None or failure.retryable
        job.failure, job.report, job.after_failure = failure, report, True
        budget = budget_of(job)
        if judge(budget, retryable=retryable) is Verdict.GIVE_UP:
            return self._close(JobOutcome.FAILED, what)
        job.restarts, self._broken_generation = budget.charge().used, job.generation
        self.causes.append(f"generation {job.generation}: {what}")
        views = self._next_generation(what)
        job.failure, job.report = None, b""
        return views

    def _close(self, outcome: JobOutcome, why: str) -> list[View]:
        job = self.job
        job.phase = JobPhase.CLOSED
        job.outcome = outcome
        job.final = job.failure is None or outcome is not JobOutcome.FAILED
        job.waiting = False
        if not job.final:
            self._begin_wait()
        self._record_change(why)
        return self._send_all()

    def _finalize(self) -> list[View]:
        self.job.final = True
        self.job.waiting = False
        self._record_change(self.job.why)
        return self._send_all()

    # Requests.

    def answer_to(self, request_id: str) -> RequestAnswer | None:
        """Return the answer to a request; None if the request is unknown or too old."""
        return self.job.answers.get(request_id)

    def _note_request(self, status: Status) -> None:
        """Keep the request in a node's status until it can be decided, usually immediately."""
        if status.request is not None:
            self.job.pending_requests[status.info.node] = status.request

    def _decide_requests(self) -> list[View]:
        job = self.job
        views: dict[tuple[str, int], View] = {}
        pending_requests, job.pending_requests = job.pending_requests, {}
        for name, request in pending_requests.items():
            is_new = request.id not in job.answers
            sent = self._request(request)
            node = job.nodes.get(name)
            # If the node sent its status before it received the answer, it needs no second one.
            if node is not None and (is_new or node.last_request != request.id):
                node.last_request = request.id
                sent.append(self._send(node, new_revision=True))
            views |= {(view.node, view.incarnation): view for view in sent}
        return [*views.values()]

    def _request(self, request: Request) -> list[View]:
        """Grant a request or refuse it; do nothing if it was answered before."""
        job = self.job
        if request.id in job.answers:
            return []
        refusal, why = self._refusal_of(request)
        if refusal is None:
            why = self._unchanged_because(request)
        answer = RequestAnswer(
            id=request.id, refusal=refusal.value if refusal else "", why=reason(why)
        )
        job.answers = with_answer(job.answers, request.id, answer)
        if why:
            self._record(Change(f"{'refused: ' if refusal else ''}{request}: {answer.why}"))
            return []
        text = reason(str(request))
        job.request, job.request_text = request.id, text
        match Action(request.action):
            case Action.STOP:
                job.stopped_by, job.grace_s = request.id, request.grace_s
                return self._close(JobOutcome.STOPPED, text)
            case Action.RESTART if not is_held(job):
                return self._next_generation(text)
            case Action.DRAIN:
                return self._drain(self._nodes_named(request.node), text)
            case Action.UNDRAIN:
                return self._undrain(self._nodes_named(request.node), text)
        self._record_change(text)
        return self._send_all()

    def _refusal_of(self, request: Request) -> Refused:
        """Return why a request is refused, or `GRANTED`."""
        job, action = self.job, request.action
        unknown = unknown_action(action)
        if unknown != GRANTED:
            return unknown
        if job.phase is JobPhase.CLOSED:
            return RequestRefusal.OVER, f"the job is over: {job.why}"
        if action == Action.STOP.value:
            return GRANTED
        if job.phase is JobPhase.RECOVERING:
            return (
                RequestRefusal.NOT_NOW,
                "the nodes are reconnecting after the coordinator was lost",
            )
        if action == Action.RESTART.value:
            if job.phase is not JobPhase.ACTIVE:
                return RequestRefusal.NO_ROUND, "no round is running: the job waits for nodes"
            return GRANTED
        named = self._nodes_named(request.node)
        if not named:
            why = f"{request.node!r} is not a node or host of the job"
            return RequestRefusal.NO_SUCH_NODE, why
        if action == Action.UNDRAIN.value:
            return GRANTED
        if len({*drained_nodes(job), *named}) > DRAINED_MAX:
            return RequestRefusal.TOO_MANY, f"{DRAINED_MAX} nodes are drained already"
        removed = sum(name in job.nodes and is_eligible(job, name) for name in named)
        needed, left = self._settings.min_nodes, self._eligible - removed
        if removed and left < needed:
            why = f"{left} other node{'s' * (left != 1)} would be left, and the job needs {needed}"
            return RequestRefusal.TOO_FEW_NODES, why
        return GRANTED

    def _unchanged_because(self, request: Request) -> str:
        """Return why granting a request would change nothing; empty if it would change something."""
        if request.action not in (Action.DRAIN.value, Action.UNDRAIN.value):
            return ""
        named = self._nodes_named(request.node)
        is_drain = request.action == Action.DRAIN.value
        if any(is_drained(self.job, name) != is_drain for name in named):
            return ""
        verb = "is" if len(named) == 1 else "are"
        return f"{names_of(named)} {verb} {'already' if is_drain else 'not'} drained"

    def _nodes_named(self, name: str) -> list[str]:
        """Return the node with this id, or the nodes on this host."""
        job = self.job
        if name in job.nodes or is_drained(job, name):
            return [name]
        return [node for node, one in job.nodes.items() if name and one.info.host == name]

    def _drain(self, nodes: list[str], why: str) -> list[View]:
        job = self.job
        is_broken = False
        for name in nodes:
            if not is_drained(job, name):
                self._include(name)
                job.exclusions[name] = Exclusion(ExclusionKind.DRAINED, why)
            is_broken = is_broken or (self._is_member(name) and name not in job.succeeded)
        if is_broken:
            return self._repair(why)
        self._record_change(why)
        return self._send_all()

    def _undrain(self, nodes: list[str], why: str) -> list[View]:
        job = self.job
        self._record_change(why)
        undrained = [name for name in nodes if is_drained(job, name)]
        self._include(*undrained)
        views = self._send_all()
        for name in undrained:
            if name in job.nodes and not self._is_member(name):
                views += self._form_or_wait(job.nodes[name])
        return views

    def _is_member(self, name: str) -> bool:
        """Whether a connected node is a member of the active round."""
        node = self.job.nodes.get(name)
        is_ranked = node is not None and (
            self.rank_table.incarnation_of(name) == node.info.incarnation
        )
        return is_ranked and self.job.phase is JobPhase.ACTIVE

    # Bookkeeping.

    @property
    def _settings(self) -> JobSettings:
        assert self.job.settings is not None
        return self.job.settings

    def _known(self, node: str, incarnation: int) -> Node | None:
        known = self.job.nodes.get(node)
        return known if known is not None and known.info.incarnation == incarnation else None

    def _retire(self, info: NodeInfo, why: str, *, superseded: bool = False) -> None:
        retired = self.job.retired
        if len(retired) >= RETIRED_MAX:
            del retired[next(iter(retired))]
        retired[info.incarnation] = RetiredNode(reason(why), superseded)

    def _begin_wait(self) -> None:
        self.job.waiting = True
        self.job.wait_seq += 1

    def _wait_for_more_nodes(self, *, is_first: bool) -> None:
        """Wait for more nodes; `is_first` is False if the job was already waiting."""
        self._begin_wait()
        if is_first:
            self.job.settle_seq = self.job.wait_seq

    def _record_change(self, why: str) -> None:
        job = self.job
        job.revision += 1
        job.why = reason(why)
        line = f"{job.phase.value}, round {job.round}, generation {job.generation}: {job.why}"
        # If only the views' `start` has changed, the line is the same.
        if self.history and self.history[-1].text == line:
            return
        broken = self._broken_generation
        self._record(
            Change(
                line,
                why=job.why,
                is_problem=broken is not None or job.outcome is JobOutcome.FAILED,
                generation=job.generation if broken is None else broken,
                outcome=job.outcome,
            )
        )

    def _record(self, change: Change) -> None:
        self.history.append(change)
        self.changes += 1

    def _send(self, node: Node, *, new_revision: bool = False) -> View:
        """Return a node's view, and note that it is sent."""
        job = self.job
        if new_revision:
            job.revision += 1
        node.sent_revision, node.sent_present = job.revision, len(job.nodes)
        return view_for_node(job, self.rank_table, node.info)

    def _send_outsider(
        self,
        info: NodeInfo,
        role: NodeRole,
        why: str,
        refusal: RefusalReason | None = None,
        *,
        known_term: int = 0,
    ) -> View:
        """Return the view for a node outside the job, which may know another coordinator's term."""
        self.job.revision += 1  # Newer than all views that the node received in the job.
        view = view_for_outsider(self.job, info, role, why, refusal)
        if known_term < self.job.term:
            return view
        return msgspec.structs.replace(view, term=known_term + 1)  # The node ignores lower terms.

    def _send_end(self, status: Status) -> View:
        """Return the view for a node that joins a closed job. A former member gets the failure, too."""
        job, info = self.job, status.info
        view = self._send_outsider(info, NodeRole.CLOSED, job.why, known_term=status.term)
        was_member = self.rank_table.incarnation_of(info.node) == info.incarnation
        if was_member or job.outcome is not JobOutcome.FAILED:
            return view
        why = f"the job failed before {info.node} joined"
        return msgspec.structs.replace(view, why=why, failure=None, report=b"", final=True)

    def _send_members(self) -> list[View]:
        members = (self._known(info.node, info.incarnation) for info in self.job.members)
        return [self._send(node) for node in members if node is not None]

    def _send_all(self) -> list[View]:
        return [self._send(node) for node in self.job.nodes.values()]


def budget_of(job: Job, used: int | None = None) -> RestartBudget:
    """Return the restart budget of a job, with its own restart count or another one."""
    assert job.settings is not None
    return RestartBudget(job.settings.max_restarts, job.restarts if used is None else used)


def emptied_job(job: Job) -> Job:
    """Return a job that all nodes left on request, in the state that the next nodes start from."""
    drained = {node: job.exclusions[node] for node in drained_nodes(job)}
    return msgspec.structs.replace(job, nodes={}, exclusions=drained, waiting=False, restarts=0)


def is_eligible(job: Job, node: str) -> bool:
    """Whether a connected node is eligible for a round."""
    return node not in job.exclusions


def eligible_count(job: Job) -> int:
    """Return the number of connected nodes that are eligible for a round."""
    return len(job.nodes) - sum(node in job.nodes for node in job.exclusions)


def is_drained(job: Job, node: str) -> bool:
    """Whether a node is drained: it must have no workers until it is undrained."""
    exclusion = job.exclusions.get(node)
    return exclusion is not None and exclusion.kind is ExclusionKind.DRAINED


def drained_nodes(job: Job) -> list[str]:
    """Return the drained nodes, connected or not."""
    return [node for node in job.exclusions if is_drained(job, node)]


def return_delay_s(departures: int) -> float:
    """Return how long to exclude a node that rejoins after this number of departures."""
    if departures < 2:
        return 0.0
    return min(RETURN_DELAY_S_MAX, RETURN_DELAY_S_MIN * 2.0 ** min(departures - 2, 20))


def close_broken(
    now: float, rounds: Rounds, what: str, make: Callable[[Job], Rounds]
) -> tuple[list[View], Rounds]:
    """Close a job with a broken invariant as failed; return the views to send, and its machine.

    The cause can only be a bug in Holdfast. The nodes of the job are informed, and other jobs of the
    process continue.
    """
    why = reason(f"the coordinator cannot continue this job; this is a bug in Holdfast ({what})")
    try:
        return rounds.handle(now, CloseRequested(JobOutcome.FAILED, why)), rounds
    except Exception:  # noqa: BLE001 (after any error, the nodes must learn of the end)
        # The new job has no nodes, so each node sends its status again and learns of the end.
        job = rounds.job
        return [], make(
            Job(
                run_id=job.run_id,
                settings=job.settings,
                phase=JobPhase.CLOSED,
                term=job.term + 1,
                round=job.round,
                generation=job.generation,
                restarts=job.restarts,
                fence=job.fence,
                outcome=JobOutcome.FAILED,
                why=why,
                final=True,
            )
        )


# Views.


class RankTable:
    """The ranks and members of the current round, computed once per round."""

    def __init__(self, job: Job) -> None:
        members = job.members
        self.rank_of = {info.node: rank for rank, info in enumerate(members)}
        self.ranks = assign_ranks([NodeShape(info.role, info.local_world_size) for info in members])
        self.key = round_key(members)
        self.members: tuple[Member, ...] = ()
        """The members, shared by their views; empty if there are too many for a view."""
        if len(members) <= VIEW_MEMBERS_MAX:
            self.members = tuple(
                Member(info.node, info.host, ranks.first_rank)
                for info, ranks in zip(members, self.ranks, strict=True)
            )
        self._incarnations = {info.node: info.incarnation for info in members}
        self.master_addr, self.master_port, self.store_key = "", 0, b""
        if members:
            first = members[0]
            self.master_addr = first.address
            self.master_port = job.master_port
            if all(info.store_key for info in members):
                self.store_key = store_key_of(first, job.generation)
            local = is_loopback(first.address) and bool(job.coordinator_address)
            if local and not all(is_loopback(info.address) for info in members):
                self.master_addr = job.coordinator_address

    def incarnation_of(self, node: str) -> int | None:
        """Return the incarnation of a member, or None if the node is not one."""
        return self._incarnations.get(node)


def store_key_of(first: NodeInfo, generation: int) -> bytes:
    """Return the key of one generation. It reveals neither the node's key nor other generations' keys."""
    text = b"generation %d" % generation
    return blake2b(text, key=first.store_key, digest_size=STORE_KEY_BYTES).digest()


def round_key(members: list[NodeInfo]) -> int:
    """Return a hash that identifies these incarnations in this order."""
    key = len(members)
    for info in members:
        key = (key * KEY_FACTOR + info.incarnation) % KEY_MODULUS
    return key


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached only from its own host."""
    return address.startswith("127.") or address == "::1"


def view_for_node(job: Job, rank_table: RankTable, info: NodeInfo) -> View:
    """Return the view for a node in the job."""
    if job.phase is JobPhase.CLOSED:
        return view_for_outsider(job, info, NodeRole.CLOSED, job.why)
    role, rank = NodeRole.WAITING, -1
    if job.phase is JobPhase.ACTIVE:
        if rank_table.incarnation_of(info.node) == info.incarnation:
            role, rank = NodeRole.MEMBER, rank_table.rank_of[info.node]
        elif not job.waiting and is_eligible(job, info.node):
            role = NodeRole.STANDBY
    drained = is_drained(job, info.node) and role is not NodeRole.MEMBER
    if drained:
        role = NodeRole.STANDBY
    member = role is NodeRole.MEMBER
    ranks = rank_table.ranks[rank] if member else NO_RANKS
    return View(
        run_id=job.run_id,
        node=info.node,
        incarnation=info.incarnation,
        term=job.term,
        revision=job.revision,
        role=role,
        why=job.why,
        present=len(job.nodes) - sum(node in job.nodes for node in drained_nodes(job)),
        needed=job.settings.min_nodes if job.settings else 0,
        wait_reason=reason_for_delay(job, info.node) if role is NodeRole.WAITING else "",
        silence_s=job.silence_s,
        round_term=job.round_term if member else 0,
        round=job.round if member else -1,
        round_key=rank_table.key if member else 0,
        generation=job.generation,
        start=not (member and is_held(job)),
        slow=job.slow,
        restarts=job.restarts,
        fence=job.fence,
        rank=rank,
        size=len(job.members) if member else 0,
        first_rank=ranks.first_rank,
        world_size=ranks.world_size,
        first_role_rank=ranks.first_role_rank,
        role_world_size=ranks.role_world_size,
        master_addr=rank_table.master_addr if member else "",
        master_port=rank_table.master_port if member else 0,
        store_key=rank_table.store_key if member else b"",
        members=rank_table.members if member else (),
        failure=job.failure,
        request=job.request,
        request_text=job.request_text,
        answered=answered_to(job, info),
        drained=drained,
        after_failure=job.after_failure,
    )


def answered_to(job: Job, info: NodeInfo) -> RequestAnswer | None:
    """Return the answer to the newest request that arrived in a node's status."""
    if not job.answers:
        return None
    node = job.nodes.get(info.node)
    return job.answers.get(node.last_request) if node is not None and node.last_request else None


def view_for_outsider(
    job: Job, info: NodeInfo, role: NodeRole, why: str, refusal: RefusalReason | None = None
) -> View:
    """Return the view for an incarnation outside the job."""
    return View(
        run_id=job.run_id,
        node=info.node,
        incarnation=info.incarnation,
        term=job.term,
        revision=job.revision,
        role=role,
        why=reason(why),
        refusal=refusal,
        generation=job.generation,
        restarts=job.restarts,
        fence=job.fence,
        outcome=job.outcome,
        failure=job.failure,
        report=job.report if job.final else b"",
        final=job.final,
        request=job.request,
        request_text=job.request_text,
        stopped_by=job.stopped_by,
        answered=answered_to(job, info),
        grace_s=job.grace_s,
        after_failure=job.after_failure,
    )


def id_in_use_text(holder: NodeInfo) -> str:
    """Return which agent has the node id of a contender."""
    where = f" on {holder.host}" if holder.host else ""
    return f"another agent{where} already has the node id {holder.node}"


def contender_waits_text(holder: NodeInfo) -> str:
    """Return why a contender has to wait."""
    return f"{id_in_use_text(holder)}; this node joins when that agent is gone"


def contender_refused_text(holder: NodeInfo) -> str:
    """Return why a contender is refused."""
    return f"{id_in_use_text(holder)} and is alive"


def needs_other_id(info: NodeInfo, holder: NodeInfo) -> bool:
    """Return whether a contender gets another id without waiting for the holder of its id.

    A machine reserves a generated id for one agent at a time. If the same machine reserved it for both nodes,
    the holder's agent has exited, and the contender waits until the job knows that.
    """
    is_successor = info.is_reserved and info.reserved_on == holder.reserved_on
    return bool(info.reserved_on) and not is_successor


def view_with_other_id(
    job: Job, status: Status, contended: Iterable[str] = (), *, has_waited: bool
) -> View:
    """Return the view that makes a node rejoin with an id that no node has: `host-2` instead of `host`.

    A node ignores terms below the one it knows, and a node that reports a term may have been in the job. So a
    node that knows no term learns none.
    """
    info = status.info
    taken = {*job.nodes, *job.exclusions, *contended}
    stem = info.node[: NODE_ID_CHARS_MAX - len(f"-{len(taken) + 2}")]
    new_id = next(one for n in itertools.count(2) if (one := f"{stem}-{n}") not in taken)
    why = id_in_use_text(job.nodes[info.node].info)
    view = view_for_outsider(job, info, NodeRole.FENCED, why)
    term = status.term + 1 if status.term else 0
    if has_waited:  # A view of this job told it to wait.
        term = max(term, job.term)
    return msgspec.structs.replace(view, term=term, new_id=new_id)


def is_held(job: Job) -> bool:
    """Return whether a round waits for the workers of earlier generations to exit."""
    return job.phase is JobPhase.ACTIVE and job.released < job.generation


def slow_stop_text(job: Job) -> str:
    """Return, as text, the nodes whose workers a generation waits for."""
    nodes = (*job.nodes.values(), *job.departed.values())
    names = [one.info.node for one in nodes if one.workers >= 0]
    return f"the workers of {names_of(names)} have not stopped yet"


def names_of(names: list[str]) -> str:
    """Return names as text: the first few, and the number of the others."""
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def objection(job: Job, status: Status) -> str:
    """Return why a node cannot join a job; empty if it can."""
    settings, info = status.settings, status.info
    if info.fixed_rank >= settings.max_nodes:
        return f"node rank {info.fixed_rank} is not below {settings.max_nodes}, the number of nodes"
    agreed = job.settings
    if agreed is None or not job.nodes:
        return ""
    if info.fixed_rank >= 0:
        for other in job.nodes.values():
            if other.info.fixed_rank == info.fixed_rank and other.info.node != info.node:
                return f"{other.info.node} already has node rank {info.fixed_rank}"
    for name, mine, theirs in differences(settings, agreed):
        return (
            f"{info.node} was started with {name} {mine}, but the job {job.run_id!r} runs with "
            f"{theirs}; start all nodes of a job with the same settings"
        )
    return ""


def implausible_report(job: Job, status: Status) -> str:
    """Return which number in a status cannot come from this job; empty if there is none."""
    fence = max(job.fence, job.fence_floor)
    for name, reported, known, ahead_max in (
        ("term", status.term, job.term, TERMS_AHEAD_MAX),
        ("round", status.round, job.round, GENERATIONS_AHEAD_MAX),
        ("generation", known_generation(status), job.generation, GENERATIONS_AHEAD_MAX),
        ("fence", status.fence, fence, FENCE_AHEAD_MAX),
    ):
        if reported > (known + ahead_max if job.generation >= 0 else FIRST_REPORTED_MAX):
            return (
                f"{status.info.node} reports {name} {reported}, but the job {job.run_id!r} is at "
                f"{known}: the node cannot have been in this job; restart its agent"
            )
    return ""


def previous_ranks(job: Job, rank_table: RankTable) -> tuple[dict[str, int], int]:
    """Return the ranks in the previous round by node, and the size of that round."""
    returned = claimants(job)
    if not returned:
        return rank_table.rank_of, len(job.members)
    ranks = {node.info.node: node.claimed_rank for node in returned}
    return ranks, returned[0].claimed_size


def reports_round(status: Status) -> bool:
    """Return whether a node reports that it is in a round."""
    return status.round_term > 0 and status.rank >= 0


def known_generation(status: Status) -> int:
    """Return the highest generation that a node knows."""
    return max(status.generation, status.assigned_generation, status.known_generation)


def why_formed(job: Job) -> str:
    """Return the reason for a round that forms because nodes joined."""
    if job.round < 0:
        max_nodes = job.settings.max_nodes if job.settings else 0
        return "all nodes joined" if len(job.nodes) >= max_nodes else "enough nodes joined"
    members = {info.node for info in job.members}
    names = [node for node in job.nodes if node not in members and is_eligible(job, node)]
    return f"{names_of(names)} joined" if names else "enough nodes joined"


def reason_for_delay(job: Job, node: str = "") -> str:
    """Return why a node's return is delayed.

    If it is not delayed and the job is forming, return why other nodes are.
    """
    delayed = {name: one for name, one in job.exclusions.items() if one.until >= 0}
    if node in delayed:
        return delayed[node].reason
    if job.phase is not JobPhase.FORMING:
        return ""
    reasons = [one.reason for one in delayed.values()]
    if len(reasons) > NAMES_MAX:
        reasons[NAMES_MAX:] = [f"{len(reasons) - NAMES_MAX} more nodes are delayed"]
    return "; ".join(reasons)


def claimants(job: Job) -> list[Node]:
    """Return the reconnected members of the newest earlier round, by rank."""
    newest = max((node.claim for node in job.nodes.values()), default=NO_CLAIM)
    returned = [node for node in job.nodes.values() if node.claim == newest != NO_CLAIM]
    return sorted(returned, key=lambda node: node.claimed_rank)
