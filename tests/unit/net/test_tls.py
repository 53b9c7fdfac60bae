"""Contexts are tried on real handshakes, over memory instead of sockets."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from certificates import Pair, make_ca, make_certificate, run_openssl
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.net.tls import client_context, explain_failure, server_context

if TYPE_CHECKING:
    from collections.abc import Callable
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


class Link:
    """Two ends of TLS in one process."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = server.wrap_bio(to_server, to_client, server_side=True)
        self.client = client.wrap_bio(to_client, to_server, server_hostname=name)

    def shake(self) -> None:
        """Go on until both ends are done; raise what the first end that fails raises."""
        waiting: list[Callable[[], object]] = [self.client.do_handshake, self.server.do_handshake]
        for _ in range(20):
            for step in list(waiting):
                try:
                    step()
                    waiting.remove(step)
                except ssl.SSLWantReadError:
                    continue
            if not waiting:
                return
        raise AssertionError("the handshake did not end")

    def say(self, words: bytes) -> bytes:
        self.server.write(words)
        return self.client.read(len(words))


def link(
    ca: Pair | None,
    server: Pair,
    *,
    name: str = "localhost",
    client: Pair | None = None,
    server_ca: Pair | None = None,
    check_hostname: bool = True,
) -> Link:
    return Link(
        server_context(server.cert, server.key, server_ca.cert if server_ca else None),
        client_context(
            ca.cert if ca else None,
            client.cert if client else None,
            client.key if client else None,
            check_hostname=check_hostname,
        ),
        name,
    )


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_a_server_is_known_by_its_authority(ca: Pair, server: Pair, name: str) -> None:
    both = link(ca, server, name=name)
    both.shake()
    assert both.client.version() in ("TLSv1.2", "TLSv1.3")
    assert both.say(b"hello") == b"hello"


