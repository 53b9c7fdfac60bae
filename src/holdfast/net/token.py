"""Chooses the shared token that a process uses.

The choice depends only on the settings and the text of the endpoint, so all processes with the same
settings make the same choice. It does not depend on name resolution: a host's own name may resolve to
loopback on that host only. The first row that applies decides:

=========================================  ========================================================
`auth=none`                                none
a token is set                             this token (`load_token`)
the endpoint names loopback                none: the kernel knows the user of a connection
each side must present a certificate       none: the certificates authenticate both sides
otherwise                                  `~/.holdfast/token`, created if missing
=========================================  ========================================================

`auth=token` skips the third and fourth row.

No process sends the token; each side proves that it has it (`holdfast.wire.handshake`). No error, message
or `repr` contains it. Anyone who can open a connection receives a proof and can test guesses against it,
so a token must be random. The token encrypts nothing: use TLS for that.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.net.addresses import names_loopback
from holdfast.wire.handshake import FILE_VARIABLE, OWN_FILE, READ_ONLY_PREFIX, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_BYTES_MAX = 4096
TOKEN_BYTES_MIN = 8
"""An attacker can find a shorter token by brute force."""
TOKEN_BYTES_SAFE = 16
"""A shorter token may be a word, which an attacker can find with a dictionary."""
RANDOM_BYTES = 32
FILE_KEY = "token_file"
AUTH_KEY = "auth"
TOKEN, NONE = "token", "none"


def choose_token(
    host: str,
    environ: Mapping[str, str],
    *,
    token_file: str | None = None,
    auth: str | None = None,
    certified: bool = False,
    read_only: bool = False,
    make: bool = True,
) -> bytes | None:
    """Return the token for an endpoint at `host`, or None for no token.

    `auth` is the setting of that name. `certified` means that both sides must present certificates. Unless
    `read_only` is set, a read-only token raises `UsageError`. `make` allows the creation of a token. A
    process that only queries a job must not create one, because it would differ from the job's token.
    """
    explicit = _setting_name(environ, token_file)
    if auth == NONE:
        if explicit:
            raise UsageError(
                f"--rdzv-conf: {AUTH_KEY}={NONE} conflicts with {explicit}",
                hint="remove one of them",
            )
        return None
    if explicit:
        token = load_token(environ, token_file, certified=certified)
        if token is not None and token.startswith(READ_ONLY_PREFIX) and not read_only:
            raise UsageError(f"{explicit}: the token is read-only and cannot run jobs")
        return token
    if auth != TOKEN and (names_loopback(host) or certified):
        return None
    return own_token(make=make)


def load_token(
    environ: Mapping[str, str], token_file: str | None = None, *, certified: bool = False
) -> bytes | None:
    """Return the configured token, or None.

    The first of these that is set decides: `token_file` (the key of that name in the rendezvous
    configuration), the file that `HOLDFAST_TOKEN_FILE` names, `HOLDFAST_TOKEN`. An unusable setting
    raises; it never falls back to the next setting or to no token. A short token causes a warning,
    unless both sides must present certificates (`certified`), so that strangers cannot test guesses.
    """
    match _setting_name(environ, token_file):
        case "":
            return None
        case variable if variable == VARIABLE:
            token = _checked(VARIABLE, environ[VARIABLE].encode(errors="surrogateescape"))
            where = VARIABLE
        case setting:
            path = token_file if token_file is not None else environ[FILE_VARIABLE]
            if not path:
                raise UsageError(f"{setting} is empty", hint="name the file that holds the token")
            where = f"{setting}: {path}"
            token = read_token(where, path)
    if len(token) < TOKEN_BYTES_SAFE and not certified:
        console.warning(
            f"{where}: anyone who reaches the coordinator may guess a token of {len(token)} bytes; "
            f"generate one of {TOKEN_BYTES_SAFE} or more, for example with `openssl rand -hex 32`"
        )
    return token


def _setting_name(environ: Mapping[str, str], token_file: str | None) -> str:
    """Return the name of the setting that configures a token; empty if there is none."""
    if token_file is not None:
        return FILE_KEY
    return next((name for name in (FILE_VARIABLE, VARIABLE) if name in environ), "")


# The user's own token.


def own_path() -> str:
    """Return the path of the user's own token."""
    path = os.path.expanduser(OWN_FILE)
    if not os.path.isabs(path):
        raise _cannot_create(OWN_FILE, "this user has no home folder")
    return path


