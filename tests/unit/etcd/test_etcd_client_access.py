"""How the client gets in: certificates, users and passwords, with a real etcd."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest
from etcd_clients import Watched, client_of, done, get, http, problem, put, server

from certificates import make_ca, make_certificate
from holdfast.core.etcd.calls import Delete, Grant, Granted, Problem, ProblemKind, Txn
from holdfast.etcd.protocol import TLS_ONLY
from holdfast.etcd.transport import NOT_TLS
from real_etcd import Etcd, Tls, make_tls, running_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, tls: Tls) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd"), tls=tls) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One that demands passwords: `user` may do all below `u/`."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        etcd.enable_auth("user", "secret", b"u/")
        yield etcd


async def refused(etcd: Etcd, request: Txn, **settings: Any) -> Problem:
    """Return why a call does not work; a watch must be refused in the same way."""
    async with client_of(etcd.port, **settings) as client:
        why = await problem(client, request)
        watched = await Watched(client, b"x").problem()
        assert watched.kind is why.kind
        return why


def test_both_sides_show_certificates(secure: Etcd, tls: Tls) -> None:
    settings = {"tls": True, "ca": tls.ca, "cert": tls.client.cert, "key": tls.client.key}

    async def talk() -> None:
        for name in ("", "localhost"):
            async with client_of(secure.port, server_name=name, **settings) as client:
                now = (await done(client, put(b"a", b"1"))).revision
                (change,) = await Watched(client, b"a", b"", now).changes()
                assert change.value == b"1"
                await asyncio.gather(*(done(client, put(b"b/%d" % n)) for n in range(20)))

    asyncio.run(talk())


def test_wrong_certificates_are_denied_in_one_line(secure: Etcd, tls: Tls, tmp_path: Path) -> None:
    other = make_ca(tmp_path, "other-ca")
    foreign = make_certificate(other, "foreign")
    ours = {"cert": tls.client.cert, "key": tls.client.key}
    cases: list[tuple[dict[str, str], str]] = [
        ({"ca": tls.ca}, "client certificate"),
        ({"ca": tls.ca, "cert": foreign.cert, "key": foreign.key}, "client certificate"),
        ({"ca": other.cert, **ours}, "not trusted"),
        ({"ca": tls.ca, **ours, "server_name": "elsewhere"}, "another host"),
        ({"ca": "/nonexistent/ca.pem"}, "cacert: /nonexistent/ca.pem"),
    ]
    for settings, why in cases:
        found = asyncio.run(refused(secure, put(b"a"), tls=True, **settings))
        assert found.kind is ProblemKind.DENIED, found
        assert why in found.why
        assert "\n" not in found.why


def test_with_and_without_tls_mixed_up(secure: Etcd, plain: Etcd, tls: Tls) -> None:
    found = asyncio.run(refused(secure, put(b"a")))
    assert found == Problem(ProblemKind.DENIED, TLS_ONLY)
    found = asyncio.run(refused(plain, put(b"a"), tls=True, ca=tls.ca))
    assert found == Problem(ProblemKind.DENIED, NOT_TLS)


def test_a_user_with_a_password(plain: Etcd) -> None:
    async def talk() -> None:
        async with client_of(plain.port, user="user", password="secret") as client:
            calls = [done(client, put(b"u/%d" % n)) for n in range(10)]
            now = (await asyncio.gather(*calls))[0].revision
            (change, *_) = await Watched(client, b"u/", b"u0", now).changes()
            assert change.key.startswith(b"u/")
            assert isinstance(await client.call(Grant(60)), Granted)
            not_ours = await problem(client, put(b"x"))
            assert not_ours == Problem(ProblemKind.DENIED, "permission denied")
            assert await Watched(client, b"x").problem() == not_ours
            await done(client, Txn(success=(Delete(b"u/", b"u0"),)))

    asyncio.run(talk())


def test_many_calls_at_once_ask_for_one_token() -> None:
    asked: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        asked.append(data.split(b" ", 2)[1])
        await asyncio.sleep(0)
        is_token = asked[-1] == b"/v3/auth/authenticate"
        return http(b'{"token":"t"}' if is_token else b'{"header":{"revision":"1"}}')

    async def talk() -> None:
        async with server(answer) as port, client_of(port, user="u", password="p") as client:
            await asyncio.gather(*(done(client, Txn()) for _ in range(8)))

    asyncio.run(talk())
    assert len(asked) == 9
    assert asked.count(b"/v3/auth/authenticate") == 1


def test_a_token_that_has_ended_is_replaced(plain: Etcd) -> None:
    async def talk() -> None:
        async with client_of(plain.port, user="user", password="secret") as client:
            now = (await done(client, put(b"u/a"))).revision
            good = client._token
            for request in (get(b"u/a"), put(b"u/a")):
                client._token = "no-token.1"
                await done(client, request)
                assert client._token not in (good, "no-token.1")
            client._token = "no-token.2"
            await Watched(client, b"u/a", b"", now).changes()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "it requires a user and a password"),
        ({"user": "user", "password": "wrong"}, "wrong user or password"),
        ({"user": "nobody", "password": "secret"}, "wrong user or password"),
    ],
)
def test_wrong_users_are_denied_in_one_line(
    plain: Etcd, settings: dict[str, str], why: str
) -> None:
    found = asyncio.run(refused(plain, put(b"u/a"), **settings))
    assert found == Problem(ProblemKind.DENIED, why)


def test_a_wrong_password_is_told_though_another_endpoint_is_dead(plain: Etcd) -> None:
    async def talk() -> Problem:
        with socket.socket() as dead:  # Bound, so that nobody else gets the port; it refuses.
            dead.bind(("127.0.0.1", 0))
            ports = (dead.getsockname()[1], plain.port)
            async with client_of(*ports, user="user", password="wrong") as client:
                return await problem(client, put(b"u/a"))

    assert asyncio.run(talk()) == Problem(ProblemKind.DENIED, "wrong user or password")


def test_a_password_does_no_harm_where_none_is_asked_for(secure: Etcd, tls: Tls) -> None:
    async def talk() -> None:
        settings = {"tls": True, "ca": tls.ca, "cert": tls.client.cert, "key": tls.client.key}
        async with client_of(secure.port, user="u", password="p", **settings) as client:
            await done(client, put(b"a"))

    asyncio.run(talk())
