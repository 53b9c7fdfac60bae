from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import UsageError
from holdfast.etcd.settings import EtcdSettings
from holdfast.processes.keeper.client import inherited_environment
from holdfast.rendezvous.config import RendezvousParameters
from holdfast.rendezvous.etcd import PASSWORD_VARIABLE, USER_VARIABLE, etcd_settings_of
from real_etcd import Tls, make_tls

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_ETCD_USER", "HOLDFAST_ETCD_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls"))


def settings(endpoint: str = "host", **config: Any) -> EtcdSettings:
    return etcd_settings_of(RendezvousParameters("etcd", endpoint, "job", 1, 2, **config))


def test_an_endpoint_is_enough() -> None:
    assert settings() == EtcdSettings(endpoints=(("host", 2379),))
    assert settings(" ").endpoints == (("localhost", 2379),)


def test_several_endpoints() -> None:
    found = settings("one,two:1234,[::1]:5")
    assert found.endpoints == (("one", 2379), ("two", 1234), ("::1", 5))


@pytest.mark.parametrize(
    ("endpoint", "config", "tls"),
    [
        ("host", {"protocol": "http"}, False),
        ("host", {"protocol": " HTTPS "}, True),
        ("https://host", {}, True),
        ("https://host", {"protocol": "https"}, True),
        ("http://host", {"protocol": "http"}, False),
    ],
)
def test_both_ways_to_say_how_etcd_is_reached(
    endpoint: str, config: dict[str, str], tls: bool
) -> None:
    assert settings(endpoint, **config).tls is tls


@pytest.mark.parametrize(
    "names", [("cert", "key", "cacert"), ("ssl_cert", "ssl_cert_key", "ca_cert")]
)
def test_both_spellings_of_certificates(names: tuple[str, ...], tls: Tls, tmp_path: Path) -> None:
    files = [tls.client.cert, tls.client.key, tls.ca]
    config = dict(zip(names, files, strict=True))
    found = settings(protocol="https", tls_server_name="etcd", **config)
    assert [found.cert, found.key, found.ca, found.server_name] == [*files, "etcd"]
    none = str(tmp_path / "none.pem")
    for name in names:
        with pytest.raises(UsageError) as caught:
            settings(protocol="https", **{**config, name: none})
        said = f"--rdzv-conf: {name}: {none} cannot be read: No such file or directory"
        assert str(caught.value) == said


def test_files_that_are_not_what_they_should_be(tls: Tls) -> None:
    cert, key = tls.client.cert, tls.client.key
    for config, said in [
        ({"cacert": key}, f"cacert: {key} has no certificate in PEM format in it"),
        ({"ssl_cert": cert, "key": cert}, f"key: {cert} is not a private key in PEM format"),
        ({"cert": cert, "key": tls.server.key}, f"key: {tls.server.key} is not the key of cert: "),
        ({"cacert": " "}, "cacert"),
    ]:
        with pytest.raises(UsageError) as caught:
            settings("https://host", **config)
        assert str(caught.value).startswith(f"--rdzv-conf: {said}")


def test_a_spelling_given_twice_may_say_the_same(tls: Tls) -> None:
    assert settings(protocol="https", ca_cert=tls.ca, cacert=tls.ca).ca == tls.ca


def test_the_limit_of_a_call() -> None:
    assert settings(read_timeout="2.5").call_s == 2.5


def test_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**config: str) -> tuple[str, str]:
        one = settings(**config)
        return one.user, one.password

    assert found(user="u", password=" p ") == ("u", " p ")
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "of the environment")
    assert found(user="u") == ("u", "of the environment")
    assert found(user="u", password="p") == ("u", "p")
    monkeypatch.setenv("HOLDFAST_ETCD_USER", "v")
    assert found() == ("v", "of the environment")
    assert found(user="v") == ("v", "of the environment")
    assert found(password="p") == ("v", "p")
    with pytest.raises(UsageError, match="user needs password"):
        found(user="u")  # That password is another user's.


@pytest.mark.parametrize(
    ("endpoint", "config", "complaint"),
    [
        ("host", {"protocol": "ftp"}, "protocol: 'ftp' cannot be used; accepted: http, https"),
        ("https://host", {"protocol": "http"}, "protocol=http contradicts --rdzv-endpoint"),
        ("http://host", {"protocol": "https"}, "protocol=https contradicts --rdzv-endpoint"),
        ("host", {"ca_cert": "/a"}, "ca_cert has no effect without TLS"),
        ("host", {"tls_server_name": "x"}, "tls_server_name has no effect without TLS"),
        ("https://host", {"cert": "/c"}, "cert needs key beside it"),
        ("https://host", {"ssl_cert_key": "/k"}, "ssl_cert_key needs ssl_cert beside it"),
        (
            "https://host",
            {"cacert": "/a", "ca_cert": "/b"},
            "ca_cert=/b and cacert=/a are the same",
        ),
        ("host", {"user": "u"}, "user needs password beside it, or HOLDFAST_ETCD_PASSWORD"),
        ("host", {"password": "p"}, "password needs user beside it, or HOLDFAST_ETCD_USER"),
        ("host", {"read_timeout": "0"}, "read_timeout: '0' is not a time"),
    ],
)
def test_what_contradicts_is_refused_by_name(
    endpoint: str, config: dict[str, str], complaint: str
) -> None:
    with pytest.raises(UsageError, match=f"^--rdzv-conf: {complaint}") as caught:
        settings(endpoint, **config)
    assert "\n" not in str(caught.value)


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: "):
        settings("host:port")


def test_workers_inherit_neither_user_nor_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_VARIABLE, "u")
    monkeypatch.setenv(PASSWORD_VARIABLE, "p")
    assert not {USER_VARIABLE, PASSWORD_VARIABLE} & inherited_environment().keys()


def test_a_password_is_shown_nowhere() -> None:
    for config in ({"password": "geheim\n" * 99}, {"password": "geheim", "user": ""}):
        with pytest.raises(UsageError) as caught:
            settings(**config)
        assert "geheim" not in str(caught.value)
