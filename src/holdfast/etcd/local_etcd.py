"""`LocalEtcd`: an etcd for one job on this machine, or for a test.

It listens on loopback only and has no authentication. Its data are in a temporary folder, which is removed
when it stops, or in a folder of the caller, which is never removed. A later server with the same folder has the same
data.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from subprocess import TimeoutExpired  # One function has to name a parameter `subprocess`.
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.runner import (
    STOP_S,
    EtcdDied,
    EtcdNotReady,
    EtcdProcess,
    find_binary,
    hold_port,
    log_tail,
)
from holdfast.etcd.sync_client import EtcdClient
from holdfast.net.addresses import LOOPBACK

if TYPE_CHECKING:
    import socket
    from typing import Self, TextIO


logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = "holdfast-etcd-"
# In milliseconds. A single member has no peers to wait for. A short election timeout also permits short
# leases: etcd's minimum is one and a half election timeouts.
ALONE = ("--heartbeat-interval=20", "--election-timeout=200")
HEALTH_S = 1.0  # The limit of one health check; a ready etcd responds within a millisecond.


class LocalEtcd:
    """Starts and stops one etcd process. Any thread may call it.

    It is stopped at the end of a `with` block, when the object is garbage-collected, and when the program exits.
    If the program is killed, etcd is killed too, and the temporary folder is removed.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._host = LOOPBACK
        self._port = -1
        self._lock = threading.RLock()
        self._process: EtcdProcess | None = None
        self._end: weakref.finalize[[int, ExitStack], LocalEtcd] | None = None

    def start(
        self, timeout: float = 60, num_retries: int = 3, stderr: int | TextIO | None = None
    ) -> None:
        """Start etcd and return when it is ready.

        `timeout` limits all attempts together. If etcd exits before it is ready, up to `num_retries`
        attempts are made. etcd's output goes to `stderr` if that is a descriptor, a file or
        `subprocess.DEVNULL`; otherwise it is kept to explain a failed start.
        """
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                raise UsageError(f"this etcd is already running at {self.get_endpoint()}")
            self.stop()  # Remove the files of a process that exited by itself.
            deadline = time.monotonic() + timeout
            for left in reversed(range(max(1, num_retries))):
                try:
                    self._start(deadline, timeout, stderr)
                    return
                except EtcdDied as problem:
                    if not left:
                        raise
                    logger.warning("%s; trying again", problem)

    def stop(self) -> None:
        """Stop etcd, wait for its exit, and remove temporary files. Does nothing if etcd is not running."""
        with self._lock:
            if self._end is not None:
                self._end()

    def get_host(self) -> str:
        """Return the address etcd listens on."""
        return self._host

    def get_port(self) -> int:
        """Return the port of the last start; -1 before the first one."""
        return self._port

    def get_endpoint(self) -> str:
        """Return `host:port`, as `--rdzv-endpoint` takes it."""
        return f"{self._host}:{self._port}"

    def get_client(self) -> EtcdClient:
        """Return a client of this server. The caller closes it."""
        if self._port < 0:
            raise UsageError("this etcd has not been started", hint="call start()")
        return EtcdClient(EtcdSettings(endpoints=((self._host, self._port),)))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, deadline: float, timeout: float, stderr: int | TextIO | None) -> None:
        """Start etcd once; undo everything if that fails."""
        with ExitStack() as made:
            folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
            made.callback(shutil.rmtree, folder, ignore_errors=True)
            data = Path(self._data_dir) if self._data_dir else folder / "data"
            data.mkdir(parents=True, exist_ok=True)
            client, peer = made.enter_context(hold_port()), made.enter_context(hold_port())
            command = command_line(find_binary(), data, client, peer)
            log = folder / "log"
            with log.open("w") as kept:
                # No process would read a pipe, and etcd would hang once it is full.
                log_to = kept if stderr is None or stderr == subprocess.PIPE else stderr
                process = EtcdProcess(command, log=log_to, folder=str(folder))
            made.callback(process.stop)
            port = client.getsockname()[1]
            try:
                process.wait_ready(deadline - time.monotonic(), lambda: is_healthy(port))
            except EtcdDied as problem:
                raise EtcdDied(explained(problem, log)) from None
            except EtcdNotReady:
                late = f"{command[0]} was not ready within {timeout:g} s"
                raise EtcdNotReady(explained(late, log)) from None
            self._port, self._process = port, process
            self._end = weakref.finalize(self, end_unless_forked, os.getpid(), made.pop_all())


def command_line(binary: str, data: Path, client: socket.socket, peer: socket.socket) -> list[str]:
    """Return the command of a single-member etcd that uses these reserved ports."""
    url, peer_url = (f"http://{LOOPBACK}:{one.getsockname()[1]}" for one in (client, peer))
    return [
        binary,
        "--name=default",
        f"--data-dir={data}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        *ALONE,
        "--logger=zap",  # Without it etcd 3.4 prints a deprecation warning.
        "--log-level=warn",
    ]


def explained(problem: object, log: Path) -> str:
    """Return a problem with the end of etcd's log, if there is one."""
    words = log_tail(log)
    return f"{problem}: {words}" if words else str(problem)


def is_healthy(port: int) -> bool:
    """Return whether the etcd at this port is healthy."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=HEALTH_S)
    try:
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read())
        return isinstance(answer, dict) and answer.get("health") == "true"
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def end_unless_forked(owner: int, made: ExitStack) -> None:
    """Undo a start, but not in a forked child of the owner."""
    if os.getpid() == owner:
        made.close()


def stop_etcd(subprocess: subprocess.Popen[bytes] | None, data_dir: str | None = None) -> None:
    """Stop an etcd process and remove its data folder, if one is given."""
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        try:
            subprocess.wait(STOP_S)
        except TimeoutExpired:
            subprocess.kill()
            subprocess.wait()
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)
