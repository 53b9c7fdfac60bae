"""Fault profiles: which faults a run has, how often, and what the network is like meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.facts import Fact
from holdfast.testing.sim.network import Weather

if TYPE_CHECKING:
    from collections.abc import Mapping


class Profile(Fact):
    """A kind of trouble; `weights` says how likely each fault of `sim.chaos` is."""

    name: str
    about: str
    weights: Mapping[str, float]
    mean_gap_s: float = 4.0
    """The mean time between two faults."""
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    jitter_s: float = 0.0
    lag_share: float = 0.0
    """So many of the nodes are slow to answer."""
    on_etcd: Mapping[str, float] = {}
    """How likely faults are that there are only on etcd."""

    @property
    def weather(self) -> Weather:
        """What the network does while faults last."""
        return Weather(
            loss=self.loss,
            duplication=self.duplication,
            reordering=self.reordering,
            jitter_s=self.jitter_s,
        )


_WORKERS = {"fail": 2.0, "cascade": 1.0, "hang": 0.3, "ruin": 0.05}
_ETCD = {"leader": 1.0, "pause_leader": 0.7, "compact": 1.0, "break_links": 1.0, "fill": 0.2}
_NODES = {"kill": 3.0, "power_off": 1.0, "join": 3.0, "leave": 1.0}

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("calm", "workers fail now and then, nodes come", {"fail": 1.0, "join": 1.0}, 8.0),
        Profile(
            "lossy",
            "messages are lost, repeated, late and out of order; some nodes are slow",
            {**_WORKERS, "kill": 0.5, "join": 1.0, "leave": 0.5},
            6.0,
            loss=0.1,
            duplication=0.1,
            reordering=0.3,
            jitter_s=1.5,
            lag_share=0.2,
        ),
        Profile(
            "partitions",
            "nodes are cut off, one by one or many at once, in one direction or both",
            {"cut": 4.0, "cut_many": 2.0, "cut_one_way": 3.0, "fail": 1.0, "join": 1.0},
            3.0,
            on_etcd={"break_links": 2.0, "compact": 1.0},
        ),
        Profile(
            "crashes",
            "agents and their hosts die; some return",
            {**_NODES, **_WORKERS},
            2.0,
            on_etcd={"leader": 2.0},
        ),
        Profile(
            "coordinator",
            "the coordinator dies and returns, also several times in a row",
            {"coordinator": 4.0, "coordinator_host": 0.7, "fail": 0.7, "kill": 0.4, "join": 0.4},
            8.0,
            on_etcd={**_ETCD, "leader": 2.0},
        ),
        Profile(
            "pauses",
            "agents and the coordinator are stopped for a while and go on",
            {"pause": 4.0, "pause_coordinator": 2.0, "fail": 1.0, "join": 1.0},
            3.0,
            on_etcd={"pause_leader": 2.0},
        ),
        Profile(
            "churn",
            "nodes come and go all the time, some with the id of another",
            {"join": 6.0, "leave": 4.0, "kill": 2.0, "twin": 0.7, "fail": 0.3},
            1.0,
        ),
        Profile(
            "everything",
            "all of it at once",
            {
                **_WORKERS,
                **_NODES,
                "cut": 1.0,
                "cut_many": 0.5,
                "cut_one_way": 1.0,
                "pause": 1.0,
                "pause_coordinator": 0.5,
                "coordinator": 1.0,
                "coordinator_host": 0.3,
                "twin": 0.2,
            },
            1.5,
            loss=0.02,
            duplication=0.02,
            reordering=0.1,
            jitter_s=0.5,
            lag_share=0.1,
            on_etcd=_ETCD,
        ),
    )
}
