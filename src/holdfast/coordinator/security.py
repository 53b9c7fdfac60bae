"""The files that TLS is set up with, for a process that may be both server and client of it.

`holdfast.wire.tls` makes the contexts; this says which of the files each side needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import UsageError
from holdfast.wire import tls

if TYPE_CHECKING:
    import ssl


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the person set of `tls_cert`, `tls_key`, `tls_ca` and the like; all are paths."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    server_name: str | None = None
    check_hostname: bool = True

    @property
    def can_serve(self) -> bool:
        """Whether a coordinator could show a certificate; a client may do without."""
        return self.cert is not None and self.key is not None

    def for_server(self) -> ssl.SSLContext:
        """Return what a coordinator listens with."""
        if self.cert is None or self.key is None:
            raise UsageError(
                "a coordinator with TLS needs a certificate of its own",
                hint=f"set {tls.CERT} and {tls.KEY}",
            )
        return tls.server_context(self.cert, self.key, self.ca)

    def for_client(self) -> ssl.SSLContext:
        """Return what an agent connects with."""
        return tls.client_context(self.ca, self.cert, self.key, check_hostname=self.check_hostname)
