"""The state of a job in a shared folder, for clusters with a common file system.

One file has the state. A write replaces it atomically: the writer creates a new file, flushes it to disk, and
renames it. The writer holds a lock and first compares the token in the file, which is random for each write. A
reader needs no lock. A checksum detects a damaged file. Only this user may access the folder
(`store.file_store.SharedFolder`), because the state contains the commands and messages of workers.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.rendezvous.backend_handler import RendezvousBackend, Token
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.file_store import LOCK_S_MAX, FileStore, SharedFolder, file_name

if TYPE_CHECKING:
    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

BESIDE = ".holdfast"
STATE_NAME, STORE_NAME = "state", "store"
MAGIC = b"holdfast rendezvous 1\n"
TOKEN_BYTES = 16
CHECKSUM_BYTES = 16
HEADER_BYTES = len(MAGIC) + TOKEN_BYTES + CHECKSUM_BYTES


class FileRendezvousBackend(RendezvousBackend):
    """Keeps the state of one job in the file `path`, with its lock in `path.lock`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "file",
        lock_timeout_s: float = LOCK_S_MAX,
        folder: SharedFolder | None = None,
    ) -> None:
        self.path = os.fspath(path)
        above, self._file = os.path.split(os.path.abspath(self.path))
        if folder is None:
            folder = SharedFolder(os.path.realpath(above), stem=self._file, make=False)
        self._folder = folder
        self._name = name
        self._lock_timeout_s = lock_timeout_s

    @property
    def name(self) -> str:
        """The name that `--rdzv-backend` requested, usually `file`."""
        return self._name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none."""
        try:
            return self._read()
        except OSError as problem:
            raise self._unreachable(problem) from problem

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without a token, store the first state."""
        try:
            with self._folder.locked(self._lock_timeout_s):
                current = self._read()
                if (current[1] if current else None) != (token or None):
                    return None if current is None else (*current, False)
                return state, self._write(state), True
        except (
            OSError
        ) as problem:  # This includes the TimeoutError of a lock that is held for too long.
            raise self._unreachable(problem) from problem

    def _read(self) -> tuple[bytes, bytes] | None:
        content = self._folder.read(self._file)
        if content is None:
            return None
        token = content[len(MAGIC) : len(MAGIC) + TOKEN_BYTES]
        checksum = content[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES]
        state = content[HEADER_BYTES:]
        if not content.startswith(MAGIC) or _checksum(token, state) != checksum:
            raise RendezvousStateError(
                f"{self.path} is damaged, or not written by Holdfast",
                hint="remove it, or choose another --rdzv-id or --rdzv-endpoint",
            )
        return state, token

    def _write(self, state: bytes) -> bytes:
        token = os.urandom(TOKEN_BYTES)
        content = MAGIC + token + _checksum(token, state) + state
        self._folder.write(self._file, content, sync=True)
        return token

    def _unreachable(self, problem: OSError) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"cannot use the rendezvous file {self.path}: {problem.strerror or problem}"
        )


def create_file_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of `--rdzv-backend file`; the endpoint is a folder that all nodes share."""
    from holdfast.rendezvous.backend_handler import create_handler

    store, folder = job_store(params), job_folder(params)
    path = os.path.join(folder.path, STATE_NAME)
    backend = FileRendezvousBackend(path, name=params.backend, folder=folder)
    return create_handler(store, backend, params)


def job_folder(params: RendezvousParameters) -> SharedFolder:
    """Return the folder of one job below the endpoint; create it if necessary.

    If the endpoint is a file, as in TorchElastic, the folder is next to that file.
    """
    if not params.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise UsageError("--rdzv-endpoint: missing; name a folder that all nodes can write to")
    if os.path.isfile(endpoint):
        endpoint += BESIDE
    was_there = os.path.isdir(endpoint) or endpoint.endswith(BESIDE)
    try:
        folder = SharedFolder(os.path.join(endpoint, file_name(params.run_id)), stem=STATE_NAME)
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(f"--rdzv-endpoint: {problem.message}", hint=problem.hint) from None
    if not was_there:
        console.warning(
            f"--rdzv-endpoint: created the folder {endpoint!r}; if it should be a shared folder, check "
            "that it is mounted here: otherwise no other node can join"
        )
    if not os.access(folder.path, os.R_OK | os.W_OK | os.X_OK):
        raise EnvironmentProblem(
            f"--rdzv-endpoint: {folder.path!r} is not writable",
            hint="name a folder that all nodes can write to",
        )
    return folder


def job_store(params: RendezvousParameters) -> FileStore:
    """Return the store that the agents of a job share, in the folder of the job."""
    return FileStore(job_folder(params).below(STORE_NAME))


def _checksum(token: bytes, state: bytes) -> bytes:
    return hashlib.blake2b(token + state, digest_size=CHECKSUM_BYTES).digest()
