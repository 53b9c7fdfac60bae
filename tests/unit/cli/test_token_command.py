"""`holdfast token`: which token it creates, derives and prints."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from holdfast.wire.handshake import job_token
from real_jobs import HOLDFAST

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(*words: str, code: int = 0) -> str:
    """Return the line that the command printed, without its end."""
    done = subprocess.run([*HOLDFAST, "token", *words], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    output = done.stderr if code else done.stdout
    assert output.count("\n") == 1
    assert not (done.stdout if code else done.stderr)
    return output.rstrip("\n")


def test_token_is_created_once_and_printed_only_on_request(home: Path) -> None:
    path = home / ".holdfast" / "token"
    first = run()
    token = path.read_text().strip()
    assert str(path) in first
    assert run() != first  # The output says that it exists.
    assert run("--path") == str(path)
    assert token not in first + run()
    assert run("--show") == token
    assert token not in run("--new")
    assert path.read_text().strip() != token
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_token_of_a_job_can_be_put_into_a_variable(home: Path) -> None:
    command = f"export IT=$({' '.join(HOLDFAST)} token --job 'my job; $HOME'); printf %s $IT"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    master = (home / ".holdfast" / "token").read_bytes().strip()
    assert shown.stdout.encode() == job_token(master, "my job; $HOME")
    assert shown.stdout.replace("-", "").isalnum()
    assert not shown.stderr


def test_token_command_uses_the_token_of_agents(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "a-token-of-the-environment")
    assert run("--show") == "a-token-of-the-environment"
    assert run("--job", "x").encode() == job_token(b"a-token-of-the-environment", "x")
    assert "a-token" not in run()
    assert "HOLDFAST_TOKEN" in run("--path", code=2)
    assert "HOLDFAST_TOKEN" in run("--new", code=2)
    assert not (home / ".holdfast").exists()
    elsewhere = home / "elsewhere"
    monkeypatch.setenv("HOLDFAST_TOKEN_FILE", str(elsewhere))
    assert str(elsewhere) in run()
    assert run("--show") == elsewhere.read_text().strip()


def test_invalid_token_request_is_reported_in_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--job" in run("--job", "", code=2)
    assert "--show" in run("--show", "--path", code=2)
    monkeypatch.setenv("HOLDFAST_TOKEN", job_token(b"the master of all", "one").decode())
    assert "--job" in run("--job", "two", code=2)
    monkeypatch.setenv("HOLDFAST_TOKEN_FILE", str(home))
    assert str(home) in run(code=78)
