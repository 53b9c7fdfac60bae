"""This machine's member of the etcd cluster of a job (`--ha`).

`core.etcd.cluster` decides; `EtcdMember` performs its effects in a thread of its own, and runs etcd with
`etcd.runner`. The data are not needed after this process has exited, so they are in a temporary folder
and never synced to a disk.

When this process stops, its member continues to run while nodes of the job need it and the other members
would not be a majority.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast import console
from holdfast.core.etcd.calls import (
    AddMember,
    Compare,
    Delete,
    Field,
    Get,
    Grant,
    Granted,
    ListMembers,
    Members,
    Problem,
    Put,
    RemoveMember,
    Revoke,
    Txn,
    TxnDone,
    end_of_prefix,
)
from holdfast.core.etcd.cluster import (
    AcceptProposal,
    Bootstrap,
    BootstrapProposed,
    ClusterMember,
    DropEtcd,
    EtcdEnded,
    EtcdReady,
    MachineProbed,
    MemberState,
    MemberStopRequested,
    OpenCluster,
    PortsHeld,
    ProbeMachines,
    ProposalAnswered,
    Propose,
    ReplaceVoter,
    ReportMajorityLost,
    ReportProgress,
    ReportProtection,
    RestartEtcd,
    Serving,
    StartAddedEtcd,
    StartNewEtcd,
    StartProbeServer,
    StopEtcd,
    StopProbeServer,
    VoterNotReplaced,
    VoterReplaced,
    majority,
)
from holdfast.core.etcd.keys import JobKeys, JobRecord, get_prefix, unpack
from holdfast.core.machine import TICK
from holdfast.defaults import PROTOCOL_VERSION
from holdfast.errors import HoldfastError
from holdfast.etcd.async_client import AsyncEtcdClient
from holdfast.etcd.cluster_list import (
    CLAIM,
    FLAG,
    LEAVING,
    OPEN,
    RECORD,
    Certificates,
    ClusterRecord,
)
from holdfast.etcd.job_records import DEFAULT_PREFIX
from holdfast.etcd.optional_h11 import require_h11
from holdfast.etcd.own_entry import claim_entry, shared_machine
from holdfast.etcd.probe import (
    Probe,
    ProbeReply,
    ProbeResult,
    ProbeServer,
    cluster_at,
    probe_member,
)
from holdfast.etcd.runner import INSTALL_SAFE, EtcdProcess, environment, find_etcd, log_tail
from holdfast.net.endpoints import format_endpoint
from holdfast.net.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from holdfast.core.etcd.calls import Change
    from holdfast.core.etcd.cluster import MemberEffect, MemberEvent
    from holdfast.etcd.cluster_list import ClusterList
    from holdfast.etcd.own_entry import OwnEntry
    from holdfast.etcd.runner import EtcdProgram

START_S = 10.0
FOLDER_PREFIX = "holdfast-ha-"
LOCK = "lock"
READY_AGAIN_S = 0.5  # Only for an etcd that does not report that it is ready.
REPORT_AFTER_S = 2.0
"""Shorter waits are not reported."""
CLAIM_TTL_S = 60
"""Covers removing a member, adding the new one, and the time it needs to catch up."""
CLAIM_AGAIN_S = 0.5
CLAIM_S = 30.0
MAJORITY_WAIT_S = 30.0
"""The maximum time that a member continues because nodes still need it: as long as workers may take to stop."""
MAJORITY_CHECK_S = 0.1
UNREACHED_S = 0.5
STOP_S = 1.0  # Handing over the leadership takes milliseconds if another member can take it.
# Machines of training jobs are busy: a member that hangs for a moment must not cause an election.
TIMING = ("--heartbeat-interval=100", "--election-timeout=1000")
KEPT_REVISIONS = 10_000
CHECK_TIME = "1m"
"""How often the members of an unsafe etcd compare their data. If they differ, etcd accepts no more changes."""
NO_ORIGIN = "http://none.invalid:1"
"""The only web origin that etcd allows: no page of a browser has it. By default etcd allows all."""
BOOTSTRAP_STAGGER_S = 0.2
"""The time between the starts of the members of a new cluster. A starting etcd does not respond until it has
asked each peer about the cluster, and it waits a second for each peer that listens. So members that start together
would wait for each other."""


def remove_orphans(temporary: str) -> None:
    """Remove the folders of members that were killed together with their guard, or by a loss of power."""
    for folder in Path(temporary).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            # In a folder that others can write to, they could have created the lock.
            if found.st_uid != os.geteuid() or found.st_mode & 0o170_077 != 0o040_000:
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while its owner runs.
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# The member.


class EtcdMember:
    """This machine's member, from `start` until `stop`; it works in its own thread."""

    def __init__(
        self,
        of: ClusterList,
        entry: OwnEntry,
        program: EtcdProgram,
        *,
        patience_s: float,
        on_over: Callable[[], object] | None = None,
    ) -> None:
        """`on_over` is called in the thread once all other machines have left intentionally."""
        self._list, self._entry, self._program = of, entry, program
        self._certificates = Certificates(of, serves=True)
        self._patience_s, self._on_over = patience_s, on_over
        self._thread = LoopThread("holdfast-cluster", self._warn_member_failed)
        self._folder = os.path.join(
            tempfile.gettempdir(), f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        )
        self._process: EtcdProcess | None = None
        self._lock: int | None = None
        self._began = False

    @property
    def name(self) -> str:
        """The name of this machine in the list."""
        return self._entry.name

    @property
    def _is_alone(self) -> bool:
        return len(self._list.names) == 1

    def start(self) -> None:
        """Start the thread; this call does not wait for the cluster."""
        try:
            self._thread.start()
            self._thread.run(self._start(), START_S)
        except BaseException:
            self.stop(linger_s=0)
            raise

    def stop(self, linger_s: float = MAJORITY_WAIT_S) -> None:
        """Stop the member once nodes no longer need it or the limit has passed; leave nothing behind."""
        try:
            if self._thread.runs:
                self._thread.run(self._stop(linger_s), linger_s + STOP_S + START_S)
        except (TimeoutError, RuntimeError) as problem:
            console.debug(f"could not stop the member of the cluster: {problem!r}")
        finally:
            self._thread.stop()
            self._entry.release()
            self._certificates.close()

    @staticmethod
    def _warn_member_failed(fault: str) -> None:
        console.warning(f"the member of the cluster: {fault}")

    # In the thread.

    async def _start(self) -> None:
        of = self._list
        self._loop = asyncio.get_running_loop()
        self._machine = ClusterMember(
            machine=self._entry.name,
            machines=of.names,
            patience_s=self._patience_s,
            draw=lambda: secrets.randbits(63),
            wall_ms=lambda: int(time.time() * 1000),
            keeps_data=self._program.is_safe,
        )
        self._tls = self._certificates.client_context()
        self._server_tls = self._certificates.server_context()
        certificate_files = self._certificates.certificate_files
        self._client = AsyncEtcdClient(
            of.client_settings(certificate_files, first=self._entry.name)
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._effects: asyncio.Queue[tuple[MemberEffect, str]] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._wait_reason = "etcd is starting"
        self._warned: set[str] = set()
        self._unreachable: dict[str, str] = {}
        self._server: ProbeServer | None = None
        self._bootstrap: Bootstrap | None = None
        self._claim_lease = 0
        self._ready_hint = asyncio.Event()
        self._make_folder()
        if certificate_files is None:
            console.warning(
                f"the member at {self._entry.name} requires no certificate (auth=none): anyone who can reach its "
                "ports can read and change the job"
            )
        self._began = True
        self._report_program()
        self._spawn(self._perform_all())
        self._spawn(self._check_list())
        self._handle(PortsHeld())

    def _make_folder(self) -> None:
        remove_orphans(os.path.dirname(self._folder))
        os.mkdir(self._folder, 0o700)
        # Lock the file before it gets the name that other processes check; hold the lock until this process exits.
        new = f"{self._folder}/{LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, f"{self._folder}/{LOCK}")
        if self._certificates.pem is not None:
            names = ("ca.pem", "cert.pem", "key.pem")
            for name, data in zip(names, self._certificates.pem, strict=True):
                path = Path(self._folder, name)
                path.touch(0o600)
                path.write_bytes(data)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _handle(self, event: MemberEvent, cause: str = "") -> list[MemberEffect]:
        effects = self._machine.handle(self._loop.time(), event, cause)
        self._machine.check()
        for effect in effects:
            self._effects.put_nowait((effect, self._machine.story.last))
        at = self._machine.next_deadline(self._loop.time())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._handle, TICK) if at is not None else None
        return effects

    async def _perform_all(self) -> None:
        while True:
            effect, cause = await self._effects.get()
            try:
                await self._perform(effect, cause)
            except (OSError, HoldfastError) as problem:
                console.warning(f"the member of the cluster: {console.describe(problem)}")
                self._handle(EtcdEnded(str(problem)), cause)
            finally:
                self._effects.task_done()

    async def _perform(self, effect: MemberEffect, cause: str) -> None:
        match effect:
            case StartProbeServer(incarnation):
                await self._open_probe_server(incarnation)
            case StopProbeServer():
                if self._server is not None:
                    await self._server.close()
                    self._server = None
            case ProbeMachines(machines):
                for name in machines:
                    self._spawn(self._probe_and_report(name, cause))
            case Propose(bootstrap, machines):
                for name in machines:
                    self._spawn(self._propose(bootstrap, name, cause))
            case StartNewEtcd(bootstrap):
                self._bootstrap = bootstrap
                urls = self._list.peer_urls()
                voters = tuple(f"{name}={url}" for name, url in urls.items())
                before = [name for name, _ in bootstrap.roster].index(self._entry.name)
                await asyncio.sleep(before * BOOTSTRAP_STAGGER_S)
                self._start_etcd("new", voters, bootstrap.id)
            case StartAddedEtcd(cluster):
                self._bootstrap = None
                self._start_etcd("existing", cluster, "")
            case RestartEtcd():
                self._start_etcd("existing", (), "")
            case ReplaceVoter():
                self._spawn(self._claim(cause))
            case DropEtcd() | StopEtcd():
                await self._stop_etcd(at_once=isinstance(effect, DropEtcd))
                await self._release_claim()
            case ReportProgress():
                self._report_progress(effect)
            case ReportMajorityLost(machines):
                console.warning(self._majority_lost(machines))
            case ReportProtection(machines):
                await self._client.call(Txn((), (self._protection(machines),)), limit_s=START_S)
            case OpenCluster():
                self._spawn(self._open())
            case AcceptProposal():
                pass  # The response to the proposal already contained it.

    # Probes.

    async def _open_probe_server(self, incarnation: int) -> None:
        def answer(bootstrap: Bootstrap | None) -> ProbeReply:
            accepted = bootstrap is not None and any(
                isinstance(one, AcceptProposal)
                for one in self._handle(BootstrapProposed(bootstrap))
            )
            return ProbeReply(self._list.run_id, self._list.names, incarnation, accepted)

        self._server = ProbeServer(answer, lambda: self._wait_reason)
        await self._server.open(self._entry.listener(), self._server_tls)

    async def _probe(self, name: str, bootstrap: Bootstrap | None = None) -> ProbeResult:
        host, port = self._list.machines[self._list.names.index(name)]
        probe = Probe(self._list.run_id, self._list.names, bootstrap)
        try:
            result = await probe_member(
                host, port, probe, tls=self._tls, server_name=self._list.server_name
            )
        except OSError as problem:  # For example too many open files: the next probe may succeed.
            result = ProbeResult(None, console.describe(problem))
        self._unreachable[name] = result.why
        if result.other is not None and name not in self._warned:
            self._warned.add(name)
            machines = ",".join(result.other.machines)
            with_list = f" with the machines {machines}" if machines else ""
            console.warning(
                f"{FLAG}: {name} serves the job {result.other.run_id!r}{with_list}; start all "
                "machines of a job with the same list, and give each job its own ports"
            )
        return result

    async def _probe_and_report(self, name: str, cause: str) -> None:
        self._handle(MachineProbed(name, (await self._probe(name)).state), cause)

    async def _propose(self, bootstrap: Bootstrap, name: str, cause: str) -> None:
        accepted = (await self._probe(name, bootstrap)).accepted
        self._handle(ProposalAnswered(bootstrap.id, name, accepted), cause)

    # etcd.

    def _start_etcd(self, state: str, voters: tuple[str, ...], token: str) -> None:
        entry, scheme = self._entry, self._list.scheme
        peer_url = self._list.peer_urls()[entry.name]
        command = [
            self._program.path,
            f"--name={entry.name}",
            f"--data-dir={self._folder}/data",
            f"--listen-client-urls={scheme}://{format_endpoint(entry.bind_host, entry.port)}",
            f"--listen-peer-urls={scheme}://{format_endpoint(entry.bind_host, entry.port + 1)}",
            f"--advertise-client-urls={scheme}://{entry.name}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster-state={state}",
            f"--initial-cluster={','.join(voters) or f'{entry.name}={peer_url}'}",
            f"--initial-cluster-token=holdfast-{token}",
            *TIMING,
            "--unsafe-no-fsync",
            # The check delays a returning machine by five seconds. It prevents a loss of the majority, which
            # cannot happen here: a majority of the others replaces one voter at a time.
            "--strict-reconfig-check=false",
            f"--cors={NO_ORIGIN}",
            f"--host-whitelist={','.join(self._list.hosts)}",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={KEPT_REVISIONS}",
            "--logger=zap",
            "--log-level=warn",
            *(
                ()
                if self._program.is_safe
                else (f"--experimental-corrupt-check-time={CHECK_TIME}",)
            ),
            *self._tls_flags(),
        ]
        env = environment()
        env.pop("RANK", None)  # etcd belongs to the job, but is not a worker (see `local_workers`).
        env["TORCHELASTIC_RUN_ID"] = self._list.run_id
        with open(f"{self._folder}/log", "ab") as log:
            self._process = process = EtcdProcess(command, log=log, env=env, folder=self._folder)
        self._loop.add_reader(process.notice_fd, self._receive_notice, process)
        if process.exit_fd >= 0:
            self._loop.add_reader(process.exit_fd, self._note_exit, process)
        else:
            self._loop.call_soon(self._note_exit, process)
        self._spawn(self._wait_ready(process))

    def _tls_flags(self) -> tuple[str, ...]:
        certificate_files = self._list.files
        if self._list.scheme == "http":
            return ()
        folder = self._folder
        ca, cert, key = (
            (f"{folder}/ca.pem", f"{folder}/cert.pem", f"{folder}/key.pem")
            if certificate_files is None
            else (
                os.path.abspath(certificate_files.ca),
                os.path.abspath(certificate_files.cert),
                os.path.abspath(certificate_files.key),
            )
        )
        return (
            f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca}",
            "--client-cert-auth",
            f"--peer-cert-file={cert}", f"--peer-key-file={key}", f"--peer-trusted-ca-file={ca}",
            "--peer-client-cert-auth",
            # A machine may have more addresses than its certificate.
            "--experimental-peer-skip-client-san-verification",
        )  # fmt: skip

    async def _wait_ready(self, process: EtcdProcess) -> None:
        """Check whether etcd serves, whenever it may have become ready."""
        while process is self._process:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READY_AGAIN_S):
                    await self._ready_hint.wait()
            self._ready_hint.clear()
            cluster = await cluster_at(
                self._entry.host,
                self._entry.port,
                tls=self._tls,
                server_name=self._list.server_name,
            )
            if cluster and process is self._process:
                await self._served(cluster)
                return

    async def _served(self, cluster: str) -> None:
        bootstrap = self._bootstrap
        if bootstrap is not None:
            record = ClusterRecord(
                PROTOCOL_VERSION, self._list.run_id, bootstrap.id, bootstrap.at_ms
            )
            first = Compare(RECORD, Field.CREATE, 0)
            write = Txn((first,), (Put(RECORD, msgspec.json.encode(record)),))
            while self._process is not None:
                if not isinstance(await self._client.call(write), Problem):
                    break
                await asyncio.sleep(CLAIM_AGAIN_S)
        self._handle(EtcdReady(cluster))
        await self._client.call(Txn((), (Delete(LEAVING + self._entry.name.encode()),)))
        await self._release_claim()
        if self._on_over is not None:
            self._spawn(self._watch_end(self._on_over))

    async def _open(self) -> None:
        """Write the key for which the nodes wait."""
        write = Txn((Compare(OPEN, Field.CREATE, 0),), (Put(OPEN, b""),))
        while self._process is not None:
            if not isinstance(await self._client.call(write), Problem):
                break
            await asyncio.sleep(CLAIM_AGAIN_S)

    def _protection(self, missing: tuple[str, ...]) -> Put:
        key = JobKeys(DEFAULT_PREFIX, self._list.run_id).missing_members
        return Put(key, ", ".join(missing).encode())

    def _receive_notice(self, process: EtcdProcess) -> None:
        if process.reported_ready():
            self._ready_hint.set()

    def _note_exit(self, process: EtcdProcess) -> None:
        if process is not self._process:
            return  # It was stopped.
        self._release_process().stop()
        output = log_tail(Path(self._folder, "log"))
        text = f"etcd on this machine exited{f': {output}' if output else ''}"
        if not self._program.is_safe and not self._is_alone:
            text += "; its data may be damaged, so it starts without data"
        console.warning(text)
        self._handle(EtcdEnded(output))

    def _release_process(self) -> EtcdProcess:
        process, self._process = self._process, None
        assert process is not None
        for descriptor in (process.notice_fd, process.exit_fd):
            if descriptor >= 0:
                self._loop.remove_reader(descriptor)
        return process

    async def _stop_etcd(self, *, at_once: bool) -> None:
        if self._process is not None:
            process = self._release_process()
            stop = process.kill if at_once else partial(process.stop, STOP_S)
            await asyncio.to_thread(stop)
        shutil.rmtree(f"{self._folder}/data", ignore_errors=True)

    # Joining an existing cluster.

    async def _claim(self, cause: str) -> None:
        """Replace the voter of this machine; a lease ensures that only one machine at a time does so."""
        voters: tuple[str, ...] | str = ""
        try:
            async with asyncio.timeout(CLAIM_S):
                voters = await self._try_claim()
        except TimeoutError:
            voters = f"not added within {CLAIM_S:g} s"
        if isinstance(voters, str):
            console.debug(f"{self._entry.name} is not in the cluster yet: {voters}")
            await self._release_claim()
            await asyncio.sleep(CLAIM_AGAIN_S)
            self._handle(VoterNotReplaced(voters), cause)
        else:
            self._handle(VoterReplaced(voters), cause)

    async def _try_claim(self) -> tuple[str, ...] | str:
        """Return all voters in the format of etcd's flag, or why the voter was not replaced."""
        call = self._client.call
        granted = await call(Grant(CLAIM_TTL_S))
        if not isinstance(granted, Granted):
            return str(getattr(granted, "why", granted))
        self._claim_lease = granted.lease
        mine = Put(CLAIM, self._entry.name.encode(), granted.lease)
        done = await call(Txn((Compare(CLAIM, Field.CREATE, 0),), (mine,), (Get(CLAIM),)))
        if not isinstance(done, TxnDone):
            return str(getattr(done, "why", done))
        if not done.succeeded:
            return "another machine is being added"
        urls = self._list.peer_urls()
        own = urls[self._entry.name]
        while True:
            members = await call(ListMembers())
            # If another machine's voter was removed and not added, add it first: never remove two.
            if isinstance(members, Members):
                gaps = [url for url in urls.values() if url not in members.ids and url != own]
                if gaps:
                    members = await call(AddMember(gaps[0]))
                    if isinstance(members, Members):
                        continue
                elif own in members.ids:
                    members = await call(RemoveMember(members.ids[own]))
            if isinstance(members, Members):
                while True:
                    members = await call(AddMember(own))
                    if isinstance(members, Members):
                        names = {url: name for name, url in urls.items()}
                        return tuple(f"{names.get(url, url)}={url}" for url in members.ids)
                    listed = await call(ListMembers())
                    if isinstance(listed, Members) and own in listed.ids:
                        break  # It was added, but the response with its id was lost.
                    await asyncio.sleep(CLAIM_AGAIN_S)
            await asyncio.sleep(CLAIM_AGAIN_S)

    async def _release_claim(self) -> None:
        lease, self._claim_lease = self._claim_lease, 0
        if lease:
            await self._client.call(Revoke(lease))

    # Messages.

    def _report_program(self) -> None:
        text = f"{FLAG}: the member at {self._entry.name} runs {self._program}"
        if self._program.is_safe:
            console.notice(text)
            return
        if self._is_alone:
            then = "and the only member has no copy to start from"
        else:
            then = "so a killed member starts without data; if a majority is killed at once, the job ends"
        console.warning(
            f"{text}. A kill can damage the data of this version, {then}; {INSTALL_SAFE}"
        )

    async def _check_list(self) -> None:
        if warning := await shared_machine(self._list, self._entry.name):
            console.warning(warning)

    def _majority_lost(self, machines: tuple[str, ...]) -> str:
        return (
            f"{len(machines)} of {len(self._list.names)} machines of {FLAG} have lost the data of the cluster "
            f"({', '.join(machines)}), so it cannot recover: the job ends after {self._patience_s:g} s"
        )

    def _report_progress(self, progress: ReportProgress) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        needed, count = majority(len(self._list.names)), len(self._list.names)
        self._wait_reason = "the cluster is about to start"
        if progress.state is MemberState.SERVING:
            console.info(f"this machine, {self._entry.name}, is a member of the cluster")
            return
        if progress.state is MemberState.REPLACING:
            console.info(f"this machine, {self._entry.name}, is joining the cluster")
            return
        if progress.leaderless and len(progress.empty) >= needed:
            text = self._majority_lost(progress.empty)
        elif progress.leaderless:
            text = (
                f"the cluster has no majority at {', '.join(progress.leaderless)}; waiting for its "
                f"machines to return: {needed} of {count} are needed"
            )
        else:
            unreachable = ", ".join(
                f"{name} ({self._unreachable[name]})" if self._unreachable.get(name) else name
                for name in progress.unreachable
            )
            text = (
                f"waiting for machines of {FLAG}: {len(progress.empty)} of {count} are present, {needed} are "
                f"needed; missing: {unreachable}"
            )
        if len(progress.empty) < needed or progress.leaderless:
            self._wait_reason = text
            self._report_timer = self._loop.call_later(REPORT_AFTER_S, console.notice, text)

    # The end.

    async def _watch_end(self, on_over: Callable[[], object]) -> None:
        """Call `on_over` once all other machines have left, since the majority is about to be lost.

        If the list has a single machine, call it once the job is over.
        """
        others = {LEAVING + name.encode() for name in self._list.names if name != self.name}
        prefix = LEAVING if others else JobKeys(DEFAULT_PREFIX, self._list.run_id).job
        while self._machine.state is MemberState.SERVING:
            answer = await self._client.call(Txn((), (get_prefix(prefix),)))
            if not isinstance(answer, TxnDone):
                await asyncio.sleep(UNREACHED_S)
                continue
            found, news = {one.key: one.value for one in answer.results[0]}, asyncio.Event()

            def is_over(found: dict[bytes, bytes] = found) -> bool:
                if others:
                    return others <= found.keys()
                records = (unpack(JobRecord, value) for value in found.values())
                return any(one is not None and one.job.outcome is not None for one in records)

            def changed(
                _: int,
                changes: tuple[Change, ...],
                found: dict[bytes, bytes] = found,
                news: asyncio.Event = news,
                is_over: Callable[[], bool] = is_over,
            ) -> None:
                for one in changes:
                    found.pop(one.key, None)
                    if one.value is not None:
                        found[one.key] = one.value
                if is_over():
                    news.set()

            def ended(_: Problem, news: asyncio.Event = news) -> None:
                news.set()

            end = end_of_prefix(prefix)
            watch = self._client.watch(prefix, end, answer.revision + 1, changed, ended)
            if not is_over():
                await news.wait()
            watch.cancel()
            if is_over():
                await self._wait_unneeded(MAJORITY_WAIT_S)
                on_over()
                return

    async def _stop(self, linger_s: float) -> None:
        if not self._began:
            self._remove_folder()
            return
        if self._machine.state is MemberState.SERVING and linger_s:
            await self._wait_for_majority(linger_s)
        self._handle(MemberStopRequested())
        await self._effects.join()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for timer in (self._timer, self._report_timer):
            if timer is not None:
                timer.cancel()
        await self._client.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    async def _wait_for_majority(self, limit_s: float) -> None:
        """Wait while the job has nodes and the other members would not be a majority."""
        name = self._entry.name
        mark = Txn((), (Put(LEAVING + name.encode(), b""), get_prefix(LEAVING, keys_only=True)))
        answer = await self._client.call(mark, limit_s=UNREACHED_S)
        if not isinstance(answer, TxnDone):
            return  # The cluster has no majority.
        left = {one.key[len(LEAVING) :].decode() for one in answer.results[1]}
        staying = [one for one in self._list.names if one not in left]
        results = await asyncio.gather(*map(self._probe, staying))
        if sum(isinstance(one.state, Serving) for one in results) >= majority(
            len(self._list.names)
        ):
            return
        await self._wait_unneeded(limit_s)

    async def _wait_unneeded(self, limit_s: float) -> None:
        nodes = JobKeys(DEFAULT_PREFIX, self._list.run_id).nodes
        members = Txn((), (get_prefix(nodes, keys_only=True),))
        deadline, reported = self._loop.time() + limit_s, False
        while (left := deadline - self._loop.time()) > 0:
            answer = await self._client.call(members, limit_s=min(UNREACHED_S, left))
            if not isinstance(answer, TxnDone) or not answer.results[0]:
                return
            if not reported and limit_s - left > REPORT_AFTER_S:
                reported = True
                console.notice(
                    f"this machine's member continues for up to {left:.0f} s: "
                    f"{len(answer.results[0])} nodes of the job are not done yet"
                )
            await asyncio.sleep(MAJORITY_CHECK_S)


@contextlib.contextmanager
def running_member(
    of: ClusterList, *, patience_s: float, on_over: Callable[[], object] | None = None
) -> Iterator[EtcdMember | None]:
    """Run this machine's member inside the block; yield None if the list does not name this machine."""
    require_h11()
    entry = claim_entry(of)
    if entry is None:
        yield None
        return
    try:
        member = EtcdMember(of, entry, find_etcd(FLAG), patience_s=patience_s, on_over=on_over)
    except BaseException:
        entry.release()
        raise
    member.start()
    try:
        yield member
    finally:
        member.stop()
