"""`TCPStore`: torch's store of this name without torch, for any server that speaks its protocol.

Three things to know. Every call ends by the store's timeout, also when the server is frozen or the
network swallows everything; torch's waits for ever then. A connection that was lost, or on which an
answer did not come in time, is given up: the call raises, and the next one connects anew, perhaps
to another server that was started there since, which knows nothing of the keys. And one call at a
time: while a thread waits with a store, others wait for it, as they do with torch's; `clone` helps.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

from holdfast.store import tcp_exchanges as exchanges
from holdfast.store import tcp_protocol as words
from holdfast.store import tcp_sentences as requests
from holdfast.store.errors import QueueEmptyError
from holdfast.store.memory import named
from holdfast.store.tcp_connection import Connection
from holdfast.store.tcp_link import Link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self, TypeVar

    from holdfast.store.tcp_hosting import Hosting

    Answer = TypeVar("Answer")

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
            from holdfast.store.tcp_hosting import host

            hosting = host(host_name, port, shared=multi_tenant, listen_fd=master_listen_fd)
        # A negative number is torch's way to say that nobody knows.
        counted = world_size if wait_for_workers and world_size and world_size > 0 else 0
        self._libuv = use_libuv
        self._connect(host_name, hosting.port if hosting else port, hosting, timeout)
        self._join(counted, waits=hosting is not None)

    def _connect(
        self, host_name: str, port: int, hosting: Hosting | None, timeout: timedelta
    ) -> None:
        self._host, self._port, self._timeout = host_name, port, timeout
        self._link = Link(host_name, port, hosting)
        # What is forgotten without being closed leaves no sockets and threads behind.
        self._finalizer = weakref.finalize(self, self._link.close)

    def _join(self, world_size: int, *, waits: bool) -> None:
        """Reach the server, which is where a wrong endpoint is noticed, and be counted there."""
        greeting = exchanges.join(world_size, waits=waits) if world_size else _nothing_more
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
        return self._call("get", [key], exchanges.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is now."""
        return self._ask("add", [key], requests.add(key, amount), Connection.i64)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raise `StoreTimeoutError` naming those without."""
        self._call("wait", keys, exchanges.wait(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._call("check", keys, exchanges.check(keys))

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
        return self._call("multi_get", keys, exchanges.multi_get(keys))

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
        return self._call("list_keys", (), exchanges.list_keys())

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._tell("queue_push", [key], requests.put(words.QUEUE_PUSH, key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one, also when another was faster.

        Without `block`, raise `QueueEmptyError` if there is none.
        """
        if block:
            return self._call("queue_pop", [key], exchanges.pop_waiting(key))
        value = self._call("queue_pop", [key], exchanges.pop(key))
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
        self._call("barrier", [key], exchanges.barrier(key, world_size), timeout)

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
        self._call(operation, keys, exchanges.telling(request))

    def _ask(
        self,
        operation: str,
        keys: Sequence[str],
        request: bytes,
        answer: Callable[[Connection], Answer],
    ) -> Answer:
        return self._call(operation, keys, exchanges.asking(request, answer))

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
