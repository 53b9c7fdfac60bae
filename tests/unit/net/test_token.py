from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import EnvironmentProblem, HoldfastError, UsageError
from holdfast.net.token import TOKEN_BYTES_MAX, load_token
from holdfast.wire.handshake import SERVER, prove

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


def test_the_more_particular_setting_counts(tmp_path: Path) -> None:
    one = written(tmp_path / "one", f"\n{SECRET}\r\n".encode())
    two = written(tmp_path / "two", b"two", mode=0o400)
    everything = {"HOLDFAST_TOKEN_FILE": two, "HOLDFAST_TOKEN": " three\n"}
    assert load_token(everything, one) == SECRET.encode()
    assert load_token(everything) == b"two"
    del everything["HOLDFAST_TOKEN_FILE"]
    assert load_token(everything) == b"three"
    assert load_token({"HOLDFAST_TOKEN": os.fsdecode(b"\xff\xfe-bytes")}) == b"\xff\xfe-bytes"
    assert load_token({"PATH": "/bin"}) is None


def test_one_that_is_set_and_cannot_be_used_never_falls_through(tmp_path: Path) -> None:
    good = {"HOLDFAST_TOKEN": SECRET}
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in ("", "a\0b", f"{tmp_path}/none", str(tmp_path), f"{tmp_path}/pipe"):
        assert "token_file" in str(refused(good, path))
        assert "HOLDFAST_TOKEN_FILE" in str(refused({**good, "HOLDFAST_TOKEN_FILE": path}))
    for text in ("", " ", "\n\t ", "x" * (TOKEN_BYTES_MAX + 1)):
        path = written(tmp_path / "token", text.encode())
        assert path in str(refused(good, path))
        assert isinstance(refused({"HOLDFAST_TOKEN": text}), UsageError)
    longest = written(tmp_path / "token", b"x" * TOKEN_BYTES_MAX)
    assert load_token({}, longest) == b"x" * TOKEN_BYTES_MAX


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "token", SECRET.encode(), mode)
    error = refused({}, path)
    assert isinstance(error, EnvironmentProblem)
    assert f"{mode:04o}" in str(error)


def proof(**changed: object) -> bytes:
    parts = {
        "token": b"t", "side": SERVER, "offered": (1, 2), "version": 2,
        "client_nonce": b"c" * 16, "server_nonce": b"s" * 16, **changed,
    }  # fmt: skip
    return prove(**parts)  # type: ignore[arg-type]


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
