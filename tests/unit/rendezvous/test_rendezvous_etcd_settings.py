"""The settings of etcd's client, from endpoints, `--rdzv-conf` and the environment."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.etcd_settings import ENDPOINTS_MAX, EtcdSettings, parse_endpoints
from holdfast.processes.keeper.keeper_client import inherited_environment
from holdfast.rendezvous.etcd_handler import PASSWORD_VARIABLE, USER_VARIABLE, etcd_settings_of
from holdfast.rendezvous.rdzv_conf import RendezvousParameters
from real_etcd import Tls, make_tls

ONE = (("h1", 2379),)


@pytest.fixture(autouse=True)
def no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USER_VARIABLE, PASSWORD_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls"))


def settings(endpoint: str = "host", **config: Any) -> EtcdSettings:
    return etcd_settings_of(RendezvousParameters("etcd", endpoint, "job", 1, 2, **config))


# Endpoints.


@pytest.mark.parametrize(
    ("text", "endpoints", "tls"),
    [
        ("h1", [("h1", 2379)], False),
        ("h1:1, h2 ,[::1]:3", [("h1", 1), ("h2", 2379), ("::1", 3)], False),
        ("http://h1:1/", [("h1", 1)], False),
        ("https://h1,HTTPS://[fe80::1%eth0]:2", [("h1", 2379), ("fe80::1%eth0", 2)], True),
        ("::1", [("::1", 2379)], False),
        ("h1,h1:2379", [("h1", 2379)], False),
    ],
)
def test_etcd_endpoints_and_tls_are_parsed(
    text: str, endpoints: list[tuple[str, int]], *, tls: bool
) -> None:
    assert parse_endpoints(text) == (tuple(endpoints), tls)
    found = EtcdSettings(endpoints=tuple(endpoints))
    assert parse_endpoints(found.where)[0] == found.endpoints


@pytest.mark.parametrize(
    "text",
    ["", "h1,,h2", "h1:", "h1:0", "h1:65536", ":2379", "h 1", "h1/v3", "[h1]:2", "[::1]2",
     "fe80::1%a b", "ftp://h1", "https://h1,h2",
     ",".join(f"h{i}" for i in range(ENDPOINTS_MAX + 1))],
)  # fmt: skip
def test_invalid_etcd_endpoints_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--etcd: ") as caught:
        parse_endpoints(text, source="--etcd")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"endpoints": ()}, {"call_s": 0.0}, {"call_s": float("nan")}, {"password": "p"},
     {"ca": "/ca.pem"}, {"server_name": "etcd"}],
)  # fmt: skip
def test_invalid_etcd_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        EtcdSettings(**{"endpoints": ONE, **wrong})  # type: ignore[arg-type]


def test_certificate_files_are_read_only_on_request() -> None:
    assert EtcdSettings(endpoints=ONE).tls_context() is None
    given = EtcdSettings(endpoints=ONE, tls=True, ca="/nonexistent/ca.pem")
    with pytest.raises(EnvironmentProblem, match=r"/nonexistent/ca\.pem"):
        given.tls_context()
    with pytest.raises(UsageError, match=r"^theirs .*mine"):
        EtcdSettings(endpoints=ONE, tls=True, key="/k").tls_context(("mine", "theirs", ""))


# `--rdzv-conf` and the environment.


@pytest.mark.parametrize(
    ("endpoint", "config", "tls"),
    [
        (" ", {}, False),
        ("host", {"protocol": " HTTPS "}, True),
        ("https://host", {"protocol": "https"}, True),
        ("http://host", {"protocol": "http"}, False),
    ],
)
def test_endpoint_and_protocol_select_how_etcd_is_reached(
    endpoint: str, config: dict[str, str], *, tls: bool
) -> None:
    found = settings(endpoint, read_timeout="2.5", **config)
    host = "localhost" if endpoint == " " else "host"
    assert (found.endpoints, found.tls, found.call_s) == (((host, 2379),), tls, 2.5)


def test_invalid_certificate_files_are_refused(tls: Tls) -> None:
    cert, key = tls.client.cert, tls.client.key
    for config, named in [
        ({"cacert": key}, f"cacert: {key}"),
        ({"ssl_cert": cert, "key": cert}, f"key: {cert}"),
        ({"cert": cert, "key": tls.server.key}, f"key: {tls.server.key}"),
        ({"cacert": " "}, "cacert"),
    ]:
        with pytest.raises(UsageError) as caught:
            settings("https://host", **config)
        assert str(caught.value).startswith(f"--rdzv-conf: {named}")


def test_environment_gives_the_missing_user_or_password_of_etcd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(**config: str) -> tuple[str, str]:
        one = settings(**config)
        return one.user, one.password

    assert found(user="u", password=" p ") == ("u", " p ")
    monkeypatch.setenv(PASSWORD_VARIABLE, "of the environment")
    assert found(user="u") == ("u", "of the environment")
    assert found(user="u", password="p") == ("u", "p")
    monkeypatch.setenv(USER_VARIABLE, "v")
    assert found() == found(user="v") == ("v", "of the environment")
    assert found(password="p") == ("v", "p")
    with pytest.raises(UsageError, match="password"):
        found(user="u")  # The password belongs to another user.
    assert not {USER_VARIABLE, PASSWORD_VARIABLE} & inherited_environment().keys()


@pytest.mark.parametrize(
    ("endpoint", "config", "named"),
    [
        ("host", {"protocol": "ftp"}, "protocol"),
        ("https://host", {"protocol": "http"}, "protocol=http .*--rdzv-endpoint"),
        ("http://host", {"protocol": "https"}, "protocol=https .*--rdzv-endpoint"),
        ("host", {"ca_cert": "/a"}, "ca_cert .*TLS"),
        ("host", {"tls_server_name": "x"}, "tls_server_name .*TLS"),
        ("https://host", {"cert": "/c"}, "cert .*key"),
        ("https://host", {"ssl_cert_key": "/k"}, "ssl_cert_key .*ssl_cert"),
        ("https://host", {"cacert": "/a", "ca_cert": "/b"}, "ca_cert=/b .*cacert=/a"),
        ("host", {"user": "u"}, f"user .*{PASSWORD_VARIABLE}"),
        ("host", {"password": "p"}, f"password .*{USER_VARIABLE}"),
        ("host", {"read_timeout": "0"}, "read_timeout"),
    ],
)
def test_contradictions_are_refused_by_name(
    endpoint: str, config: dict[str, str], named: str
) -> None:
    with pytest.raises(UsageError, match=f"^--rdzv-conf: {named}") as caught:
        settings(endpoint, **config)
    assert "\n" not in str(caught.value)


def test_a_password_is_never_shown() -> None:
    assert "geheim" not in repr(EtcdSettings(endpoints=ONE, user="u", password="geheim"))
    for config in ({"password": "geheim\n" * 99}, {"password": "geheim", "user": ""}):
        with pytest.raises(UsageError) as caught:
            settings(**config)
        assert "geheim" not in str(caught.value)
