"""Finds jobs: on this machine, at a coordinator, and in the etcd or folder where agents store their ports.

Every agent has a socket in its user's runtime folder, so a client on the same machine needs nothing
else. From another machine the client connects to the coordinator. A job without a coordinator is
listed in a directory: its agents store their ports in etcd (including that of `--ha`) or in a shared folder.
A client that can read the directory, and has the job's token if there is one, can connect. Discovery
writes nothing to a directory. Reading one may block, so it happens in a thread.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import contextmanager
from glob import escape, glob
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.control.job_client import (
    CONNECT_S,
    AgentConnections,
    ControlProblem,
    Endpoint,
    JobClient,
    JobNotFound,
    JobOver,
    JobUnreachable,
    NoLocalAgent,
    open_contact,
    open_endpoint,
    open_socket,
    tls_of,
    unpacked,
)
from holdfast.control.name_matching import NAMES_SHOWN, listed, match_name
from holdfast.core.rounds import Rounds
from holdfast.core.shared_state import decode
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.errors import HoldfastError, UsageError
from holdfast.etcd.cluster_list import Certificates
from holdfast.etcd.job_records import DEFAULT_PREFIX, read_job, read_ports, read_run_ids
from holdfast.etcd.optional_h11 import require_h11
from holdfast.etcd.sync_client import EtcdClient, EtcdError
from holdfast.membership.backend import ports_of
from holdfast.net.agent_port import ControlCredentials, explicit_token
from holdfast.net.endpoints import parse_rendezvous_endpoint
from holdfast.net.runtime_dir import agent_sockets, pid_of, remove_if_dead, version_of
from holdfast.net.token import choose_token
from holdfast.printable import one_line
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.coordinator_handler import DEFAULT_PORT
from holdfast.rendezvous.etcd_handler import etcd_settings_of
from holdfast.rendezvous.file_backend import FOLDER_SUFFIX, STATE_NAME, FileRendezvousBackend
from holdfast.rendezvous.ha_handler import cluster_list_of, control_access
from holdfast.store.file_store import SharedFolder, file_name
from holdfast.wire import messages
from holdfast.wire.handshake import READ_ONLY_PREFIX
from holdfast.wire.messages import printable_summary, summary_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.control.job_client import ControlConnection
    from holdfast.core.rounds import Job
    from holdfast.etcd.etcd_settings import EtcdSettings
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters
    from holdfast.wire.messages import Contacts, JobSummary

R = TypeVar("R")

ACCEPTED = [name for one in Backend if one is not Backend.HA for name in one.names]
"""The backends that the commands for running jobs accept; `--ha` is a flag of its own."""
LATE_S = 2.0
"""If an agent takes longer to respond, the command names it."""
GIVE_UP_S = 10.0
"""If no agent has responded after this time, give up. A firewall may drop all packets."""
STAGGER_S = 0.5
"""If an agent has not responded after this time, try the next one in parallel."""
ELSEWHERE = "for a job on other machines, use --rdzv-endpoint and its --rdzv-backend, or --ha"


def _ignore(_line: str) -> None:
    """Do not report agents that are late, or of another version."""


# Which job.


class JobChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The job that the flags select. Any field may be empty."""

    run_id: str = ""
    backend: str = ""
    endpoint: str = ""
    ha: str = ""
    settings: dict[str, str] = {}
    """The settings of `--rdzv-conf`."""

    @property
    def names_endpoint(self) -> bool:
        """Whether the flags name an endpoint. Otherwise the job has an agent on this machine."""
        return bool(self.endpoint or self.backend or self.ha)


async def find_job(
    choice: JobChoice, on_problem: Callable[[str], None] = _ignore
) -> tuple[Location, list[LocalJob]]:
    """Return where the chosen job is, and all its agents on this machine.

    If a coordinator has several jobs, the location refers to all of them.
    """
    if choice.names_endpoint:
        location = location_of(choice)
        if isinstance(location, AgentDirectory):
            await _choose_listed(location, on_problem)
        return location, []
    found = await local_jobs(on_problem)
    if choice.run_id:
        run_id = match_name(choice.run_id, (one.here.run_id for one in found), "jobs")
        found = [one for one in found if one.here.run_id == run_id]
        if not found:
            raise NoLocalAgent(
                f"no agent of job {choice.run_id!r} runs on this machine", hint=ELSEWHERE
            )
    if not found:
        raise NoLocalAgent("no job of yours runs on this machine", hint=ELSEWHERE)
    single_job(sorted({one.here.run_id for one in found}), "on this machine")
    return found[0], found


