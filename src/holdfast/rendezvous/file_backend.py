"""The state of a job in a shared folder, for clusters with a common file system.

Each write creates the next of the files `state.1`, `state.2`, ..., and the one with the highest number is the
state. A name can be created only once (`SharedFolder.create`), so if several writers replace the same
state, one succeeds. No lock is held: a process that is stopped at any point blocks no other. A writer removes the
files that are `STATES_KEPT` behind.

The token of a state is random. A checksum detects a damaged file. Only this user may access the folder
(`store.file_store.SharedFolder`), because the state contains the commands and messages of workers.
"""

from __future__ import annotations

import errno
import hashlib
import os
from typing import TYPE_CHECKING

from holdfast import console
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.rendezvous.backend_handler import RendezvousBackend, Token, create_handler
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.file_store import FileStore, SharedFolder, file_name

if TYPE_CHECKING:
    from holdfast.rendezvous.handler import RendezvousHandler
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

FOLDER_SUFFIX = ".holdfast"
STATE_NAME, STORE_NAME = "state", "store"
MAGIC = b"holdfast rendezvous 1\n"
TOKEN_BYTES = 16
CHECKSUM_BYTES = 16
HEADER_BYTES = len(MAGIC) + TOKEN_BYTES + CHECKSUM_BYTES
STATES_KEPT = 32
"""If a process is stopped during a read or write, the others can write this many states before the process must
repeat its operation."""
READ_TRIES_MAX = 5
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class FileRendezvousBackend(RendezvousBackend):
    """Keeps the state of one job in the files `path`.1, `path`.2 and so on."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "file",
        folder: SharedFolder | None = None,
    ) -> None:
        self.path = os.fspath(path)
        above, self._stem = os.path.split(os.path.abspath(self.path))
        self._folder = folder or SharedFolder(os.path.realpath(above), make=False)
        self._name = name

    @property
    def name(self) -> str:
        """The name that `--rdzv-backend` requested, usually `file`."""
        return self._name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none."""
        try:
            return self._read()[1]
        except OSError as problem:
            raise self._unreachable(problem) from problem

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without a token, store the first state."""
        try:
            number, current = self._read()
            if (current[1] if current else None) == (token or None):
                new = os.urandom(TOKEN_BYTES)
                content = MAGIC + new + _checksum(new, state) + state
                if self._folder.create(self._file(number + 1), content):
                    # While this process was stopped, others may have used the same name and removed the file.
                    is_last = self._remove_old() < number + 1 + STATES_KEPT
                    return (state, new, True) if is_last else None
                _number, current = self._read()
            return None if current is None else (*current, False)
        except OSError as problem:
            if problem.errno in NO_HARD_LINKS:
                raise RendezvousStateError(
                    f"the file system of {self.path} has no hard links",
                    hint="choose another folder for --rdzv-endpoint",
                ) from problem
            raise self._unreachable(problem) from problem

    def _file(self, number: int) -> str:
        return f"{self._stem}.{number}"

    def _numbers(self) -> list[int]:
        """Return the numbers of the files with states, in order."""
        try:
            names = [name.rpartition(".") for name in self._folder.names()]
        except FileNotFoundError:
            return []
        return sorted(int(end) for stem, _, end in names if stem == self._stem and end.isdecimal())

    def _read(self) -> tuple[int, tuple[bytes, bytes] | None]:
        """Return the highest number, and the state and token in that file; 0 and None if there is none."""
        for _ in range(READ_TRIES_MAX):
            numbers = self._numbers()
            if not numbers:
                return 0, None
            file = self._file(numbers[-1])
            content = self._folder.read(file)
            if content is not None:  # Otherwise it was removed, because there are newer ones.
                return numbers[-1], self._parsed(file, content)
        raise OSError(errno.ESTALE, f"{file} is listed but does not exist")

    def _parsed(self, file: str, content: bytes) -> tuple[bytes, bytes]:
        token = content[len(MAGIC) : len(MAGIC) + TOKEN_BYTES]
        checksum = content[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES]
        state = content[HEADER_BYTES:]
        if not content.startswith(MAGIC) or _checksum(token, state) != checksum:
            raise RendezvousStateError(
                f"{os.path.join(self._folder.path, file)} is damaged, or not written by Holdfast",
                hint="remove it, or choose another --rdzv-id or --rdzv-endpoint",
            )
        return state, token

    def _remove_old(self) -> int:
        """Remove old states; return the highest number."""
        numbers = self._numbers()
        newest = numbers[-1] if numbers else 0
        for number in numbers:
            if number <= newest - STATES_KEPT:
                self._folder.remove(self._file(number))
        return newest

    def _unreachable(self, problem: OSError) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"cannot use the rendezvous file {self.path}: {problem.strerror or problem}"
        )


def create_file_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of `--rdzv-backend file`; the endpoint is a folder that all nodes share."""
    store, folder = job_store(params), job_folder(params)
    path = os.path.join(folder.path, STATE_NAME)
    backend = FileRendezvousBackend(path, name=params.backend, folder=folder)
    return create_handler(store, backend, params)


def shared_folder_of(params: RendezvousParameters) -> str:
    """Return the folder that the endpoint names. If it is a file, as in TorchElastic, the folder is next to it."""
    if not params.run_id:
        raise UsageError("--rdzv-id: the id of the job is empty")
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise UsageError("--rdzv-endpoint: missing; name a folder that all nodes can write to")
    return endpoint + FOLDER_SUFFIX if os.path.isfile(endpoint) else endpoint


def not_writable(folder: str) -> EnvironmentProblem:
    """Return the error for a folder that this node cannot write to."""
    return EnvironmentProblem(
        f"--rdzv-endpoint: {folder!r} is not writable",
        hint="name a folder that all nodes can write to",
    )


def job_folder(params: RendezvousParameters) -> SharedFolder:
    """Return the folder of one job below the endpoint; create it if necessary."""
    endpoint = shared_folder_of(params)
    was_there = os.path.isdir(endpoint) or endpoint.endswith(FOLDER_SUFFIX)
    try:
        folder = SharedFolder(os.path.join(endpoint, file_name(params.run_id)))
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(f"--rdzv-endpoint: {problem.message}", hint=problem.hint) from None
    if not was_there:
        console.warning(
            f"--rdzv-endpoint: created the folder {endpoint!r}; if it should be a shared folder, check "
            "that it is mounted here: otherwise no other node can join"
        )
    if not os.access(folder.path, os.R_OK | os.W_OK | os.X_OK):
        raise not_writable(folder.path)
    return folder


def job_store(params: RendezvousParameters) -> FileStore:
    """Return the store that the agents of a job share, in the folder of the job."""
    return FileStore(job_folder(params).subfolder(STORE_NAME))


def _checksum(token: bytes, state: bytes) -> bytes:
    return hashlib.blake2b(token + state, digest_size=CHECKSUM_BYTES).digest()
