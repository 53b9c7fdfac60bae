"""`TCPStore`: torch's store of this name without torch, for any server that speaks its protocol."""

from __future__ import annotations

import os
import threading
import time
import weakref
from datetime import timedelta

from holdfast import console
from holdfast.net.endpoints import format_endpoint
from holdfast.store.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreTimeoutError,
)
from holdfast.store.memory import named
from holdfast.store.tcp import protocol as requests
from holdfast.store.tcp import protocol as words
from holdfast.store.tcp.channel import Connection, DeadlinePassed, InvalidResponse, connect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self, TypeVar

    from holdfast.store.tcp.shared import SharedServer

    Answer = TypeVar("Answer")
    Talk = Callable[[Connection], Answer]


GRACE_S_MAX = 0.5
"""How much longer than its timeout a wait may take, to end it in order and to look a last time; it
is not used up unless the server does not answer. Then the connection is given up."""
CHECKED_MAX = 256
"""How many keys of an overdue wait are looked at one by one, to name those that are missing."""
LISTED_MAX = 1 << 24

PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.05


class WaitTimedOut(Exception):
    """What was waited for did not come, as the message says; the connection is in order."""


def wait(keys: Sequence[str]) -> Talk[None]:
    """Wait until all keys are there; raise `WaitTimedOut` naming those that are not."""
    request = requests.of_keys(words.WAIT, keys)

    def talk(connection: Connection) -> None:
        connection.ask(request)
        if not _released(connection):
            raise WaitTimedOut(f"no value came for: {named(_missing(connection, keys))}")

    return talk


def get(key: str) -> Talk[bytes]:
    """Wait for a key, and return its value."""
    request = requests.of_key(words.GET, key)

    def read(connection: Connection) -> list[bytes]:
        connection.ask(request)
        return [connection.blob()]

    talk = _get([key], read)
    return lambda connection: talk(connection)[0]


def multi_get(keys: Sequence[str]) -> Talk[list[bytes]]:
    """Wait for keys, and return their values."""
    request = requests.of_keys(words.MULTI_GET, keys)

    def read(connection: Connection) -> list[bytes]:
        connection.ask(request)
        return [connection.blob() for _ in keys]

    return _get(keys, read)


def check(keys: Sequence[str]) -> Talk[bool]:
    """Ask whether all keys are there."""
    return asking(requests.of_keys(words.CHECK, keys), _is_ready)


def list_keys() -> Talk[list[str]]:
    """Ask for all keys."""

    def read(connection: Connection) -> list[str]:
        found = [connection.blob() for _ in range(connection.count(LISTED_MAX))]
        return [name for name in map(requests.name_of, found) if name is not None]

    return asking(requests.bare(words.LIST_KEYS), read)


def pop(key: str) -> Talk[bytes | None]:
    """Take the first value of a queue, or return None if there is none."""

    def read(connection: Connection) -> bytes | None:
        return connection.blob() if connection.i64() > 0 else None

    return asking(requests.of_key(words.QUEUE_POP, key), read)


def pop_waiting(key: str) -> Talk[bytes]:
    """Wait for a value in a queue, and go on waiting if another takes it first."""
    await_it, take_it = wait([key]), pop(key)

    def talk(connection: Connection) -> bytes:
        for _ in _pauses(connection):
            await_it(connection)
            _allow_grace(connection)
            value = take_it(connection)
            if value is not None:
                return value
        raise WaitTimedOut(f"no value came for: {named([key])}")

    return talk


def barrier(key: str, world_size: int) -> Talk[None]:
    """Wait until so many have come to a barrier."""
    request = requests.barrier(key, world_size)

    def talk(connection: Connection) -> None:
        connection.ask(request)
        if not _released(connection):
            raise WaitTimedOut(f"fewer than {world_size} came to: {named([key])}")

    return talk


def join(world_size: int, *, waits: bool) -> Talk[None]:
    """Have this client counted, and, if it `waits`, wait until so many have been.

    The server tells nobody of a count, so the wait is by looking again.
    """

    def talk(connection: Connection) -> None:
        connection.ask(requests.add(words.INIT_KEY, 1))
        came = connection.i64()
        if not waits:
            return
        for _ in _pauses(connection):
            if came >= world_size:
                return
            _allow_grace(connection)
            connection.ask(requests.of_key(words.GET, words.INIT_KEY))
            value = connection.blob()
            if not value.isdigit():
                raise InvalidResponse(f"{value[:20]!r} for the number of clients")
            came = int(value)
        raise WaitTimedOut(f"{came} of {world_size} clients came")

    return talk


