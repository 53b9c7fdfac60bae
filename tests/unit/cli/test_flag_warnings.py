from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.cli import run
from holdfast.errors import UsageError
from holdfast.launcher import launch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Said:
    """What a command line is told; the job itself is not run."""
    monkeypatch.setattr(launch.elastic_launch, "__call__", lambda *_: {})
    (tmp_path / "job.py").touch()
    return Said(str(tmp_path / "job.py"), caplog)


class Said:
    def __init__(self, script: str, caplog: pytest.LogCaptureFixture) -> None:
        self._script, self._caplog = script, caplog

    def __call__(self, words: str) -> list[str]:
        self._caplog.clear()
        run.run(run.parse_args([*words.split(), self._script]))
        return self._caplog.messages


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--standalone --rdzv-conf join_timeout=5",
        "--rdzv-conf timeout=5,is_host=1",
        "--local-ranks-filter 0",
        "--nnodes 2 --master-addr head",
        "--nnodes 2 --rdzv-endpoint 127.0.0.1:5000",
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost",
        "--nnodes 2 --rdzv-backend file --rdzv-endpoint /somewhere",
    ],
)
def test_nothing_is_said_of_what_makes_sense(said: Said, words: str) -> None:
    assert said(words) == []


@pytest.mark.parametrize(
    "words", ["", "--standalone", "--rdzv-backend c10d --rdzv-endpoint localhost:0"]
)
def test_one_node_checks_its_settings_too(said: Said, words: str) -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-conf: join_timeout: 'x' is not a time"):
        said(f"{words} --rdzv-conf join_timeout=x")
    unknown = "--rdzv-conf: foo is unknown and has no effect"
    assert said(f"{words} --rdzv-conf foo=1") == [unknown]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--spares 3", "--spares is ignored: the job has one node"),
        ("--rdzv-conf spares=3", "--spares is ignored: the job has one node"),
        ("--node-rank 1", "--node-rank 1 is ignored: the only node of a job is 0"),
        ("--standalone --node-rank 1", "--node-rank 1 is ignored: the only node of a job is 0"),
        (
            "--rdzv-backend c10d --node-rank 1",
            "--node-rank is ignored: c10d assigns the ranks of nodes itself",
        ),
    ],
)
def test_what_one_node_ignores_is_told(said: Said, words: str, line: str) -> None:
    assert said(words) == [line]


def test_a_level_that_is_none_is_told_of_at_the_start(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGLEVEL", "FOO")
    (line,) = said("")
    assert line.startswith("LOGLEVEL: 'FOO' is ignored")


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ("7", "no worker has local rank 7, there are 1 here: no output of any is shown"),
        ("0,2,1", "no worker has local rank 1, 2, there are 1 here"),
    ],
)
def test_a_filter_for_workers_that_do_not_exist(said: Said, ranks: str, line: str) -> None:
    assert said(f"--local-ranks-filter {ranks}") == [f"--local-ranks-filter: {line}"]


@pytest.mark.parametrize(
    ("words", "place", "flag"),
    [
        ("", "127.0.0.1:29500", "--master-addr, the address of node 0"),
        ("--master-port 7", "127.0.0.1:7", "--master-addr, the address of node 0"),
        ("--rdzv-backend c10d", "localhost:29400", "--rdzv-endpoint, HOST:29400 of the node"),
    ],
)
def test_nodes_that_cannot_meet_across_machines_are_told(
    said: Said, words: str, place: str, flag: str
) -> None:
    (line,) = said(f"--nnodes 2 {words}")
    assert f"meet at {place}, where only agents on this machine can come" in line
    assert flag in line
