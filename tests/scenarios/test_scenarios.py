"""Transcripts of the machines in `core`; `transcripts` and the players document their format.

To replace the output below every `----` with the current output (a new block may omit it)::

    pytest --rewrite-scenarios tests/scenarios

Read the difference before you commit it: a transcript is a specification.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import pytest
from cluster_members import ClusterPlayer
from etcd_nodes import EtcdPlayer
from many_nodes import CoordinatedPlayer, CoordinatorPlayer, RoundsPlayer, SessionPlayer
from one_node import StoppingPlayer, SupervisionPlayer
from shared_nodes import SharedStatePlayer
from transcripts import Transcript

from holdfast.core import rounds, session, supervision
from holdfast.core.etcd.cluster import MemberEffect, MemberEvent, MemberState
from holdfast.core.etcd.etcd_session import SessionEffect, SessionEvent, SessionState
from holdfast.core.phases import NodeRole
from holdfast.core.rounds import JobPhase
from holdfast.core.stopping import StopPhase

if TYPE_CHECKING:
    from types import ModuleType

    from transcripts import Player

HERE = Path(__file__).parent
PlayerT = TypeVar("PlayerT", bound="Player")

PLAYERS: dict[str, type[Player]] = {
    "supervision": SupervisionPlayer,
    "stopping": StoppingPlayer,
    "rounds": RoundsPlayer,
    "coordinator": CoordinatorPlayer,
    "session": SessionPlayer,
    "coordinated_supervision": CoordinatedPlayer,
    "shared_state": SharedStatePlayer,
    "etcd_session": EtcdPlayer,
    "etcd_election": EtcdPlayer,
    "etcd_leader": EtcdPlayer,
    "etcd_witness": EtcdPlayer,
    "etcd_cluster": ClusterPlayer,
}


def transcripts(folder: str) -> list[Path]:
    return sorted((HERE / folder).glob("*.txt"))


FILES = [path for folder in PLAYERS for path in transcripts(folder)]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_machine_produces_the_recorded_transcript(path: Path, pytestconfig: pytest.Config) -> None:
    written = path.read_text()
    happened = Transcript(written).replayed(PLAYERS[path.parent.name]())
    if pytestconfig.getoption("rewrite_scenarios"):
        path.write_text(happened)
    else:
        assert written == happened


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_transcript_begins_with_a_description(path: Path) -> None:
    assert re.match(r"# [A-Z].+\.$", path.read_text().partition("\n\n")[0].replace("\n# ", " "))


@pytest.mark.parametrize(
    ("machine", "count", "folders"),
    [(supervision, 19, ("supervision", "coordinated_supervision")), (rounds, 14, ("rounds",))],
    ids=str,
)
def test_every_rule_of_a_machine_has_a_transcript(
    machine: ModuleType, count: int, folders: tuple[str, ...]
) -> None:
    rules = re.findall(r"^(\d+)\. ", machine.__doc__ or "", flags=re.MULTILINE)
    assert len(rules) == count
    numbers = {path.name.partition("_")[0] for one in folders for path in transcripts(one)}
    assert {number for number in numbers if number.isdigit()} == set(rules)


def played(player: PlayerT, *folders: str) -> PlayerT:
    """Return a player that has played all transcripts of these folders."""
    for folder in folders:
        for path in transcripts(folder):
            Transcript(path.read_text()).replayed(player)
    return player


def test_transcripts_use_every_handler_of_both_supervisions() -> None:
    own = played(SupervisionPlayer(), "supervision").handled
    assert set(supervision.Supervision._handlers) - own == set()
    coordinated = played(CoordinatedPlayer(), "coordinated_supervision").handled
    assert set(supervision.CoordinatedSupervision._handlers) - coordinated == set()


def test_transcripts_of_etcd_and_clusters_cover_every_state_event_and_effect() -> None:
    nodes = played(EtcdPlayer(), "etcd_session", "etcd_election", "etcd_leader", "etcd_witness")
    assert nodes.states == {*SessionState}
    assert nodes.events == {*get_args(SessionEvent)}
    assert nodes.effects == {*get_args(SessionEffect)}
    machines = played(ClusterPlayer(), "etcd_cluster")
    assert machines.states == {*MemberState}
    assert machines.events == {*get_args(MemberEvent)}
    assert machines.effects == {*get_args(MemberEffect)}


def test_transcripts_cover_exactly_the_transitions_of_a_job() -> None:
    player = played(RoundsPlayer(), "rounds")
    assert player.roles == set(NodeRole)
    moves = {(before, after) for before, after in player.passed if before is not after}
    assert moves == {
        (JobPhase.FORMING, JobPhase.ACTIVE),
        (JobPhase.FORMING, JobPhase.RECOVERING),
        (JobPhase.FORMING, JobPhase.CLOSED),
        (JobPhase.RECOVERING, JobPhase.ACTIVE),
        (JobPhase.RECOVERING, JobPhase.FORMING),
        (JobPhase.ACTIVE, JobPhase.FORMING),
        (JobPhase.ACTIVE, JobPhase.CLOSED),
    }


def test_transcripts_cover_every_effect_and_connection_state_of_session() -> None:
    player = played(SessionPlayer(), "session")
    assert player.effects == set(get_args(session.SessionEffect))
    assert {before for before, _ in player.links} == set(session.ConnectionState)


def test_transcripts_cover_exactly_the_transitions_of_a_stop() -> None:
    player = played(StoppingPlayer(), "stopping")
    moves = {(before, after) for before, after in player.passed if before is not after}
    assert moves == {
        (StopPhase.SIGNALLED, StopPhase.LEFTOVERS),
        (StopPhase.SIGNALLED, StopPhase.KILLING),
        (StopPhase.SIGNALLED, StopPhase.SWEEPING),
        (StopPhase.SIGNALLED, StopPhase.ENDED),  # the keeper was lost
        (StopPhase.LEFTOVERS, StopPhase.ENDED),
        (StopPhase.LEFTOVERS, StopPhase.SWEEPING),
        (StopPhase.KILLING, StopPhase.SWEEPING),
        (StopPhase.SWEEPING, StopPhase.ENDED),
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1 WorkersStarted", "generation"),
        ("1 WorkersStarted generation=0 loudly=true", "loudly"),
        ("1 SignalReceived signum=SIGNONE", "SIGNONE"),
        ("1 WorkerExited generation=0 local_rank=0 failed=yes", "yes"),
        ("1 WorkersFled generation=0", "WorkersFled"),
        ("-1 Begun", "backwards"),
    ],
)
def test_an_invalid_input_is_an_error(line: str, complaint: str) -> None:
    player = SupervisionPlayer()
    player.play("new local_world_size=1 max_restarts=0")
    with pytest.raises((AssertionError, KeyError, TypeError), match=complaint):
        player.play(line)


def test_a_wrong_transcript_is_detected_and_rewritten() -> None:
    text = "# It begins.\n\nnew local_world_size=1 max_restarts=0\n----\ndone\n\n0 Begun\n"
    expected = (
        "# It begins.\n\nnew local_world_size=1 max_restarts=0\n----\n"
        "idle: generation -1, 0 of 0 restarts used\n\n"
        "0 Begun\n----\nJoinRound\njoining: generation -1, 0 of 0 restarts used\n"
    )
    assert Transcript(text).replayed(SupervisionPlayer()) == expected
    assert Transcript(expected).replayed(SupervisionPlayer()) == expected
