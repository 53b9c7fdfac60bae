"""What is said and answered on a connection to a TCPStore, one function for each purpose.

Each returns what is then called with a connection, so that a request that is above a limit is
refused before there is one. The one thing to know: a wait that is over may be answered all the
same, just then. So after CANCEL_WAIT one byte is read, and one more if it was the answer of the
wait; then the connection is in order again, and `Overdue` says so. Any other exception means that
it is not.
"""

from __future__ import annotations

import time

from holdfast.store import tcp_protocol as words
from holdfast.store import tcp_sentences as requests
from holdfast.store.memory import named
from holdfast.store.tcp_connection import Connection, OutOfTime, WrongAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

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


class Overdue(Exception):
    """What was waited for did not come, as the message says; the connection is in order."""


def wait(keys: Sequence[str]) -> Talk[None]:
    """Wait until all keys are there; raise `Overdue` naming those that are not."""
    request = requests.of_keys(words.WAIT, keys)

    def talk(connection: Connection) -> None:
        connection.ask(request)
        if not _released(connection):
            raise Overdue(f"no value came for: {named(_missing(connection, keys))}")

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
        raise Overdue(f"no value came for: {named([key])}")

    return talk


def barrier(key: str, world_size: int) -> Talk[None]:
    """Wait until so many have come to a barrier."""
    request = requests.barrier(key, world_size)

    def talk(connection: Connection) -> None:
        connection.ask(request)
        if not _released(connection):
            raise Overdue(f"fewer than {world_size} came to: {named([key])}")

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
                raise WrongAnswer(f"{value[:20]!r} for the number of clients")
            came = int(value)
        raise Overdue(f"{came} of {world_size} clients came")

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
        raise Overdue(f"no value came for: {named(keys)}")

    return talk


def _without_value(keys: Sequence[str], values: list[bytes]) -> set[str]:
    return {key for key, value in zip(keys, values, strict=True) if not value}


def _released(connection: Connection) -> bool:
    """Return whether a WAIT or BARRIER was answered in time; if not, it is cancelled."""
    try:
        answer = connection.u8()
    except OutOfTime:
        _allow_grace(connection)
        connection.send(requests.bare(words.CANCEL_WAIT))
        answer = connection.u8()
        if answer == words.STOP_WAITING:
            answer = connection.u8()
        if answer != words.WAIT_CANCELED:
            raise WrongAnswer(f"CANCEL_WAIT with {answer}") from None
        return False
    if answer != words.STOP_WAITING:
        raise WrongAnswer(f"WAIT with {answer}")
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
        raise WrongAnswer(f"CHECK with {answer}")
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
