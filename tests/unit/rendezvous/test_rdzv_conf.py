"""Parameters, time limits, and the keys of `--rdzv-conf`."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from holdfast.core.ranks import RankOrder
from holdfast.errors import UsageError
from holdfast.rendezvous import rdzv_conf
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.rdzv_conf import (
    KEY_OF,
    KEYS,
    SECONDS_MAX,
    RendezvousConfig,
    RendezvousParameters,
    RendezvousTimeout,
)

# Every key of TorchElastic; a launcher that accepts its command lines must support them.
TORCH_KEYS = {
    "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout",
    "keep_alive_interval", "keep_alive_max_attempt", "store_type", "read_timeout", "is_host",
    "protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix",
    "timeout", "rank",
}  # fmt: skip


def with_value(value: object) -> RendezvousParameters:
    return RendezvousParameters("c10d", "host:1", "job", 1, 2, key=value)


def parse(backend: str = "c10d", **values: Any) -> RendezvousConfig:
    return rdzv_conf.parse(RendezvousParameters(backend, "host", "job", 1, 4, **values))


@pytest.mark.parametrize(("backend", "least", "most"), [("", 1, 1), ("c10d", 0, 1), ("c10d", 3, 2)])
def test_invalid_parameters_are_refused(backend: str, least: int, most: int) -> None:
    with pytest.raises(UsageError):
        RendezvousParameters(backend, "", "job", least, most)


@pytest.mark.parametrize("value", [0, "0", -1, "nan", "inf", "x", "", True, [], SECONDS_MAX + 1])
def test_text_that_is_not_a_time_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="key"):
        with_value(value).get_as_seconds("key")


def test_times_are_parsed() -> None:
    assert with_value("0.25").get_as_seconds("key") == 0.25
    assert with_value("0").get_as_seconds("key", zero=True) == 0
    with pytest.raises(UsageError):
        with_value("-1").get_as_seconds("key", zero=True)
    assert with_value(None).get_as_seconds("key", 1) is None
    assert with_value(None).get_as_seconds("missing", 1) == 1


@pytest.mark.torch
@pytest.mark.parametrize("method", ["get_as_bool", "get_as_int"])
@pytest.mark.parametrize(
    "value", [True, 0, 1, 2, -1, "1", "Yes", "F", "n", "on", "2", " -3 ", "x", "", None, 1.5, []]
)
def test_values_are_read_as_torch_reads_them(method: str, value: object) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters as Torch

    def read(kind: Any) -> object:
        try:
            return getattr(kind("c10d", "", "job", 1, 1, key=value), method)("key")
        except (ValueError, TypeError):
            return ValueError

    assert read(RendezvousParameters) == read(Torch)


@pytest.mark.torch
def test_time_limits_equal_torchs_except_the_last_call() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout as Torch

    ours, theirs = RendezvousTimeout(), Torch()
    assert (ours.join, ours.close, ours.heartbeat) == (theirs.join, theirs.close, theirs.heartbeat)
    assert (ours.last_call, theirs.last_call) == (timedelta(seconds=1), timedelta(seconds=30))
    with pytest.raises(ValueError, match="last_call"):
        RendezvousTimeout(last_call=timedelta(0))


def test_table_has_every_key_of_torch_and_every_backend() -> None:
    assert KEY_OF.keys() > TORCH_KEYS
    assert len(KEY_OF) == len(KEYS)
    assert {name for key in KEYS for name in key.backends} == set(Backend)
    own = {field.name for field in fields(RendezvousConfig)} - {"given", "shared"}
    assert own <= KEY_OF.keys()


def test_values_can_be_text_and_none_means_not_given() -> None:
    conf = parse(
        join_timeout="2.5", keep_alive_interval="0.25", keep_alive_max_attempt="4", is_host="no",
        reconnect_grace="0", spares="1", rank_order=" Host ", tls_cert="/c", tls_key="/k",
        store_type="FILE",
    )  # fmt: skip
    assert (conf.join_timeout, conf.lost_after_s, conf.is_host) == (2.5, 1.0, False)
    assert (conf.reconnect_grace, conf.job_settings().spares, conf.job_settings().order) == (
        0.0,
        1,
        RankOrder.HOST,
    )
    assert conf.store_type == "file"
    assert parse(join_timeout=None, spares=None) == parse()


@pytest.mark.parametrize(
    "given",
    ["join_timeout=0", "settle=soon", "reconnect_grace=-1", "keep_alive_max_attempt=0",
     "keep_alive_max_attempt=2.5", "spares=-1", "is_host=maybe", "store_type=hash",
     "rank_order=random", "store=closed", "node_id=a\nb", "node_id=" + "x" * 201, "label= ", "token_file="],
)  # fmt: skip
def test_invalid_value_is_reported_in_one_line(given: str) -> None:
    key, _, value = given.partition("=")
    with pytest.raises(UsageError, match=key) as refused:
        parse(**{key: value})
    assert "\n" not in str(refused.value)


def test_store_of_a_job_of_one_node_is_open_by_default() -> None:
    for most, given, expected in (
        (1, {}, "open"),
        (2, {}, "hosts"),
        (1, {"store": "hosts"}, "hosts"),
    ):
        params = RendezvousParameters("c10d", "", "job", 1, most, **given)
        assert rdzv_conf.parse(params).job_settings().store.value == expected


def test_settle_is_an_alias_of_last_call_timeout() -> None:
    assert parse(settle="2").job_settings().settle_s == 2
    assert parse(settle="2", last_call_timeout="2.0").job_settings().settle_s == 2
    with pytest.raises(UsageError, match="settle=2 and last_call_timeout=3"):
        parse(settle="2", last_call_timeout=3)


def test_timeout_of_a_launch_is_the_join_timeout_only_for_static_and_etcd() -> None:
    assert parse("static", timeout=900, rank=0).join_timeout == 900
    assert parse("static", timeout=900, join_timeout=5, rank=0).join_timeout == 5
    assert parse("c10d", timeout=900).join_timeout == 600
    assert parse("file", timeout="no time at all").join_timeout == 600


@pytest.mark.parametrize(
    "given",
    [
        {"tls_cert": "/c"},
        {"tls_key": "/k"},
        {"spares": 4},
        {"store": "private", "worker_store": True},
    ],
)
def test_conflicting_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        parse(**given)


def test_unknown_and_unused_keys_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    params = RendezvousParameters("c10d", "", "job", 1, 1, join_timout=3, protocol="x", timeout=9)
    rdzv_conf.parse(params)
    rdzv_conf.parse(params)
    first, second = caplog.messages
    assert "join_timeout" in first
    assert "protocol" in second
    caplog.clear()
    # A custom backend may support them.
    parse("mine", my_own_key=1, protocol="x", join_timeout="3")
    assert not caplog.messages


@pytest.mark.parametrize("key", ["tls_cacert", "tls_verify", "token", "tokens_file", "authn"])
@pytest.mark.parametrize("backend", ["c10d", "static", "file", "etcd"])
def test_unknown_protecting_key_is_an_error(key: str, backend: str) -> None:
    with pytest.raises(UsageError, match=key):
        parse(backend, **{key: "1"})


@pytest.mark.parametrize("backend", ["file", "etcd", "c10d"])
@pytest.mark.parametrize("setting", ["HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE", "token_file", "auth"])
def test_unused_token_causes_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, backend: str, setting: str
) -> None:
    given = {}
    if setting.isupper():
        monkeypatch.setenv(setting, "of-no-use-here")
    else:
        given[setting] = "none"
    parse("static", rank=0, **given)
    assert not caplog.messages
    params = RendezvousParameters(backend, "folder", "job", 1, 4, **given)
    rdzv_conf.parse(params, shares_state=backend != "etcd")
    (line,) = caplog.messages
    assert setting in line
    assert "file" in line or "etcd" in line
    assert "of-no-use-here" not in line


@pytest.mark.parametrize("key", ["close_timeout", "heartbeat_timeout"])
def test_keys_of_a_shared_state_have_no_effect_elsewhere(
    caplog: pytest.LogCaptureFixture, key: str
) -> None:
    params = RendezvousParameters("c10d", "folder", "job", 1, 4, **{key: "0.5"})
    assert getattr(rdzv_conf.parse(params, shares_state=True), key) == 0.5
    assert not caplog.messages
    assert getattr(parse(**{key: "0.5"}), key) == KEY_OF[key].default
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("address", ["$(reboot)", "a b", "[::1]", "x\ny"])
def test_invalid_local_address_is_refused(address: str) -> None:
    for good in (None, "10.0.0.7", "fe80::1%eth0", "node_7.example.org"):
        RendezvousParameters("c10d", "", "job", 1, 1, good)
    with pytest.raises(UsageError, match=r"^--local-addr: ") as refused:
        RendezvousParameters("c10d", "", "job", 1, 1, address)
    assert "\n" not in str(refused.value)
