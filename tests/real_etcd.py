"""Real etcd processes for tests: one, or a cluster on loopback, with fast starts and elections.

Ports are reserved from before the first start until the end, so that a killed member restarts at the same address.
All members exit with the process of the tests, however that exits.

A fixture of a whole module may share one etcd. A test that stops or restarts a member needs its own etcd, because the
leak check identifies processes by their id.
"""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from certificates import Pair, make_ca, make_certificate
from holdfast.etcd.runner import EtcdProcess, find_binary, hold_port, log_tail
from holdfast.net.addresses import LOOPBACK

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

PATIENCE_S = 30.0  # Only a failing test waits this long.
POLL_S = 0.01
ROOT_PASSWORD = "of-root"
VALUE_BYTES = 1 << 20  # etcd accepts at most 1.5 MiB.
VALUES_MAX = 64

# Elections take a few hundredths of a second. Password hashing, slow by design, is fast here.
QUICK = (
    "--heartbeat-interval=20",
    "--election-timeout=200",
    "--unsafe-no-fsync",
    "--snapshot-count=1000",
    "--bcrypt-cost=4",
    "--log-level=error",
)


SAFE, UNSAFE = "3.5.16", "3.5.1"


def etcd_that_reports(version: str, folder: Path) -> str:
    """Return the path of a program that is the installed etcd, but reports this version."""
    program = folder / "etcd"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo etcd Version: {version}; exit; fi\n'
        f'exec {find_binary()} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


