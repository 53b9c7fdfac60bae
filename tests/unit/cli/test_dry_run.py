"""`holdfast run --dry-run`: it prints what a command line would run, and changes nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import console
from holdfast.cli import main
from holdfast.rendezvous import handler_registry

if TYPE_CHECKING:
    from pathlib import Path

PRINTS_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PRINTS_ENVIRONMENT)
    (tmp_path / "a file").touch()


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.run_command(["--dry-run", "--json", *words]) == 0, capsys.readouterr()
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_dry_run_predicts_the_environment_of_a_real_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--standalone", "--rdzv-id", "nightly", "--max-restarts", "2", "--nproc-per-node", "2"]
    words += ["--local-ranks-filter", "0", "train.py"]
    planned_for = planned(capsys, *words)["environment"]
    command = [sys.executable, "-m", "holdfast", "run", *words]
    env = dict(os.environ)
    real = json.loads(subprocess.check_output(command, env=env, text=True))
    changed = {name for name, value in real.items() if env.get(name) != value} - {"LC_CTYPE"}
    assert changed <= {*planned_for}
    assert {*planned_for} <= {*real}
    known = {name: value for name, value in planned_for.items() if value is not None}
    assert known == {name: real[name] for name in known}
    assert {*planned_for} - {*known} == {
        "HOLDFAST_FENCE", "HOLDFAST_WORKER_PAGE", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE",
    }  # fmt: skip


def test_dry_run_shows_the_job_and_what_the_rendezvous_decides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--nnodes", "2:4", "--nproc-per-node", "8", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "node0.invalid", "--rdzv-id", "nightly", "--log-dir", "logs"]
    assert main.run_command(["--dry-run", *words, "train.py", "--name", "two words"]) == 0
    shown = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines() if line[0] != " ")
    assert lines["job"] == "nightly"
    assert lines["nodes"] == "2 to 4"
    assert lines["workers"] == "8 on this node"
    assert lines["rendezvous"] == "c10d at node0.invalid"
    assert lines["token"].startswith(os.path.expanduser("~/.holdfast/token"))
    assert lines["command"] == f"{sys.executable} -u train.py --name 'two words'"
    assert lines["logs"] == f"a new folder in {tmp_path}/logs"
    assert "  RANK=0\n" in shown
    assert "  MASTER_ADDR=(decided at the rendezvous)\n" in shown
    assert "  WORLD_SIZE=(decided at the rendezvous)\n" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend", "file", "--rdzv-endpoint", "shared/deep"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29999"],
        ["--rdzv-backend", "static", "--rdzv-endpoint", "host.invalid:1"],
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd.invalid:2379"],
        ["--ha", "a.invalid,b.invalid,c.invalid"],
        ["--preload", "json"],
        ["--run-path", "--redirects", "3"],
    ],
    ids=" ".join,
)
def test_dry_run_starts_nothing_and_creates_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run must not do this")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("holdfast.processes.keeper.keeper_client.Keeper.prestart", refuse)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # Other tests create a token in theirs.
    before = [*tmp_path.rglob("*")]
    nodes = [] if "--preload" in words or "--run-path" in words else ["--nnodes", "2"]
    flags = ["--dry-run", *nodes, "--rdzv-id", "x", "--log-dir", "logs/here", *words]
    assert main.run_command([*flags, "train.py"]) == 0
    assert [*tmp_path.rglob("*")] == before


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["trian.py"], 127, "trian.py"),
        (["--no-python", "./train.py"], 126, "not executable"),
        (["--nnodes", "0", "train.py"], 2, "--nnodes"),
        (["--nproc-per-node", "many", "train.py"], 2, "--nproc-per-node"),
        (["--log-dir", "a file/logs", "train.py"], 2, "--log-dir"),
        (["--event-log-handler", "nowhere", "train.py"], 2, "--event-log-handler"),
        (["--nnodes", "2", "--rdzv-backend", "nobody", "train.py"], 2, "--rdzv-backend"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:x", "train.py"], 2, "h:x"),
        (["--nnodes", "2", "--rdzv-backend", "file", "--rdzv-endpoint", "a file/x", "train.py"], 78, "a file/x"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h", "--rdzv-conf", "token_file=none", "train.py"], 78, "token_file"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "h", "--rdzv-conf", "cert=x", "train.py"], 2, "cert"),
    ],
)  # fmt: skip
def test_dry_run_fails_as_the_real_run_would(
    words: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_command(["--dry-run", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err


def test_dry_run_on_a_machine_of_the_ha_list_needs_etcd(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/nowhere/etcd")
    words = ["--dry-run", "--nnodes", "3", "--ha", "127.0.0.1,b.invalid,c.invalid"]
    assert main.run_command([*words, "--rdzv-id", "x", "train.py"]) == 78
    assert "/nowhere/etcd" in capsys.readouterr().err


def test_dry_run_warns_if_the_ha_list_names_one_machine_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    etcd = tmp_path / "etcd"
    etcd.write_text("#!/bin/sh\necho 'etcd Version: 3.4.23'\n")
    etcd.chmod(0o700)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(etcd))
    warnings: list[str] = []
    monkeypatch.setattr(console, "warning", warnings.append)
    words = ["--dry-run", "--ha", "127.0.0.1:2000,127.0.0.1:3000", "--rdzv-id", "x"]
    assert main.run_command([*words, "train.py"]) == 0
    same = "127.0.0.1:2000 and 127.0.0.1:3000 are the same machine"
    assert [same in one for one in warnings].count(True) == 1


def test_plug_in_is_looked_up_but_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    registry = handler_registry.rendezvous_handler_registry

    def create(_: object) -> Any:
        raise AssertionError("a dry run must not create a handler")

    registry.register("dry-run-test", create)
    words = ["--nnodes", "2", "--rdzv-backend", "dry-run-test", "--rdzv-endpoint", "x", "train.py"]
    assert planned(capsys, *words)["backend"] == "dry-run-test"


def test_json_needs_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command(["--json", "train.py"]) == 2
    assert "--dry-run" in capsys.readouterr().err
