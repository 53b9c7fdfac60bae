from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.cli.operate import build_parser, choice_of
from holdfast.control.discovery import location_of
from holdfast.errors import EnvironmentProblem, HoldfastError, UsageError
from holdfast.net import token as token_module
from holdfast.net.token import TOKEN_BYTES_MAX, choose_token, load_token, make_token, own_token
from holdfast.wire.handshake import read_only_token
from other_users import STRANGER, as_user

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "a-token-that-nobody-may-see"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, without a token."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def written(path: Path, data: bytes, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def refused(environ: dict[str, str], token_file: str | None = None) -> HoldfastError:
    with pytest.raises(HoldfastError) as raised:
        load_token(environ, token_file)
    line = str(raised.value)
    assert SECRET not in line
    assert line.isprintable()
    return raised.value


def test_more_specific_setting_takes_precedence(tmp_path: Path) -> None:
    one = written(tmp_path / "one", f"\n{SECRET}\r\n".encode())
    two = written(tmp_path / "two", b"the second of them", mode=0o400)
    everything = {"HOLDFAST_TOKEN_FILE": two, "HOLDFAST_TOKEN": " the third of them\n"}
    assert load_token(everything, one) == SECRET.encode()
    assert load_token(everything) == b"the second of them"
    del everything["HOLDFAST_TOKEN_FILE"]
    assert load_token(everything) == b"the third of them"
    odd = b"\xff\xfe-bytes-of-any-kind"
    assert load_token({"HOLDFAST_TOKEN": os.fsdecode(odd)}) == odd
    assert load_token({"PATH": "/bin"}) is None


def test_unusable_setting_never_falls_back_to_the_next(tmp_path: Path) -> None:
    good = {"HOLDFAST_TOKEN": SECRET}
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in ("", "a\0b", f"{tmp_path}/none", str(tmp_path), f"{tmp_path}/pipe"):
        assert "token_file" in str(refused(good, path))
        assert "HOLDFAST_TOKEN_FILE" in str(refused({**good, "HOLDFAST_TOKEN_FILE": path}))
    for text in ("", " ", "\n\t ", "hunter2", "x" * (TOKEN_BYTES_MAX + 1)):
        path = written(tmp_path / "token", text.encode())
        assert path in str(refused(good, path))
        assert isinstance(refused({"HOLDFAST_TOKEN": text}), UsageError)
    longest = written(tmp_path / "token", b"x" * TOKEN_BYTES_MAX)
    assert load_token({}, longest) == b"x" * TOKEN_BYTES_MAX


def test_short_token_causes_a_warning_unless_certificates_protect_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_token({"HOLDFAST_TOKEN": "x" * 16})
    load_token({"HOLDFAST_TOKEN": "x" * 15}, certified=True)
    assert not caplog.records
    load_token({"HOLDFAST_TOKEN": "correct-horse"})
    (line,) = caplog.messages
    assert "HOLDFAST_TOKEN" in line
    assert "correct-horse" not in line


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can access."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("owner", "modes", "to_root", "to_stranger"),
    [
        (0, (0o400, 0o600), "taken", "is not readable"),
        (0, (0o440, 0o640), "taken", "taken"),  # Like secret volumes of Kubernetes.
        (0, (0o460, 0o444, 0o644, 0o660), "open to other users", "open to other users"),
        (STRANGER, (0o400, 0o600), "another user", "taken"),
        (STRANGER, (0o440, 0o604, 0o601, 0o620), "another user", "open to other users"),
    ],
)
def test_file_is_accepted_only_if_it_is_private(
    public: Path, owner: int, modes: tuple[int, ...], to_root: str, to_stranger: str
) -> None:
    path = written(public / "token", SECRET.encode())
    os.chown(path, owner, STRANGER)

    def load() -> str:
        try:
            return "taken" if load_token({}, path) == SECRET.encode() else "misread"
        except EnvironmentProblem as error:
            return str(error)

    for mode in modes:
        os.chmod(path, mode)
        assert to_root in load()
        assert to_stranger in as_user(STRANGER, load)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "a.localhost"])
def test_loopback_endpoint_needs_and_creates_no_token(home: Path, host: str) -> None:
    assert choose_token(host, {}) is None
    assert not os.listdir(home)
    assert choose_token(host, {"HOLDFAST_TOKEN": SECRET}) == SECRET.encode()
    assert choose_token(host, {}, auth="token") == own_token()


