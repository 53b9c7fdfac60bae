"""The story of a real job: from a killed worker to the restart on every node, cause by cause."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from holdfast.cli.story_command import Listing, read
from real_teams import OBEY

if TYPE_CHECKING:
    from pathlib import Path

    from etcd_teams import MakeTeam


def test_story_leads_from_a_killed_worker_to_the_restart_on_all_nodes(
    tmp_path: Path, team: MakeTeam
) -> None:
    names = ("a", "b", "c")
    files = {name: str(tmp_path / f"{name}.story") for name in names}
    files["b"] = files["a"]  # Agents may share one file.
    with team(tmp_path, OBEY, "--max-restarts=1", nnodes="3") as cluster:
        for name in names:
            cluster.start(name, f"--story={files[name]}", conf=f"node_id={name}")
        os.kill(cluster.generation(3)["b"].pid, signal.SIGKILL)
        assert set(cluster.finish(cluster.generation(3)).values()) == {0}
    # Read the files in reverse order, so that the order of the steps can come only from their causes.
    listing = Listing(read(sorted(set(files.values()), reverse=True)))
    lines, order = listing.lines, listing.in_order()
    died = next(
        at
        for at, line in enumerate(lines)
        if (line.node, line.state) == ("b", "running") and "failed=True" in line.event
    )
    caused = listing.caused_by(died)
    restarts = [at for at in caused if "StartWorkers(generation=1" in lines[at].effects]
    assert {lines[at].node for at in restarts} == set(names)
    [other] = [at for at in restarts if lines[at].node == "c"]
    path = sorted(listing.causes_of(other), key=order.index)
    assert (path[0], path[-1]) == (died, other)
    assert {lines[at].node for at in path} > {"b", "c"}  # And the coordinator or leader.
