"""The book of one job: how `core.rounds` writes changes down and says them, not what it decides.

Every change that a node is told of gets a new revision here, and every node that is told is noted
with it; so what a node lacks can be found out later. What must hold of a book at any time is
checked here too.
"""

from __future__ import annotations

from collections import deque

import msgspec

from holdfast.core import views
from holdfast.core.job import Job, JobPhase, Node, Retired, Wait
from holdfast.core.news import Beat, JobSettings, NodeInfo, Role, View  # noqa: TC001

RETIRED_MAX = 4_096  # Late messages of more incarnations than this would be taken for new nodes.
HISTORY_LINES_MAX = 200
RECOVER_S_MIN, RECOVER_S_MAX = 0.7, 5.0
"""How long nodes of an earlier coordinator's round are waited for, from the last that came: twice
as long as any was without a coordinator. They try to reconnect ever more rarely
(`core.membership`), so those who missed it for a moment only are back in a moment."""
TOLD_CHANGE_MIN = 0.1  # Those who wait are told how many are there when it changed by as much.
REPORT_S = 10.0  # How long a failed job waits for the report of the node that failed.
BLAME_S = 0.3  # And then for that of a node whose worker is the likelier cause.


class Book:
    """A job's state, who sits where in its round, and its history in words."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seats = views.Seats(job)
        self.history: deque[str] = deque(maxlen=HISTORY_LINES_MAX)

    @property
    def wait(self) -> Wait | None:
        """The one thing that is being waited for, if any."""
        job = self.job
        if not job.waiting:
            return None
        if job.phase is JobPhase.RECOVERING:
            return Wait(job.wait_seq, min(max(RECOVER_S_MIN, job.recover_s), RECOVER_S_MAX))
        if job.phase is JobPhase.CLOSED:
            return Wait(job.wait_seq, BLAME_S if job.report else REPORT_S)
        return Wait(job.wait_seq, job.settings.settle_s if job.settings else 0.0)

    def behind(self, beat: Beat) -> View | None:
        """Return the view a node lacks, by what its beat says it has."""
        job = self.job
        known = self._known(beat.node, beat.incarnation)
        if known is None or job.phase is JobPhase.RECOVERING:
            return None  # Its whole status is needed first (`Ack` tells it so), or all nodes'.
        change = abs(len(job.nodes) - known.told_present)
        waits = job.phase is JobPhase.FORMING and change > known.told_present * TOLD_CHANGE_MIN
        if waits or (beat.term, beat.revision) < (job.term, known.told):
            return self._tell(known, anew=waits)
        return None

    def seq_of(self, node: str, incarnation: int) -> int:
        """Return the number of the last status taken in of an incarnation, or -1."""
        known = self._known(node, incarnation)
        return known.seq if known else -1

    def check(self) -> None:
        """Assert what must hold after every step, at a cost that does not grow with the job."""
        job = self.job
        settings = job.settings
        assert len(job.succeeded) <= len(job.members)
        if settings is not None:
            assert 0 <= job.restarts <= max(0, settings.max_restarts), "the budget is exceeded"
            if job.phase is JobPhase.ACTIVE:
                assert settings.min_nodes <= len(job.members) <= settings.max_nodes
                assert len(self.seats.rank_of) == len(job.members), "a node has two ranks"
        assert (job.outcome is not None) == (job.phase is JobPhase.CLOSED)

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
        retired[info.incarnation] = Retired(why, superseded)

    def _begin_wait(self) -> None:
        self.job.waiting = True
        self.job.wait_seq += 1

    def _changed(self, why: str) -> None:
        job = self.job
        job.revision += 1
        job.why = why
        self.history.append(
            f"{job.phase.value}, round {job.round}, generation {job.generation}: {why}"
        )

    def _tell(self, node: Node, *, anew: bool = False) -> View:
        job = self.job
        if anew:
            job.revision += 1
        node.told, node.told_present = job.revision, len(job.nodes)
        return views.to_node(job, self.seats, node.info)

    def _turn_away(self, info: NodeInfo, role: Role, why: str, *, heard: int = 0) -> View:
        """Tell one that is not in the job; `heard` is a term another coordinator told it of."""
        self.job.revision += 1  # So that it is newer than all it was told while it was in.
        view = views.to_outsider(self.job, info, role, why)
        if heard < self.job.term:
            return view
        return msgspec.structs.replace(view, term=heard + 1)  # Else it would pass over it.

    def _tell_all(self) -> list[View]:
        return [self._tell(node) for node in self.job.nodes.values()]