def telling(request: bytes) -> Talk[None]:
    """Say what has no answer."""
    return lambda connection: connection.ask(request)


def asking(request: bytes, read: Talk[Answer]) -> Talk[Answer]:
    """Say what is answered at once."""

    def talk(connection: Connection) -> Answer:
        connection.ask(request)
        return read(connection)

    return talk


def _get(keys: Sequence[str], read: Talk[list[bytes]]) -> Talk[list[bytes]]:
    """Wait for the keys, and return what `read` then reads of them.

    An empty value may be that of a key which is not there: torch's server ends a wait when somebody
    only compares the key, and a key may be deleted just then. So a key is asked for, and it is read
    again since its value may have come in between; if it is not there, the wait goes on.
    """
    await_them = wait(keys)

    def talk(connection: Connection) -> list[bytes]:
        for _ in _pauses(connection):
            await_them(connection)
            _allow_grace(connection)
            values = read(connection)
            doubtful = _without_value(keys, values)
            if doubtful and check(sorted(doubtful))(connection):
                values = read(connection)
                doubtful = _without_value(keys, values) - doubtful
            if not doubtful:
                return values
        raise WaitTimedOut(f"no value came for: {named(keys)}")

    return talk


def _without_value(keys: Sequence[str], values: list[bytes]) -> set[str]:
    return {key for key, value in zip(keys, values, strict=True) if not value}


def _released(connection: Connection) -> bool:
    """Return whether a WAIT or BARRIER was answered in time; if not, it is cancelled."""
    try:
        answer = connection.u8()
    except DeadlinePassed:
        _allow_grace(connection)
        connection.send(requests.bare(words.CANCEL_WAIT))
        answer = connection.u8()
        if answer == words.STOP_WAITING:
            answer = connection.u8()
        if answer != words.WAIT_CANCELED:
            raise InvalidResponse(f"CANCEL_WAIT with {answer}") from None
        return False
    if answer != words.STOP_WAITING:
        raise InvalidResponse(f"WAIT with {answer}")
    return True


def _missing(connection: Connection, keys: Sequence[str]) -> Sequence[str]:
    """Return those of the keys that are not there; all, if there are too many to ask for each."""
    if not 1 < len(keys) <= CHECKED_MAX:
        return keys
    connection.ask(b"".join(requests.of_keys(words.CHECK, [key]) for key in keys))
    return [key for key in keys if not _is_ready(connection)] or keys


def _is_ready(connection: Connection) -> bool:
    answer = connection.u8()
    if answer not in (words.READY, words.NOT_READY):
        raise InvalidResponse(f"CHECK with {answer}")
    return answer == words.READY