@pytest.mark.parametrize("host", [os.uname().nodename, "0.0.0.0", "::", "10.77.0.1", "node0"])
def test_other_endpoint_uses_the_users_token_and_creates_it(
    home: Path, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the text matters: a host whose own name resolves to loopback must decide like the others."""
    caplog.set_level("INFO", "holdfast")
    old = os.umask(0)
    try:
        token = choose_token(host, {})
    finally:
        os.umask(old)
    path = home / ".holdfast" / "token"
    assert token is not None
    assert path.read_bytes() == token + b"\n"
    assert len(bytes.fromhex(token.decode())) == 32
    assert [one.stat().st_mode & 0o777 for one in (path.parent, path)] == [0o700, 0o600]
    assert os.listdir(path.parent) == ["token"]
    (line,) = caplog.messages
    assert str(path) in line
    assert token.decode() not in line
    assert choose_token(host, {}) == token
    assert choose_token(host, {"HOLDFAST_TOKEN": SECRET}) == SECRET.encode()
    assert len(caplog.messages) == 1


def test_own_token_in_a_folder_that_others_can_change_is_refused(home: Path) -> None:
    own_token()
    (home / ".holdfast").chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="other users can replace the token"):
        own_token()


def test_read_only_token_runs_no_job() -> None:
    """With `--ha`, clients need a node's token as well: etcd knows no other certificates."""
    reader = read_only_token(b"a token of all these nodes", "job").decode()
    environ = {"HOLDFAST_TOKEN": reader}
    with pytest.raises(UsageError, match="the token is read-only and cannot run jobs"):
        choose_token("node0", environ)
    assert choose_token("node0", environ, read_only=True) == reader.encode()


def test_mutual_certificates_replace_the_token(home: Path) -> None:
    assert choose_token("node0", {}, certified=True) is None
    assert not os.listdir(home)
    assert choose_token("node0", {}, certified=True, auth="token") == own_token()


def test_auth_none_uses_no_token_and_conflicts_with_a_set_one(home: Path, tmp_path: Path) -> None:
    own_token()
    assert choose_token("node0", {}, auth="none") is None
    file = written(tmp_path / "token", SECRET.encode())
    for environ, token_file in (
        ({"HOLDFAST_TOKEN": SECRET}, None),
        ({"HOLDFAST_TOKEN_FILE": file}, None),
        ({}, file),
    ):
        with pytest.raises(UsageError, match="auth=none") as raised:
            choose_token("node0", environ, token_file=token_file, auth="none")
        assert next(iter(environ), "token_file") in str(raised.value)


RACE = """
import sys
from holdfast.net.token import own_token
sys.stdin.read()
print(own_token().decode())
"""


def test_concurrent_starts_with_one_home_share_one_token(home: Path) -> None:
    command = [sys.executable, "-c", RACE]
    pipe = subprocess.PIPE
    nodes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(8)]
    for one in nodes:
        assert one.stdin is not None
        one.stdin.close()
        one.stdin = None
    tokens, errors = zip(*(one.communicate() for one in nodes), strict=True)
    assert len(set(tokens)) == 1
    assert len(tokens[0]) == 65
    assert sum(b"created " in one for one in errors) == 1  # One process reports it.
    assert os.listdir(home / ".holdfast") == ["token"]


def test_process_that_loses_the_race_uses_the_existing_token(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own_token()
    monkeypatch.setattr("os.path.lexists", lambda _: False)  # The state of a moment ago.
    assert own_token() == first


def test_new_token_replaces_the_old_one(home: Path) -> None:
    first = own_token()
    assert make_token(token_module.own_path(), replace=True)
    assert own_token() != first
    assert os.listdir(home / ".holdfast") == ["token"]


@pytest.mark.parametrize("place", [("--rdzv-endpoint", "node0"), ("--ha", "node0,node1")])
def test_query_of_a_job_creates_no_token(home: Path, place: tuple[str, str]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"\.holdfast/token"):
        location_of(choice_of(build_parser("status").parse_args([*place, "--rdzv-id", "job"])))
    assert not os.listdir(home)


@pytest.mark.parametrize("lacking", ["home", "right", "links"])
def test_failed_creation_names_the_setting_to_use(
    home: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "home":
        monkeypatch.setenv("HOME", str(home / "none"))
    elif lacking == "right":
        written(home / ".holdfast", b"")
    else:

        def link(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("os.link", link)
    with pytest.raises(EnvironmentProblem) as raised:
        own_token()
    line = str(raised.value)
    for part in (".holdfast/token", "HOLDFAST_TOKEN_FILE", "token_file", "auth=none"):
        assert part in line
    left = home / ".holdfast"
    assert not left.is_dir() or not os.listdir(left)


def test_user_without_a_home_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    output = as_user(STRANGER, lambda: str(own_token()))
    assert output.startswith("EnvironmentProblem")
    assert "HOLDFAST_TOKEN_FILE" in output
