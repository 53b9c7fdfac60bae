"""`TCPStore`: torch's store of this name without torch, for any server that speaks its protocol.

Every call ends by the store's timeout, even if the server is frozen or the network drops everything; torch's
client then waits forever. After a lost connection or a missing response the call raises. The next call
reconnects, possibly to a restarted server without the keys. Calls of several threads run one after the
other, as with torch's client; `clone` gives each thread its own connection.

The response to a wait may arrive just as the wait times out. So after CANCEL_WAIT the client reads one byte, and
one more if that was the response to the wait. Then the connection is usable, and the call raises `WaitTimedOut`.
After any other exception the connection is unusable.
"""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.core.limits import PORT_MAX
from holdfast.store.memory_store import named
from holdfast.store.store_errors import QueueEmptyError
from holdfast.store.tcp import tcp_protocol
from holdfast.store.tcp.channel import (
    Channel,
    Connection,
    DeadlinePassed,
    InvalidResponse,
    WaitTimedOut,
)
from holdfast.store.tcp.embedded import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self, TypeVar

    from holdfast.store.tcp.embedded import SharedServer

    Result = TypeVar("Result")

DEFAULT_TIMEOUT = timedelta(seconds=300)
GRACE_S_MAX = 0.5
"""A wait may exceed its timeout by this time, to cancel and to check a last time. It does so only if the server
does not respond; then the connection is closed."""
CHECKED_MAX = 256
"""Up to this many keys of a timed-out wait are checked one by one, to name the missing ones."""
LISTED_MAX = 1 << 24
PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.05