async def _choose_listed(location: AgentDirectory, on_problem: Callable[[str], None]) -> None:
    """Set the run id to that of the only job, or of the job with this prefix."""
    if location.run_id and (location.has_one_job or await read(location.has_job)):
        return
    run_ids = await _run_ids_of(location, on_problem)
    if location.run_id:
        location.run_id = match_name(location.run_id, run_ids, "jobs") or location.run_id
    else:
        location.run_id = single_job(run_ids, f"at {location.where}")


def single_job(names: list[str], where: str) -> str:
    """Return the only job; raise if there is none, or more than one."""
    if not names:
        raise JobNotFound(f"no job {where}")
    if len(names) > 1:
        raise UsageError(
            f"there are several jobs {where}: {listed(names)}", hint="choose one: JOB or --rdzv-id"
        )
    return names[0]


def location_of(choice: JobChoice) -> Location:
    """Return the location of the job, from the flags."""
    backend, endpoint = choice.backend or "c10d", choice.endpoint
    if choice.ha:
        for other, name in ((endpoint, "--rdzv-endpoint"), (choice.backend, "--rdzv-backend")):
            if other:
                raise UsageError(f"{name}: {other!r} conflicts with --ha; accepted: one of the two")
        backend, endpoint = "ha", choice.ha
    params = rdzv_conf.RendezvousParameters(
        backend, endpoint, choice.run_id, 1, 1, **choice.settings
    )
    return directory_of(params) or _coordinator_of(choice)


def _coordinator_of(choice: JobChoice) -> Endpoint:
    host, port = parse_rendezvous_endpoint(choice.endpoint, DEFAULT_PORT)
    if choice.settings:
        return _secured(choice, host, port)
    token = choose_token(host, os.environ, read_only=True, make=False)
    return Endpoint(host=host, port=port, run_id=choice.run_id, token=token)


def _secured(choice: JobChoice, host: str, port: int) -> Endpoint:
    """Return the coordinator's endpoint with the token and the TLS that `--rdzv-conf` sets."""
    run_id = choice.run_id
    conf = rdzv_conf.parse(
        rdzv_conf.RendezvousParameters(
            "c10d", choice.endpoint, run_id or "none", 1, 1, **choice.settings
        )
    )
    token = conf.token_for(host, os.environ, read_only=True, make=False)
    tls = conf.tls_with(token, run_id)
    if tls is not None and tls.is_psk and token is not None and token.startswith(READ_ONLY_PREFIX):
        raise UsageError("--rdzv-conf: tls=psk requires the full token; this one is read-only")
    return Endpoint(
        host=host,
        port=port,
        run_id=run_id,
        token=token,
        tls=tls.for_client() if tls is not None else None,
        server_name=tls.server_name if tls is not None else None,
    )


# On this machine.


class LocalJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has an agent on this machine."""

    path: str
    here: messages.AgentIdentity


async def local_jobs(on_problem: Callable[[str], None] = _ignore) -> list[LocalJob]:
    """Return the jobs of this user's agents on this machine; remove the sockets of dead agents.

    Agents of another version, and agents that do not respond, are omitted. `on_problem` receives one line about
    each agent of another version, and one about all agents that have not responded within `LATE_S`.
    """
    try:
        paths = agent_sockets()
    except OSError as problem:
        raise ControlProblem(f"cannot list the jobs: {problem}", exit_code=78) from None
    queries = {asyncio.ensure_future(_local_job(path, on_problem)): path for path in paths}
    if queries:
        _, late = await asyncio.wait(queries, timeout=LATE_S)
        if late:
            pids = sorted(pid_of(queries[one]) for one in late)
            agents = f"the agent{'s' * (len(pids) > 1)} with pid {', '.join(pids)}"
            on_problem(f"waiting for {agents} to respond")
    found = await asyncio.gather(*queries)
    return sorted(
        (one for one in found if one is not None), key=lambda job: (job.here.run_id, job.here.pid)
    )


async def _local_job(path: str, on_problem: Callable[[str], None]) -> LocalJob | None:
    try:
        connection = await open_socket(path, "")
    except ControlProblem:
        remove_if_dead(path)
        return None
    try:
        if version_of(path) != str(PROTOCOL_VERSION):
            on_problem(
                f"the agent with pid {pid_of(path)} speaks protocol version {version_of(path)}, this "
                f"command {PROTOCOL_VERSION}: use the version of Holdfast that started the job"
            )
            return None
        reply = await connection.query(messages.HERE, limit_s=CONNECT_S)
        return LocalJob(path=path, here=unpacked(messages.AgentIdentity, reply.body))
    except ControlProblem:
        return None
    finally:
        connection.close()


# Without a coordinator.


class AgentDirectory:
    """Lists the agents of one job. With an empty run id, it covers all jobs, and none is chosen yet."""

    where: str
    """As the user writes it, with the flag."""
    has_one_job = False
    """Whether it can have no job with another run id."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.problems: list[str] = []
        """Entries that `run_ids` omitted because they are not readable."""

    def run_ids(self, *, running: bool = False) -> list[str]:
        """Return the run ids of all jobs, or with `running` only of running jobs."""
        raise NotImplementedError

    def contacts(self) -> Contacts:
        """Return how to reach the agents of the job; raise `HoldfastError` if the directory is not readable."""
        raise NotImplementedError

    def summary(self, run_id: str) -> JobSummary | None:
        """Return the stored state of a job."""
        raise NotImplementedError

    def has_job(self) -> bool:
        """Return whether there is a job with exactly this run id."""
        return self.summary(self.run_id) is not None or self.run_id in self.run_ids(running=True)

    def close(self) -> None:
        """Release files and connections."""


class EtcdDirectory(AgentDirectory):
    """The jobs below a prefix of an etcd."""

    unreadable_hint = ""
    """The hint for the user if the directory is not readable."""

    def __init__(self, run_id: str, where: str, etcd: EtcdSettings, prefix: str) -> None:
        require_h11()
        super().__init__(run_id)
        self.where = where
        self._etcd, self._prefix = etcd, prefix

    def run_ids(self, *, running: bool = False) -> list[str]:
        with self._reading() as client:
            return read_run_ids(client, self._prefix, running=running)

    def contacts(self) -> Contacts:
        with self._reading() as client:
            return self._access().contacts(read_ports(client, self.run_id, self._prefix))

    def summary(self, run_id: str) -> JobSummary | None:
        with self._reading() as client:
            return read_job(client, run_id, self._prefix)[0]

    @contextmanager
    def _reading(self) -> Iterator[EtcdClient]:
        with EtcdClient(self._etcd) as client:
            try:
                yield client
            except EtcdError as problem:
                raise HoldfastError(problem.message, hint=self.unreadable_hint) from None

    def _access(self) -> ControlCredentials:
        return ControlCredentials(
            run_id=self.run_id, token=explicit_token(os.environ, read_only=True)
        )


class HaDirectory(EtcdDirectory):
    """The only job in the etcd of `--ha`."""

    has_one_job = True

    unreadable_hint = "--ha, --rdzv-id and the token must match the job's"

    def __init__(self, params: RendezvousParameters) -> None:
        of = cluster_list_of(params, make_token=False)
        self._certificates = Certificates(of)
        self._own_access = control_access(of, self._certificates)
        etcd = of.client_settings(self._certificates.certificate_files)
        super().__init__(params.run_id, f"--ha {params.endpoint}", etcd, DEFAULT_PREFIX)

    def close(self) -> None:
        self._certificates.close()

    def _access(self) -> ControlCredentials:
        return self._own_access