def own_token(*, make: bool = True) -> bytes:
    """Return the user's own token; create it, with a message, if it is missing."""
    path = own_path()
    if not make and not os.path.lexists(path):
        raise EnvironmentProblem(
            f"no token is set, and there is no {path} on this machine",
            hint=f"copy it from a machine of the job, or set {FILE_VARIABLE} or {VARIABLE} to the same value",
        )
    if not os.path.lexists(path) and make_token(path):
        console.notice(
            f"created {path}, the token with which agents and coordinators of this user authenticate "
            "each other; machines with another home need a copy"
        )
    _check_folder(os.path.dirname(path))
    return read_token(path, path)


def make_token(path: str, *, replace: bool = False) -> bool:
    """Create a file with a random token; return whether this call created it.

    Nodes that share a home may start at the same moment and must all use the same token: the first node
    creates it. `replace` overwrites an existing token.
    """
    folder = os.path.dirname(path)
    # Write a temporary file, then link it. No process can read an incomplete token: link and rename are
    # atomic on network file systems too, where exclusive creation may not be.
    beside = f"{path}.{os.urandom(8).hex()}"
    try:
        if not os.path.isdir(folder):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                pass  # Another process has created it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # Independent of the umask.
            os.write(descriptor, os.urandom(RANDOM_BYTES).hex().encode() + b"\n")
            os.fsync(descriptor)
            if replace:
                os.rename(beside, path)
                return True
            os.link(beside, path)
        except FileExistsError:
            return False
        finally:
            os.close(descriptor)
            try:
                os.unlink(beside)
            except FileNotFoundError:
                pass  # It has been renamed.
    except OSError as error:
        raise _cannot_create(path, error.strerror or str(error)) from None
    return True


def _cannot_create(path: str, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"no token is set, and {path} cannot be created: {why}",
        hint=f"set {FILE_VARIABLE}, {VARIABLE} or --rdzv-conf {FILE_KEY}=FILE to the same token on all "
        f"machines, or --rdzv-conf {AUTH_KEY}={NONE} to accept everyone",
    )


# A token in a file.


def read_token(where: str, path: str) -> bytes:
    """Return the content of a private file; `where` names it in errors."""
    try:
        # Nonblocking: otherwise a named pipe at this path would block the start forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise UsageError(f"{where!r} is not a valid file name") from None
    except OSError as error:
        raise EnvironmentProblem(f"{where} is not readable: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise EnvironmentProblem(f"{where} is not a regular file")
        _check_private(where, status)
        # Loop, because a file system may return fewer bytes than requested.
        data = b""
        while len(data) <= TOKEN_BYTES_MAX:
            piece = os.read(descriptor, TOKEN_BYTES_MAX + 1 - len(data))
            if not piece:
                break
            data += piece
    except OSError as error:
        raise EnvironmentProblem(f"{where} is not readable: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return _checked(where, data)


def _check_private(where: str, status: os.stat_result) -> None:
    """Raise unless the content of a file is private.

    Only this user, root, and a group that root chose may read it. Kubernetes mounts secrets as files that
    root owns and a group may read.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise EnvironmentProblem(
            f"{where} belongs to another user (uid {status.st_uid}), who can read it",
            hint="use your own file, with a token that only you know",
        )
    others = 0o037 if status.st_uid == 0 else 0o077
    if status.st_mode & others:
        raise EnvironmentProblem(
            f"{where} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})",
            hint="chmod 600 it",
        )


def _check_folder(folder: str) -> None:
    """Raise if another user can replace the token in its folder, for example by a token known to that user."""
    status = os.stat(folder)
    if status.st_uid not in (0, os.geteuid()):
        raise EnvironmentProblem(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise EnvironmentProblem(
            f"other users can replace the token in {folder} (mode {stat.S_IMODE(status.st_mode):04o})",
            hint="chmod 700 it",
        )


def _checked(where: str, data: bytes) -> bytes:
    if len(data) > TOKEN_BYTES_MAX:
        raise UsageError(f"{where}: the token is longer than {TOKEN_BYTES_MAX} bytes")
    token = data.strip()
    if not token:
        raise UsageError(f"{where}: the token is empty", hint="remove the setting, or set a token")
    if len(token) < TOKEN_BYTES_MIN:
        raise UsageError(
            f"{where}: the token is shorter than {TOKEN_BYTES_MIN} bytes",
            hint="generate one: openssl rand -hex 32",
        )
    return token
