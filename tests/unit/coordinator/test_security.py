from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from certificates import make_ca, make_certificate
from holdfast.errors import UsageError
from holdfast.net.tls import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path


def test_a_coordinator_needs_a_certificate(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    only_ca = TlsFiles(ca=ca.cert)
    assert not only_ca.can_serve
    with pytest.raises(UsageError, match="tls_cert and tls_key"):
        only_ca.for_server()
    assert only_ca.for_client().verify_mode == ssl.CERT_REQUIRED


def test_one_set_of_files_serves_both_sides(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    head = make_certificate(ca, "head")
    files = TlsFiles(cert=head.cert, key=head.key, ca=ca.cert, check_hostname=False)
    assert files.can_serve
    assert files.for_server().verify_mode == ssl.CERT_REQUIRED
    assert not files.for_client().check_hostname
