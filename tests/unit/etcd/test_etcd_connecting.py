from __future__ import annotations

import asyncio
import socket

import pytest
from etcd_clients import LOCAL, saying

from holdfast.core.etcd.calls import ProblemKind
from holdfast.etcd import transport
from holdfast.etcd.transport import ConnectionProblem, open_connection
from holdfast.net import addresses
from holdfast.net.addresses import Address
from holdfast.net.tls import client_context


def test_a_host_that_vanishes_is_noticed_by_the_kernel() -> None:
    async def connect() -> dict[str, int]:
        async with saying(b"") as port:
            connection = await open_connection("localhost", port, limit_s=5.0)
            assert connection._transport is not None
            there: socket.socket = connection._transport.get_extra_info("socket")
            tcp = socket.IPPROTO_TCP
            found = {
                "alive": there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                "no delay": there.getsockopt(tcp, socket.TCP_NODELAY),
                "idle": there.getsockopt(tcp, socket.TCP_KEEPIDLE),
                "every": there.getsockopt(tcp, socket.TCP_KEEPINTVL),
                "probes": there.getsockopt(tcp, socket.TCP_KEEPCNT),
                "unacknowledged": there.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
            }
            connection.abort("done")
            await connection.ended
            return found

    found = asyncio.run(connect())
    assert found.pop("unacknowledged") == transport.UNACKNOWLEDGED_MS_MAX
    assert found["idle"] + found["every"] * found["probes"] <= 10
    assert found["alive"]
    assert found["no delay"]


def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind((LOCAL, 0))  # And does not listen.
        with pytest.raises(ConnectionProblem, match=r"^connection refused$") as caught:
            asyncio.run(open_connection(LOCAL, bound.getsockname()[1], limit_s=5.0))
    assert caught.value.kind is ProblemKind.UNREACHABLE
    assert not caught.value.written


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(ConnectionProblem, match="cannot be resolved"):
        asyncio.run(open_connection("nowhere.invalid", 1, limit_s=5.0))


def test_nobody_takes_the_connection() -> None:
    with socket.create_server((LOCAL, 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        with pytest.raises(ConnectionProblem, match=r"no connection within 0\.1 s"):
            asyncio.run(open_connection(LOCAL, full.getsockname()[1], limit_s=0.1))


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(blocked: int) -> None:
        async with saying(b"") as port:

            async def find_two(_host: str, _port: int) -> list[Address]:
                return [Address(socket.AF_INET, (LOCAL, one)) for one in (blocked, port)]

            monkeypatch.setattr(addresses, "resolve_async", find_two)
            connection = await open_connection("two", 1, limit_s=1.0)
            connection.abort("done")
            await connection.ended

    with socket.create_server((LOCAL, 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        asyncio.run(connect(full.getsockname()[1]))


def test_nobody_answers_the_tls_handshake() -> None:
    with socket.create_server((LOCAL, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionProblem, match=r"no TLS handshake within 0\.5 s"):
            asyncio.run(open_connection(LOCAL, port, tls=client_context(), limit_s=0.5))


def test_no_tls_there() -> None:
    async def connect() -> None:
        async with saying(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
            await open_connection(LOCAL, port, tls=client_context(), limit_s=5.0)

    with pytest.raises(ConnectionProblem, match="does not speak TLS: write http://") as caught:
        asyncio.run(connect())
    assert caught.value.kind is ProblemKind.DENIED
