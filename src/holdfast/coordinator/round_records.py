"""Records of running jobs, for the next coordinator at the same endpoint of this host.

A coordinator without a state file keeps a record of each job whose round has members on other nodes: a small file in
the user's private folder (`net.runtime_dir`). If the coordinator is killed, its successor finds the record when the
first node of the job connects, and waits for the members of the round instead of starting generation 0 beside their
workers (decision 0048).

Each write replaces the file atomically, before any node receives the decision. The file is not synced to disk,
because it only has to outlive the process. Its modification time is the time at which it expires: members have given
up the coordinator by then. The coordinator postpones that while it runs, and removes the file when the round ends.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.bounded import MALFORMED
from holdfast.core.protocol import View
from holdfast.core.rounds import JobPhase
from holdfast.core.saved_jobs import SavedJob
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.net.runtime_dir import runtime_dir

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from holdfast.core.coordinator_machine import Answer, CoordinatorMachine

REFRESH_S = 30.0
"""How often the coordinator postpones the expiry of its records."""
KEEP_S = 60.0
"""The default of `coordinator_timeout`, after which agents have stopped their workers."""
BYTES_MAX = 64 * 1024 * 1024
PREFIX, SUFFIX = "round-", f"-v{PROTOCOL_VERSION}.json"
NETWORK = "/proc/self/ns/net"
DIGEST_BYTES = 12
FOREIGN: tuple[int, ...] = ()
"""The contents of a file that an earlier coordinator wrote."""


class RoundRecords:
    """The records of a coordinator's jobs.

    A record expires `keep_s` after the coordinator has exited, and up to `REFRESH_S` later.
    """

    def __init__(
        self, listener: socket.socket, warn: Callable[[str], None], *, keep_s: float = KEEP_S
    ) -> None:
        address, port = listener.getsockname()[:2]
        self._port = int(port)
        # The network tells containers apart that share this folder.
        self._scope = f"{_network()}\n{address}\n{port}"
        self._warn = warn
        self._keep_s = keep_s + REFRESH_S
        self._folder = ""
        # What each file has, by run id.
        self._written: dict[str, tuple[int, ...]] = {}

    def read(self, run_id: str) -> SavedJob | None:
        """Return the record of a job by an earlier coordinator, or None."""
        try:
            descriptor = os.open(self._path(run_id), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        self._written[run_id] = FOREIGN
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_mtime < time.time():
                return None
            text = file.read(BYTES_MAX)
        try:
            saved = msgspec.json.decode(text, type=SavedJob)
        except MALFORMED:
            return None
        return saved if saved.run_id == run_id else None

    def update(self, machine: CoordinatorMachine, answers: Sequence[Answer]) -> None:
        """Write the decisions in these answers, before they are sent."""
        for run_id in {one.run_id for one in answers if type(one) is View}:
            self._update(machine, run_id)

    def refresh(self) -> None:
        """Postpone the expiry of the records, and remove those that have expired."""
        with suppress(OSError):  # The next decision reports a folder that cannot be used.
            for run_id in self._written:
                self._set_expiry(self._path(run_id))
            remove_expired()

    def close(self, machine: CoordinatorMachine) -> None:
        """Keep only the records of jobs that continue on other nodes."""
        for run_id in [*self._written]:
            self._update(machine, run_id)

    def _update(self, machine: CoordinatorMachine, run_id: str) -> None:
        rounds = machine.jobs.get(run_id)
        runs = rounds is not None and rounds.job.phase in (JobPhase.ACTIVE, JobPhase.RECOVERING)
        mark: tuple[int, ...] | None = None
        if rounds is not None and runs and rounds.job.nodes:
            job = rounds.job
            mark = (job.term, job.round, job.generation, job.fence)
        if self._written.get(run_id) == mark:
            return
        try:
            saved = machine.saved_job(run_id) if mark is not None else None
            if mark is not None and saved is not None and saved.awaited:
                self._write(run_id, saved)
                self._written[run_id] = mark
            elif self._written.pop(run_id, None) is not None:
                with suppress(FileNotFoundError):
                    os.unlink(self._path(run_id))
        except OSError as problem:
            self._folder = ""
            self._warn(
                f"cannot write the record of the job {run_id!r} ({problem.strerror}): if this coordinator "
                "is killed, the next one does not know its nodes"
            )

    def _write(self, run_id: str, saved: SavedJob) -> None:
        path = self._path(run_id)
        beside = f"{path}.{os.getpid()}"
        # Nodes report the restarts. If none is left, the job has its whole budget again.
        text = msgspec.json.encode(msgspec.structs.replace(saved, restarts=0))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(text)
        self._set_expiry(beside)
        os.rename(beside, path)

    def _set_expiry(self, path: str) -> None:
        expires = time.time() + self._keep_s
        os.utime(path, (expires, expires))

    def _path(self, run_id: str) -> str:
        text = f"{self._scope}\n{run_id}".encode("utf-8", "surrogateescape")
        digest = blake2b(text, digest_size=DIGEST_BYTES).hexdigest()
        self._folder = self._folder or runtime_dir()
        return os.path.join(self._folder, f"{PREFIX}{self._port}-{digest}{SUFFIX}")


def remove_expired() -> None:
    """Remove the expired records of all coordinators of this user."""
    folder, now = runtime_dir(), time.time()
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError):
            if name.startswith(PREFIX) and os.lstat(path).st_mtime < now:
                os.unlink(path)


def _network() -> int:
    try:
        return os.stat(NETWORK).st_ino
    except OSError:
        return 0
