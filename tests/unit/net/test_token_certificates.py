"""Certificates derived from a token: only holders of the token trust them."""

from __future__ import annotations

import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from certificates import Link
from holdfast.net.token_certificates import Certificate, make_certificate

if TYPE_CHECKING:
    from pathlib import Path

TOKEN, OTHER = b"a token that was drawn", b"another token, drawn too"


def stored(folder: Path, made: Certificate) -> dict[str, str]:
    paths = {}
    for name, data in made._asdict().items():
        path = folder / f"{abs(hash(data))}.{name}"
        path.write_bytes(data)
        paths[name] = str(path)
    return paths


def context(folder: Path, made: Certificate, *, server: bool) -> ssl.SSLContext:
    files = stored(folder, made)
    made_for = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    found = ssl.SSLContext(made_for)
    found.verify_flags |= ssl.VERIFY_X509_STRICT
    found.verify_mode = ssl.CERT_REQUIRED
    found.load_verify_locations(files["ca"])
    found.load_cert_chain(files["cert"], files["key"])
    return found


@pytest.mark.parametrize("host", ["node0", "10.0.0.1", "fd00::1"])
def test_certificates_of_one_token_trust_each_other(tmp_path: Path, host: str) -> None:
    server = make_certificate(TOKEN, ["node0", "10.0.0.1", "fd00::1"])
    Link(
        context(tmp_path, server, server=True),
        context(tmp_path, make_certificate(TOKEN), server=False),
        host,
    ).do_handshake()


@pytest.mark.parametrize(
    ("server_token", "client_token", "host"),
    [(TOKEN, OTHER, "node0"), (OTHER, TOKEN, "node0"), (TOKEN, TOKEN, "elsewhere")],
)
def test_certificates_of_other_tokens_or_hosts_are_refused(
    tmp_path: Path, server_token: bytes, client_token: bytes, host: str
) -> None:
    server = context(tmp_path, make_certificate(server_token, ["node0"]), server=True)
    client = context(tmp_path, make_certificate(client_token), server=False)
    with pytest.raises(ssl.SSLCertVerificationError):
        Link(server, client, host).do_handshake()


def test_server_refuses_a_client_with_another_token_that_verifies_nothing(tmp_path: Path) -> None:
    client = context(tmp_path, make_certificate(OTHER), server=False)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    server = context(tmp_path, make_certificate(TOKEN, ["node0"]), server=True)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        Link(server, client, "node0").do_handshake()


def test_openssl_accepts_the_certificates(tmp_path: Path) -> None:
    files = stored(tmp_path, make_certificate(TOKEN, ["node0", "127.0.0.1"]))
    ca = stored(tmp_path, make_certificate(TOKEN))["ca"]  # Created separately: the same authority.
    for command in (
        ["verify", "-x509_strict", "-CAfile", ca, files["cert"]],
        ["ec", "-check", "-noout", "-in", files["key"]],
    ):
        done = subprocess.run(["openssl", *command], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
