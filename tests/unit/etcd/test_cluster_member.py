"""The requirements for running a member: the etcd program, and a place in the list."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem
from holdfast.etcd.cluster_list import cluster_list, parse_machines
from holdfast.etcd.cluster_member import remove_orphans
from holdfast.etcd.own_entry import claim_entry, shared_machine
from holdfast.etcd.runner import find_etcd
from holdfast.net.runtime_dir import runtime_dir
from other_users import STRANGER, as_user, shared_folder
from real_teams import reserved_port_pairs

if TYPE_CHECKING:
    from holdfast.etcd.cluster_list import ClusterList

ELSEWHERE = "192.0.2.1"


def a_list(machines: str, run_id: str = "job") -> ClusterList:
    return cluster_list(parse_machines(machines), run_id, environ={}, auth="none")


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("echo etcd Version: 3.3.27", "3.3"),
        ("echo something else", "is not etcd"),
        (None, "is not a file"),
    ],
)
def test_unsuitable_etcd_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, named: str
) -> None:
    program = tmp_path / "etcd"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(program))
    with pytest.raises(EnvironmentProblem, match=named) as refused:
        find_etcd("--ha")
    assert str(program) in str(refused.value)


def fake_etcd(folder: Path, version: str) -> str:
    """Write a program that only prints its version; return its path."""
    program = folder / "etcd"
    folder.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("versions", "beside", "chosen"),
    [
        (["3.5.1", "3.5.3"], "3.5.1", 1),
        (["3.5.2"], "3.4.30", -1),
        (["3.3.27", "3.5.0"], "3.5.1", 1),
        (["3.4.23"], "3.5.16", 0),
        ([], "3.5.1", -1),
    ],
)
def test_safe_etcd_is_preferred_to_an_unsafe_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: list[str], beside: str, chosen: int
) -> None:
    folders = [tmp_path / str(number) for number in range(len(versions))]
    programs = [fake_etcd(*one) for one in zip(folders, versions, strict=True)]
    programs.append(fake_etcd(tmp_path / "beside", beside))
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(tmp_path), *map(str, folders)]))
    monkeypatch.setattr("sys.executable", str(tmp_path / "beside" / "python"))
    found = find_etcd("--ha")
    version = [*versions, beside][chosen]
    assert (found.path, found.is_safe) == (programs[chosen], version not in ("3.5.0", "3.5.1"))
    assert str(found) == f"etcd {version} ({programs[chosen]})"


def test_machine_that_is_not_listed_runs_no_member() -> None:
    assert claim_entry(a_list(f"{ELSEWHERE}:7000")) is None


def test_agents_of_one_job_on_one_machine_use_different_list_entries() -> None:
    with reserved_port_pairs(2) as (first, second):
        of = a_list(f"{ELSEWHERE}:7000,127.0.0.1:{first},127.0.0.1:{second}")
        one, other = claim_entry(of), claim_entry(of)
        assert one is not None
        assert other is not None
        assert (one.port, other.port) == (first, second)
        assert claim_entry(of) is None
        one.release()
        again = claim_entry(of)
        assert again is not None
        assert again.port == first
        for place in (other, again):
            place.release()


def test_port_of_another_job_is_refused_even_without_a_listener() -> None:
    with reserved_port_pairs(1) as (port,):
        place = claim_entry(a_list(f"127.0.0.1:{port}"))
        assert place is not None
        with pytest.raises(EnvironmentProblem, match=rf"port {port}\b"):
            claim_entry(a_list(f"127.0.0.1:{port}", "other"))
        place.release()


def test_another_user_cannot_take_an_entry_first() -> None:
    """The names of locks follow from the list and the run id, which every user of the host can see."""
    with reserved_port_pairs(1) as (port,), shared_folder() as shared:
        of = a_list(f"127.0.0.1:{port}")

        def claim() -> str:
            os.environ["HOLDFAST_RUNTIME_DIR"] = str(shared)
            return "taken" if claim_entry(of) is None else "claimed"

        place = claim_entry(of)
        assert place is not None
        assert as_user(STRANGER, claim) == "claimed"
        place.release()


def test_lock_of_a_killed_process_and_a_removed_lock_do_not_block_an_entry() -> None:
    with reserved_port_pairs(1) as (port,):
        of = a_list(f"127.0.0.1:{port}")
        killed = os.fork()
        if killed == 0:
            claim_entry(of)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(killed, 0)
        (left,) = locks()
        place = claim_entry(of)
        assert place is not None
        left.unlink()
        place.release()
        again = claim_entry(of)
        assert again is not None
        again.release()
        assert locks() == []


def locks() -> list[Path]:
    return [*Path(runtime_dir()).glob("ha-*.lock")]


@pytest.mark.parametrize(
    ("machines", "advice"),
    [
        (
            "localhost:7000,127.0.0.2:7002,[::1]:7004",
            "start 3 agents on it, or list it once: --ha {0}",
        ),
        (f"127.0.0.1:7000,{ELSEWHERE}:7000,127.0.0.2:7001", "each machine once: --ha {0},{1}"),
        (f"127.0.0.1:7000,{ELSEWHERE}:7002", ""),
    ],
)
def test_list_with_several_addresses_of_one_machine_causes_a_warning(
    machines: str, advice: str
) -> None:
    of = a_list(machines)
    warning = asyncio.run(shared_machine(of, of.names[0]))
    assert warning.endswith(advice.format(*of.names))
    assert bool(warning) == bool(advice)


@pytest.mark.parametrize("offset", [0, 1])
def test_process_that_holds_a_port_is_named(offset: int) -> None:
    with reserved_port_pairs(1) as (port,), socket.create_server(("127.0.0.1", port + offset)):
        named = rf"port {port + offset}\b.* pid {os.getpid()},"
        with pytest.raises(EnvironmentProblem, match=named):
            claim_entry(a_list(f"127.0.0.1:{port}"))


def test_stale_folders_are_removed_and_used_ones_kept(tmp_path: Path) -> None:
    folders = [tmp_path / f"holdfast-ha-{name}" for name in ("left", "shared", "used", "new")]
    for folder in folders:
        folder.mkdir(0o700)
        (folder / "data").mkdir()
    for folder in folders[:3]:
        (folder / "lock").touch()
    folders[1].chmod(0o777)  # Another user may have created the lock.
    (tmp_path / "holdfast-ha-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    with (folders[2] / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_orphans(str(tmp_path))
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    assert (tmp_path / "elsewhere" / "lock").exists()
