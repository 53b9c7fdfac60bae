from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem, HoldfastError, UsageError
from holdfast.net.token import TOKEN_BYTES_MAX, load_token
from holdfast.wire.handshake import CLIENT, SERVER, prove, same

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "a-token-that-nobody-may-see"


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


def test_there_may_be_none() -> None:
    assert load_token({}) is None
    assert load_token({"PATH": "/bin"}, None) is None


def test_it_is_read_from_the_variable() -> None:
    assert load_token({"HOLDFAST_TOKEN": f" {SECRET}\n"}) == SECRET.encode()


def test_a_variable_may_hold_any_bytes() -> None:
    assert load_token({"HOLDFAST_TOKEN": os.fsdecode(b"\xff\xfe-bytes")}) == b"\xff\xfe-bytes"


def test_it_is_read_from_the_file_the_variable_names(tmp_path: Path) -> None:
    path = written(tmp_path / "token", f"\n{SECRET}\r\n".encode())
    assert load_token({"HOLDFAST_TOKEN_FILE": path}) == SECRET.encode()


def test_the_more_particular_setting_counts(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one", b"one"), written(tmp_path / "two", b"two", mode=0o400)
    everything = {"HOLDFAST_TOKEN_FILE": two, "HOLDFAST_TOKEN": "three"}
    assert load_token(everything, one) == b"one"
    assert load_token(everything) == b"two"
    del everything["HOLDFAST_TOKEN_FILE"]
    assert load_token(everything) == b"three"


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_an_empty_token_is_refused(tmp_path: Path, text: str) -> None:
    error = refused({"HOLDFAST_TOKEN": text})
    assert isinstance(error, UsageError)
    assert str(error).startswith("HOLDFAST_TOKEN: the token is empty")
    path = written(tmp_path / "token", text.encode())
    error = refused({"HOLDFAST_TOKEN_FILE": path, "HOLDFAST_TOKEN": SECRET})
    assert str(error).startswith(f"HOLDFAST_TOKEN_FILE: {path}: the token is empty")


def test_an_empty_file_name_is_refused_rather_than_passed_over() -> None:
    error = refused({"HOLDFAST_TOKEN_FILE": "", "HOLDFAST_TOKEN": SECRET})
    assert str(error).startswith("HOLDFAST_TOKEN_FILE is empty")
    assert str(refused({}, "")).startswith("token_file is empty")


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    error = refused({"HOLDFAST_TOKEN": SECRET}, f"{tmp_path}/none")
    assert isinstance(error, EnvironmentProblem)
    assert str(error) == f"token_file: {tmp_path}/none cannot be read: No such file or directory"
    assert "HOLDFAST_TOKEN_FILE: " in str(refused({"HOLDFAST_TOKEN_FILE": f"{tmp_path}/none"}))


def test_a_name_that_no_file_can_have_is_refused() -> None:
    assert str(refused({}, "a\0b")) == r"token_file: 'a\x00b' is not the name of a file"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "token", SECRET.encode(), mode)
    error = refused({}, path)
    assert isinstance(error, EnvironmentProblem)
    assert f"{path} is open to other users (mode {mode:04o})" in str(error)
    assert "chmod 600" in str(error)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "is not a regular file" in str(refused({}, str(tmp_path)))
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is not a regular file" in str(refused({}, f"{tmp_path}/pipe"))


def test_a_token_has_a_limit(tmp_path: Path) -> None:
    path = written(tmp_path / "token", b"x" * TOKEN_BYTES_MAX)
    assert load_token({}, path) == b"x" * TOKEN_BYTES_MAX
    written(tmp_path / "token", b"x" * (TOKEN_BYTES_MAX + 1))
    assert "longer than 4096 bytes" in str(refused({}, path))
    assert "longer than 4096" in str(refused({"HOLDFAST_TOKEN": SECRET * 200}))


def proof(**changed: object) -> bytes:
    parts = {
        "token": b"t", "side": SERVER, "offered": (1, 2), "version": 2,
        "client_nonce": b"c" * 16, "server_nonce": b"s" * 16, **changed,
    }  # fmt: skip
    return prove(**parts)  # type: ignore[arg-type]


def test_a_proof_depends_on_everything_that_was_said() -> None:
    proofs = [
        proof(),
        proof(token=b"u"),
        proof(token=b"t\0"),
        proof(side=CLIENT),
        proof(offered=(2, 2)),
        proof(offered=(1, 3)),
        proof(version=1),
        proof(client_nonce=b"d" * 16),
        proof(server_nonce=b"d" * 16),
        proof(client_nonce=b"s" * 16, server_nonce=b"c" * 16),
        proof(client_nonce=b"c" * 17, server_nonce=b"s" * 15),
        proof(client_nonce=b"c" * 16 + b"s", server_nonce=b"s" * 15),
    ]
    assert len(set(proofs)) == len(proofs)
    assert {len(one) for one in proofs} == {32}
    assert proof() == proof()


def test_a_proof_is_the_hmac_that_other_programs_compute() -> None:
    """Written out once, so that a change of the bytes is noticed: both sides must agree on it."""
    import hashlib
    import hmac

    text = (
        b"\0\0\0\x14holdfast coordinator"
        b"\0\0\0\x05"
        b"1 2 2"
        b"\0\0\0\x10" + b"c" * 16 + b"\0\0\0\x10" + b"s" * 16
    )
    assert proof() == hmac.new(hashlib.sha256(b"t").digest(), text, hashlib.sha256).digest()


def test_proofs_are_compared() -> None:
    assert same(proof(), proof())
    assert not same(proof(), proof(token=b"u"))
    assert not same(b"", proof())
    assert not same(proof()[:31], proof())