class FolderDirectory(AgentDirectory):
    """The jobs in a folder that nodes share (`--rdzv-backend file`)."""

    def __init__(self, run_id: str, endpoint: str) -> None:
        super().__init__(run_id)
        if not endpoint:
            raise UsageError("--rdzv-endpoint: missing; name a folder that all nodes share")
        self.where = f"--rdzv-endpoint {endpoint}"
        self._folder = endpoint + FOLDER_SUFFIX if os.path.isfile(endpoint) else endpoint
        if not os.path.isdir(self._folder):
            raise UsageError(
                f"--rdzv-endpoint: {endpoint!r} is not a folder; accepted: the job's folder"
            )

    def run_ids(self, *, running: bool = False) -> list[str]:
        try:
            names = sorted(os.listdir(self._folder))
        except OSError as problem:
            raise HoldfastError(f"{self.where}: {problem.strerror}", exit_code=78) from None
        found = []
        self.problems.clear()
        for name in names:
            try:
                job = self._read(name)
            except HoldfastError as problem:  # Another user's, or of another version.
                if len(self.problems) < NAMES_SHOWN:
                    self.problems.append(problem.message)
                continue
            if job is not None and (job.outcome is None or not running):
                found.append(job.run_id)
        return found

    def contacts(self) -> Contacts:
        job = self._job(self.run_id)
        access = ControlCredentials(
            run_id=self.run_id, token=explicit_token(os.environ, read_only=True)
        )
        return access.contacts(ports_of(job) if job is not None else ())

    def summary(self, run_id: str) -> JobSummary | None:
        job = self._job(run_id)
        return summary_of(Rounds(job)) if job is not None else None

    def _job(self, run_id: str) -> Job | None:
        return self._read(file_name(run_id))

    def _read(self, name: str) -> Job | None:
        path = os.path.join(self._folder, name)
        if not glob(os.path.join(escape(path), f"{STATE_NAME}.*")):
            return None
        folder = SharedFolder(path, make=False)
        backend = FileRendezvousBackend(os.path.join(path, STATE_NAME), folder=folder)
        try:
            state = backend.get_state()
            return decode(state[0]) if state is not None else None
        except ValueError as problem:
            raise HoldfastError(f"{path}: {problem}", exit_code=78) from None


def directory_of(params: RendezvousParameters) -> AgentDirectory | None:
    """Return the directory of a job; None if it has a coordinator."""
    backend = params.kind
    if backend is Backend.HA:
        if not params.run_id:
            raise UsageError("--rdzv-id: missing; --ha needs it")
        return HaDirectory(params)
    if backend is Backend.ETCD:
        etcd = etcd_settings_of(params)
        prefix = str(rdzv_conf.value_of(params, "etcd_prefix"))
        return EtcdDirectory(params.run_id, f"--rdzv-endpoint {etcd.where}", etcd, prefix)
    if backend is Backend.FILE:
        return FolderDirectory(params.run_id, params.endpoint.strip())
    if backend is not None and backend.has_coordinator:
        return None
    raise UsageError(
        f"--rdzv-backend: {params.backend!r} does not list its agents; accepted: "
        f"{', '.join(ACCEPTED)}, or no flag on a host of the job"
    )


async def read(call: Callable[[], R]) -> R:
    """Return what `call` reads from a directory; raise `ControlProblem` if the read fails."""
    try:
        return await asyncio.to_thread(call)
    except UsageError:
        raise
    except HoldfastError as problem:
        raise JobUnreachable(problem.message, hint=problem.hint) from None


async def _run_ids_of(location: AgentDirectory, on_problem: Callable[[str], None]) -> list[str]:
    run_ids = await read(lambda: location.run_ids(running=True) or location.run_ids())
    for problem in location.problems:
        on_problem(one_line(problem))
    return run_ids


async def stored_jobs(
    location: AgentDirectory, on_problem: Callable[[str], None] = _ignore
) -> list[JobSummary]:
    """Return the stored state of the chosen job, or of all running jobs if none is chosen."""

    def stored() -> list[JobSummary]:
        names = [location.run_id] if location.run_id else location.run_ids(running=True)
        return [one for one in map(location.summary, names) if one is not None]

    try:
        found = [printable_summary(one) for one in await read(stored)]
    finally:
        location.close()
    for problem in location.problems:
        on_problem(one_line(problem))
    return found


Location = Endpoint | LocalJob | AgentDirectory


# The client of a job.


async def connect(choice: JobChoice, on_problem: Callable[[str], None] = _ignore) -> JobClient:
    """Return a client of the chosen job. Raise if no job, or more than one, matches."""
    location, local_agents = await find_job(choice, on_problem)
    if isinstance(location, Endpoint) and location.run_id:
        location = await _with_full_run_id(location)
    client = await open_job(location, local_agents)
    if not client.run_id:
        try:
            client.run_id = single_job(
                [one.run_id for one in await client.jobs()], f"at {choice.endpoint}"
            )
        except BaseException:
            client.close()
            raise
    return client


