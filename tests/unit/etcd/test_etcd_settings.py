from __future__ import annotations

import pytest

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.settings import ENDPOINTS_MAX, EtcdSettings, parse_endpoints

ONE = (("h1", 2379),)


@pytest.mark.parametrize(
    ("text", "endpoints", "tls"),
    [
        ("h1", [("h1", 2379)], False),
        ("h1:1234", [("h1", 1234)], False),
        ("h1:1, h2 ,[::1]:3", [("h1", 1), ("h2", 2379), ("::1", 3)], False),
        ("http://h1:1/", [("h1", 1)], False),
        ("https://h1,HTTPS://[fe80::1%eth0]:2", [("h1", 2379), ("fe80::1%eth0", 2)], True),
        ("::1", [("::1", 2379)], False),
        ("[::1]", [("::1", 2379)], False),
        ("h1,h1:2379", [("h1", 2379)], False),
    ],
)
def test_endpoints_are_read(text: str, endpoints: list[tuple[str, int]], tls: bool) -> None:
    assert parse_endpoints(text) == (tuple(endpoints), tls)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' of etcd is empty"),
        ("h1,,h2", "is empty"),
        ("h1:", "has '' for a port"),
        ("h1:0", "has '0' for a port"),
        ("h1:65536", "has '65536' for a port"),
        (":2379", "has no host"),
        ("h 1", "has 'h 1' for a host"),
        ("h1/v3", "has 'h1/v3' for a host"),
        ("[h1]:2", "no IPv6 address"),
        ("[::1]2", "no IPv6 address"),
        ("fe80::1%a b", "for a port"),
        ("ftp://h1", "begins with ftp://"),
        ("https://h1,h2", "some endpoints of etcd have https:// and some have not"),
        (",".join(f"h{i}" for i in range(ENDPOINTS_MAX + 1)), "17 endpoints, where 16"),
    ],
)
def test_endpoints_that_cannot_be_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_endpoints(text, source="--etcd")
    assert said in str(caught.value)
    assert str(caught.value).startswith("--etcd: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"endpoints": ()}, "etcd needs an endpoint"),
        ({"call_s": 0.0}, "a limit of 0 s"),
        ({"call_s": float("nan")}, "a limit of nan s"),
        ({"password": "p"}, "a password and no user"),
        ({"ca": "/ca.pem"}, "certificates are set and TLS is not"),
        ({"server_name": "etcd"}, "certificates are set and TLS is not"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EtcdSettings(**{"endpoints": ONE, **wrong})  # type: ignore[arg-type]


def test_where_is_what_a_person_would_write() -> None:
    settings = EtcdSettings(endpoints=(("h1", 1), ("::1", 2)))
    assert settings.where == "h1:1,[::1]:2"
    assert parse_endpoints(settings.where) == (settings.endpoints, False)


def test_files_of_certificates_are_read_only_when_asked_for() -> None:
    assert EtcdSettings(endpoints=ONE).tls_context() is None
    settings = EtcdSettings(endpoints=ONE, tls=True, ca="/nonexistent/ca.pem")
    with pytest.raises(EnvironmentProblem, match=r"/nonexistent/ca\.pem cannot be read"):
        settings.tls_context()
    with pytest.raises(UsageError, match=r"^cert is set and key is not"):
        EtcdSettings(endpoints=ONE, tls=True, cert="/c").tls_context()
    with pytest.raises(UsageError, match=r"^theirs is set and mine is not"):
        EtcdSettings(endpoints=ONE, tls=True, key="/k").tls_context(("mine", "theirs", ""))


def test_a_password_is_not_shown() -> None:
    shown = repr(EtcdSettings(endpoints=ONE, user="u", password="geheim"))
    assert "geheim" not in shown
    assert shown.startswith(
        "EtcdSettings(endpoints=(('h1', 2379),), user='u', password='...', tls="
    )
    assert "password=''" in repr(EtcdSettings(endpoints=ONE))
