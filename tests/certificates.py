"""Certificates for tests of TLS, which the `openssl` command creates on demand.

The keys use elliptic curves, so that a whole set takes a few hundredths of a second. The certificates are valid for two
days.
"""

from __future__ import annotations

import ipaddress
import ssl
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DAYS = "2"
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Pair(NamedTuple):
    """The paths of a certificate and of its key."""

    cert: str
    key: str


def make_ca(folder: Path, name: str = "test-ca") -> Pair:
    """Create an authority that can sign certificates."""
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    settings = folder / f"{name}.cnf"
    settings.write_text(
        "[req]\ndistinguished_name = names\nx509_extensions = ca\nprompt = no\n"
        f"[names]\nCN = {name}\n"
        "[ca]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign\n"
        "subjectKeyIdentifier = hash\n"
    )
    run_openssl(
        "req", "-x509", *NEW_KEY, "-days", DAYS, "-config", str(settings),
        "-keyout", pair.key, "-out", pair.cert,
    )  # fmt: skip
    return pair


def make_certificate(
    ca: Pair, name: str, san: Sequence[str] = ("localhost", "127.0.0.1", "::1")
) -> Pair:
    """Create a certificate for a host or an agent, next to that of the authority."""
    folder = Path(ca.cert).parent
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    run_openssl(
        "req", "-new", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", str(request)
    )
    extensions.write_text(
        "basicConstraints = CA:FALSE\n"
        + (f"subjectAltName = {','.join(map(_alternative, san))}\n" if san else "")
    )
    run_openssl(
        "x509", "-req", "-in", str(request), "-CA", ca.cert, "-CAkey", ca.key,
        "-set_serial", str(zlib.crc32(name.encode()) + 1), "-days", DAYS,
        "-extfile", str(extensions), "-out", pair.cert,
    )  # fmt: skip
    return pair


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def run_openssl(*words: str) -> None:
    """Run the command; fail the test if the command fails."""
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"openssl {' '.join(words)}: {done.stderr}"


class Link:
    """Two ends of TLS in one process."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = server.wrap_bio(to_server, to_client, server_side=True)
        self.client = client.wrap_bio(to_client, to_server, server_hostname=name)

    def do_handshake(self) -> None:
        """Run the handshake on both ends; raise the error of the first end that fails."""
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
        raise AssertionError("the handshake did not finish")
