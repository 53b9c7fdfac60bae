"""Where the agents of a job without a coordinator are found by people whose machine has none of them.

Agents store their control ports where they find each other: in etcd, also that of `--ha`, or in a
shared folder. Whoever can read that, and has the job's token if there is one, can ask. Nothing is
ever written here. All that reads may block, so it is called in a thread.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, UsageError
from holdfast.net.agent_port import ControlCredentials, explicit_token
from holdfast.rendezvous import config
from holdfast.rendezvous.backends import Backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.rounds import Job
    from holdfast.etcd.etcd_settings import EtcdSettings
    from holdfast.etcd.sync_client import EtcdClient
    from holdfast.rendezvous.config import RendezvousParameters
    from holdfast.wire.control import Contacts
    from holdfast.wire.messages import JobSummary

ASKED = ("c10d", "static", "etcd", "etcd-v2", "file")
"""The backends that can be given to the commands for running jobs."""


class Directory:
    """Where one job, or every job, can be looked up; with an empty run id it is not clear yet which."""

    where: str
    """As a person writes it, with the flag."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def run_ids(self, *, running: bool = False) -> list[str]:
        """Return the jobs that are there, all or those that have an agent."""
        raise NotImplementedError

    def contacts(self) -> Contacts:
        """Return how to reach the agents of the job; raise `HoldfastError` if that cannot be read."""
        raise NotImplementedError

    def summary(self, run_id: str) -> JobSummary | None:
        """Return the state of a job as it is stored."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is held."""


class EtcdDirectory(Directory):
    """The jobs below a prefix of an etcd."""

    advice = ""
    """What to look at where it cannot be read."""

    def __init__(self, run_id: str, where: str, etcd: EtcdSettings, prefix: str) -> None:
        super().__init__(run_id)
        self.where = where
        self._etcd, self._prefix = etcd, prefix

    def run_ids(self, *, running: bool = False) -> list[str]:
        from holdfast.etcd.job_records import read_run_ids

        with self._reading() as client:
            return read_run_ids(client, self._prefix, running=running)

    def contacts(self) -> Contacts:
        from holdfast.etcd.job_records import read_ports

        with self._reading() as client:
            return self._access().contacts(read_ports(client, self.run_id, self._prefix))

    def summary(self, run_id: str) -> JobSummary | None:
        from holdfast.etcd.job_records import read_job

        with self._reading() as client:
            return read_job(client, run_id, self._prefix)[0]

    @contextmanager
    def _reading(self) -> Iterator[EtcdClient]:
        from holdfast.etcd.sync_client import EtcdClient, EtcdError

        with EtcdClient(self._etcd) as client:
            try:
                yield client
            except EtcdError as problem:
                raise HoldfastError(problem.message, hint=self.advice) from None

    def _access(self) -> ControlCredentials:
        return ControlCredentials(
            run_id=self.run_id, token=explicit_token(os.environ, read_only=True)
        )


class HaDirectory(EtcdDirectory):
    """The one job of the etcd of `--ha`."""

    advice = "the machines of --ha, --rdzv-id and the token must be those of the job"

    def __init__(self, params: RendezvousParameters) -> None:
        from holdfast.etcd.cluster_list import Certificates
        from holdfast.etcd.job_records import DEFAULT_PREFIX
        from holdfast.rendezvous.ha import control_access, list_of

        of = list_of(params, make_token=False)
        self._certificates = Certificates(of)
        self._own_access = control_access(of, self._certificates)
        etcd = of.client_settings(self._certificates.guard)
        super().__init__(params.run_id, f"--ha {params.endpoint}", etcd, DEFAULT_PREFIX)

    def close(self) -> None:
        self._certificates.close()

    def _access(self) -> ControlCredentials:
        return self._own_access


class FolderDirectory(Directory):
    """The jobs in a folder that nodes share (`--rdzv-backend file`)."""

    def __init__(self, run_id: str, endpoint: str) -> None:
        from holdfast.rendezvous.file_backend import BESIDE

        super().__init__(run_id)
        if not endpoint:
            raise UsageError("--rdzv-endpoint: missing; name the folder where the nodes meet")
        self.where = f"--rdzv-endpoint {endpoint}"
        self._folder = endpoint + BESIDE if os.path.isfile(endpoint) else endpoint
        if not os.path.isdir(self._folder):
            raise UsageError(
                f"--rdzv-endpoint: {endpoint!r} is not a folder; accepted: that of the job"
            )

    def run_ids(self, *, running: bool = False) -> list[str]:
        try:
            names = sorted(os.listdir(self._folder))
        except OSError as problem:
            raise HoldfastError(f"{self.where}: {problem.strerror}", exit_code=78) from None
        found = [job for name in names if (job := self._read(name)) is not None]
        return [job.run_id for job in found if not running or job.outcome is None]

    def contacts(self) -> Contacts:
        from holdfast.membership.backend import ports_of

        job = self._job(self.run_id)
        access = ControlCredentials(
            run_id=self.run_id, token=explicit_token(os.environ, read_only=True)
        )
        return access.contacts(ports_of(job) if job is not None else ())

    def summary(self, run_id: str) -> JobSummary | None:
        from holdfast.core.rounds import Rounds
        from holdfast.wire.job_summary import summary_of

        job = self._job(run_id)
        return summary_of(Rounds(job)) if job is not None else None

    def _job(self, run_id: str) -> Job | None:
        from holdfast.store.file_store import file_name

        return self._read(file_name(run_id))

    def _read(self, name: str) -> Job | None:
        from holdfast.core.shared_state import decode
        from holdfast.rendezvous.file_backend import STATE_NAME, FileRendezvousBackend
        from holdfast.store.file_store import SharedFolder

        path = os.path.join(self._folder, name)
        if not os.path.isfile(os.path.join(path, STATE_NAME)):
            return None
        folder = SharedFolder(path, stem=STATE_NAME, make=False)
        backend = FileRendezvousBackend(os.path.join(path, STATE_NAME), folder=folder)
        try:
            state = backend.get_state()
            return decode(state[0]) if state is not None else None
        except ValueError as problem:
            raise HoldfastError(f"{path}: {problem}", exit_code=78) from None


def directory_of(params: RendezvousParameters) -> Directory | None:
    """Return where a job is looked up; None if it has a coordinator, which is asked."""
    backend = params.kind
    if backend is Backend.HA:
        if not params.run_id:
            raise UsageError("--rdzv-id: missing; with --ha it says which job is meant")
        return HaDirectory(params)
    if backend is Backend.ETCD:
        from holdfast.rendezvous.etcd import etcd_settings_of

        etcd = etcd_settings_of(params)
        prefix = str(config.value_of(params, "etcd_prefix"))
        return EtcdDirectory(params.run_id, f"--rdzv-endpoint {etcd.where}", etcd, prefix)
    if backend is Backend.FILE:
        return FolderDirectory(params.run_id, params.endpoint.strip())
    if backend is not None and backend.has_coordinator:
        return None
    raise UsageError(
        f"--rdzv-backend: the agents of {params.backend!r} cannot be found from here; accepted: "
        f"{', '.join(ASKED)}, or no flag on the machine of one of the agents"
    )
