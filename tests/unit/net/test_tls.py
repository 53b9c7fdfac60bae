"""TLS contexts in real handshakes, in memory instead of over sockets."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from certificates import Link, Pair, make_ca, make_certificate, run_openssl
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.net.tls import TlsFiles, TlsToken, client_context, explain_failure, server_context
from holdfast.wire.handshake import job_token

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def server(ca: Pair) -> Pair:
    return make_certificate(ca, "server")


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_ca(tmp_path_factory.mktemp("other"), "other-ca")


def link(
    ca: Pair | None,
    server: Pair,
    *,
    name: str = "localhost",
    client: Pair | None = None,
    server_ca: Pair | None = None,
) -> Link:
    return Link(
        server_context(server.cert, server.key, server_ca.cert if server_ca else None),
        client_context(
            ca.cert if ca else None,
            client.cert if client else None,
            client.key if client else None,
        ),
        name,
    )


def failure(both: Link) -> str:
    with pytest.raises(ssl.SSLError) as raised:
        both.do_handshake()
    return explain_failure(raised.value)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_client_accepts_a_server_of_its_authority(ca: Pair, server: Pair, name: str) -> None:
    both = link(ca, server, name=name)
    both.do_handshake()
    assert both.client.version() in ("TLSv1.2", "TLSv1.3")
    for context in (server_context(*server), client_context(ca.cert)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_untrusted_server_or_other_name_is_refused(ca: Pair, other_ca: Pair, server: Pair) -> None:
    assert "tls_ca" in failure(link(other_ca, server))
    assert "tls_ca" in failure(link(None, server))
    for name in ("elsewhere.example.org", "127.0.0.2"):
        why = failure(link(ca, server, name=name))
        assert name in why
        assert "tls_server_name" in why


def test_server_with_an_authority_requires_client_certificates(
    ca: Pair, other_ca: Pair, server: Pair
) -> None:
    link(ca, server, client=make_certificate(ca, "agent", san=()), server_ca=ca).do_handshake()
    without_certificate = link(ca, server, server_ca=ca)
    assert "tls_cert and tls_key" in failure(without_certificate)
    # With TLS 1.3 the client completes its handshake, and learns of the refusal only when it reads.
    with pytest.raises(ssl.SSLError) as raised:
        without_certificate.client.read()
    assert "tls_cert and tls_key" in explain_failure(raised.value)
    untrusted = link(ca, server, client=make_certificate(other_ca, "untrusted"), server_ca=ca)
    failure(untrusted)
    with pytest.raises(ssl.SSLError) as raised:
        untrusted.client.read()
    assert "tls_ca there" in explain_failure(raised.value)


def test_side_without_tls_is_recognized(ca: Pair, server: Pair) -> None:
    for first in (b"\x00\x00\x00\x31\x84\xa4type\xa5hello", b"GET / HTTP/1.1\r\n\r\n"):
        incoming = ssl.MemoryBIO()
        end = server_context(*server).wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
        incoming.write(first)
        with pytest.raises(ssl.SSLError) as raised:
            end.do_handshake()
        assert "does not use TLS" in explain_failure(raised.value)
    incoming = ssl.MemoryBIO()
    client = client_context(ca.cert).wrap_bio(incoming, ssl.MemoryBIO(), server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    incoming.write(b"\x00\x00\x00\x31\x84\xa4type\xa7refused")
    with pytest.raises(ssl.SSLError) as raised:
        client.do_handshake()
    assert "does not use TLS" in explain_failure(raised.value)
    assert explain_failure(OSError("odd\nend")).endswith("odd end")


def test_invalid_files_are_named_with_their_settings(
    ca: Pair, server: Pair, tmp_path: Path
) -> None:
    garbage, locked = tmp_path / "garbage", f"{tmp_path}/locked.key"
    garbage.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n")
    run_openssl("ec", "-in", server.key, "-aes128", "-passout", "pass:secret", "-out", locked)
    for bad, error in (
        (f"{tmp_path}/none", EnvironmentProblem),
        (str(tmp_path), EnvironmentProblem),
        (str(garbage), UsageError),
    ):
        with pytest.raises(error, match=f"^tls_cert: {bad} "):
            server_context(bad, server.key)
        with pytest.raises(error, match=f"^tls_key: {bad} "):
            server_context(server.cert, bad)
        with pytest.raises(error, match=f"^tls_ca: {bad} "):
            server_context(server.cert, server.key, bad)
        with pytest.raises(error, match=f"^tls_ca: {bad} "):
            client_context(bad)
    for key in (ca.key, locked):  # The key of another certificate, and one with a passphrase.
        with pytest.raises(UsageError, match=f"^tls_key: {key} "):
            server_context(server.cert, key)
    with pytest.raises(UsageError, match=r"^tls_cert: "):
        server_context(server.key, server.cert)
    with pytest.raises(UsageError, match=r"^tls_ca "):
        client_context("")
    with pytest.raises(UsageError, match="tls_key"):
        client_context(ca.cert, cert=server.cert)


def test_same_certificate_files_work_for_client_and_server(ca: Pair, server: Pair) -> None:
    files = TlsFiles(cert=server.cert, key=server.key, ca=ca.cert)
    assert files.can_serve
    assert files.for_server().verify_mode == ssl.CERT_REQUIRED
    assert files.for_client().check_hostname
    only_ca = TlsFiles(ca=ca.cert)
    assert not only_ca.can_serve
    assert only_ca.for_client().verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(UsageError, match="tls_cert"):
        only_ca.for_server()


def test_token_replaces_certificates_if_python_supports_psk(ca: Pair, server: Pair) -> None:
    ours = TlsToken(b"master", "job")
    assert "master" not in repr(ours)
    if not getattr(ssl, "HAS_PSK", False):
        for make in (ours.for_client, ours.for_server):
            with pytest.raises(UsageError, match="tls=psk"):
                make()
        return
    for there in (TlsToken(b"master"), TlsToken(job_token(b"master", "job"))):
        both = Link(there.for_server(), ours.for_client(), "anything")
        both.do_handshake()
        assert both.client.version() == "TLSv1.3"
        assert both.client.getpeercert(binary_form=True) is None
    for other in (TlsToken(b"another"), TlsToken(job_token(b"master", "other"))):
        assert "tls=psk" in failure(Link(other.for_server(), ours.for_client(), "x"))
    # A certificate does not help either, whichever authority signed it.
    assert "certificate" in failure(Link(server_context(*server), ours.for_client(), "localhost"))
    assert "tls=psk" in failure(Link(ours.for_server(), client_context(ca.cert), "localhost"))
    with pytest.raises(UsageError, match="--rdzv-id"):
        TlsToken(b"master", "j" * 201).for_client()
