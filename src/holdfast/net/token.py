"""The shared token: which one a process uses.

Only the settings and the text of the endpoint decide, so all processes with the same settings decide alike (a
host's own name may be loopback for that host only). The first row that applies counts:

=========================================  ========================================================
`auth=none`                                none
a token is set                             that one (`load_token`)
the endpoint names loopback                none: the kernel knows the user of a connection
each side must show a certificate          none: the certificates authenticate both sides
otherwise                                  the user's own, `~/.holdfast/token`, created if missing
=========================================  ========================================================

`auth=token` skips the third and fourth line.

The token itself is never sent (`holdfast.wire.handshake` proves it), and no error, message or `repr` shows it.
Anyone who can open a connection receives a proof to test guesses against, so a token must be random.
It encrypts nothing: use TLS for that.
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
"""A shorter token can be found by trying all of them."""
TOKEN_BYTES_SAFE = 16
"""A shorter token may be a word, and can be found by trying words."""
DRAWN_BYTES = 32
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
    """Return the token for an endpoint at this host, or None for no token.

    `auth` is the setting of that name, and `certified` whether both sides must show certificates. A
    read-only token is refused unless `read_only` is set. A process that only queries a job does not
    `make` a token: it would differ from the job's.
    """
    explicit = _setting(environ, token_file)
    if auth == NONE:
        if explicit:
            raise UsageError(
                f"--rdzv-conf: {AUTH_KEY}={NONE} and {explicit} contradict each other",
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

    The first of these counts: `token_file` (the key of that name in the rendezvous configuration), the
    file that `HOLDFAST_TOKEN_FILE` names, `HOLDFAST_TOKEN`. An unusable setting raises; it never falls
    through to the next, or to no token. A short token causes a warning unless certificates keep
    strangers from guessing (`certified`).
    """
    match _setting(environ, token_file):
        case "":
            return None
        case variable if variable == VARIABLE:
            token = _usable(VARIABLE, environ[VARIABLE].encode(errors="surrogateescape"))
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


def _setting(environ: Mapping[str, str], token_file: str | None) -> str:
    """Return the setting that configures a token; empty without one."""
    if token_file is not None:
        return FILE_KEY
    return next((name for name in (FILE_VARIABLE, VARIABLE) if name in environ), "")


# The user's own token.


def own_path() -> str:
    """Return the file of the user's own token."""
    path = os.path.expanduser(OWN_FILE)
    if not os.path.isabs(path):
        raise _not_made(OWN_FILE, "this user has no home folder")
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
    return read_token(path, path)


def make_token(path: str, *, anew: bool = False) -> bool:
    """Create a file with a random token; return whether this call created it.

    Nodes that share a home may start at the same moment, and all must use the same token: the first one
    wins. `anew` replaces an existing token.
    """
    folder = os.path.dirname(path)
    # Complete before it has its name. Network file systems rename atomically too, where exclusive
    # creation may not be atomic; so no process ever reads half a token.
    beside = f"{path}.{os.urandom(8).hex()}"
    try:
        if not os.path.isdir(folder):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                pass  # Another process was faster.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # Whatever the umask is.
            os.write(descriptor, os.urandom(DRAWN_BYTES).hex().encode() + b"\n")
            os.fsync(descriptor)
            if anew:
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
        raise _not_made(path, error.strerror or str(error)) from None
    return True


def _not_made(path: str, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"no token is set, and {path} cannot be created: {why}",
        hint=f"set {FILE_VARIABLE}, {VARIABLE} or --rdzv-conf {FILE_KEY}=FILE to the same on all "
        f"machines, or --rdzv-conf {AUTH_KEY}={NONE} to accept everyone",
    )


# A token in a file.


def read_token(where: str, path: str) -> bytes:
    """Return the content of a private file; `where` names it in errors."""
    try:
        # Nonblocking, or a named pipe in its place would block the start forever.
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
        # Read until the end, or until it is too long: a file system may return less than requested.
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
    return _usable(where, data)


def _check_private(where: str, status: os.stat_result) -> None:
    """Raise if anyone but this user, root, and a group that root chose may know the content of a file.

    Root owns a volume that Kubernetes makes of a secret, and its group may read it.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise EnvironmentProblem(
            f"{where} belongs to another user (uid {status.st_uid}), who knows its content",
            hint="use your own file, with a token that only you know",
        )
    others = 0o037 if status.st_uid == 0 else 0o077
    if status.st_mode & others:
        raise EnvironmentProblem(
            f"{where} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})",
            hint="chmod 600 it",
        )


def _usable(where: str, data: bytes) -> bytes:
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
