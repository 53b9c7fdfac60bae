"""Reaching a TCPStore server: names are resolved, addresses tried, and all of it again until then.

A server may come up after its clients, and its name may be known later still, so every failure is
tried again after a pause that grows. The one thing to know: a server that takes the connection and
says nothing is frozen, and told of as one that does not answer; a new attempt would not help it.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from holdfast.store import tcp_sentences
from holdfast.store.errors import DistNetworkError, StoreTimeoutError
from holdfast.store.tcp_connection import Connection, OutOfTime, WrongAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 1.0
PAUSE_GROWTH = 1.7
ATTEMPT_S_MAX = 5.0
"""How long one address may take to take the connection; then the next gets its turn."""

NO_TIME = "there was no time to try"

Found = tuple[int, "Any"]
"""A family of addresses, and one of these as the `socket` module takes it."""


def dial(host: str, port: int, deadline: float, timeout_s: float, about: str) -> Connection:
    """Return a connection on which the server has answered, by the deadline.

    Raises `DistNetworkError` with all addresses that were tried, or if somebody else answers, and
    `StoreTimeoutError` if nobody does on a connection. These messages begin with `about`, which
    says what the connection is for, and tell `timeout_s`.
    """
    where = written(host, port)
    pause = PAUSE_S_MIN
    problems = {where: NO_TIME}
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _unreachable(about, timeout_s, problems)
        try:
            found = resolve(host, port, left)
        except OSError as problem:
            problems = {where: _reason(problem)}
        else:
            before, problems = problems, {}
            for number, one in enumerate(found):
                place = written(*one[1][:2])
                left = deadline - time.monotonic()
                if left <= 0:  # What was wrong when there was time says more.
                    problems[place] = before.get(place, NO_TIME)
                    continue
                attempt_s = min(ATTEMPT_S_MAX, left / (len(found) - number))
                try:
                    return _greeted(_connect(one, attempt_s), deadline, timeout_s, about)
                except StoreTimeoutError:
                    raise  # It is an OSError too.
                except OSError as problem:
                    problems[place] = _reason(problem)
        jitter = 0.5 + os.urandom(1)[0] / 255
        time.sleep(max(0.0, min(pause * jitter, deadline - time.monotonic())))
        pause = min(pause * PAUSE_GROWTH, PAUSE_S_MAX)


def resolve(host: str, port: int, timeout_s: float) -> list[Found]:
    """Return where a host may be, or raise `OSError`, not later than `timeout_s` from now.

    Only names take a thread, which a name server that does not answer may keep for a while.
    """
    if is_address(host):
        return _look_up(host, port)
    answer: list[list[Found] | OSError] = []

    def look() -> None:
        try:
            answer.append(_look_up(host, port))
        except OSError as problem:
            answer.append(problem)
        except ValueError:  # It has a zero in it, or is no name in any encoding.
            answer.append(OSError("the name cannot be resolved"))

    looking = threading.Thread(target=look, name="holdfast-resolve", daemon=True)
    looking.start()
    looking.join(min(timeout_s, threading.TIMEOUT_MAX))
    if not answer:
        raise TimeoutError("the name server does not answer")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def is_address(host: str) -> bool:
    """Whether a host is given as an IPv4 or IPv6 address."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):  # ValueError: a null character.
            continue
        return True
    return False


def written(host: str, port: int) -> str:
    """Return host and port as a person writes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _look_up(host: str, port: int) -> list[Found]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), where) for family, _, _, _, where in found))


def _connect(address: Found, timeout_s: float) -> socket.socket:
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address[1])
        if sock.getsockname() == sock.getpeername():
            # The kernel gave this socket the very port that nobody listens at.
            raise ConnectionRefusedError("nobody listens there")
    except BaseException:
        sock.close()
        raise
    return sock


def _greeted(sock: socket.socket, deadline: float, timeout_s: float, about: str) -> Connection:
    """Say hello, and return the connection when it was answered."""
    nonce = tcp_sentences.own_nonce()
    try:
        connection = Connection(sock, deadline)
        connection.send(tcp_sentences.hello(nonce))
        echo = connection.u32()
        if echo != nonce:
            raise WrongAnswer(f"PING {nonce:#x} with {echo:#x}")
        connection.finish()
    except WrongAnswer as problem:
        sock.close()
        raise DistNetworkError(
            f"{about}: what listens there is no TCPStore: it answered {problem}"
        ) from None
    except OutOfTime:
        sock.close()
        raise StoreTimeoutError(
            f"{about}: the server took the connection, but did not answer within {timeout_s:g} s; "
            "its process is stopped or overloaded, or it is no TCPStore"
        ) from None
    except BaseException:
        sock.close()
        raise
    return connection


def _unreachable(about: str, timeout_s: float, problems: dict[str, str]) -> DistNetworkError:
    tried = "; ".join(f"{address}: {reason}" for address, reason in problems.items())
    return DistNetworkError(
        f"{about}: the server could not be reached within {timeout_s:g} s ({tried})"
    )


def _reason(problem: Exception) -> str:
    if isinstance(problem, TimeoutError) and not problem.args[1:]:
        return str(problem) if problem.args else "no answer"
    return getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