def _pauses(connection: Connection) -> Iterator[None]:
    """Let something be tried at once, and again after growing pauses until the deadline.

    The deadline is set anew for each try, since a try may have used its grace.
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
    """Give what is answered at once the time that an answer takes, however late it is."""
    connection.deadline = max(connection.deadline, time.monotonic() + GRACE_S_MAX)


class Channel:
    """Connects when it is used first, and again after a loss."""

    def __init__(self, host: str, port: int, hosting: SharedServer | None) -> None:
        self.where = format_endpoint(host, port)
        self.hosting = hosting
        self._address = hosting.address if hosting else host
        self._port = port
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._lost = ""  # Why there is no connection any more, in words.
        self._closed = False
        _links.add(self)

    def call(
        self,
        operation: str,
        keys: Sequence[str],
        talk: Callable[[Connection], Answer],
        timeout_s: float,
    ) -> Answer:
        """Have `talk` ask something on the connection, and return what it returns.

        Raises `DistNetworkError` for a loss, `StoreTimeoutError` when time is over, and
        `DistStoreError` for an answer that is none. Others that use the link wait meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(
                f"{self._about(operation, keys)}: another thread used it all of {timeout_s:g} s"
            )
        try:
            connection = self._connection
            if connection is None or self._closed:
                connection = self._connect(deadline, timeout_s, self._about(operation, keys))
            connection.deadline = deadline
            answer = talk(connection)
            connection.finish()
        except WaitTimedOut as overdue:
            raise StoreTimeoutError(
                f"{self._about(operation)}: within {timeout_s:g} s {overdue}"
            ) from None
        except BaseException as problem:
            # Whatever it was, an interrupt of the user's too: an answer may still be on its way.
            self._give_up()
            failure = self._failure(problem, self._about(operation, keys), timeout_s)
            if failure is None:
                raise
            raise failure from None
        finally:
            self._lock.release()
            if self._closed:
                self._drop_if_unused()
        return answer

    def close(self) -> None:
        """Close the connection for good, also under a call; a server is left to who else has it."""
        self._closed = True
        connection = self._connection
        if not self._drop_if_unused() and connection is not None:
            connection.abort()  # The call that is going on fails, and drops it.
        hosting, self.hosting = self.hosting, None
        if hosting is not None:
            hosting.release()

    def forget_after_fork(self) -> None:
        """In a forked child: the connection, the server and whoever held the lock are the parent's.

        The descriptor is closed here and nowhere else, so that the parent notices nothing.
        """
        self._lock = threading.Lock()
        self._drop()
        self._lost = ""
        self.hosting = None

    def _connect(self, deadline: float, timeout_s: float, about: str) -> Connection:
        if not self._closed:
            if self._lost:
                console.info(f"connecting to the store at {self.where} again: {self._lost}")
            self._connection = connect(self._address, self._port, deadline, timeout_s, about)
            self._lost = ""
        if self._connection is None or self._closed:
            raise self._is_closed()
        return self._connection

    def _drop_if_unused(self) -> bool:
        """Close the connection unless a call is using it, which then does so when it ends."""
        if not self._lock.acquire(blocking=False):
            return False
        self._drop()
        self._lock.release()
        return True

    def _give_up(self) -> None:
        if self._connection is not None:
            self._lost = "the last connection was given up"
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _failure(self, problem: BaseException, about: str, timeout_s: float) -> DistError | None:
        """Return the error that a caller is told of; None for one that is told of as it is."""
        if self._closed and isinstance(problem, Exception):
            return self._is_closed()
        match problem:
            case DistError():
                return None
            case DeadlinePassed():
                self._lost = f"it did not answer within {timeout_s:g} s"
                return StoreTimeoutError(f"{about}: no answer within {timeout_s:g} s")
            case OSError():
                self._lost = problem.strerror or str(problem)
                return DistNetworkError(f"{about}: {self._lost}")
            case InvalidResponse():
                self._lost = "its answer was none"
                return DistStoreError(f"{about}: the answer was none: {problem}")
        return None

    def _is_closed(self) -> DistStoreError:
        return DistStoreError(f"the store at {self.where} is closed here")

    def _about(self, operation: str, keys: Sequence[str] = ()) -> str:
        of = f" of {named(keys)}" if keys else ""
        return f"the store at {self.where}{operation and f': {operation}'}{of}"


_links: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for link in list(_links):
        link.forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)


DEFAULT_TIMEOUT = timedelta(seconds=300)
PORT_MAX = 65_535


