"""The fixture of the suites in this folder: jobs with a coordinator, or on etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from etcd_teams import AtCoordinator, OnEtcd

if TYPE_CHECKING:
    from etcd_teams import MakeTeam
    from real_etcd import Etcd


@pytest.fixture(params=["c10d", "etcd"])
def team(request: pytest.FixtureRequest, etcd: Etcd) -> MakeTeam:
    """A factory of teams: once at a coordinator, once on etcd."""
    return OnEtcd(etcd) if request.param == "etcd" else AtCoordinator()
