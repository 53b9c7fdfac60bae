"""TLS: the contexts of both sides, their files, and readable messages for failures.

A server with `tls_ca` requires a certificate from every client. A client always verifies the
server's certificate: an authority of `tls_ca` (by default, one of the machine's) must have signed it, and it
must be valid for `tls_server_name` (by default, the host of the endpoint).

With `tls=psk` there are no certificates: the key is derived from the token (`TlsToken`).

Nothing here opens a connection.
"""

from __future__ import annotations

import os
import ssl
import sys
from typing import ClassVar

import msgspec

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.printable import quoted
from holdfast.wire.handshake import tls_key

CERT, KEY, CA = "tls_cert", "tls_key", "tls_ca"
PSK = "tls=psk"
IDENTITY_BYTES_MAX = 200  # OpenSSL accepts at most 255.
NAMES = (CERT, KEY, CA)
SERVER_NAME = "tls_server_name"


def server_context(cert: str, key: str, ca: str | None = None) -> ssl.SSLContext:
    """Return the context of a coordinator. With `ca`, clients must present a certificate that it signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, cert, key, NAMES)
    if ca is not None:
        _load_ca(context, ca, CA)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    *,
    names: tuple[str, str, str] = NAMES,
) -> ssl.SSLContext:
    """Return the context of an agent.

    Connect with `server_hostname` set to `tls_server_name`, or to the host of the endpoint if there is none: the
    server's certificate must contain that name. `names` are the settings of certificate, key and authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        _load_ca(context, ca, names[2])
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if cert is not None or key is not None:
        if cert is None or key is None:
            present, missing = names[:2] if key is None else (names[1], names[0])
            raise UsageError(f"{present} is set and {missing} is not", hint="set both or neither")
        _load_certificate(context, cert, key, names)
    return context


def mutual_context(ca: bytes, cert: bytes, key: bytes, *, serving: bool) -> ssl.SSLContext:
    """Return a context, for either side, that trusts every certificate of the authority.

    The arguments are in PEM. The peers prove their identity over the connection.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.decode())
    descriptor = os.memfd_create("holdfast-certificate")  # OpenSSL reads only files.
    try:
        os.write(descriptor, cert + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)
    return context


def explain_failure(error: Exception) -> str:
    """Return why a TLS handshake failed, and the setting to change."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # 62 and 64: the name, or the address, is not in the certificate.
        if error.verify_code in (62, 64):
            return (
                f"the certificate is for another host: {quoted(error.verify_message)} "
                f"(set {SERVER_NAME} to a name that is in it)"
            )
        return f"the certificate is not trusted: {quoted(error.verify_message)} (check {CA})"
    reason = getattr(error, "reason", None) or ""
    if reason in (
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "UNKNOWN_PROTOCOL",
        "RECORD_LAYER_FAILURE",
    ):
        return (
            f"the other side does not use TLS (a node needs {CA}, a coordinator {CERT} and {KEY}; "
            f"or both {PSK})"
        )
    if reason in ("BINDER_DOES_NOT_VERIFY", "NO_SUITABLE_SIGNATURE_ALGORITHM"):
        return f"the other side has a different token, or does not use {PSK}"
    if "CERTIFICATE_REQUIRED" in reason or reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"a client certificate is required (set {CERT} and {KEY} on the client's side)"
    if "UNKNOWN_CA" in reason:
        return f"the other side does not trust this side's certificate (check {CA} there)"
    return f"TLS failed: {quoted(str(error) or 'the connection closed')}"


def _load_certificate(
    context: ssl.SSLContext, cert: str, key: str, names: tuple[str, str, str]
) -> None:
    cert_setting, key_setting, _ = names
    _check_readable(cert_setting, cert)
    _check_readable(key_setting, key)

    def no_passphrase() -> str:
        # Without this OpenSSL would prompt on the terminal, and the agent would hang.
        raise UsageError(
            f"{key_setting}: {key} is encrypted", hint="use a key without a passphrase"
        )

    try:
        context.load_cert_chain(cert, key, password=no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"{key_setting}: {key} is not the key of {cert_setting}: {cert}"
            ) from None
        # OpenSSL does not report which of the two files it could not read.
        if _is_certificate(cert):
            raise UsageError(f"{key_setting}: {key} is not a private key in PEM format") from None
        raise UsageError(f"{cert_setting}: {cert} is not a certificate in PEM format") from None


def _load_ca(context: ssl.SSLContext, ca: str, name: str) -> None:
    _check_readable(name, ca)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise UsageError(f"{name}: {ca} does not contain a certificate in PEM format") from None


def _is_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return False
    return True


def _check_readable(setting: str, path: str) -> None:
    """Raise for an unreadable file; the errors of `ssl` do not name it."""
    if not path:
        raise UsageError(f"{setting} is empty", hint="name a file in PEM format")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.read(descriptor, 1)
        finally:
            os.close(descriptor)
    except ValueError:
        raise UsageError(f"{setting}: {path!r} is not a valid file name") from None
    except OSError as error:
        raise EnvironmentProblem(f"{setting}: {path} is not readable: {error.strerror}") from None


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS settings of a process that may be a client, a server or both."""

    is_psk: ClassVar[bool] = False
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    server_name: str | None = None

    @property
    def can_serve(self) -> bool:
        """Whether a certificate and key are set, which a coordinator needs and a client does not."""
        return self.cert is not None and self.key is not None

    def for_server(self) -> ssl.SSLContext:
        """Return the context of a coordinator."""
        if self.cert is None or self.key is None:
            raise UsageError(
                "a coordinator with TLS needs its own certificate",
                hint=f"set {CERT} and {KEY}",
            )
        return server_context(self.cert, self.key, self.ca)

    def for_client(self) -> ssl.SSLContext:
        """Return the context of an agent."""
        return client_context(self.ca, self.cert, self.key)


class TlsToken:
    """`tls=psk`: both sides derive the key from their token, and need no certificates.

    A client sends its run id, from which the coordinator derives the job's key. TLS 1.3 derives new keys for each
    connection, so a token that leaks later does not decrypt earlier traffic.
    """

    is_psk = True
    can_serve = True
    ca: str | None = None
    server_name: str | None = None

    def __init__(self, token: bytes, run_id: str = "") -> None:
        self._token = token
        self._run_id = run_id

    def for_server(self) -> ssl.SSLContext:
        """Return the context of a coordinator."""
        _require_psk()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_psk_server_callback(self._key_of)  # type: ignore[attr-defined, unused-ignore]
        return context

    def for_client(self) -> ssl.SSLContext:
        """Return the context of an agent."""
        _require_psk()
        if len(self._run_id.encode()) > IDENTITY_BYTES_MAX:
            raise UsageError(
                f"--rdzv-conf: {PSK} needs a --rdzv-id of at most {IDENTITY_BYTES_MAX} bytes"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        # No certificate is trusted: without the key there is no connection.
        context.verify_mode = ssl.CERT_REQUIRED
        identity, key = self._run_id, tls_key(self._token, self._run_id)
        context.set_psk_client_callback(lambda _hint: (identity, key))  # type: ignore[attr-defined, unused-ignore]
        return context

    def _key_of(self, identity: str | None) -> bytes:
        return b"" if identity is None else tls_key(self._token, identity)


def _require_psk() -> None:
    if not getattr(ssl, "HAS_PSK", False):
        raise UsageError(
            f"--rdzv-conf: {PSK} needs Python 3.13 or newer on all nodes, with an OpenSSL that has "
            f"pre-shared keys; this is Python {sys.version.split()[0]}",
            hint=f"use certificates: {CERT}, {KEY} and {CA}",
        )