class TCPStore:
    """Keys and values on a server at `host_name` and `port`, which `is_master` serves from here.

    The arguments are those of torch's. With a `world_size`, each client is counted, and the master
    waits until so many have come, unless `wait_for_workers` is False. The server of a master ends
    with the last store of this process that uses it. `use_libuv` chooses nothing here.
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
            raise ValueError("world_size: 0 clients never come; accepted: from 1, or None")
        if not 0 <= port <= PORT_MAX:
            raise ValueError(f"port: {port} is no port; accepted: 0 to {PORT_MAX}")
        hosting = None
        if is_master:
            from holdfast.store.tcp.shared import host

            hosting = host(host_name, port, shared=multi_tenant, listen_fd=master_listen_fd)
        # A negative number is torch's way to say that nobody knows.
        counted = world_size if wait_for_workers and world_size and world_size > 0 else 0
        self._libuv = use_libuv
        self._connect(host_name, hosting.port if hosting else port, hosting, timeout)
        self._join(counted, waits=hosting is not None)

    def _connect(
        self, host_name: str, port: int, hosting: SharedServer | None, timeout: timedelta
    ) -> None:
        self._host, self._port, self._timeout = host_name, port, timeout
        self._link = Channel(host_name, port, hosting)
        # What is forgotten without being closed leaves no sockets and threads behind.
        self._finalizer = weakref.finalize(self, self._link.close)

    def _join(self, world_size: int, *, waits: bool) -> None:
        """Reach the server, which is where a wrong endpoint is noticed, and be counted there."""
        greeting = join(world_size, waits=waits) if world_size else _nothing_more
        try:
            self._call("", (), greeting)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value. The server does not confirm it: only that it was sent is known."""
        self._tell("set", [key], requests.put(words.SET, key, value))

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it to have one."""
        return self._call("get", [key], get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        return self._ask("add", [key], requests.add(key, amount), Connection.i64)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raise `StoreTimeoutError` naming those without."""
        self._call("wait", keys, wait(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._call("check", keys, check(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards.

        A missing key is set if nothing is expected; if something is, that is returned.
        """
        request = requests.compare_set(key, expected, desired)
        return self._ask("compare_set", [key], request, Connection.blob)

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value after the one that a key has."""
        self._tell("append", [key], requests.put(words.APPEND, key, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys, waiting for each to have one."""
        return self._call("multi_get", keys, multi_get(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value."""
        self._tell("multi_set", keys, requests.put_all(keys, values))

    def delete_key(self, key: str) -> bool:
        """Take a key's value away; return whether it had one."""
        request = requests.of_key(words.DELETE_KEY, key)
        return self._ask("delete_key", [key], request, Connection.i64) == 1

    def num_keys(self) -> int:
        """Return how many keys have values, the counter of clients included."""
        return self._ask("num_keys", (), requests.bare(words.GETNUMKEYS), Connection.i64)

    def list_keys(self) -> list[str]:
        """Return the keys that have values, in any order."""
        return self._call("list_keys", (), list_keys())

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._tell("queue_push", [key], requests.put(words.QUEUE_PUSH, key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one, also when another was faster.

        Without `block`, raise `QueueEmptyError` if there is none.
        """
        if block:
            return self._call("queue_pop", [key], pop_waiting(key))
        value = self._call("queue_pop", [key], pop(key))
        if value is None:
            raise QueueEmptyError(
                f"the store at {self._link.where}: the queue {named([key])} is empty"
            )
        return value

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        request = requests.of_key(words.QUEUE_LEN, key)
        return self._ask("queue_len", [key], request, Connection.i64)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` clients have called this with the key.

        Use a new key for each barrier: torch's server counts for ever, so that who gave up stays
        counted, and a key that was used up lets everybody pass. Ours begins anew.
        """
        self._call("barrier", [key], barrier(key, world_size), timeout)

    def clone(self) -> TCPStore:
        """Return another store on the same server, with a connection of its own."""
        other = type(self).__new__(type(self))
        hosting = self._link.hosting
        other._libuv = self._libuv
        other._connect(self._host, self._port, hosting.share() if hosting else None, self._timeout)
        other._join(0, waits=False)
        return other

    @property
    def timeout(self) -> timedelta:
        """How long a call may take."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take."""
        self._timeout = timeout

    @property
    def host(self) -> str:
        """The host as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 (torch's name)
        """What `use_libuv` was. A server that this made is neither of torch's two."""
        return self._libuv

    def has_extended_api(self) -> bool:
        """Return that there are `append`, `multi_get` and `multi_set`."""
        return True

    def close(self) -> None:
        """Close the connection, and end the server if this was its last store in this process.

        A call that another thread is in raises `DistStoreError`.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        role = "serving" if self._link.hosting else "client of"
        return f"<TCPStore {role} {self._link.where}>"

    def _tell(self, operation: str, keys: Sequence[str], request: bytes) -> None:
        self._call(operation, keys, telling(request))

    def _ask(
        self,
        operation: str,
        keys: Sequence[str],
        request: bytes,
        answer: Callable[[Connection], Answer],
    ) -> Answer:
        return self._call(operation, keys, asking(request, answer))

    def _call(
        self,
        operation: str,
        keys: Sequence[str],
        talk: Callable[[Connection], Answer],
        timeout: timedelta | None = None,
    ) -> Answer:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        return self._link.call(operation, keys, talk, seconds)


def _nothing_more(connection: Connection) -> None:
    """Connecting is all."""