def test_nothing_older_than_tls_1_2(ca: Pair, server: Pair) -> None:
    for context in (server_context(*server), client_context(ca.cert)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_server_of_another_authority_is_not_trusted(other_ca: Pair, server: Pair) -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as raised:
        link(other_ca, server).shake()
    assert "the certificate is not trusted: " in explain_failure(raised.value)
    assert "(check tls_ca)" in explain_failure(raised.value)


def test_without_an_authority_of_ones_own_the_machines_count(server: Pair) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        link(None, server).shake()


@pytest.mark.parametrize("name", ["elsewhere.example.org", "127.0.0.2"])
def test_the_name_must_be_in_the_certificate(ca: Pair, server: Pair, name: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as raised:
        link(ca, server, name=name).shake()
    why = explain_failure(raised.value)
    assert why.startswith("the certificate is for another host: ")
    assert name in why
    assert "(set tls_server_name, or tls_check_hostname=false)" in why


def test_the_check_of_the_name_can_be_switched_off_and_no_more(
    ca: Pair, other_ca: Pair, server: Pair
) -> None:
    link(ca, server, name="elsewhere.example.org", check_hostname=False).shake()
    with pytest.raises(ssl.SSLCertVerificationError):
        link(other_ca, server, check_hostname=False).shake()


def test_a_server_with_an_authority_requires_certificates(
    ca: Pair, other_ca: Pair, server: Pair
) -> None:
    agent = make_certificate(ca, "agent", san=())
    link(ca, server, client=agent, server_ca=ca).shake()
    nameless = link(ca, server, server_ca=ca)
    with pytest.raises(ssl.SSLError) as raised:
        nameless.shake()
    required = "a client certificate is required (set tls_cert and tls_key on the client's side)"
    assert explain_failure(raised.value) == required
    # With TLS 1.3 the client believes it is done, and hears of it when it reads.
    with pytest.raises(ssl.SSLError) as raised:
        nameless.client.read()
    assert explain_failure(raised.value) == required
    stranger = link(ca, server, client=make_certificate(other_ca, "stranger"), server_ca=ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.shake()
    with pytest.raises(ssl.SSLError) as raised:
        stranger.client.read()
    assert "the other side does not trust our certificate" in explain_failure(raised.value)


def test_a_plain_side_is_recognised(ca: Pair, server: Pair) -> None:
    for words in (b"\x00\x00\x00\x31\x84\xa4type\xa5hello", b"GET / HTTP/1.1\r\n\r\n"):
        incoming = ssl.MemoryBIO()
        end = server_context(*server).wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
        incoming.write(words)
        with pytest.raises(ssl.SSLError) as raised:
            end.do_handshake()
        assert "the other side does not speak TLS" in explain_failure(raised.value)
    incoming = ssl.MemoryBIO()
    client = client_context(ca.cert).wrap_bio(incoming, ssl.MemoryBIO(), server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    incoming.write(b"\x00\x00\x00\x31\x84\xa4type\xa7refused")
    with pytest.raises(ssl.SSLError) as raised:
        client.do_handshake()
    assert "the other side does not speak TLS" in explain_failure(raised.value)


def test_any_other_failure_is_quoted() -> None:
    assert explain_failure(OSError("odd\nend")) == "TLS failed: odd?end"


def test_missing_files_are_named_with_their_settings(
    ca: Pair, server: Pair, tmp_path: Path
) -> None:
    none = f"{tmp_path}/none"
    missing = "cannot be read: No such file or directory"
    with pytest.raises(EnvironmentProblem, match=f"^tls_cert: {none} {missing}$"):
        server_context(none, server.key)
    with pytest.raises(EnvironmentProblem, match=f"^tls_key: {none} {missing}$"):
        server_context(server.cert, none)
    with pytest.raises(EnvironmentProblem, match=f"^tls_ca: {none} {missing}$"):
        server_context(server.cert, server.key, none)
    with pytest.raises(EnvironmentProblem, match=f"^tls_ca: {none} {missing}$"):
        client_context(none)
    with pytest.raises(EnvironmentProblem, match=r"^tls_ca: .* cannot be read: Is a directory$"):
        client_context(str(tmp_path))
    with pytest.raises(UsageError, match=r"^tls_ca is empty"):
        client_context("")


def test_files_with_something_else_in_them_are_named(
    ca: Pair, server: Pair, tmp_path: Path
) -> None:
    garbage = tmp_path / "garbage"
    for content in (b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n", b"\0" * 100):
        garbage.write_bytes(content)
        with pytest.raises(UsageError, match=f"^tls_cert: {garbage} is not a certificate"):
            server_context(str(garbage), server.key)
        with pytest.raises(UsageError, match=f"^tls_key: {garbage} is not a private key"):
            server_context(server.cert, str(garbage))
        with pytest.raises(UsageError, match=f"^tls_ca: {garbage} has no certificate"):
            client_context(str(garbage))
    with pytest.raises(UsageError, match=r"^tls_cert: .* is not a certificate"):
        server_context(server.key, server.cert)


def test_a_key_of_another_certificate_is_named(ca: Pair, server: Pair) -> None:
    with pytest.raises(UsageError, match=f"^tls_key: {ca.key} is not the key of tls_cert: "):
        server_context(server.cert, ca.key)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(server: Pair, tmp_path: Path) -> None:
    locked = f"{tmp_path}/locked.key"
    run_openssl("ec", "-in", server.key, "-aes128", "-passout", "pass:secret", "-out", locked)
    with pytest.raises(UsageError, match=f"^tls_key: {locked} is encrypted"):
        server_context(server.cert, locked)


def test_half_a_client_certificate_is_refused(ca: Pair, server: Pair) -> None:
    with pytest.raises(UsageError, match=r"^tls_cert is set and tls_key is not"):
        client_context(ca.cert, cert=server.cert)
    with pytest.raises(UsageError, match=r"^tls_key is set and tls_cert is not"):
        client_context(ca.cert, key=server.key)