class Tls(NamedTuple):
    """Certificates of an etcd that requires client certificates."""

    ca: str
    server: Pair
    client: Pair

    def context(self) -> ssl.SSLContext:
        """Return the context of a client with a valid certificate."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.client.cert, self.client.key)
        return context


def make_tls(folder: Path) -> Tls:
    """Create an authority, and certificates for etcd and a client."""
    ca = make_ca(folder, "etcd-ca")
    return Tls(ca.cert, make_certificate(ca, "etcd-server"), make_certificate(ca, "etcd-client"))


class RawRefused(Exception):
    """etcd responded to a raw request with an error."""

    def __init__(self, path: str, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{path}: {status} {body.get('message') or body.get('error')}")
        self.status = status
        self.body = body


class Etcd:
    """One member, standalone or of a cluster; it does not run before `start`."""

    def __init__(
        self, folder: Path, *flags: str, name: str = "etcd", tls: Tls | None = None
    ) -> None:
        self.name = name
        self.tls = tls
        self.log = folder / f"{name}.log"
        self.data = folder / f"{name}.data"
        self._flags = flags
        self._token = ""
        self.paused = False
        self._client_port, self._peer_port = hold_port(), hold_port()
        self._process: EtcdProcess | None = None
        self.initial_cluster = f"{name}={self.peer_url}"

    @property
    def port(self) -> int:
        return _port(self._client_port)

    @property
    def endpoint(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        return f"http://{LOOPBACK}:{_port(self._peer_port)}"

    @property
    def runs(self) -> bool:
        """Whether it has been started, and has neither exited nor been paused."""
        return self._process is not None and not self.paused

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> Self:
        """Start it and wait until it responds."""
        self.begin()
        self.ready()
        return self

    def begin(self) -> None:
        """Start it without waiting, for members that need each other."""
        assert self._process is None, f"{self.name} runs already"
        command = [
            find_binary(),
            f"--name={self.name}",
            f"--data-dir={self.data}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={self.initial_cluster}",
            *QUICK,
            *self._tls_flags(),
            *self._flags,
        ]
        with self.log.open("a") as log:
            self._process = EtcdProcess(command, log=log)
        self.paused = False

    def ready(self) -> None:
        """Wait until a started member responds."""
        try:
            self._running().wait_ready(PATIENCE_S)
        except Exception as problem:
            problem.add_note(f"{self.name}: {log_tail(self.log)}")
            raise

    def stop(self) -> None:
        """Stop it with SIGTERM, if it runs."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """Kill it with SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def restart(self) -> None:
        """Stop it if it runs, and start it with the same ports and data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it, like a machine that hangs; its connections stay open."""
        running = self._running()
        running.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":  # Until then it may respond.
            time.sleep(0.001)
        self.paused = True

    def resume(self) -> None:
        self._running().signal(signal.SIGCONT)
        self.paused = False

    def close(self) -> None:
        """Stop it and release its ports."""
        self.kill()
        self._client_port.close()
        self._peer_port.close()

    def raw(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Post to the gateway, such as `raw("/v3/kv/compaction", {"revision": 7})`.

        Byte fields are base64 (see `b64`); 64-bit numbers are returned as text.
        """
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        context = self.tls.context() if self.tls else None
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                raise RawRefused(path, error.code, json.loads(error.read())) from None

    def get(self, key: bytes) -> bytes | None:
        """Return a value, read without the client under test."""
        found = self.raw("/v3/kv/range", {"key": b64(key)}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def put(self, key: bytes, value: bytes) -> int:
        """Store a value; return the new revision."""
        answer = self.raw("/v3/kv/put", {"key": b64(key), "value": b64(value)})
        return int(answer["header"]["revision"])

    def keys(self, prefix: bytes = b"") -> list[bytes]:
        """Return all keys that begin with a prefix, in order."""
        end = prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\0"
        wanted = {"key": b64(prefix or b"\0"), "range_end": b64(end), "keys_only": True}
        answer = self.raw("/v3/kv/range", wanted)
        return sorted(base64.b64decode(one["key"]) for one in answer.get("kvs", []))

    def revision(self) -> int:
        """Return the store's revision."""
        answer = self.raw("/v3/kv/range", {"key": b64(b"\0"), "count_only": True})
        return int(answer["header"]["revision"])

    def leases(self) -> list[int]:
        """Return the ids of all leases."""
        return [int(one["ID"]) for one in self.raw("/v3/lease/leases").get("leases", [])]

    def keep_leases(self) -> None:
        """Renew all leases, as if no client were slow."""
        for lease in self.leases():
            self.raw("/v3/lease/keepalive", {"ID": str(lease)})

    def slow_watchers(self) -> int:
        """Return how many watches have undelivered changes because their connections are full."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        return int(text.partition("\netcd_debugging_mvcc_slow_watcher_total ")[2].split()[0])

    def compact(self, revision: int | None = None) -> int:
        """Compact all changes before a revision, by default the newest; return it."""
        revision = self.revision() if revision is None else revision
        self.raw("/v3/kv/compaction", {"revision": revision, "physical": True})
        return revision

    def enable_auth(self, user: str, password: str, prefix: bytes = b"") -> None:
        """Require passwords. This user has all rights below `prefix`; `raw` authenticates as root."""
        end = prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\0"
        below = {"permType": "READWRITE", "key": b64(prefix or b"\0"), "range_end": b64(end)}
        self.raw("/v3/auth/user/add", {"name": "root", "password": ROOT_PASSWORD})
        self.raw("/v3/auth/role/add", {"name": "root"})
        self.raw("/v3/auth/user/grant", {"user": "root", "role": "root"})
        self.raw("/v3/auth/user/add", {"name": user, "password": password})
        self.raw("/v3/auth/role/add", {"name": f"of-{user}"})
        self.raw("/v3/auth/role/grant", {"name": f"of-{user}", "perm": below})
        self.raw("/v3/auth/user/grant", {"user": user, "role": f"of-{user}"})
        self.raw("/v3/auth/enable")
        answer = self.raw("/v3/auth/authenticate", {"name": "root", "password": ROOT_PASSWORD})
        self._token = answer["token"]

    def fill_up(self) -> None:
        """Write until it reports that there is no space; start it with `SMALL_QUOTA`."""
        for _ in range(VALUES_MAX):
            try:
                self.put(b"filling", b"x" * VALUE_BYTES)
            except RawRefused as refused:
                if "space exceeded" in str(refused):
                    return
                raise
        raise AssertionError("etcd accepted all writes")

    def make_room(self) -> None:
        """Undo `fill_up`, as an operator would."""
        self.raw("/v3/kv/deleterange", {"key": b64(b"filling")})
        self.compact()
        self.raw("/v3/maintenance/defragment")
        for alarm in self.raw("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", []):
            self.raw("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    def status(self) -> dict[str, Any]:
        """Return the status that the member reports."""
        return self.raw("/v3/maintenance/status")

    def _running(self) -> EtcdProcess:
        assert self._process is not None, f"{self.name} does not run"
        return self._process

    def _tls_flags(self) -> Sequence[str]:
        if self.tls is None:
            return ()
        return (
            f"--cert-file={self.tls.server.cert}",
            f"--key-file={self.tls.server.key}",
            f"--trusted-ca-file={self.tls.ca}",
            "--client-cert-auth",
        )


SMALL_QUOTA = "--quota-backend-bytes=4194304"


class EtcdCluster:
    """Members that elect a leader; they are started together."""

    def __init__(self, folder: Path, *flags: str, size: int = 3, tls: Tls | None = None) -> None:
        self.members = [
            Etcd(folder, *flags, name=f"member{number}", tls=tls) for number in range(size)
        ]
        together = ",".join(f"{one.name}={one.peer_url}" for one in self.members)
        for one in self.members:
            one.initial_cluster = together

    @property
    def endpoints(self) -> str:
        """All endpoints, as a user writes them."""
        return ",".join(one.endpoint for one in self.members)

    def start(self) -> Self:
        """Start all members and wait until each responds."""
        for one in self.members:
            one.begin()
        for one in self.members:
            one.ready()
        return self

    def leader(self) -> Etcd:
        """Return the leader, once all running members agree on it.

        Without a leader, etcd rejects writes with a 503 after more than 5 seconds.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            received = [(one, one.status()) for one in self.members if one.runs]
            names = {status.get("leader", "0") for _, status in received}
            for one, status in received:
                if names == {status["header"]["member_id"]}:
                    return one
            assert time.monotonic() < deadline, f"no leader: {received}"
            time.sleep(POLL_S)

    def close(self) -> None:
        for one in self.members:
            one.close()


@contextlib.contextmanager
def running_etcd(folder: Path, *flags: str, tls: Tls | None = None) -> Iterator[Etcd]:
    """Run one etcd with its files in this folder."""
    with contextlib.closing(Etcd(folder, *flags, tls=tls)) as etcd:
        yield etcd.start()


@contextlib.contextmanager
def running_cluster(
    folder: Path, *flags: str, size: int = 3, tls: Tls | None = None
) -> Iterator[EtcdCluster]:
    """Run a cluster with its files in this folder."""
    with contextlib.closing(EtcdCluster(folder, *flags, size=size, tls=tls)) as cluster:
        yield cluster.start()


def b64(data: bytes) -> str:
    """Return bytes in the gateway's format."""
    return base64.b64encode(data).decode()


def _port(holder: socket.socket) -> int:
    port: int = holder.getsockname()[1]
    return port