class TCPStore:
    """Keys and values on a server at `host_name` and `port`; with `is_master`, this process serves them.

    The arguments are torch's. With a `world_size`, each client registers, and the master waits until all have
    registered, unless `wait_for_workers` is False. The last store in this process that uses a master's server
    closes it. `use_libuv` has no effect.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if world_size == 0:
            raise ValueError(
                "world_size: 0 is not a valid number of clients; accepted: from 1, or None"
            )
        if not 0 <= port <= PORT_MAX:
            raise ValueError(f"port: {port} is not a valid port; accepted: 0 to {PORT_MAX}")
        server = None
        if is_master:
            server = serve(host_name, port, shared=multi_tenant, listen_fd=master_listen_fd)
        # torch passes a negative number for an unknown size.
        counted = world_size if wait_for_workers and world_size and world_size > 0 else 0
        self._libuv = use_libuv
        self._open(host_name, server.port if server else port, server, timeout)
        self._join(counted, waits=server is not None)

    def _open(
        self, host_name: str, port: int, server: SharedServer | None, timeout: timedelta
    ) -> None:
        self._host, self._port, self._timeout = host_name, port, timeout
        self._channel = Channel(host_name, port, server)
        # Closes the sockets and threads of a store that is dropped without `close`.
        self._finalizer = weakref.finalize(self, self._channel.close)

    def _join(self, world_size: int, *, waits: bool) -> None:
        """Connect, which detects a wrong endpoint, and register as a client if required."""

        def join(connection: Connection) -> None:
            if world_size:
                _join(connection, world_size, waits=waits)

        try:
            self._call("", (), join)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key. The server does not confirm that it received the request."""
        self._send("set", [key], tcp_protocol.encode_values(tcp_protocol.SET, key, value))

    def get(self, key: str) -> bytes:
        return self._get("get", [key], tcp_protocol.encode_key(tcp_protocol.GET, key))[0]

    def add(self, key: str, amount: int) -> int:
        request = tcp_protocol.encode_number(tcp_protocol.ADD, key, amount)
        return self._request("add", [key], request, Connection.i64)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        request = tcp_protocol.encode_keys(tcp_protocol.WAIT, keys)
        self._call("wait", keys, lambda connection: _wait(connection, request, keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._request(
            "check", keys, tcp_protocol.encode_keys(tcp_protocol.CHECK, keys), _is_ready
        )

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = tcp_protocol.encode_values(tcp_protocol.COMPARE_SET, key, expected, desired)
        return self._request("compare_set", [key], request, Connection.blob)

    def append(self, key: str, value: str | bytes) -> None:
        self._send("append", [key], tcp_protocol.encode_values(tcp_protocol.APPEND, key, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._get("multi_get", keys, tcp_protocol.encode_keys(tcp_protocol.MULTI_GET, keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._send("multi_set", keys, tcp_protocol.encode_pairs(keys, values))

    def delete_key(self, key: str) -> bool:
        request = tcp_protocol.encode_key(tcp_protocol.DELETE_KEY, key)
        return self._request("delete_key", [key], request, Connection.i64) == 1

    def num_keys(self) -> int:
        """Return how many keys have values, including the counter of clients."""
        return self._request(
            "num_keys", (), tcp_protocol.encode(tcp_protocol.GETNUMKEYS), Connection.i64
        )

    def list_keys(self) -> list[str]:
        return self._request(
            "list_keys", (), tcp_protocol.encode(tcp_protocol.LIST_KEYS), _read_keys
        )

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._send(
            "queue_push", [key], tcp_protocol.encode_values(tcp_protocol.QUEUE_PUSH, key, value)
        )

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        pop = tcp_protocol.encode_key(tcp_protocol.QUEUE_POP, key)
        if block:
            wait = tcp_protocol.encode_keys(tcp_protocol.WAIT, [key])
            return self._call(
                "queue_pop", [key], lambda connection: _pop_waiting(connection, wait, pop, key)
            )
        value = self._request("queue_pop", [key], pop, _read_popped)
        if value is None:
            raise QueueEmptyError(
                f"the store at {self._channel.where}: the queue {named([key])} is empty"
            )
        return value

    def queue_len(self, key: str) -> int:
        request = tcp_protocol.encode_key(tcp_protocol.QUEUE_LEN, key)
        return self._request("queue_len", [key], request, Connection.i64)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` clients have called this with the key.

        Use a new key for each barrier: torch's server counts forever, so a client that timed out stays counted, and
        a used key lets every client pass. Holdfast's server starts a new barrier.
        """
        request = tcp_protocol.encode_number(tcp_protocol.BARRIER, key, world_size)

        def barrier(connection: Connection) -> None:
            connection.request(request)
            if not _released(connection):
                raise WaitTimedOut(f"fewer than {world_size} clients reached {named([key])}")

        self._call("barrier", [key], barrier, timeout)

    def clone(self) -> TCPStore:
        """Return another store on the same server, with its own connection."""
        other = type(self).__new__(type(self))
        server = self._channel.server
        other._libuv = self._libuv
        other._open(self._host, self._port, server.share() if server else None, self._timeout)
        other._join(0, waits=False)
        return other

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 (torch's name)
        return self._libuv

    def has_extended_api(self) -> bool:
        return True

    def close(self) -> None:
        """Close the connection, and the server if this was its last store in this process.

        A call in another thread raises `DistStoreError`.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        role = "serving" if self._channel.server else "client of"
        return f"<TCPStore {role} {self._channel.where}>"

    # A request above a limit raises before a connection is opened, since it is encoded before `_call`.

    def _send(self, operation: str, keys: Sequence[str], request: bytes) -> None:
        self._call(operation, keys, lambda connection: connection.request(request))

    def _request(
        self,
        operation: str,
        keys: Sequence[str],
        request: bytes,
        read: Callable[[Connection], Result],
    ) -> Result:
        def send(connection: Connection) -> Result:
            connection.request(request)
            return read(connection)

        return self._call(operation, keys, send)

    def _get(self, operation: str, keys: Sequence[str], request: bytes) -> list[bytes]:
        wait = tcp_protocol.encode_keys(tcp_protocol.WAIT, keys)
        return self._call(
            operation, keys, lambda connection: _get_values(connection, wait, request, keys)
        )

    def _call(
        self,
        operation: str,
        keys: Sequence[str],
        exchange: Callable[[Connection], Result],
        timeout: timedelta | None = None,
    ) -> Result:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        return self._channel.call(operation, keys, exchange, seconds)


# Exchanges with several requests.


def _wait(connection: Connection, request: bytes, keys: Sequence[str]) -> None:
    connection.request(request)
    if not _released(connection):
        raise WaitTimedOut(f"no value for {named(_missing(connection, keys))}")


def _get_values(
    connection: Connection, wait: bytes, request: bytes, keys: Sequence[str]
) -> list[bytes]:
    """Wait for the keys, and return their values.

    An empty value may mean a missing key: torch's server ends a wait when a client only compares the key, and
    another client may delete a key after the wait. So such keys are checked. If all exist, they are read again,
    since a value may have arrived in between. If one is missing, the wait continues.
    """

    def read() -> list[bytes]:
        connection.request(request)
        return [connection.blob() for _ in keys]

    def empty(values: list[bytes]) -> set[str]:
        return {key for key, value in zip(keys, values, strict=True) if not value}

    for _ in _attempts(connection):
        _wait(connection, wait, keys)
        _allow_grace(connection)
        values = read()
        doubtful = empty(values)
        if doubtful:
            connection.request(tcp_protocol.encode_keys(tcp_protocol.CHECK, sorted(doubtful)))
            if _is_ready(connection):
                values = read()
                doubtful = empty(values) - doubtful
        if not doubtful:
            return values
    raise WaitTimedOut(f"no value for {named(keys)}")


def _pop_waiting(connection: Connection, wait: bytes, pop: bytes, key: str) -> bytes:
    """Wait for a value in a queue, and wait again if another client takes it first."""
    for _ in _attempts(connection):
        _wait(connection, wait, [key])
        _allow_grace(connection)
        connection.request(pop)
        value = _read_popped(connection)
        if value is not None:
            return value
    raise WaitTimedOut(f"no value for {named([key])}")


def _join(connection: Connection, world_size: int, *, waits: bool) -> None:
    """Register as a client; with `waits`, wait until `world_size` clients have registered.

    The server does not announce the count, so this polls.
    """
    connection.request(tcp_protocol.encode_number(tcp_protocol.ADD, tcp_protocol.INIT_KEY, 1))
    arrived = connection.i64()
    if not waits:
        return
    for _ in _attempts(connection):
        if arrived >= world_size:
            return
        _allow_grace(connection)
        connection.request(tcp_protocol.encode_key(tcp_protocol.GET, tcp_protocol.INIT_KEY))
        value = connection.blob()
        if not value.isdigit():
            raise InvalidResponse(f"{value[:20]!r} for the number of clients")
        arrived = int(value)
    raise WaitTimedOut(f"only {arrived} of {world_size} clients connected")


def _released(connection: Connection) -> bool:
    """Return whether a WAIT or BARRIER ended in time; if not, it is cancelled."""
    try:
        response = connection.u8()
    except DeadlinePassed:
        _allow_grace(connection)
        connection.send(tcp_protocol.encode(tcp_protocol.CANCEL_WAIT))
        response = connection.u8()
        if response == tcp_protocol.STOP_WAITING:
            response = connection.u8()
        if response != tcp_protocol.WAIT_CANCELED:
            raise InvalidResponse(f"{response} to CANCEL_WAIT") from None
        return False
    if response != tcp_protocol.STOP_WAITING:
        raise InvalidResponse(f"{response} to WAIT")
    return True


def _missing(connection: Connection, keys: Sequence[str]) -> Sequence[str]:
    """Return the missing keys; all keys, if there are too many to check each."""
    if not 1 < len(keys) <= CHECKED_MAX:
        return keys
    checks = (tcp_protocol.encode_keys(tcp_protocol.CHECK, [key]) for key in keys)
    connection.request(b"".join(checks))
    return [key for key in keys if not _is_ready(connection)] or keys


def _is_ready(connection: Connection) -> bool:
    response = connection.u8()
    if response not in (tcp_protocol.READY, tcp_protocol.NOT_READY):
        raise InvalidResponse(f"{response} to CHECK")
    return response == tcp_protocol.READY


def _read_keys(connection: Connection) -> list[str]:
    found = [connection.blob() for _ in range(connection.count(LISTED_MAX))]
    return [key for key in map(tcp_protocol.decode_key, found) if key is not None]


def _read_popped(connection: Connection) -> bytes | None:
    return connection.blob() if connection.i64() > 0 else None


def _attempts(connection: Connection) -> Iterator[None]:
    """Yield for each attempt: immediately, then after growing pauses until the deadline.

    The deadline is reset before each attempt, since `_allow_grace` may have extended it.
    """
    deadline = connection.deadline
    pause = PAUSE_S_MIN
    while True:
        yield
        connection.deadline = deadline
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(pause * 2, PAUSE_S_MAX)


def _allow_grace(connection: Connection) -> None:
    """Extend the deadline, so that an immediate response can still arrive."""
    connection.deadline = max(connection.deadline, time.monotonic() + GRACE_S_MAX)