async def _with_full_run_id(location: Endpoint) -> Endpoint:
    """Return the endpoint with the only run id that begins with its own, if it has no such job."""
    async with await open_job(location) as client:
        if await _run_ids_at(client):
            return location
    try:
        async with await open_job(msgspec.structs.replace(location, run_id="")) as client:
            run_ids = await _run_ids_at(client)
    except ControlProblem:
        return location  # The token is valid for one job.
    run_id = match_name(location.run_id, run_ids, "jobs")
    return msgspec.structs.replace(location, run_id=run_id or location.run_id)


async def _run_ids_at(client: JobClient) -> list[str]:
    try:
        return [one.run_id for one in await client.jobs()]
    except JobNotFound:
        return []


async def open_job(location: Location, local_agents: Iterable[LocalJob] = ()) -> JobClient:
    """Return a client of a job, or raise `ControlProblem`.

    `local_agents` are the job's other agents on this machine. The client sends a query about one of their
    nodes directly to its agent.
    """
    if isinstance(location, LocalJob):
        here = location.here
        connection = await open_socket(location.path, here.run_id, here.node)
        sockets = {one.here.node: one.path for one in local_agents if one.here.node}
        return JobClient(
            AgentConnections(connection, passes_on=here.coordinated, local_sockets=sockets)
        )
    if isinstance(location, AgentDirectory):
        try:
            return await _open_listed(location)
        except BaseException:
            location.close()
            raise
    connection = await open_endpoint(location)
    read_only = (location.token or b"").startswith(READ_ONLY_PREFIX)
    return JobClient(AgentConnections(connection, passes_on=True), read_only=read_only)


async def _open_listed(location: AgentDirectory) -> JobClient:
    connection, found = await _open_any_agent(location)

    async def reopen() -> ControlConnection:
        return (await _open_any_agent(location))[0]

    read_contacts = lambda: read(location.contacts)  # noqa: E731
    agents = AgentConnections(
        connection, passes_on=False, read_contacts=read_contacts, reopen=reopen, found=found
    )
    return JobClient(agents, read_only=found.read_only, closed=location.close)


async def _open_any_agent(location: AgentDirectory) -> tuple[ControlConnection, messages.Contacts]:
    """Return a connection to the leader's agent, or to the first other agent that responds."""
    found = await read(location.contacts)
    reachable = [one for one in found.contacts if one.port]
    if not reachable:
        where = f"of {location.run_id!r} at {location.where}"
        if not found.contacts:
            job = await read(lambda: location.summary(location.run_id))
            if job is not None and job.outcome:
                over = f"there is no agent {where}; the job is over: {job.outcome}"
                raise JobOver(over, job.outcome, one_line(job.why))
            raise JobNotFound(f"there is no agent {where}")
        raise JobUnreachable(
            f"the agents {where} are reachable only from their own hosts (control=off)"
        )
    return await _first_that_responds(reachable, location, found), found


async def _first_that_responds(
    reachable: list[messages.Contact], location: AgentDirectory, found: messages.Contacts
) -> ControlConnection:
    tls = tls_of(found)
    now = asyncio.get_running_loop().time
    deadline = now() + GIVE_UP_S
    others = reachable[1:]
    random.shuffle(others)  # Neighbours in the list may share a rack that is unreachable.
    left = [*others, reachable[0]]
    trying: set[asyncio.Task[ControlConnection]] = set()
    responded: list[ControlConnection] = []
    problem: ControlProblem | None = None
    try:
        while not responded and (left or trying):
            if left:
                work = open_contact(left.pop(), location.run_id, found, tls)
                trying.add(asyncio.ensure_future(work))
            done, trying = await asyncio.wait(
                trying, timeout=STAGGER_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            if now() >= deadline:
                left.clear()
            for one in done:
                try:
                    responded.append(one.result())
                except ControlProblem as refused:
                    problem = problem or refused
    finally:
        for one in trying:
            one.cancel()
    if responded:
        for connection in responded[1:]:
            connection.close()
        return responded[0]
    job = await read(lambda: location.summary(location.run_id))
    if job is not None and job.outcome:
        over = f"job {location.run_id!r} is over: {job.outcome}"
        raise JobOver(over, job.outcome, one_line(job.why))
    assert problem is not None
    raise problem
