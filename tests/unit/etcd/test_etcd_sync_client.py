from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest
from etcd_clients import LOCAL

from holdfast.core.etcd.calls import Change, Get, Txn
from holdfast.etcd import sync_client
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient, EtcdError
from real_etcd import Etcd, running_etcd

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 30.0


def client_of(*ports: int) -> EtcdClient:
    return EtcdClient(EtcdSettings(endpoints=tuple((LOCAL, one) for one in ports)))


def test_client_starts_no_thread_before_its_first_call(etcd: Etcd) -> None:
    client = client_of(etcd.port)
    before = threading.active_count()
    assert client.endpoint == etcd.endpoint
    assert client.local_address == ""
    client.close()
    client.close()
    assert threading.active_count() == before


def test_watch_delivers_changes_and_ends_with_the_client(etcd: Etcd) -> None:
    with client_of(etcd.port) as client:
        now = client.put(b"watched", b"0")
        with client.watch(b"watched", b"", now) as watch:
            assert watch.next(PATIENCE_S) == (Change(b"watched", b"0", now, now),)
            with pytest.raises(TimeoutError, match=r"no change within 0\.01 s"):
                watch.next(0.01)
            later = client.put(b"watched", b"1")
            assert watch.next() == (Change(b"watched", b"1", later, now),)
        with pytest.raises(EtcdError, match="the watch is closed"):
            watch.next()
        # Another watch, which ends with the client and wakes its waiting thread.
        watch = client.watch(b"watched", b"", later + 1)
        threading.Timer(0.05, client.close).start()
        with pytest.raises(EtcdError, match="the client is closed"):
            watch.next(PATIENCE_S)
        watch.close()
        with pytest.raises(EtcdError, match="the client is closed"):
            client.watch(b"watched", b"", 1)


def test_unread_changes_are_kept_up_to_a_limit(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_client, "UNREAD_MAX", 3)
    with client_of(etcd.port) as client:
        now = client.put(b"unread", b"0")
        with client.watch(b"unread", b"", now) as watch, client.watch(b"unread", b"", now) as taken:
            assert taken.next(PATIENCE_S)
            for n in range(1, 6):
                client.put(b"unread", b"%d" % n)
                assert taken.next(PATIENCE_S)[0].value == b"%d" % n
            kept: list[Change] = []

            def take_all() -> None:
                while True:
                    kept.extend(watch.next(PATIENCE_S))

            with pytest.raises(EtcdError, match="more than 3 changes are unread"):
                take_all()
            assert [one.value for one in kept] == [b"%d" % n for n in range(len(kept))]


def test_closing_the_client_ends_a_call_in_progress(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, client_of(etcd.port) as client:
        client.put(b"a", b"1")
        etcd.pause()
        threading.Timer(0.05, client.close).start()
        with pytest.raises(EtcdError, match="the client is closed"):
            client.put(b"a", b"2")
        etcd.resume()
    with pytest.raises(EtcdError, match="the client is closed"):
        client.put(b"a", b"3")


def test_problem_of_each_endpoint_is_reported(etcd: Etcd) -> None:
    with socket.socket() as bound, socket.create_server((LOCAL, 0)) as silent:
        bound.bind((LOCAL, 0))  # Bound, but not listening.
        dead, hanging = (one.getsockname()[1] for one in (bound, silent))
        with client_of(dead, hanging) as client:
            with pytest.raises(EtcdError) as caught:
                client.call(Txn(success=(Get(b"a"),)), limit_s=1.0)
            assert f"{LOCAL}:{dead}: connection refused; {LOCAL}:{hanging}: " in str(caught.value)
