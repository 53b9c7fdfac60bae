"""The list of `--ha`: which machines run a member of a job's etcd, on which ports, with which authentication.

All values are derived from the command line and the token, so every machine derives the same values. Each
machine has two ports: one for clients and the next one for the other members. Both use the same
authentication:

=================================  ================================================================
`tls_cert`, `tls_key`, `tls_ca`    both sides present these certificates
a token                            both sides present certificates made with it (`net.token_certificates`)
`auth=none`                        plain HTTP
=================================  ================================================================
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.defaults import PROTOCOL_VERSION, SAME_VERSION
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.net import tls
from holdfast.net.addresses import LOCALHOST
from holdfast.net.endpoints import format_endpoint, split_endpoint
from holdfast.net.token import TOKEN, choose_token
from holdfast.net.token_certificates import make_certificate
from holdfast.wire.handshake import job_token

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

FLAG = "--ha"
DEFAULT_PORT = 29410
MACHINES_MAX = 7
"""With more machines, every decision waits for more of them."""
OWN_HOSTS = (LOCALHOST, "127.0.0.1", "::1")
"""A member connects to itself under these names."""
PORT_MAX = 65_534  # The members use the next port.
RECORD = b"/holdfast/cluster"
"""The key of the cluster's own record, which names its job."""
OPEN = b"/holdfast/open"
"""Nodes of the job use the cluster once it has this key."""
CLAIM = b"/holdfast/claim"
LEAVING = b"/holdfast/leaving/"


class ClusterRecord(msgspec.Struct, frozen=True):
    """The record that the founders store."""

    version: int
    """The `PROTOCOL_VERSION` of the founders."""
    run_id: str
    bootstrap: str
    at_ms: int


def read_record(value: bytes) -> ClusterRecord:
    """Return the record of a cluster; raise `ValueError` with the reason if it has another format."""
    try:
        record = msgspec.json.decode(value, type=ClusterRecord)
    except msgspec.MsgspecError:
        record = None
    if record is None or record.version != PROTOCOL_VERSION:
        raise ValueError(f"another version of Holdfast created its cluster: {SAME_VERSION}")
    return record


class CertificateFiles(msgspec.Struct, frozen=True):
    """The files of certificates, in PEM: the authority's, a certificate to present, and its key."""

    ca: str
    cert: str
    key: str


