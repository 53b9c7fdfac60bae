"""The shared token: where it comes from.

The token itself never travels (`holdfast.wire.handshake` proves it), and no error, message or
`repr` shows it. Whoever can open a connection gets a proof to try guesses on, so a token must be
drawn, not thought up: `openssl rand -hex 32`. It encrypts nothing: that is what TLS is for.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.wire.handshake import FILE_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_BYTES_MAX = 4096
FILE_KEY = "token_file"


def load_token(environ: Mapping[str, str], token_file: str | None = None) -> bytes | None:
    """Return the token, or None if none is set.

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
