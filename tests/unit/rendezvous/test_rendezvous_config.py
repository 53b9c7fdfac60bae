from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.rendezvous import config
from holdfast.rendezvous.config import (
    BACKENDS,
    KEY_OF,
    KEYS,
    RendezvousConfig,
    RendezvousParameters,
)

# Every key of TorchElastic's; a launcher that takes its command lines must know them.
TORCH_KEYS = {
    "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout",
    "keep_alive_interval", "keep_alive_max_attempt", "store_type", "read_timeout", "is_host",
    "protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix",
    "timeout", "rank",
}  # fmt: skip


def parse(backend: str = "c10d", **values: Any) -> RendezvousConfig:
    return config.parse(RendezvousParameters(backend, "host", "job", 1, 4, **values))


def test_the_table_is_whole() -> None:
    assert KEY_OF.keys() > TORCH_KEYS
    assert len(KEY_OF) == len(KEYS)
    assert {name for key in KEYS for name in key.backends} == set(BACKENDS)
    assert all(key.meaning and key.backends for key in KEYS)
    own = {field.name for field in fields(RendezvousConfig)} - {"given"}
    assert own <= KEY_OF.keys()


def test_defaults() -> None:
    conf = parse()
    assert conf.join_timeout == 600
    assert conf.last_call_timeout == 1
    assert conf.close_timeout == 30
    assert conf.heartbeat_timeout == 5
    assert (conf.keep_alive_interval, conf.keep_alive_max_attempt) == (1, 5)
    assert conf.lost_after_s == 5
    assert conf.read_timeout is None
    assert conf.is_host is None
    assert (conf.reconnect_grace, conf.coordinator_timeout) == (0.2, 60)
    assert (conf.rank_order, conf.label, conf.node_id, conf.spares) == ("stable", "", "", 0)
    assert conf.given == frozenset()


def test_all_values_may_be_text_and_times_fractional() -> None:
    conf = parse(
        join_timeout="2.5", last_call_timeout="0.5", keep_alive_interval="0.25",
        keep_alive_max_attempt="4", is_host="no", read_timeout="3", reconnect_grace="0",
        spares="1", rank_order=" Host ", label="rack 7", node_id="n1", token_file="/t",
        tls_cert="/c", tls_key="/k", tls_ca="/a", tls_server_name="name", store_type="FILE",
    )  # fmt: skip
    assert (conf.join_timeout, conf.last_call_timeout, conf.lost_after_s) == (2.5, 0.5, 1.0)
    assert (conf.is_host, conf.read_timeout, conf.reconnect_grace) == (False, 3.0, 0.0)
    assert (conf.spares, conf.rank_order, conf.label, conf.node_id) == (1, "host", "rack 7", "n1")
    assert (conf.token_file, conf.tls_cert, conf.tls_key, conf.tls_ca) == ("/t", "/c", "/k", "/a")
    assert (conf.tls_server_name, conf.store_type) == ("name", "file")


def test_as_the_times_of_a_handler() -> None:
    given = {"join_timeout": 7, "settle": 0.5, "close_timeout": 8, "heartbeat_timeout": 9}
    times = parse("file", **given).timeouts()
    assert [times.join, times.last_call, times.close, times.heartbeat] == [
        timedelta(seconds=one) for one in (7, 0.5, 8, 9)
    ]


def test_none_is_as_if_not_given() -> None:
    assert parse(join_timeout=None, spares=None) == parse()


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("join_timeout", "0", "seconds above 0"),
        ("settle", "soon", "seconds above 0"),
        ("reconnect_grace", "-1", "seconds from 0"),
        ("keep_alive_max_attempt", "0", "a whole number from 1"),
        ("keep_alive_max_attempt", "2.5", "digits"),
        ("spares", "-1", "a whole number from 0"),
        ("is_host", "maybe", "true, yes"),
        ("store_type", "hash", "tcp, file"),
        ("rank_order", "random", "stable, host, label"),
        ("node_id", "a\nb", "printable"),
        ("node_id", "x" * 201, "printable"),
        ("label", " ", "some text"),
        ("token_file", "", "a path"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line(key: str, value: str, accepted: str) -> None:
    with pytest.raises(UsageError, match=rf"^--rdzv-conf: {key}: .*; accepted: .*") as told:
        parse(**{key: value})
    assert accepted in str(told.value)
    assert "\n" not in str(told.value)


def test_settle_is_the_last_call() -> None:
    assert parse(settle="2").last_call_timeout == 2
    assert parse(settle="2", last_call_timeout="2.0").last_call_timeout == 2
    with pytest.raises(UsageError, match="settle=2 and last_call_timeout=3 are the same setting"):
        parse(settle="2", last_call_timeout=3)


def test_the_timeout_of_a_launch_is_the_join_timeout_of_static_alone() -> None:
    assert parse("static", timeout=900, rank=0).join_timeout == 900
    assert parse("static", timeout=900, join_timeout=5, rank=0).join_timeout == 5
    assert parse("static", rank="2").rank == 2
    assert parse("c10d", timeout=900).join_timeout == 600
    assert parse("file", timeout="no time at all").join_timeout == 600


def test_what_must_be_given_together() -> None:
    with pytest.raises(UsageError, match="tls_cert needs tls_key beside it"):
        parse(tls_cert="/c")
    with pytest.raises(UsageError, match="tls_key needs tls_cert beside it"):
        parse(tls_key="/c")
    assert parse(tls_ca="/a").tls_ca == "/a"
    with pytest.raises(UsageError, match=r"^--spares: 4 of at most 4 nodes"):
        parse(spares=4)


def warnings_of(caplog: pytest.LogCaptureFixture, backend: str = "c10d", **more: Any) -> list[str]:
    parse(backend, **more)
    return caplog.messages


def test_an_unknown_key_is_warned_of_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, join_timout=3, zzz=1) == [
        "--rdzv-conf: join_timout is unknown and has no effect; did you mean join_timeout?",
        "--rdzv-conf: zzz is unknown and has no effect",
    ]


def test_a_key_of_another_backend_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, protocol="gopher") == [
        "--rdzv-conf: protocol has no effect with --rdzv-backend c10d"
    ]


@pytest.mark.parametrize("key", ["close_timeout", "heartbeat_timeout"])
def test_keys_that_only_a_shared_state_has_a_use_for(
    caplog: pytest.LogCaptureFixture, key: str
) -> None:
    params = RendezvousParameters("c10d", "folder", "job", 1, 4, **{key: "0.5"})
    conf = config.parse(params, shares_state=True)
    assert getattr(conf, key) == 0.5
    assert caplog.messages == []
    assert getattr(parse(**{key: "0.5"}), key) == KEY_OF[key].default
    assert caplog.messages == [f"--rdzv-conf: {key} has no effect with --rdzv-backend c10d"]


def test_what_launches_set_and_a_users_backend_has_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings_of(caplog, timeout=900, rank=0) == []
    assert warnings_of(caplog, "mine", my_own_key=1, protocol="x", join_timeout="3") == []


def test_parameters_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    params = RendezvousParameters("c10d", "", "job", 1, 1, zzz=1)
    config.parse(params)
    config.parse(params)
    assert len(caplog.messages) == 1


def test_a_users_backend_has_the_common_settings() -> None:
    assert parse("mine", join_timeout="3", settle=2, spares="1").join_timeout == 3