class ClusterList(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one job's cluster."""

    run_id: str
    machines: tuple[tuple[str, int], ...]
    files: CertificateFiles | None = None
    """The user's certificates."""
    token: bytes | None = None
    """The job's token, from which certificates are derived."""
    server_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Each machine as HOST:PORT."""
        return tuple(format_endpoint(*one) for one in self.machines)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names by which clients reach a member, including those that its own machine uses."""
        return tuple(dict.fromkeys((*(host for host, _ in self.machines), *OWN_HOSTS)))

    @property
    def scheme(self) -> str:
        return "https" if self.files is not None or self.token is not None else "http"

    def peer_urls(self) -> dict[str, str]:
        """Return the URL of each member for the others, by name."""
        return {
            name: f"{self.scheme}://{format_endpoint(host, port + 1)}"
            for name, (host, port) in zip(self.names, self.machines, strict=True)
        }

    def client_settings(
        self, certificate_files: CertificateFiles | None, first: str = ""
    ) -> EtcdSettings:
        """Return the settings of a client, with the certificates of `Certificates`.

        `first` is the machine that the client tries first.
        """
        order = sorted(self.machines, key=lambda one: format_endpoint(*one) != first)
        if certificate_files is None:
            return EtcdSettings(endpoints=tuple(order))
        return EtcdSettings(
            endpoints=tuple(order),
            tls=True,
            ca=certificate_files.ca,
            cert=certificate_files.cert,
            key=certificate_files.key,
            server_name=self.server_name,
        )


def parse_machines(text: str, *, source: str = FLAG) -> tuple[tuple[str, int], ...]:
    """Return host and port of each machine in a comma-separated list."""
    machines: list[tuple[str, int]] = []
    for part in map(str.strip, text.split(",")):
        try:
            host, port = split_endpoint(part, DEFAULT_PORT, port_min=1)
            if port > PORT_MAX:
                raise ValueError(f"has a port above {PORT_MAX}")
        except ValueError as problem:
            what = f"{part!r} {problem}" if part else f"{text!r} has an empty entry"
            raise UsageError(
                f"{source}: {what if text else 'no machine is given'}; accepted: HOST or HOST:PORT of up "
                f"to {MACHINES_MAX} machines, separated by commas"
            ) from None
        machines.append((host, port))
    taken: dict[tuple[str, int], tuple[str, int]] = {}
    for one in machines:
        for port in (one[1], one[1] + 1):
            other = taken.setdefault((_machine(one[0]), port), one)
            if other is one:
                continue
            names = [format_endpoint(*entry) for entry in (other, one)]
            both = f"{names[0]!r} and {names[1]!r}, which both need port {port} of one machine"
            what = f"{names[0]!r} twice" if other == one else both
            raise UsageError(
                f"{source}: {text!r} has {what}; accepted: one entry for each machine, which uses "
                "this port and the next"
            )
    if len(machines) > MACHINES_MAX:
        raise UsageError(f"{source}: {len(machines)} machines; accepted: up to {MACHINES_MAX}")
    return tuple(machines)


def _machine(host: str) -> str:
    """Return the host in lower case, or one name for all names of loopback."""
    return LOCALHOST if host.lower() in OWN_HOSTS else host.lower()


def advice(count: int) -> str:
    """Return why this number of machines is no better than one less; empty for an odd number."""
    if count % 2:
        return ""
    return (
        f"{count} machines survive no more losses than {count - 1}, and the extra machine can fail too; "
        f"list {count - 1} or {count + 1}"
    )


def cluster_list(
    machines: tuple[tuple[str, int], ...],
    run_id: str,
    *,
    environ: Mapping[str, str],
    token_file: str | None = None,
    auth: str | None = None,
    tls: tuple[str | None, str | None, str | None] = (None, None, None),
    server_name: str = "",
    make_token: bool = True,
) -> ClusterList:
    """Return the list with its authentication; `tls` is `tls_ca`, `tls_cert` and `tls_key`."""
    ca, cert, key = tls
    files = CertificateFiles(ca, cert, key) if ca and cert and key else None
    if (ca or cert or key) and files is None:
        raise UsageError(
            f"{FLAG}: members and nodes authenticate each other; accepted: tls_cert, tls_key and tls_ca "
            "together, or none of them and a token"
        )
    if files is not None:
        return ClusterList(run_id=run_id, machines=machines, files=files, server_name=server_name)
    # On loopback too: etcd does not tell the users of a machine apart.
    token = choose_token(
        machines[0][0], environ, token_file=token_file, auth=auth or TOKEN, make=make_token
    )
    return ClusterList(
        run_id=run_id,
        machines=machines,
        token=job_token(token, run_id) if token is not None else None,
    )


class Certificates:
    """The certificates of one process, as files until `close`.

    The files are in memory, so none of them remains, however the process exits.
    """

    def __init__(self, of: ClusterList, *, serves: bool = False) -> None:
        self._fds: list[int] = []
        self.certificate_files = of.files
        self.pem: tuple[bytes, bytes, bytes] | None = None
        if of.token is None:
            return
        self.pem = made = make_certificate(of.token, of.hosts if serves else ())
        paths = []
        for data in made:
            fd = os.memfd_create("holdfast-certificate")
            self._fds.append(fd)
            os.write(fd, data)
            paths.append(f"/proc/self/fd/{fd}")
        self.certificate_files = CertificateFiles(*paths)

    def texts(self) -> tuple[bytes, bytes, bytes] | None:
        """Return the authority, the certificate and its key, in PEM; None without TLS."""
        if self.pem is None and self.certificate_files is not None:
            certificate_files = self.certificate_files
            paths = (
                Path(one)
                for one in (certificate_files.ca, certificate_files.cert, certificate_files.key)
            )
            try:
                ca, cert, key = (one.read_bytes() for one in paths)
            except OSError as problem:
                raise EnvironmentProblem(
                    f"cannot read {problem.filename}: {problem.strerror}"
                ) from None
            return ca, cert, key
        return self.pem

    def client_context(self) -> ssl.SSLContext | None:
        """Return the context of a client, or None without TLS."""
        if self.certificate_files is None:
            return None
        return tls.client_context(
            self.certificate_files.ca, self.certificate_files.cert, self.certificate_files.key
        )

    def server_context(self) -> ssl.SSLContext | None:
        """Return the context of a server that demands a certificate, or None without TLS."""
        if self.certificate_files is None:
            return None
        return tls.server_context(
            self.certificate_files.cert, self.certificate_files.key, self.certificate_files.ca
        )

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())
