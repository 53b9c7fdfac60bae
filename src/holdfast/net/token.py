"""The shared token: where it comes from, and how each side proves that it knows it.

The one thing to know: the token itself never travels, and no error, message or `repr` shows it. A
proof is an HMAC-SHA256 over what both sides said so far, keyed by the token, with a label for the
side that makes it; so the proof of one side, sent back to it, proves nothing.

Whoever can open a connection gets a proof of the server's to try guesses on at home. A token must
therefore be drawn, not thought up: `openssl rand -hex 32`.

It does not encrypt anything: that is what TLS is for (`holdfast.net.tls`).
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_BYTES_MAX = 4096
VARIABLE = "HOLDFAST_TOKEN"
FILE_VARIABLE = "HOLDFAST_TOKEN_FILE"
FILE_KEY = "token_file"

SERVER = b"holdfast coordinator"
CLIENT = b"holdfast agent"


def load_token(environ: Mapping[str, str], token_file: str | None = None) -> bytes | None:
    """Return the token, or None if nobody set one.

    The first of these counts: `token_file` (the key of that name in the rendezvous configuration),
    the file that `HOLDFAST_TOKEN_FILE` names, `HOLDFAST_TOKEN`. One that is set but cannot be used
    raises; it never falls through to the next, let alone to none.
    """
    if token_file is not None:
        return _from_file(FILE_KEY, token_file)
    if FILE_VARIABLE in environ:
        return _from_file(FILE_VARIABLE, environ[FILE_VARIABLE])
    if VARIABLE in environ:
        text = environ[VARIABLE]
        return _usable(VARIABLE, text.encode(errors="surrogateescape"))
    return None


def _from_file(setting: str, path: str) -> bytes:
    if not path:
        raise UsageError(f"{setting} is empty", hint="name the file that holds the token")
    where = f"{setting}: {path}"
    try:
        # Not blocking, lest a named pipe in its place holds up the start for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise UsageError(f"{setting}: {path!r} is not the name of a file") from None
    except OSError as error:
        raise EnvironmentProblem(f"{where} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise EnvironmentProblem(f"{where} is not a regular file")
        if status.st_mode & 0o077:
            raise EnvironmentProblem(
                f"{where} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})",
                hint="chmod 600 it",
            )
        # Read until the end, or until it is certain to be too long: a file system may return less
        # than was asked for.
        data = b""
        while len(data) <= TOKEN_BYTES_MAX:
            piece = os.read(descriptor, TOKEN_BYTES_MAX + 1 - len(data))
            if not piece:
                break
            data += piece
    except OSError as error:
        raise EnvironmentProblem(f"{where} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return _usable(where, data)


def _usable(where: str, data: bytes) -> bytes:
    if len(data) > TOKEN_BYTES_MAX:
        raise UsageError(f"{where}: the token is longer than {TOKEN_BYTES_MAX} bytes")
    token = data.strip()
    if not token:
        raise UsageError(f"{where}: the token is empty", hint="remove the setting, or set a token")
    return token


def prove(
    token: bytes,
    side: bytes,
    *,
    offered: tuple[int, int],
    version: int,
    client_nonce: bytes,
    server_nonce: bytes,
) -> bytes:
    """Return the proof that `side` (`SERVER` or `CLIENT`) knows the token.

    `offered` is the range of versions the client spoke of: nobody in between can make two sides
    settle on an older version than they would have.
    """
    import hashlib
    import hmac

    parts = (side, b"%d %d %d" % (*offered, version), client_nonce, server_nonce)
    # Each part with its length, so that no two different lists make the same text.
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    # HMAC fills a short key up with zeros, so that `x` and `x\0` would be the same to it.
    return hmac.digest(hashlib.sha256(token).digest(), text, "sha256")


def same(proof: bytes, expected: bytes) -> bool:
    """Compare in a time that tells nothing of where the two differ."""
    import hmac

    return hmac.compare_digest(proof, expected)
